"""What a sample is, how it lies in a shard, and what happens to it on its way. Imports no other fuelrail folder."""
