"""Recipe and plan of a run: what goes into which shard."""
