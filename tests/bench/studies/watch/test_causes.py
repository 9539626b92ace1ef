"""One cause is put into a small training: it is named, with its rank and phase."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from fuelrail.bench.studies.watch.report import conclude
from support.ranks import run_ranks
from support.watched import battery, training

pytestmark = [pytest.mark.process, pytest.mark.slow]

MODULES = {"lightning": "pytorch_lightning"}
LOADED_MS = 90
"""Steps of most causes take 18 to 80 ms."""


@pytest.mark.long
@pytest.mark.parametrize("run", battery.plan(), ids=lambda run: run.title)
def test_a_cause_is_named(run: battery.Run, tmp_path: Path) -> None:
    module = MODULES.get(run.trainer, run.trainer)
    if run.trainer not in ("plain", "cuda") and find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    battery.run_watch(run, tmp_path)
    answer = battery.judge_watch(run, tmp_path)
    report = conclude(tmp_path, is_written=False)
    assert report is not None
    step_ms = report.times["step [ms]"].median
    if not answer.is_right and report.disturbed and step_ms > LOADED_MS:
        pytest.skip(f"the host is too busy for {run.title}: {report.disturbed}")
    assert answer.is_right, answer.text
    for finding in report.findings:
        assert finding.low <= finding.share <= finding.high


@pytest.mark.parametrize(("num_ranks", "way"), [(1, "watch"), (2, "hooks")])
def test_nothing_is_named_where_nothing_is_wrong_and_weights_are_those_without_a_watch(
    num_ranks: int, way: str, tmp_path: Path
) -> None:
    folder = tmp_path / "watched"
    said = run_ranks(num_ranks, training.__file__, "plain", "none", folder, way)
    report = conclude(folder, is_written=False)
    assert report is not None
    assert report.window.num_measured_steps == training.num_steps("none") - 10
    if not report.disturbed:  # other processes can hold a rank up
        assert not report.findings, report.as_text()
        assert "Nothing certain" in report.verdict()
    plain = run_ranks(num_ranks, training.__file__, "plain", "none", tmp_path / "not", "plain")
    ends = [line for line in said.splitlines() if line.startswith("weights")]
    assert ends == plain.splitlines()
    assert len(ends) == num_ranks
    assert not (tmp_path / "not").exists()
