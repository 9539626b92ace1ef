"""`fuelrail order`: what an order selects, and how well it shuffles."""
