"""`fuelrail bench comm`: how fast the ranks' links are."""
