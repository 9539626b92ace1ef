"""Where a dataset is written: folder or URL, locks, and the state of a partial run."""
