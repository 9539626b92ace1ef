"""The report of ``fuelrail bench compare``: rounds to medians, and to ratios within a round with
their intervals.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from fuelrail.bench.measure.processes import WAS_INTERRUPTED
from fuelrail.bench.measure.rates import Interval, interval_of, ratio_interval
from fuelrail.bench.peers.peer import OURS, Work
from fuelrail.bench.peers.process import Check
from fuelrail.bench.report.files import (
    ReportHeader,
    created_now,
    load_report_of,
)

if TYPE_CHECKING:
    from fuelrail.bench.measure.machine import DatasetFacts, MachineFacts
    from fuelrail.bench.studies.compare.laps import Timed

SCHEMA = "fuelrail-bench-compare"
VERSION = 2
MIN_BATCHES = 8
REFERENCE = f"{OURS}:turbo"
# A gap this long between two batches means that the machine was stopped, not that a loader is slow.
_PAUSE_S = 1.0
_PAUSE_FACTOR = 20
_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?!\w)")
CLOCK_JUMP_S = 0.25
"""A run whose wall clock and monotonic clock differ by more is left out."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one contestant in a round.

    ``images_per_s`` is of all its laps; None where ``doubt`` says why the run does not count.
    ``reference_images_per_s`` is the reference's rate in its laps between these; None without them,
    or where those do not count. CPU time is that of the process and its children in the laps;
    ``peak_memory_bytes`` counts pages that processes share once; ``others_cpus`` is what else kept
    CPUs busy on this machine, with what its host kept back; ``stolen_cpus`` is the host's part
    alone. None where that cannot be known.
    """

    round: int
    images_per_s: float | None
    reference_images_per_s: float | None
    first_batch_s: float
    num_batches: int
    cpu_s_per_1000_images: float
    peak_memory_bytes: int
    others_cpus: float | None
    stolen_cpus: float | None
    doubt: str | None


class ContestantFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a contestant over the rounds.

    ``ours_times_as_fast``: the reference's rate over this one's in laps in turns; geometric mean
    over the rounds with a 95 % interval. None without the reference, and without an interval after
    a single round.
    """

    images_per_s: Interval
    cpu_s_per_1000_images: float
    peak_memory_bytes: int
    first_batch_s: float
    ours_times_as_fast: Interval | None


class ContestantResult(msgspec.Struct, frozen=True, kw_only=True):
    """A loader with a way to decode. ``left_out`` says why it was not timed; None if it was."""

    name: str
    peer: str
    recipe: str
    check: Check | None
    left_out: str | None
    runs: list[Run]
    figures: ContestantFigures | None


class CompareReport(ReportHeader, frozen=True, kw_only=True):
    """A whole report. ``cut_off`` says why it is partial; ``packages`` has the peers' versions."""

    packages: dict[str, str]
    work: Work
    num_rounds: int
    contestants: list[ContestantResult]


def reasons_left_out(contestants: Iterable[ContestantResult]) -> list[str]:
    """Return why contestants were not timed: each cause once, with all whom it kept out.

    Reasons that differ in numbers alone have one cause; the numbers become their range.
    """
    names: dict[str, list[str]] = {}
    numbers: dict[str, list[list[str]]] = {}
    for contestant in contestants:
        if contestant.left_out is not None:
            cause = _NUMBER.sub("\0", contestant.left_out)
            numbers_of_reason = _NUMBER.findall(contestant.left_out)
            names.setdefault(cause, []).append(contestant.name)
            numbers.setdefault(cause, []).append(numbers_of_reason)
    lines = []
    for cause, affected in names.items():
        ranges = []
        for values in zip(*numbers[cause], strict=True):
            low = min(values, key=float)
            high = max(values, key=float)
            ranges.append(low if low == high else f"{low} to {high}")
        parts = cause.split("\0")
        pairs = zip_longest(parts, ranges, fillvalue="")
        reason = "".join(part + number for part, number in pairs)
        lines.append(f"{', '.join(affected)}: {reason}")
    return lines


def make_run(
    round_number: int,
    timed: Timed,
    beside: Timed | None,
    images_per_batch: int,
) -> Run:
    """Judge one run by the times at which its batches came, and the reference's laps ``beside``
    it likewise.
    """
    rate, doubt = _rate(timed, images_per_batch)
    reference_rate = None
    if beside is not None:
        reference_rate, _ = _rate(beside, images_per_batch)
    num_batches = len(timed.arrival_s)
    num_images = max(num_batches, 1) * images_per_batch
    return Run(
        round=round_number,
        images_per_s=rate,
        reference_images_per_s=reference_rate,
        first_batch_s=timed.first_batch_s,
        num_batches=num_batches,
        cpu_s_per_1000_images=1e3 * timed.cpu_s / num_images,
        peak_memory_bytes=timed.peak_memory_bytes,
        others_cpus=timed.others_cpus,
        stolen_cpus=timed.stolen_cpus,
        doubt=doubt,
    )


