"""`fuelrail bench loader`: each stage alone and together."""
