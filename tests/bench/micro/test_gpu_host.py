from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from fuelrail.bench.micro import gpu_host
from support.backends import needs_dali

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, needs_dali]


def test_runs_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_host.main(["--quick", "--out", str(tmp_path / "report.json")]) == 0
    assert "at best  plain, evaluation maps" in capsys.readouterr().out
    times = json.loads((tmp_path / "report.json").read_text())["per_image"]
    assert {"plain, evaluation maps", "plain, training maps"} <= set(times)
    assert all(0.0 < value["cpu_us"] < 1e5 for value in times.values())
