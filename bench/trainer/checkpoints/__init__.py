"""Checkpoints of a training run: what is in one, where it lies, when it is written."""
