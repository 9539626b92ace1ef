"""Layers: rows written by any process in any order, cut into shards by arithmetic."""
