"""Training that is killed at any moment continues on another mesh with the same samples and losses."""

from __future__ import annotations

import time

import pytest

from support.checkpoint_kills import FAULTS, MAX_LOSS_DIFFERENCE, Kills
from support.checkpoint_ranks import MESHES, OWN_MESHES, PHASES
from support.datasets import build_dataset

pytestmark = [pytest.mark.long, pytest.mark.process, pytest.mark.timeout(5400)]

LONGEST_S = 3600


@pytest.mark.parametrize(
    ("has_own_model", "num_kills", "meshes"),
    [(False, 200, MESHES), (True, 60, OWN_MESHES)],
)
def test_kills(tmp_path, has_own_model, num_kills, meshes):
    build_dataset(tmp_path / "data", {"train": (16, 16, 16)})
    kills = Kills(tmp_path / "work", tmp_path / "data", seed=0, own=has_own_model)
    kills.run(num_kills, time.monotonic() + LONGEST_S)
    assert kills.by_phase.total() == num_kills
    assert set(kills.by_phase) == set(PHASES)
    assert set(kills.by_mesh) == set(meshes)
    assert {name: kills.found[name] for name in FAULTS} == dict.fromkeys(FAULTS, 0)
    assert kills.largest <= MAX_LOSS_DIFFERENCE
