"""The report of a watch: from the ranks' records to a verdict of one screen, JSON and a page."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fuelrail.bench.measure.clock import Summary, summarise_ns
from fuelrail.bench.measure.machine import CpuUse, combine_host_uses, machine_facts
from fuelrail.bench.measure.nvml import GpuUse
from fuelrail.bench.measure.occupancy import (
    MIN_MEASURED_STEPS,
    Occupancy,
    Window,
    measured_steps,
    occupancy_of,
    window_of,
)
from fuelrail.bench.measure.rates import Interval, bootstrap_means
from fuelrail.bench.measure.records import RankLog, StepRecord, rank_path, read_rank
from fuelrail.bench.report.files import (
    REPORT_JSON,
    ReportHead,
    created_now,
    publish,
    publish_json,
)
from fuelrail.bench.studies.watch.export import TENSORBOARD_FOLDER, write_tensorboard
from fuelrail.bench.studies.watch.judge import (
    LABELS,
    PARTS,
    Finding,
    find_causes,
    late_steps,
    part_times,
)
from fuelrail.pipeline.cli import counted

SCHEMA = "fuelrail-watch"

VERSION = 2

RECORDS = "records"

PROMETHEUS_FILE = "metrics.prom"

_WARM_UP = 10
_MAX_RECORDS = 10_000
"""Of a longer run the last ones are judged."""
_SHOWN_RANKS = 16
_GAUGES = {
    "step_seconds": "mean time of a step",
    "occupancy_ratio": "share of the time in forward, backward and optimiser",
    "part_ratio": "share of the time in a part of the step",
    "finding_ratio": "share of the time that something certainly takes; rank is empty for all",
}
_MIN_MS = 0.1
"""Parts of a step below are not compared with those of another run."""


class RankTimes(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's mean step: its time, the shares of ``PARTS``, how often it came last, and what NVML
    says of its GPU.
    """

    rank: int
    device: str
    step_ms: float
    occupancy: float
    shares: dict[str, float]
    last_in: float
    gpu: GpuUse | None = None


class Remedy(msgspec.Struct, frozen=True, kw_only=True):
    """A change that was tried, the line to change, the step's time with it, and the share of the
    step that it saves with the ends of its 95 % interval.
    """

    name: str
    line: str
    step_ms: float
    gain: float
    low: float
    high: float

    def as_text(self) -> str:
        """Return the remedy in a line."""
        ends = f"{self.low:.1%} to {self.high:.1%}"
        if self.low <= 0 <= self.high:
            return f"saves nothing certain ({ends}): {self.line}"
        return f"saves {self.gain:.1%} of the step ({ends}): {self.line}"


