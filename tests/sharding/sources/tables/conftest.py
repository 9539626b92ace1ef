"""The synthetic world as a manifest in JSON lines, wide and long."""

from __future__ import annotations

import pytest

from support.manifest_world import write_long, write_wide
from support.source_world import make_world


def write_source(write, root):
    root.mkdir()
    write(make_world(), root, "jsonl")
    return root


@pytest.fixture
def wide(tmp_path):
    return write_source(write_wide, tmp_path / "source")


@pytest.fixture
def long(tmp_path):
    return write_source(write_long, tmp_path / "source")
