"""A small world on disk, made once for all tests that only read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fuelrail.sharding.demo.options import SynthOptions
from fuelrail.sharding.demo.synth import synth

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(scope="session")
def small_options() -> SynthOptions:
    return SynthOptions(seed=5, clips=2, frames=2, size=(160, 90), workers=1)


@pytest.fixture(scope="session")
def small_world(small_options: SynthOptions, made_once: Callable[..., Path]) -> Path:
    return made_once("small-world", lambda out: synth(out, small_options))
