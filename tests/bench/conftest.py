"""The small dataset that most tests of the harness read: 24 samples to train on, two cameras, boxes, a lidar."""

from __future__ import annotations

import pytest

from support.datasets import build_dataset


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "tiny"
    build_dataset(folder, {"train": (12, 12)})
    return folder


@pytest.fixture
def warm_ranks(monkeypatch):
    """Have the ranks of `fuelrail bench` be forks of a process that has torch loaded."""
    from fuelrail.bench.ranks import launch
    from support.warm_ranks import Warm

    monkeypatch.setattr(launch, "subprocess", Warm)
