"""Engines run the same pure shard tasks in different places; all of them give the same bytes."""
