"""The output of a run: folder or URL, locks, and the state of a partial run."""
