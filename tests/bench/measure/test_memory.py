from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fuelrail
from fuelrail.bench.measure.machine import peak_memory_bytes

pytestmark = pytest.mark.process

_PEAK = "from fuelrail.bench.measure.machine import peak_memory_bytes as peak; "


def run(program):
    """Whole numbers that a Python program of its own prints."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(fuelrail.__file__).parents[1]),
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    return [int(word) for word in done.stdout.split()]


def test_memory_that_was_freed_counts():
    """In a process of its own: the peak to exceed is then that of a start, not that of all tests before this one."""
    before, after = run(
        _PEAK
        + "import numpy as np; before = peak(); np.ones(before + (64 << 20), np.uint8); print(before, peak())"
    )
    assert after > before + (60 << 20)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="VmHWM is Linux's")
def test_a_large_parents_peak_is_not_its_childs():
    np.ones(512 << 20, np.uint8)
    assert peak_memory_bytes() > 512 << 20
    (peak,) = run(_PEAK + "print(peak())")
    assert peak < 256 << 20