class WatchReport(ReportHead, frozen=True, kw_only=True):
    """A whole report.

    ``findings``: what certainly holds the accelerators up, the largest first; empty where nothing
    is certain. ``occupancy`` is None where too few steps were made. ``times``: means of a
    step and of its parts over ranks, by name, for a comparison with another run. ``remedies`` were
    tried, best first.
    """

    num_ranks: int
    window: Window
    step_time: Summary | None
    occupancy: Occupancy | None
    findings: list[Finding]
    ranks: list[RankTimes]
    times: dict[str, Interval]
    remedies: list[Remedy] = msgspec.field(default_factory=list)

    def verdict(self) -> str:
        """Return the run in a sentence or two."""
        if self.occupancy is None:
            return f"No verdict: {self.window.too_short}."
        if not self.findings:
            return "Nothing certain holds the accelerators up by more than 2% of the time."
        return f"{self.findings[0].text} {self.findings[0].advice}"

    def as_text(self) -> str:
        """Return the verdict, what else was found, and a line for each rank."""
        lines = [self.verdict()]
        lines += [f"also: {finding.text}" for finding in self.findings[1:]]
        lines += [f"tried: {remedy.as_text()}" for remedy in self.remedies]
        lines += [f"note: {warning}" for warning in self.warnings]
        if self.disturbed is not None:
            lines.append(f"note: measured on a loaded host: {self.disturbed}")
        if self.occupancy is None or self.step_time is None:
            return "\n".join(lines)
        lines.append(
            f"occupancy {self.occupancy.mean:.1%}: forward, backward and optimiser, of "
            f"{counted(self.window.num_measured_steps, 'step')} on "
            f"{counted(self.num_ranks, 'rank')}, {self.step_time.mean_ms:.1f} ms each"
        )
        columns = [part for part in PARTS if any(rank.shares[part] >= 5e-4 for rank in self.ranks)]
        header = ["rank", "step ms", *(part.replace("_", " ") for part in columns), "last"]
        rows = [
            [
                f"{rank.rank}",
                f"{rank.step_ms:.1f}",
                *(f"{rank.shares[part]:.1%}" for part in columns),
                f"{rank.last_in:.0%}",
            ]
            for rank in self.ranks[:_SHOWN_RANKS]
        ]
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines += [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in (header, *rows)
        ]
        lines += [
            f"GPU of rank {rank.rank}: kernels ran {rank.gpu.kernels:.0%} of the time, memory "
            f"{rank.gpu.peak_memory_bytes / 2**30:.1f} GiB, {rank.gpu.mean_sm_clock_mhz:.0f} MHz"
            for rank in self.ranks[:_SHOWN_RANKS]
            if rank.gpu is not None
        ]
        if len(self.ranks) > _SHOWN_RANKS:
            lines.append(f"and {len(self.ranks) - _SHOWN_RANKS} more ranks")
        return "\n".join(lines)

    def as_prometheus(self) -> str:
        """Return the report as gauges, such as for the node exporter's textfile collector."""
        values: dict[str, list[tuple[dict[str, Any], float]]] = {name: [] for name in _GAUGES}
        for row in self.ranks:
            rank = {"rank": row.rank}
            values["step_seconds"].append((rank, row.step_ms / 1e3))
            values["occupancy_ratio"].append((rank, row.occupancy))
            for part, share in row.shares.items():
                values["part_ratio"].append((rank | {"part": part}, share))
        for finding in self.findings:
            blamed = "" if finding.rank is None else finding.rank
            labels = {"cause": finding.cause, "phase": finding.phase, "rank": blamed}
            values["finding_ratio"].append((labels, finding.share))
        lines = []
        for name, rows in values.items():
            lines.append(f"# HELP fuelrail_watch_{name} {_GAUGES[name]}")
            lines.append(f"# TYPE fuelrail_watch_{name} gauge")
            for labels, value in rows:
                words = ",".join(f'{label}="{word}"' for label, word in labels.items())
                lines.append(f"fuelrail_watch_{name}{{{words}}} {value:.6g}")
        return "\n".join(lines) + "\n"


def remedies_path(folder: Path, rank: int) -> Path:
    """Return the path of the remedies that a rank tried."""
    return folder / f"remedies-{rank:05d}.json"


def conclude(
    folder: Path, *, first_rank: int = 0, is_written: bool = True, is_last: bool = False
) -> WatchReport | None:
    """Return the report of the records in a folder; None where there are none.

    ``is_written``: write report.json and metrics.prom too, and the page where what draws it is
    installed. ``is_last``: also TensorBoard's scalars, where it is.
    """
    records = folder / RECORDS
    first = read_rank(rank_path(records, first_rank))
    if first.header is None:
        return None
    logs = {first_rank: first}
    if first_rank == 0:
        logs |= {rank: read_rank(rank_path(records, rank)) for rank in range(1, first.header.world)}
    files = [remedies_path(records, rank) for rank in logs]
    tried = [
        msgspec.json.decode(file.read_bytes(), type=list[Remedy]) for file in files if file.exists()
    ]
    report = build_report(logs, world=first.header.world, tried=tried)
    if is_written:
        publish_json(folder / REPORT_JSON, report)
        if find_spec("jinja2") is not None:
            from fuelrail.bench.report.page import write_report

            write_report(report, folder, html=True)
        publish(folder / PROMETHEUS_FILE, report.as_prometheus().encode())
        if is_last:
            write_tensorboard(logs, folder / TENSORBOARD_FOLDER)
    return report


