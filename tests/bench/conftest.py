"""The small dataset that most tests of the harness read: 24 samples to train on, two cameras, boxes, a lidar."""

from __future__ import annotations

import pytest

from support.datasets import build_dataset


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "tiny"
    build_dataset(folder, {"train": (12, 12)})
    return folder
