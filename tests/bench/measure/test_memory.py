from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fuelrail
from fuelrail.bench.measure.machine import peak_memory_bytes

_CHILD = "from fuelrail.bench.measure.machine import peak_memory_bytes; print(peak_memory_bytes())"


@pytest.mark.slow
def test_memory_that_was_freed_counts():
    before = peak_memory_bytes()
    block = np.ones(before + (64 << 20), np.uint8)
    del block
    assert peak_memory_bytes() > before + (60 << 20)


@pytest.mark.process
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="VmHWM is Linux's")
def test_a_large_parents_peak_is_not_its_childs():
    np.ones(512 << 20, np.uint8)
    assert peak_memory_bytes() > 512 << 20
    environment = {**os.environ, "PYTHONPATH": str(Path(fuelrail.__file__).parents[2])}
    answer = subprocess.run([sys.executable, "-c", _CHILD], capture_output=True, text=True, check=True, env=environment)
    assert int(answer.stdout) < 256 << 20
