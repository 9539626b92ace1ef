"""Fuelrail datasets as sources: `reshard` and `append`."""
