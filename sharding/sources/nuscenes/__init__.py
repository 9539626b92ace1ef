"""nuScenes v1.0 tables as a source."""
