"""`fuelrail bench scale`: scaling, measured and simulated."""
