"""The twin of the GPU check: every way of computing a step runs, and learns the same at first."""

from __future__ import annotations

import pytest

from fuelrail.bench.gpu.training_modes import measure_modes

# torch.compile looks at the gradients of all tensors in a frame, and torch warns of those that are no leaves.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")]


def test_every_mode_trains_and_agrees():
    found = measure_modes("cpu", {"gpt-tiny": 2})
    assert len(found) == 7
    full = found[0].loss
    assert all(mode.loss == pytest.approx(full, rel=0.01) for mode in found)
