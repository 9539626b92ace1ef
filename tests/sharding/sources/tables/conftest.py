"""The synthetic world as a manifest in JSON lines, wide and long."""

from __future__ import annotations

import pytest

from support.manifest_world import write_long, write_wide
from support.source_world import make_world


@pytest.fixture
def wide(tmp_path):
    root = tmp_path / "source"
    root.mkdir()
    write_wide(make_world(), root, "jsonl")
    return root


@pytest.fixture
def long(tmp_path):
    root = tmp_path / "source"
    root.mkdir()
    write_long(make_world(), root, "jsonl")
    return root
