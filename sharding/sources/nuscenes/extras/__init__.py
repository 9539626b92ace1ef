"""Opt-in channels of nuScenes."""
