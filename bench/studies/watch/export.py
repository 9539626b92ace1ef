"""A watch's steps as scalars of TensorBoard and of Weights & Biases."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fuelrail.bench.measure.records import step_table
from fuelrail.bench.studies.watch.judge import part_times

if TYPE_CHECKING:
    from fuelrail.bench.measure.records import RankLog

TENSORBOARD_FOLDER: Final = "tensorboard"


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
