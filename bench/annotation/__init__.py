"""Run a model over a dataset and store a layer."""
