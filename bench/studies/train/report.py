"""The report of a run: from the ranks' records to figures, and to JSON with a versioned schema."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fuelrail.bench.measure.clock import (
    NS_PER_MS,
    NS_PER_S,
    Summary,
    summarise_ns,
)
from fuelrail.bench.measure.machine import CpuUse, DatasetFacts, MachineFacts
from fuelrail.bench.measure.nvml import GpuUse
from fuelrail.bench.measure.occupancy import (
    Window,
    measured_steps,
    rolling_occupancy,
    window_of,
)
from fuelrail.bench.measure.rates import bootstrap_means
from fuelrail.bench.measure.records import PHASES, CheckpointRestore, RankLog
from fuelrail.bench.report.files import (
    ReportHeader,
    created_now,
    load_report_of,
)
from fuelrail.bench.studies.train.figures import Figures, figures_of
from fuelrail.bench.studies.train.warnings import find_warnings, ranks_disagree
from fuelrail.bench.studies.watch.judge import Finding, find_causes
from fuelrail.bench.trainer.strategies.settings import degrees_of

if TYPE_CHECKING:
    from fuelrail.bench.studies.train.settings import TrainSettings

SCHEMA = "fuelrail-bench-train"

VERSION = 4

_ROLLING_STEPS = 5

_SHOWN_ELSEWHERE = {
    *(
        "dataset",
        "records",
        "profile",
        "accelerator",
        "ranks",
        "cache_dir",
        "trace",
        "checkpoint",
        "transforms",
        "ledger",
    ),
    *(
        "teacher",
        "teacher_layer",
        "distill",
        "temperature",
        "price_per_gpu_hour",
    ),
}


class RankFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One rank: what it ran on, how far it came, and what it held (`RankEnd`)."""

    rank: int
    device: str
    backend: str | None
    num_steps: int
    completed: bool
    peak_rss_bytes: int | None
    peak_device_bytes: int | None
    state_bytes: dict[str, int]


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's steps, warm-up included, column by column.

    ``end_s`` counts from the first rank's start.

    ``first_step`` is not 0 in a run that continues from a checkpoint.
    """

    rank: int
    first_step: int = 0
    end_s: list[float]
    occupancy: list[float]
    loss: list[float | None]
    wall_ms: list[float]
    phases_ms: dict[str, list[float]]


class CheckpointFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Checkpoints of a run.

    ``stall``: what each save took from the training, of the rank that lost most. ``save``: how long
    it took in the background, until it was visible. The last three are None where none was saved.
    """

    restored: CheckpointRestore | None
    num_saves: int
    num_bytes: int | None
    stall: Summary | None
    save: Summary | None


class Report(ReportHeader, frozen=True, kw_only=True):
    """A whole report.

    ``global_batch``: samples of an optimiser step. ``cpu`` is the use of the host's CPUs by the
    ranks and by others, from the ranks' start to their end.
    ``figures`` is None when the window is too short; ``cut_off`` says why a run ended early;
    ``ranks_disagree``: they ended with different weights, so the gradients were not the same on all
    of them. ``findings``: what certainly holds the accelerators up, as a watch says it. ``gpus`` is
    what NVML saw from the ranks' start to their end, where there is a GPU and
    `pynvml`.
    """

    num_ranks: int
    global_batch: int
    accelerator: dict[str, Any]
    model: dict[str, Any]
    window: Window
    figures: Figures | None
    cpu: CpuUse | None
    ranks_disagree: bool
    ranks: list[RankFacts]
    series: list[Series]
    gpus: list[GpuUse] | None = None
    checkpoints: CheckpointFigures | None = None
    findings: list[Finding] = msgspec.field(default_factory=list)


