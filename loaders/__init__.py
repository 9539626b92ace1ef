"""Online: shards to batches on a device. Imports fuelrail.pipeline only."""
