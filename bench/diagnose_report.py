"""The report of ``fuelrail bench diagnose``: what was found, from which runs, and what came of the advice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from fuelrail.bench.diagnosis import Counterfactual, Diagnosis  # noqa: TC001 (likewise)
from fuelrail.bench.remedies import Tried, best
from fuelrail.bench.report_header import ReportHeader

if TYPE_CHECKING:
    from collections.abc import Sequence

SCHEMA = "fuelrail-bench-diagnose"
VERSION = 4


class RunMade(msgspec.Struct, frozen=True, kw_only=True):
    """One run that was made whole; its own report lies in a folder beside this one."""

    name: str
    report: str
    step_ms: float
    occupancy: float
    samples_per_s: float


class DiagnoseReport(ReportHeader, frozen=True, kw_only=True):
    """A whole report. ``cut_off`` says why it is partial: then ``diagnosis`` may be None, as not all runs were made."""

    accelerator: dict[str, Any]
    num_ranks: int
    diagnosis: Diagnosis | None
    tried: list[Tried] | None
    runs: list[RunMade]


RUNS_HEADER = ("run", "step ms", "faster by", "95 % interval")
TRIED_HEADER = ("tried", "samples/s", "faster by", "95 % interval", "")


def headline(diagnosis: Diagnosis) -> str:
    """The verdict in a few words."""
    if diagnosis.bound == "not told apart":
        return f"not told apart from noise (the repeat differed by {diagnosis.noise or 0:.1%})"
    return f"bound by: {diagnosis.bound}"


def title_of(entry: Counterfactual) -> str:
    """What a run was made without, for readers."""
    return "as it is, again" if entry.left_out == "again" else f"without {entry.left_out}"


def run_rows(diagnosis: Diagnosis) -> list[list[str]]:
    """The run as it is, and each of the others against it."""
    rows = [["as it is", f"{diagnosis.step_ms:.2f}", "", ""]]
    return rows + [
        [
            title_of(entry),
            f"{entry.step_ms:.2f}",
            f"{entry.gain:+.1%}",
            f"{entry.gain_low:+.1%} to {entry.gain_high:+.1%}",
        ]
        for entry in diagnosis.counterfactuals
    ]


def tried_rows(tried: Sequence[Tried]) -> list[list[str]]:
    """What was tried, and what came of it."""
    return [
        [
            entry.options,
            f"{entry.samples_per_s:.1f}",
            f"{entry.gain:+.1%}",
            f"{entry.gain_low:+.1%} to {entry.gain_high:+.1%}",
            verdict_on(entry),
        ]
        for entry in tried
    ]


def verdict_on(entry: Tried) -> str:
    """Whether something that was tried helps."""
    return "helps" if entry.helps else "no difference shown" if entry.gain_high > -entry.noise else "is slower"


def conclusion(tried: Sequence[Tried] | None) -> str:
    """What to use; empty where nothing was to be tried."""
    if tried is None:
        return ""
    if not tried:
        return "tried nothing: no setting of this command lifts that bound; see the advice"
    winner = best(list(tried))
    return "none of the settings tried is shown to help; see the advice" if winner is None else f"use: {winner.options}"
