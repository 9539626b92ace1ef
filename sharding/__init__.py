"""Offline: any source to shards. Imports fuelrail.pipeline only."""
