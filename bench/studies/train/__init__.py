"""`fuelrail bench train`: occupancy and the time of each phase of a step."""
