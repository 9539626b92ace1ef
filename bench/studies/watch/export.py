"""What a watch writes: its report, and figures for Prometheus, TensorBoard, Weights & Biases."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from fuelrail.bench.measure.records import rank_path, read_rank
from fuelrail.bench.report.files import REPORT_JSON, publish, publish_json
from fuelrail.bench.studies.watch.judge import PARTS, part_times
from fuelrail.bench.studies.watch.report import (
    RECORDS,
    Remedy,
    WatchReport,
    build_report,
    remedies_path,
)

if TYPE_CHECKING:
    from fuelrail.bench.measure.records import RankLog, StepRecord

PROMETHEUS_FILE: Final = "metrics.prom"
TENSORBOARD_FOLDER: Final = "tensorboard"

_HELP: Final = {
    "step_seconds": "mean time of a step",
    "occupancy_ratio": "share of the time in forward, backward and optimiser",
    "part_ratio": "share of the time in a part of the step",
    "finding_ratio": "share of the time that something certainly takes; rank is empty for all",
}


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
        publish(folder / PROMETHEUS_FILE, as_prometheus(report).encode())
        if is_last:
            write_tensorboard(logs, folder / TENSORBOARD_FOLDER)
    return report


def as_prometheus(report: WatchReport) -> str:
    """Return the report as gauges, such as for the node exporter's textfile collector."""
    values: dict[str, list[tuple[dict[str, Any], float]]] = {name: [] for name in _HELP}
    for row in report.ranks:
        rank = {"rank": row.rank}
        values["step_seconds"].append((rank, row.step_ms / 1e3))
        values["occupancy_ratio"].append((rank, row.occupancy))
        for part, share in row.shares.items():
            values["part_ratio"].append((rank | {"part": part}, share))
    for finding in report.findings:
        blamed = "" if finding.rank is None else finding.rank
        labels = {"cause": finding.cause, "phase": finding.phase, "rank": blamed}
        values["finding_ratio"].append((labels, finding.share))
    lines = []
    for name, rows in values.items():
        lines.append(f"# HELP fuelrail_watch_{name} {_HELP[name]}")
        lines.append(f"# TYPE fuelrail_watch_{name} gauge")
        for labels, value in rows:
            words = ",".join(f'{label}="{word}"' for label, word in labels.items())
            lines.append(f"fuelrail_watch_{name}{{{words}}} {value:.6g}")
    return "\n".join(lines) + "\n"


def scalars(log: RankLog) -> Iterator[tuple[StepRecord, dict[str, float]]]:
    """Yield each record with its scalars: milliseconds a step, and the share that is busy."""
    for record in log.steps:
        num_steps = record.details.num_steps
        values = {
            f"watch/{part}_ms": part_ns / num_steps / 1e6
            for part, part_ns in zip(PARTS, part_times(record), strict=True)
            if part_ns
        }
        values["watch/step_ms"] = record.wall_ns / num_steps / 1e6
        values["watch/occupancy"] = record.device_busy_ns / max(1, record.wall_ns)
        yield record, values


def write_tensorboard(logs: dict[int, RankLog], folder: Path) -> None:
    """Write the ranks' scalars as TensorBoard's event files, a run for each rank; nothing where it
    is not installed.
    """
    if find_spec("tensorboard") is None:
        return
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    shutil.rmtree(folder, ignore_errors=True)
    started_s = time.time() - time.monotonic()
    for rank, log in logs.items():
        writer = EventFileWriter(str(folder / f"rank-{rank:05d}"))
        for record, values in scalars(log):
            tags = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
            writer.add_event(
                Event(
                    wall_time=started_s + record.end_ns / 1e9,
                    step=record.step,
                    summary=Summary(value=tags),
                )
            )
        writer.close()


def log_to_wandb(log: RankLog, run: Any) -> None:
    """Log a rank's scalars to an active run of W&B, over the watch's own steps."""
    run.define_metric("watch/step")
    run.define_metric("watch/*", step_metric="watch/step")
    for record, values in scalars(log):
        run.log(values | {"watch/step": record.step})
