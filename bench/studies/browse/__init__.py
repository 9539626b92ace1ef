"""Look into a dataset in a browser: `fuelrail browse`."""
