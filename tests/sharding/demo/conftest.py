"""A small world on disk, made once for all tests that only read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fuelrail.sharding.demo.build import build
from fuelrail.sharding.demo.world import WorldSpec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(scope="session")
def small_spec() -> WorldSpec:
    return WorldSpec(seed=5, num_clips=2, num_frames=2, width_px=160, height_px=90, num_camera_sweeps=1)


@pytest.fixture(scope="session")
def small_world(small_spec: WorldSpec, made_once: Callable[..., Path]) -> Path:
    return made_once("small-world", lambda out: build(small_spec, out, 1))
