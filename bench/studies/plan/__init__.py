"""`fuelrail plan`: what fits, how fast it trains, what it costs, and whether the data keeps up."""
