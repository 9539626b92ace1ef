"""The benchmark of layers runs."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.process


def test_rates_with_and_without_layers(tmp_path: Path) -> None:
    words = ["--samples", "16", "--rounds", "1", "--out", str(tmp_path / "report.json")]
    command = [sys.executable, "-m", "fuelrail.bench.micro.layers", str(tmp_path / "work"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["samples_per_s"].keys() == {"without layers", "three layers"}
    assert report["ratio"] > 0
