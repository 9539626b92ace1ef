"""Ledgers of runs: what they say, and batches made again."""
