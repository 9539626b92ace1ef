"""Adapters for published research datasets."""
