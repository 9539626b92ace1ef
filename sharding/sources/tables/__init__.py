"""Manifests: tables of the user's own that list files."""
