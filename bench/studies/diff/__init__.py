"""`fuelrail bench diff`: two reports of one kind compared, with their noise."""
