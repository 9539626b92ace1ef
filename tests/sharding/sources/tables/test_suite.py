"""Manifests in all forms do what every source must do."""

from __future__ import annotations

from typing import ClassVar

from support.manifest_world import write_long, write_wide
from support.source_suite import SourceSuite

COLUMNS = ["x", "y", "z", "intensity", "ring"]


class TestWideParquet(SourceSuite):
    kind = "manifest"
    states_sizes = False
    options: ClassVar = {"boxes_in": "global", "lidar_columns": COLUMNS}

    def write(self, world, root):
        return write_wide(world, root, "parquet")


class TestWideJson(TestWideParquet):
    impossible = ("no file",)

    def write(self, world, root):
        return write_wide(world, root, "jsonl", "range")


class TestWideCsv(TestWideParquet):
    impossible = ("no file",)

    def write(self, world, root):
        return write_wide(world, root, "csv", "tar")


class TestLongParquet(TestWideParquet):
    def write(self, world, root):
        return write_long(world, root, "parquet")


class TestLongCsv(TestWideParquet):
    def write(self, world, root):
        return write_long(world, root, "csv")
