"""Training that is killed at any moment continues on another mesh with the same samples and losses."""

from __future__ import annotations

import time

import pytest

from support.checkpoint_kills import FAULTS, MAX_LOSS_DIFFERENCE, Kills
from support.checkpoint_ranks import MESHES, PHASES
from support.datasets import build_dataset

pytestmark = [pytest.mark.long, pytest.mark.process, pytest.mark.timeout(5400)]

NUM_KILLS = 200
LONGEST_S = 3600


def test_two_hundred_kills(tmp_path):
    build_dataset(tmp_path / "data", {"train": (16, 16, 16)})
    kills = Kills(tmp_path / "work", tmp_path / "data", seed=0)
    kills.run(NUM_KILLS, time.monotonic() + LONGEST_S)
    assert kills.by_phase.total() == NUM_KILLS
    assert set(kills.by_phase) == set(PHASES)
    assert set(kills.by_mesh) == set(MESHES)
    assert {name: kills.found[name] for name in FAULTS} == dict.fromkeys(FAULTS, 0)
    assert kills.largest <= MAX_LOSS_DIFFERENCE
