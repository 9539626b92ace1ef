"""The input of the GPU checks on the CPU, and on a fake device."""

from __future__ import annotations

import pytest
import torch

from fuelrail.bench.gpu.base import Bench
from support.datasets import build_dataset


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu-check")
    build_dataset(folder / "data", {"train": (8, 8)})
    return Bench(torch.device("cpu"), folder / "data", folder, folder)
