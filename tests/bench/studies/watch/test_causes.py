"""One cause is put into a small training, on one and two ranks of gloo: it is named, with its rank and phase."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuelrail.bench.studies.watch.report import conclude
from support import watched_ranks
from support.ranks import run_ranks

pytestmark = [pytest.mark.process, pytest.mark.slow]

CAUSES = {
    "slow-storage": ("storage", "data_wait", None),
    "slow-storage-of-one-rank": ("storage", "data_wait", 1),
    "slow-storage-of-workers": ("storage", "data_wait", None),
    "slow-storage-of-one-worker": ("storage", "data_wait", 1),
    "slow-transform": ("preprocessing", "data_wait", None),
    "slow-transform-of-one-rank": ("preprocessing", "data_wait", 1),
    "slow-rank": ("slow rank", "forward", 1),
    "uneven-batches": ("uneven ranks", "forward", None),
    "slow-optimiser": ("optimiser", "optimiser", None),
    "slow-logging": ("host", "other", None),
    "slow-logging-of-one-rank": ("host", "other", 0),
    "evaluation": ("evaluation", "evaluation", None),
    "evaluation-of-one-rank": ("evaluation", "evaluation", 0),
    "checkpoint": ("checkpoint", "checkpoint", 0),
}
LOADED_MS = 70
"""Steps of most causes take 16 to 60 ms."""
ON_ONE_RANK = ["slow-storage", "slow-storage-of-workers", "slow-optimiser", "evaluation"]


def watch_ranks(num_ranks: int, cause: str, out: Path, *words: str) -> str:
    return run_ranks(num_ranks, watched_ranks.__file__, cause, out, *words)


def check_cause(out: Path, cause: str) -> None:
    report = conclude(out, is_written=False)
    assert report is not None
    assert report.window.num_measured_steps == watched_ranks.NUM_STEPS - 10
    name, phase, rank = CAUSES[cause]
    found = [(finding.cause, finding.phase, finding.rank) for finding in report.findings]
    is_named = found[:1] == [(name, phase, rank)]
    if not is_named and report.disturbed and report.step_time.mean_ms > LOADED_MS:
        pytest.skip(f"the host is too busy to name {cause}: {report.disturbed}")
    assert is_named, report.as_text()
    first = report.findings[0]
    assert first.low <= first.share <= first.high
    assert report.verdict().startswith(first.text)


@pytest.mark.long
@pytest.mark.parametrize("cause", CAUSES)
def test_a_cause_on_two_ranks_is_named(cause: str, tmp_path: Path) -> None:
    watch_ranks(2, cause, tmp_path)
    check_cause(tmp_path, cause)


@pytest.mark.long
@pytest.mark.parametrize("cause", ON_ONE_RANK)
def test_a_cause_on_one_rank_is_named(cause: str, tmp_path: Path) -> None:
    watch_ranks(1, cause, tmp_path)
    check_cause(tmp_path, cause)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_nothing_is_named_where_nothing_is_wrong_and_weights_are_those_without_a_watch(
    num_ranks: int, tmp_path: Path
) -> None:
    said = watch_ranks(num_ranks, "none", tmp_path / "watched")
    report = conclude(tmp_path / "watched", is_written=False)
    assert report is not None
    if not report.disturbed:  # other processes can hold a rank up
        assert not report.findings, report.as_text()
        assert "Nothing certain" in report.verdict()
    plain = watch_ranks(num_ranks, "none", tmp_path / "plain", "plain")
    assert said.splitlines() == plain.splitlines()
    assert "weights" in said
    assert not (tmp_path / "plain").exists()


def test_several_batches_of_a_step_are_one_step(tmp_path: Path) -> None:
    watch_ranks(2, "accumulation", tmp_path)
    report = conclude(tmp_path, is_written=False)
    assert report is not None
    assert report.window.num_measured_steps == watched_ranks.NUM_STEPS - 10
    assert report.ranks[0].step_ms >= 4e3 * watched_ranks.WORK_S
