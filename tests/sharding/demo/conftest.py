"""A small world on disk, made once for all tests that only read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fuelrail.sharding.demo.build import build
from fuelrail.sharding.demo.world import WorldSpec

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def small_spec() -> WorldSpec:
    return WorldSpec(seed=5, num_clips=2, num_frames=2, width_px=160, height_px=90, num_camera_sweeps=1)


@pytest.fixture(scope="session")
def small_world(small_spec: WorldSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("synth") / "world"
    build(small_spec, out, 1)
    return out
