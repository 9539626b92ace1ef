"""Batches made in another process than the trainer's, ``DataLoader(where=...)``."""
