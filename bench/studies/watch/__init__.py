"""``fr.watch`` and ``fuelrail watch``: occupancy in anybody's trainer."""
