"""Samples, their format on disk, their order and their geometry.

Imports no other fuelrail folder.
"""
