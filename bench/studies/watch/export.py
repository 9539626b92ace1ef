"""A watch's steps as scalars of TensorBoard and of Weights & Biases."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fuelrail.bench.studies.watch.judge import PARTS, part_times

if TYPE_CHECKING:
    from fuelrail.bench.measure.records import RankLog, StepRecord

TENSORBOARD_FOLDER: Final = "tensorboard"


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
