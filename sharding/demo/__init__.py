"""A synthetic street world with true geometry, written as nuScenes v1.0 tables."""
