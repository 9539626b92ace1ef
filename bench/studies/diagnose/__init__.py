"""`fuelrail bench diagnose`: find the bottleneck of a run."""
