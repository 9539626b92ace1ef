"""Metadata, and tables of any size."""
