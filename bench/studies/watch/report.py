"""The report of a watch: from the ranks' records to a verdict of one screen, JSON and a page."""

from __future__ import annotations

import functools
import itertools
import shutil
import time
from collections.abc import Iterator
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fuelrail.bench.measure.machine import CpuUse, machine_facts
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
from fuelrail.bench.measure.records import BUSY, RankLog, Remedy, rank_path, read_rank, step_table
from fuelrail.bench.report.files import REPORT_JSON, ReportHead, created_now, publish, publish_json
from fuelrail.bench.studies.watch.judge import LABELS, PARTS, Finding, find_causes, part_times
from fuelrail.pipeline.cli import counted

SCHEMA = "fuelrail-watch"

VERSION = 3

RECORDS = "records"

_WARM_UP = 10
_MAX_RECORDS = 10_000
"""Of a longer run the last ones are judged."""
_SHOWN_RANKS = 16
_MIN_MS = 0.1
"""Parts of a step below are not compared with those of another run."""


class RankTimes(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's mean step: its time and the shares of ``PARTS``, and what NVML says of its GPU."""

    rank: int
    step_ms: float
    shares: dict[str, float]
    gpu: GpuUse | None = None


class WatchReport(ReportHead, frozen=True, kw_only=True):
    """A whole report.

    ``findings``: what certainly holds the accelerators up, the largest first; empty where nothing
    is certain. ``occupancy`` is None where too few steps were made. ``times``: means of a
    step, which comes first, and of its parts over ranks, by name, for a comparison with another
    run. ``remedies`` were tried, best first.
    """

    num_ranks: int
    window: Window
    occupancy: Occupancy | None = None
    findings: list[Finding] = msgspec.field(default_factory=list)
    ranks: list[RankTimes] = msgspec.field(default_factory=list)
    times: dict[str, Interval] = msgspec.field(default_factory=dict)
    remedies: list[Remedy] = msgspec.field(default_factory=list)

    def verdict(self) -> str:
        """Return the run in a sentence or two."""
        if self.occupancy is None:
            return f"No verdict: {self.window.too_short}."
        if not self.findings:
            return "Nothing certain holds the accelerators up by more than 5% of the time."
        return f"{self.findings[0].text} {self.findings[0].advice}"

    def as_text(self) -> str:
        """Return the verdict, what else was found, and a line for each rank."""
        lines = [self.verdict()]
        lines += [f"also: {finding.text}" for finding in self.findings[1:]]
        lines += [f"tried: {remedy.as_text()}" for remedy in self.remedies]
        lines += [f"note: {warning}" for warning in self.warnings]
        if self.disturbed is not None:
            lines.append(f"note: measured on a loaded host: {self.disturbed}")
        if self.occupancy is None:
            return "\n".join(lines)
        lines.append(
            f"occupancy {self.occupancy.mean:.1%}: forward, backward and optimiser, of "
            f"{counted(self.window.num_measured_steps, 'step')} on "
            f"{counted(self.num_ranks, 'rank')}, {self.times['step [ms]'].median:.1f} ms each"
        )
        table = self.rank_table()[: 1 + _SHOWN_RANKS]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines += ["  ".join(map(str.rjust, row, widths)) for row in table]
        if len(self.ranks) > _SHOWN_RANKS:
            lines.append(f"and {len(self.ranks) - _SHOWN_RANKS} more ranks")
        return "\n".join(lines)

    def rank_table(self) -> list[list[str]]:
        """Return a row for each rank, below a header; parts that no rank has are left out. There is
        an occupancy.
        """
        assert self.occupancy is not None
        columns = [part for part in PARTS if any(rank.shares[part] >= 5e-4 for rank in self.ranks)]
        rows = []
        for rank, figures in zip(self.ranks, self.occupancy.ranks, strict=True):
            cells = {"rank": f"{rank.rank}", "step ms": f"{rank.step_ms:.1f}"}
            cells |= {part.replace("_", " "): f"{rank.shares[part]:.1%}" for part in columns}
            cells["last"] = f"{figures.last_in:.0%}"
            if rank.gpu is not None:
                cells["kernels ran"] = f"{rank.gpu.kernels:.0%}"
                cells["GPU GiB"] = f"{rank.gpu.peak_memory_bytes / 2**30:.1f}"
                cells["GPU MHz"] = f"{rank.gpu.mean_sm_clock_mhz:.0f}"
            rows.append(cells)
        header = max(map(list, rows), key=len)
        return [header, *([cells.get(name, "") for name in header] for cells in rows)]

    def as_prometheus(self) -> bytes:
        """Return the report as gauges, such as for the node exporter's textfile collector."""
        from prometheus_client import CollectorRegistry, Gauge, generate_latest

        registry = CollectorRegistry()
        gauge = functools.partial(Gauge, namespace="fuelrail_watch", registry=registry)
        step_s = gauge("step_seconds", "mean time of a step", ["rank"])
        meaning = "share of the time in forward, backward and optimiser"
        busy = gauge("occupancy_ratio", meaning, ["rank"])
        parts = gauge("part_ratio", "share of the time in a part of the step", ["rank", "part"])
        for rank in self.ranks:
            step_s.labels(rank.rank).set(rank.step_ms / 1e3)
            busy.labels(rank.rank).set(sum(rank.shares[phase] for phase in BUSY))
            for part, share in rank.shares.items():
                parts.labels(rank.rank, part).set(share)
        meaning = "share of the time that something certainly takes; rank is empty for all"
        findings = gauge("finding_ratio", meaning, ["cause", "phase", "rank"])
        for finding in self.findings:
            blamed = "" if finding.rank is None else finding.rank
            findings.labels(finding.cause, finding.phase, blamed).set(finding.share)
        return generate_latest(registry)


def conclude(folder: Path, *, is_written: bool = True) -> WatchReport | None:
    """Return the report of the records in a folder; None where there are none.

    ``is_written``: write report.json too, and the page and metrics.prom where what makes them is
    installed, and TensorBoard's scalars where it is.
    """
    header = read_rank(rank_path(folder / RECORDS, 0)).header
    if header is None:
        return None
    logs = {rank: read_rank(rank_path(folder / RECORDS, rank)) for rank in range(header.world)}
    report = build_report(logs)
    if is_written:
        publish_json(folder / REPORT_JSON, report)
        if find_spec("jinja2") is not None:
            from fuelrail.bench.report.page import write_report

            write_report(report, folder, html=True)
        if find_spec("prometheus_client") is not None:
            publish(folder / "metrics.prom", report.as_prometheus())
        write_tensorboard(logs, folder / "tensorboard")
    return report


def build_report(logs: dict[int, RankLog]) -> WatchReport:
    """Judge the records of all ranks, by their numbers; those of a rank may be empty."""
    by_name: dict[str, list[Remedy]] = {}
    tried = [log.remedies for log in logs.values() if log.remedies is not None]
    for remedy in itertools.chain.from_iterable(tried):
        by_name.setdefault(remedy.name, []).append(remedy)
    # The ranks go on together, so that one to which a remedy brings less holds the others up.
    of_all = [results for results in by_name.values() if len(results) == len(tried)]
    remedies = [min(results, key=attrgetter("gain")) for results in of_all]
    remedies.sort(key=attrgetter("gain"), reverse=True)
    missing = [str(rank) for rank, log in logs.items() if not log.steps]
    names = ", ".join(missing[:_SHOWN_RANKS])
    text = f"no steps of rank {names} of {len(logs)}: what they wait for is not known"
    logs = {rank: log for rank, log in logs.items() if log.steps}
    all_steps = [log.steps for log in logs.values()]
    num_records = min(map(len, all_steps), default=0)
    warm_up = min(_WARM_UP, max(0, num_records - MIN_MEASURED_STEPS))
    warm_up = max(warm_up, num_records - _MAX_RECORDS)
    window = window_of(all_steps, warm_up)
    machine = machine_facts()
    headers = [log.header for log in logs.values() if log.header is not None]
    on_host = max((header.ranks_on_host for header in headers), default=1)
    is_crowded = on_host > machine.num_cpus
    warnings = [text] if missing else []
    if is_crowded:
        text = f"{on_host} ranks share {machine.num_cpus:g} CPUs: what their collectives take"
        warnings.append(f"{text} is not told apart from waits for a CPU")
    report = WatchReport(
        schema=SCHEMA,
        version=VERSION,
        created=created_now(),
        machine=machine,
        options={},
        warnings=warnings,
        num_ranks=len(logs),
        window=window,
        remedies=remedies,
    )
    if window.too_short:
        return report
    inside = {rank: measured_steps(log.steps, window) for rank, log in logs.items()}
    steps = step_table(inside.values())
    parts = part_times(steps)
    num_steps = steps["num_steps"]
    # The host's CPUs, of which all ranks count the same use.
    counted_ns = np.maximum(1, steps["cpu_wall_ns"].sum(axis=1))
    own_ns = (steps["process_cpu_ns"] + steps["workers_cpu_ns"]).sum(axis=1)
    own_cpus = float((own_ns / counted_ns).sum())
    host_cpus = float((steps["host_cpu_ns"].sum(axis=1) / counted_ns).max())
    cpu = CpuUse(
        seconds=float(counted_ns.max()) / 1e9,
        own_cpus=own_cpus,
        other_cpus=max(0.0, host_cpus - own_cpus),
        usable=machine.num_cpus,
    )
    # The mean step, and its parts where they are not small, over ranks, with 95 % intervals over blocks of steps.
    times: dict[str, Interval] = {}
    for name, times_ns in {"step": steps["wall_ns"], **parts}.items():
        values = times_ns.mean(axis=0) / num_steps[0] / 1e6
        low, high = np.quantile(bootstrap_means(values, seed=0), (0.025, 0.975)).tolist()
        if low > _MIN_MS or not times:
            times[f"{LABELS.get(name, name)} [ms]"] = Interval(
                median=float(values.mean()),
                low=low,
                high=high,
                confidence=0.95,
                num_repeats=len(values),
            )
    ranks = []
    for row, (rank, log) in enumerate(logs.items()):
        wall_ns = steps["wall_ns"][row].sum()
        rank_times = RankTimes(
            rank=rank,
            step_ms=float(wall_ns / num_steps[row].sum()) / 1e6,
            shares={part: float(ns[row].sum() / wall_ns) for part, ns in parts.items()},
            gpu=log.gpu,
        )
        ranks.append(rank_times)
    return msgspec.structs.replace(
        report,
        disturbed=cpu.disturbed,
        occupancy=occupancy_of(all_steps, window),
        findings=find_causes(
            inside,
            num_workers=max((header.num_workers for header in headers), default=0),
            num_cpus=machine.num_cpus,
            is_loaded=cpu.disturbed is not None,
            is_crowded=is_crowded,
        ),
        ranks=ranks,
        times=times,
    )


def scalars(log: RankLog) -> Iterator[tuple[Any, dict[str, float]]]:
    """Yield each row of the steps with its scalars: milliseconds a step, and the share that is
    busy.
    """
    for step in step_table([log.steps])[0]:
        times = part_times(step) | {"step": step["wall_ns"]}
        values = {
            f"watch/{name}_ms": float(ns / step["num_steps"]) / 1e6
            for name, ns in times.items()
            if ns
        }
        values["watch/occupancy"] = float(step["device_busy_ns"] / max(1, step["wall_ns"]))
        yield step, values


def write_tensorboard(logs: dict[int, RankLog], folder: Path) -> None:
    """Write the ranks' scalars as TensorBoard's event files, a run for each rank; nothing where it
    is not installed.
    """
    if find_spec("tensorboard") is None:
        return
    from torch.utils.tensorboard import SummaryWriter

    shutil.rmtree(folder, ignore_errors=True)
    started_s = time.time() - time.monotonic()
    for rank, log in logs.items():
        with SummaryWriter(folder / f"rank-{rank:05d}") as writer:
            for step, values in scalars(log):
                for tag, value in values.items():
                    writer.add_scalar(tag, value, step["step"], started_s + step["end_ns"] / 1e9)


def log_to_wandb(log: RankLog, run: Any) -> None:
    """Log a rank's scalars to an active run of W&B, over the watch's own steps."""
    run.define_metric("watch/step")
    run.define_metric("watch/*", step_metric="watch/step")
    for step, values in scalars(log):
        run.log(values | {"watch/step": int(step["step"])})
