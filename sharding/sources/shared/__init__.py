"""Shared parts of sources: files, points, video, protobuf, joins."""
