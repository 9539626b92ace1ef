"""Geometry of images and augmentation."""
