"""Fuelrail beside other frameworks, one module each."""
