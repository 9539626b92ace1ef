"""Checkpoints of a training run: what is in one, where it is stored, when it is written."""
