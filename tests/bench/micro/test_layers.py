"""The benchmark of layers runs: killed writers leave the bytes of one that was not killed."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.process


def test_ranks_and_kills_do_not_show_in_the_bytes(tmp_path: Path) -> None:
    words = ["--samples", "16", "--rounds", "1", "--kills", "4", "--out", str(tmp_path / "report.json")]
    command = [sys.executable, "-m", "fuelrail.bench.micro.layers", str(tmp_path / "work"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["num_kills"] >= 4
    assert len(report["equal_digests"]) == 5
    assert all(report["equal_digests"].values())
