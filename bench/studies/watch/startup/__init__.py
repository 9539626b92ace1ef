"""What `fuelrail watch` has Python run at its start."""
