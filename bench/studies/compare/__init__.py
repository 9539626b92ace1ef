"""`fuelrail bench compare`: other loaders on the same images."""