def build_report(
    logs: dict[int, RankLog], *, world: int, tried: Sequence[Sequence[Remedy]] = ()
) -> WatchReport:
    """Judge the records of ranks, by their numbers, with the remedies that each one tried."""
    by_name: dict[str, list[Remedy]] = {}
    for remedy in itertools.chain.from_iterable(tried):
        by_name.setdefault(remedy.name, []).append(remedy)
    # The ranks go on together, so that one to which a remedy brings less holds the others up.
    remedies = [
        min(found, key=lambda remedy: remedy.gain)
        for found in by_name.values()
        if len(found) == len(tried)
    ]
    remedies.sort(key=lambda remedy: -remedy.gain)
    missing = [rank for rank in range(world) if not logs.get(rank, RankLog()).steps]
    warnings = []
    if missing:
        names = ", ".join(map(str, missing[:_SHOWN_RANKS]))
        warnings.append(f"no steps of rank {names} of {world}: what they wait for is not known")
    logs = {rank: log for rank, log in logs.items() if log.steps}
    num_records = min((len(log.steps) for log in logs.values()), default=0)
    warm_up = min(_WARM_UP, max(0, num_records - MIN_MEASURED_STEPS))
    warm_up = max(warm_up, num_records - _MAX_RECORDS)
    steps = [log.steps for log in logs.values()]
    window = window_of(steps, warm_up)
    machine = machine_facts()
    occupancy = None
    findings: list[Finding] = []
    ranks: list[RankTimes] = []
    step_time = None
    times: dict[str, Interval] = {}
    disturbed = None
    if window.too_short is None:
        inside = {rank: measured_steps(log.steps, window) for rank, log in logs.items()}
        occupancy = occupancy_of(steps, window)
        num_workers = max(log.header.num_workers if log.header else 0 for log in logs.values())
        uses = [
            use for rank_steps in inside.values() if (use := _cpu_use(rank_steps, machine.num_cpus))
        ]
        disturbed = combine_host_uses(uses).disturbed if uses else None
        findings = find_causes(
            inside,
            num_workers=num_workers,
            num_cpus=machine.num_cpus,
            is_loaded=disturbed is not None,
        )
        every = [step for rank in inside.values() for step in rank]
        step_time = summarise_ns([step.wall_ns // step.details.num_steps for step in every])
        times = _mean_times(list(inside.values()))
        last = late_steps(list(inside.values()))
        for row, (rank, rank_steps) in enumerate(inside.items()):
            header = logs[rank].header
            wall_ns = sum(step.wall_ns for step in rank_steps)
            columns = zip(*map(part_times, rank_steps), strict=True)
            ranks.append(
                RankTimes(
                    rank=rank,
                    device="unknown" if header is None else header.device,
                    step_ms=wall_ns / sum(step.details.num_steps for step in rank_steps) / 1e6,
                    occupancy=occupancy.ranks[row].occupancy,
                    shares={
                        part: sum(part_ns) / wall_ns
                        for part, part_ns in zip(PARTS, columns, strict=True)
                    },
                    last_in=last[row],
                    gpu=logs[rank].gpu,
                )
            )
    return WatchReport(
        schema=SCHEMA,
        version=VERSION,
        created=created_now(),
        machine=machine,
        options={},
        warnings=warnings,
        disturbed=disturbed,
        num_ranks=len(logs),
        window=window,
        step_time=step_time,
        occupancy=occupancy,
        findings=findings,
        ranks=ranks,
        times=times,
        remedies=remedies,
    )


def _mean_times(ranks: Sequence[Sequence[StepRecord]]) -> dict[str, Interval]:
    """Return the mean step and its parts, over ranks, with 95 % intervals over blocks of steps."""
    parts = np.array([[part_times(step) for step in steps] for steps in ranks], np.float64)
    num_steps = np.array([step.details.num_steps for step in ranks[0]])
    parts_ms = parts.mean(axis=0) / num_steps[:, None] / 1e6
    columns = {"step [ms]": parts_ms.sum(axis=1)}
    columns |= {f"{LABELS[part]} [ms]": parts_ms[:, row] for row, part in enumerate(PARTS)}
    times = {}
    for name, values in columns.items():
        low, high = np.quantile(bootstrap_means(values, seed=0), (0.025, 0.975)).tolist()
        if low > _MIN_MS:
            times[name] = Interval(
                median=float(values.mean()),
                low=low,
                high=high,
                confidence=0.95,
                num_repeats=len(values),
            )
    return times


def _cpu_use(steps: Sequence[StepRecord], usable: float) -> CpuUse | None:
    """Return the use of the host's CPUs by a rank, with its workers, and by all others."""
    details = [step.details for step in steps]
    seconds = sum(entry.cpu_wall_ns for entry in details) / 1e9
    host_s = sum(entry.host_cpu_ns for entry in details) / 1e9
    if not seconds or not host_s:
        return None
    own_s = sum(entry.process_cpu_ns + entry.workers_cpu_ns for entry in details) / 1e9
    return CpuUse(
        seconds=seconds,
        own_cpus=own_s / seconds,
        other_cpus=max(0.0, host_s - own_s) / seconds,
        usable=usable,
    )