def _rate(timed: Timed, images_per_batch: int) -> tuple[float | None, str | None]:
    """Return the rate, and why there is none.

    It is the slope of the line through the arrivals, by least squares: with several workers batches
    come in bursts, and first-to-last would depend on where a burst is cut.
    """
    num_batches = len(timed.arrival_s)
    if abs(timed.clock_jump_s) > CLOCK_JUMP_S:
        doubt = (
            f"the wall clock jumped by {timed.clock_jump_s:+.1f} s: it was set, or the machine "
            "slept"
        )
        return None, doubt
    if num_batches < MIN_BATCHES:
        doubt = (
            f"{num_batches} batches are too few: {MIN_BATCHES} are needed; give it more --seconds"
        )
        return None, doubt
    gaps = np.diff(timed.arrival_s)
    longest_s = gaps.max()
    usual_s = max(_PAUSE_S, _PAUSE_FACTOR * float(np.median(gaps)))
    if longest_s > usual_s:
        doubt = f"nothing came for {longest_s:.1f} s: something stopped the process"
        return None, doubt
    slope, _ = np.polyfit(timed.arrival_s, np.arange(num_batches), 1)
    return float(slope) * images_per_batch, None


def build_compare_report(
    *,
    machine: MachineFacts,
    packages: dict[str, str],
    dataset: DatasetFacts,
    work: Work,
    options: dict[str, Any],
    num_rounds: int,
    contestants: Sequence[ContestantResult],
    cut_off: str | None,
) -> CompareReport:
    """Put the parts together."""
    judged = []
    for entry in contestants:
        figures = None
        good = [run for run in entry.runs if run.images_per_s is not None]
        rates = [run.images_per_s for run in good if run.images_per_s is not None]
        if rates:
            ratios = []
            for run, rate in zip(good, rates, strict=True):
                if run.reference_images_per_s is not None:
                    ratios.append(run.reference_images_per_s / rate)
            cpu_s = np.median([run.cpu_s_per_1000_images for run in good])
            first_batch_s = np.median([run.first_batch_s for run in good])
            figures = ContestantFigures(
                images_per_s=interval_of(rates),
                cpu_s_per_1000_images=float(cpu_s),
                peak_memory_bytes=max(run.peak_memory_bytes for run in good),
                first_batch_s=float(first_batch_s),
                ours_times_as_fast=ratio_interval(ratios) if ratios else None,
            )
        judged.append(msgspec.structs.replace(entry, figures=figures))
    warnings = []
    runs = [(entry.name, run) for entry in judged for run in entry.runs]
    excluded = [
        f"{name} in round {run.round + 1}: {run.doubt}"
        for name, run in runs
        if run.doubt is not None
    ]
    if excluded:
        warnings.append(f"{len(excluded)} of {len(runs)} runs do not count: {'; '.join(excluded)}.")
    undoubted = [run for _, run in runs if run.doubt is None]
    other_cpus = [run.others_cpus for run in undoubted if run.others_cpus is not None]
    disturbed = None
    if other_cpus and max(other_cpus) > 0.1:  # more than a tenth of a CPU
        stolen = max(
            (run.stolen_cpus for run in undoubted if run.stolen_cpus is not None),
            default=0.0,
        )
        disturbed = (
            f"other processes used up to {max(other_cpus):.1f} CPUs during a run (median "
            f"{float(np.median(other_cpus)):.2f}), of which the hypervisor took up to "
            f"{stolen:.2f}; rates are too low by about that share, ratios suffer less"
        )
    return CompareReport(
        schema=SCHEMA,
        version=VERSION,
        created=created_now(),
        cut_off=cut_off,
        interrupted=cut_off == WAS_INTERRUPTED,
        machine=machine,
        packages=packages,
        dataset=dataset,
        work=work,
        options=options,
        num_rounds=num_rounds,
        contestants=judged,
        disturbed=disturbed,
        warnings=warnings,
    )


def ranking(report: CompareReport) -> list[ContestantResult]:
    """Return the contestants that have figures, the fastest first."""
    rates = {
        entry.name: entry.figures.images_per_s.median
        for entry in report.contestants
        if entry.figures is not None
    }
    timed = [entry for entry in report.contestants if entry.name in rates]
    return sorted(timed, key=lambda entry: -rates[entry.name])


def load_compare_report(path: Path) -> CompareReport:
    """Read a report; raises ConfigError for other files and other versions."""
    return load_report_of(path, CompareReport, SCHEMA, VERSION)
