"""A few kills; ``tests/slow/test_checkpoint_kills.py`` makes hundreds, on all meshes."""

from __future__ import annotations

import time

import pytest

from support import checkpoint_kills
from support.checkpoint_kills import FAULTS, MAX_LOSS_DIFFERENCE, MESHES, Kills
from support.datasets import build_dataset

pytestmark = [pytest.mark.process, pytest.mark.slow]


def test_runs_survive_a_few_kills(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_kills, "_PATIENCE_S", 280)  # a busy machine is not a fault
    monkeypatch.setattr(
        checkpoint_kills,
        "MESHES",
        {name: MESHES[name] for name in ("one", "fsdp2")},
    )
    build_dataset(tmp_path / "data", {"train": (16, 16, 16)})
    # Of this seed both kills come after a checkpoint, and no run ends before its kill.
    kills = Kills(tmp_path / "work", tmp_path / "data", seed=4)
    kills.run(2, time.monotonic() + 3600)
    assert kills.by_phase.total() == 2
    assert kills.found["resumed_on_another_mesh"] > 0
    assert kills.found["checkpoints_checked"] > 0
    assert {name: kills.found[name] for name in FAULTS} == dict.fromkeys(FAULTS, 0)
    assert kills.largest <= MAX_LOSS_DIFFERENCE
