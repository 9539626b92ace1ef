"""`fuelrail order`: which samples an order selects, and how random it is."""