def build_report(
    settings: TrainSettings,
    logs: Sequence[RankLog],
    *,
    machine: MachineFacts,
    dataset: DatasetFacts,
    cut_off: str | None,
    cpu: CpuUse | None = None,
    gpus: list[GpuUse] | None = None,
    interrupted: bool = False,
) -> Report:
    """Make the report of a run of ``len(logs)`` ranks, complete or cut off."""
    steps = [log.steps for log in logs]
    window = window_of(steps, settings.warmup)
    figures = None if window.too_short else figures_of(settings, logs, window)
    disturbed = None if cpu is None else cpu.disturbed
    findings = []
    if figures is not None:
        findings = find_causes(
            {rank: measured_steps(log.steps, window) for rank, log in enumerate(logs)},
            num_workers=None,
            num_cpus=machine.num_cpus,
            is_loaded=disturbed is not None,
        )
    start_ns = min((rank[0].start_ns for rank in steps if rank), default=0)
    header = next((log.header for log in logs if log.header), None)
    accelerator: dict[str, Any] = {"kind": settings.accelerator}
    if settings.profile is not None:
        accelerator |= msgspec.to_builtins(settings.profile)
    else:
        accelerator["device"] = header.device if header else "unknown"
    checkpoints = None
    if settings.checkpoint is not None:
        # Ranks that were killed may lack the last ones.
        saves = list(zip(*(log.saves for log in logs), strict=False))
        stalls_ns = [max(save.stall_ns for save in ranks) for ranks in saves]
        totals_ns = [max(save.total_ns for save in ranks) for ranks in saves]
        checkpoints = CheckpointFigures(
            restored=logs[0].restored,
            num_saves=len(saves),
            num_bytes=saves[-1][0].num_bytes if saves else None,
            stall=summarise_ns(stalls_ns) if saves else None,
            save=summarise_ns(totals_ns) if saves else None,
        )
    options: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(settings))
    return Report(
        schema=SCHEMA,
        version=VERSION,
        created=created_now(),
        cut_off=cut_off,
        interrupted=interrupted,
        options={key: value for key, value in options.items() if key not in _SHOWN_ELSEWHERE},
        num_ranks=len(logs),
        global_batch=degrees_of(settings, len(logs)).data
        * settings.batch_size
        * settings.accumulation,
        machine=machine,
        dataset=dataset,
        accelerator=accelerator,
        model={
            "name": settings.model,
            "num_parameters": header.num_parameters if header else None,
        },
        window=window,
        figures=figures,
        findings=findings,
        disturbed=disturbed,
        warnings=find_warnings(
            settings,
            logs=logs,
            window=window,
            figures=figures,
            dataset=dataset,
            cpu=cpu,
        ),
        checkpoints=checkpoints,
        cpu=cpu,
        gpus=gpus,
        ranks_disagree=ranks_disagree(logs),
        ranks=[
            RankFacts(
                rank=rank,
                device=log.header.device if log.header else "unknown",
                backend=log.header.backend if log.header else None,
                num_steps=len(log.steps),
                completed=log.end is not None,
                peak_rss_bytes=log.end.peak_rss_bytes if log.end else None,
                peak_device_bytes=log.end.peak_device_bytes if log.end else None,
                state_bytes=log.end.state_bytes if log.end else {},
            )
            for rank, log in enumerate(logs)
        ],
        series=[
            Series(
                rank=rank,
                first_step=log.steps[0].step if log.steps else 0,
                end_s=[(step.end_ns - start_ns) / NS_PER_S for step in log.steps],
                occupancy=rolling_occupancy(log.steps, _ROLLING_STEPS),
                loss=[step.loss for step in log.steps],
                wall_ms=[step.wall_ns / NS_PER_MS for step in log.steps],
                phases_ms={
                    phase: [step.phase_ns(phase) / NS_PER_MS for step in log.steps]
                    for phase in PHASES
                },
            )
            for rank, log in enumerate(logs)
        ],
    )


def step_ratios(before: Report, after: Report) -> NDArray[np.float64]:
    """Return the mean step time of a run over that of another, resampled: float64 (num_resamples,).

    A step's time is its mean over ranks. Both reports must have figures.
    """
    means = []
    for seed, report in enumerate((before, after)):
        first = report.window.num_warmup_steps
        end = report.window.num_warmup_steps + report.window.num_measured_steps
        steps = np.array(
            [series.wall_ms[first:end] for series in report.series],
            dtype=np.float64,
        )
        means.append(bootstrap_means(steps.mean(axis=0), seed))
    return means[1] / means[0]


def load_report(path: Path) -> Report:
    """Read a report; raises ConfigError for other files and other versions."""
    return load_report_of(path, Report, SCHEMA, VERSION)
