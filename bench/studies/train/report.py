"""The report of a run: from the ranks' records to figures, and to JSON with a versioned schema."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fuelrail.bench.measure.clock import NS_PER_S, Summary, summarise_ns
from fuelrail.bench.measure.machine import CpuUse, DatasetFacts, MachineFacts
from fuelrail.bench.measure.nvml import GpuUse
from fuelrail.bench.measure.occupancy import (
    Occupancy,
    RankPace,
    Window,
    measured_steps,
    occupancy_of,
    rank_paces,
    window_of,
)
from fuelrail.bench.measure.rates import bootstrap_means
from fuelrail.bench.measure.records import PHASES, MemoryLine, RankLog, StageSnapshot, StepRecord
from fuelrail.bench.report.files import ReportHeader, created_now, load_report_of
from fuelrail.bench.studies.train.checkpoints import CheckpointFigures, checkpoint_figures
from fuelrail.bench.studies.train.convergence import LossComparison, Target
from fuelrail.bench.studies.train.data_source import DataSource, data_source, warnings_of_source
from fuelrail.bench.studies.train.series import Series, series_of
from fuelrail.bench.trainer.strategies.settings import not_promised

if TYPE_CHECKING:
    from fuelrail.bench.studies.train.settings import TrainSettings
    from fuelrail.pipeline.runtime.stages import StageClock

SCHEMA = "fuelrail-bench-train"

VERSION = 2

_S_PER_HOUR = 3600


_SHOWN_ELSEWHERE = {
    *("dataset", "records", "profile", "accelerator", "ranks", "cache_dir", "trace", "checkpoint", "transforms"),
    *("teacher", "teacher_layer", "distill", "temperature", "price_per_gpu_hour"),
    *("against", "check_batch", "target_loss"),
}


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """One phase of the step over all measured steps of all ranks; ``share`` is of the wall time."""

    phase: str
    time: Summary
    share: float


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of the whole world in the measured window.

    ``gpu_hours_per_million_samples`` = world size x wall time / samples. ``demand_samples_per_s`` is what the
    accelerators would take if nothing kept them waiting: samples / busy time, summed over ranks; 0 where none computed.
    """

    samples_per_s: float
    images_per_s: float
    demand_samples_per_s: float
    gpu_hours_per_million_samples: float
    cost_per_million_samples: float | None


class StageFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One loader stage in the measured window, summed over ranks: shares of its threads' time."""

    name: str
    num_threads: int
    items_per_s: float
    busy: float
    starved: float
    blocked: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a run whose measured window is long enough.

    ``launch_share``: what the host took to queue the device's work, in parts of what the device took for it; near 1 the
    device waits for the host. ``mfu``: the model's arithmetic (the profile's, when emulated) over what the devices
    could have done in the wall time; None where either isn't known. ``paces``: which rank the others wait for.
    """

    occupancy: Occupancy
    throughput: Throughput
    step_time: Summary
    phases: list[Phase]
    all_reduce_total: Summary
    stages: list[StageFigures]
    stand_in_share: float
    overrun_share: float
    overshoot_share: float
    launch_share: float = 0.0
    mfu: float | None = None
    paces: list[RankPace] = []


class RankFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One rank: what it ran on and how far it came."""

    rank: int
    device: str
    backend: str | None
    num_steps: int
    completed: bool
    peak_rss_bytes: int | None
    peak_device_bytes: int | None


class Report(ReportHeader, frozen=True, kw_only=True):
    """A whole report.

    ``cpu`` is the use of the host's CPUs by the ranks and by others, from the ranks' start to their end.
    ``figures`` is None when the window is too short; ``cut_off`` says why a run ended early; ``ranks_disagree``: they
    ended with different weights, so the gradients were not the same on all of them. ``gpus`` is what NVML saw from the
    ranks' start to their end, where there is a GPU and `pynvml`. ``source`` says where the bytes came from.
    ``against`` compares the loss with that of another report, ``target`` says when it reached a value, ``memory`` has
    a line for each rank that followed its memory.
    """

    num_ranks: int
    accelerator: dict[str, Any]
    model: dict[str, Any]
    window: Window
    figures: Figures | None
    cpu: CpuUse | None
    ranks_disagree: bool
    ranks: list[RankFacts]
    series: list[Series]
    gpus: list[GpuUse] | None = None
    source: DataSource | None = None
    checkpoints: CheckpointFigures | None = None
    against: LossComparison | None = None
    target: Target | None = None
    memory: list[MemoryLine] | None = None


def build_report(
    settings: TrainSettings,
    logs: Sequence[RankLog],
    *,
    machine: MachineFacts,
    dataset: DatasetFacts,
    cut_off: str | None,
    cpu: CpuUse | None = None,
    price_per_gpu_hour: float | None = None,
    gpus: list[GpuUse] | None = None,
) -> Report:
    """Make the report of a run of ``len(logs)`` ranks, complete or cut off."""
    steps = [log.steps for log in logs]
    window = window_of(steps, settings.warmup)
    figures = None if window.too_short else _figures(settings, logs, window, price_per_gpu_hour)
    start_ns = min((rank[0].start_ns for rank in steps if rank), default=0)
    header = next((log.header for log in logs if log.header), None)
    profile = settings.profile
    source = data_source(settings, logs, dataset)
    return Report(
        schema=SCHEMA,
        version=VERSION,
        created=created_now(),
        cut_off=cut_off,
        options=_options(settings),
        num_ranks=len(logs),
        machine=machine,
        dataset=dataset,
        accelerator={"kind": "cuda", "device": header.device if header else "unknown"}
        if profile is None
        else {"kind": "emulated", **msgspec.to_builtins(profile)},
        model={"name": settings.model, "num_parameters": header.num_parameters if header else None},
        window=window,
        figures=figures,
        disturbed=None if cpu is None else cpu.disturbed,
        warnings=find_warnings(settings, logs, window, figures, source),
        source=source,
        checkpoints=checkpoint_figures(settings, logs, None if figures is None else figures.step_time.mean_ms),
        memory=[log.memory for log in logs if log.memory is not None] or None,
        cpu=cpu,
        gpus=gpus,
        ranks_disagree=ranks_disagree(logs),
        ranks=[_rank_facts(rank, log) for rank, log in enumerate(logs)],
        series=[series_of(rank, log.steps, start_ns) for rank, log in enumerate(logs)],
    )


def learning_sentences(report: Report) -> list[str]:
    """What the report says on loss and checkpoints, as text."""
    parts = [part.sentence() for part in (report.against, report.target) if part is not None]
    return [*parts, *(report.checkpoints.sentences() if report.checkpoints else [])]


def step_ratios(before: Report, after: Report) -> NDArray[np.float64]:
    """Return the mean step time of a run over that of another, resampled: float64 (num_resamples,).

    A step's time is its mean over ranks. Both reports must have figures.
    """
    means = []
    for seed, report in enumerate((before, after)):
        first, end = report.window.num_warmup_steps, report.window.num_warmup_steps + report.window.num_measured_steps
        steps = np.array([series.wall_ms[first:end] for series in report.series], dtype=np.float64)
        means.append(bootstrap_means(steps.mean(axis=0), seed))
    return means[1] / means[0]


def load_report(path: Path) -> Report:
    """Read a report; raises ConfigError for other files and other versions."""
    return load_report_of(path, Report, SCHEMA, VERSION)


def _options(settings: TrainSettings) -> dict[str, Any]:
    """Return the run's settings, without those reported elsewhere and paths of this machine."""
    options: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(settings))
    return {key: value for key, value in options.items() if key not in _SHOWN_ELSEWHERE}


def _figures(
    settings: TrainSettings, logs: Sequence[RankLog], window: Window, price_per_gpu_hour: float | None
) -> Figures:
    ranks = [measured_steps(log.steps, window) for log in logs]
    inside = [step for rank in ranks for step in rank]
    wall_ns = sum(step.wall_ns for step in inside)
    occupancy = occupancy_of([log.steps for log in logs], window)
    return Figures(
        occupancy=occupancy,
        throughput=_throughput(ranks, price_per_gpu_hour),
        step_time=summarise_ns([step.wall_ns for step in inside]),
        phases=[
            Phase(
                phase=phase,
                time=summarise_ns([step.phase_ns(phase) for step in inside]),
                share=sum(step.phase_ns(phase) for step in inside) / wall_ns,
            )
            for phase in PHASES
        ],
        all_reduce_total=summarise_ns([step.all_reduce_total_ns for step in inside]),
        stages=_stage_figures([log.snapshots for log in logs], wall_ns / len(ranks) / NS_PER_S),
        stand_in_share=sum(step.stand_in_ns for step in inside) / wall_ns,
        overrun_share=sum(step.overrun_ns for step in inside) / wall_ns,
        overshoot_share=sum(step.overshoot_ns for step in inside) / wall_ns,
        launch_share=_launch_share(inside),
        mfu=_mfu(settings, logs, inside),
        paces=rank_paces([log.steps for log in logs], window),
    )


def _mfu(settings: TrainSettings, logs: Sequence[RankLog], steps: Sequence[StepRecord]) -> float | None:
    """Of all ranks' steps together; padding rows, which the device computes too, do not count."""
    profile = settings.profile
    facts = next((log.input for log in logs if log.input), None)
    header = next((log.header for log in logs if log.header), None)
    if profile is not None:
        gflop, peak, per_image = profile.train_gflop, profile.peak_tflops, profile.per == "image"
    else:
        gflop = None if facts is None or facts.train_flop is None else facts.train_flop / 1e9
        peak, per_image = None if header is None else header.peak_tflops, False
    if gflop is None or peak is None:
        return None
    units = sum(step.num_images if per_image else step.num_samples for step in steps)
    return units * gflop * 1e9 / (sum(step.wall_ns for step in steps) / NS_PER_S * peak * 1e12)


def _launch_share(steps: Sequence[StepRecord]) -> float:
    device_ns = sum(step.forward_ns + step.backward_ns + step.optimiser_ns for step in steps)
    return sum(step.launch_ns for step in steps) / device_ns if device_ns else 0.0


def _throughput(ranks: Sequence[Sequence[StepRecord]], price_per_gpu_hour: float | None) -> Throughput:
    samples_per_s = images_per_s = demand = 0.0
    for steps in ranks:
        # Each rank by its own clock: ranks of different hosts share none.
        wall_s = (steps[-1].end_ns - steps[0].start_ns) / NS_PER_S
        samples = sum(step.num_samples for step in steps)
        samples_per_s += samples / wall_s
        images_per_s += sum(step.num_images for step in steps) / wall_s
        busy_ns = sum(step.device_busy_ns for step in steps)
        demand += samples / (busy_ns / NS_PER_S) if busy_ns else 0.0
    gpu_hours = len(ranks) / samples_per_s / _S_PER_HOUR * 1e6
    return Throughput(
        samples_per_s=samples_per_s,
        images_per_s=images_per_s,
        demand_samples_per_s=demand,
        gpu_hours_per_million_samples=gpu_hours,
        cost_per_million_samples=None if price_per_gpu_hour is None else gpu_hours * price_per_gpu_hour,
    )


def _stage_figures(snapshots: Sequence[Sequence[StageSnapshot]], wall_s: float) -> list[StageFigures]:
    """Differences of the stage clocks over the window; none if a rank was cut off before its second snapshot."""
    if not all(len(rank) == 2 for rank in snapshots):
        return []
    figures = []
    for columns in zip(*(zip(first.stages, last.stages, strict=True) for first, last in snapshots), strict=True):

        def gain(name: str, columns: tuple[tuple[StageClock, StageClock], ...] = columns) -> float:
            return float(sum(getattr(last, name) - getattr(first, name) for first, last in columns))

        thread_s = sum(gain(name) for name in ("busy_s", "starved_s", "blocked_s")) or 1.0
        figures.append(
            StageFigures(
                name=columns[0][0].name,
                num_threads=sum(first.num_threads for first, _ in columns),
                items_per_s=gain("items") / wall_s,
                busy=gain("busy_s") / thread_s,
                starved=gain("starved_s") / thread_s,
                blocked=gain("blocked_s") / thread_s,
            )
        )
    return figures


def _rank_facts(rank: int, log: RankLog) -> RankFacts:
    return RankFacts(
        rank=rank,
        device=log.header.device if log.header else "unknown",
        backend=log.header.backend if log.header else None,
        num_steps=len(log.steps),
        completed=log.end is not None,
        peak_rss_bytes=log.end.peak_rss_bytes if log.end else None,
        peak_device_bytes=log.end.peak_device_bytes if log.end else None,
    )


# Shares of the wall time or of the steps below which there is no warning.
_NOISE = 0.01

_NOTABLE = 0.02


def find_warnings(
    settings: TrainSettings,
    logs: Sequence[RankLog],
    window: Window,
    figures: Figures | None,
    source: DataSource | None = None,
) -> list[str]:
    """Return all warnings; ``figures`` is None if the window is too short, ``source`` if nothing was loaded."""
    found = [*_of_the_run(settings, logs), *_of_the_input(settings, logs)]
    if source is not None and figures is not None:
        found += warnings_of_source(source)
    if figures is not None:
        found += [*_of_the_emulation(figures), *_of_the_window(settings, logs, window, figures)]
    return found


def ranks_disagree(logs: Sequence[RankLog]) -> bool:
    """Return whether ranks that completed have different weights."""
    return len({log.end.parameters_xxh3 for log in logs if log.end}) > 1


def _of_the_run(settings: TrainSettings, logs: Sequence[RankLog]) -> Iterator[str]:
    if settings.leave_out:
        yield f"This run left out {' and '.join(settings.leave_out)}: it measures what that costs, not training."
    elif ranks_disagree(logs):
        yield "The ranks ended with different weights: their gradients differed. Do not trust this run."
    for name in (logs[0].restored.skipped if logs[0].restored else []) if logs else []:
        yield f"A newer checkpoint was damaged and is set aside; the run continued from the one before. {name}."
    if any(step.loss is None for log in logs for step in log.steps):
        yield "The loss was not finite in some steps: lower the learning rate. The times are valid."
    if settings.deterministic:
        yield f"The run is deterministic, with limits: {'; '.join(not_promised(settings))}."


def _of_the_input(settings: TrainSettings, logs: Sequence[RankLog]) -> Iterator[str]:
    facts = next((log.input for log in logs if log.input), None)
    if facts is None:
        return
    if not facts.labelled:
        yield "The first batch had no boxes: the times are valid, the loss is not."
    if settings.profile is not None:
        reference = settings.profile.reference_input
        want = (reference.cameras, reference.width, reference.height)
        got = (facts.num_cameras, facts.width, facts.height)
        if want != got:
            yield (
                f"The profile's times hold for {want[0]} x {want[1]}x{want[2]} pixels, the batches had "
                f"{got[0]} x {got[1]}x{got[2]}: the emulated step times do not fit this input."
            )


def _of_the_emulation(figures: Figures) -> Iterator[str]:
    if figures.overrun_share > _NOISE:
        yield (
            f"The stand-in model's real work on the host outlasted the emulated phases by {figures.overrun_share:.1%} "
            "of the wall time. This time counts as “other”, not as busy, so occupancy is a lower bound: a real "
            "accelerator would have been occupied more. Use a slower profile, or more CPU cores for each rank."
        )
    if figures.overshoot_share > _NOISE:
        yield (
            f"The CPUs are overloaded: emulated phases ended late by {figures.overshoot_share:.1%} of the wall time. "
            "What lengthened the step counts as “other”, so occupancy is a lower bound. With CAP_SYS_NICE, ranks use "
            "real-time scheduling and wake in time."
        )


def _of_the_window(settings: TrainSettings, logs: Sequence[RankLog], window: Window, figures: Figures) -> Iterator[str]:
    wait_share = next(phase.share for phase in figures.phases if phase.phase == "data_wait")
    steps_per_epoch, at_turns = _waits_at_turns(logs, window)
    if wait_share > _NOTABLE and at_turns > 0.5:
        yield (
            f"{at_turns:.0%} of the data wait fell on the first step of an epoch, and an epoch of this split has only "
            f"{steps_per_epoch} steps. In an epoch of a thousand steps this would be negligible."
        )
    stock = _share_from_stock(logs, window, settings.accumulation)
    if stock > _NOTABLE:
        yield (
            f"{stock:.0%} of the measured steps used batches that were prefetched before measuring began. In a long "
            f"run occupancy may be up to {100 * stock:.0f} points lower."
        )


def _waits_at_turns(logs: Sequence[RankLog], window: Window) -> tuple[int, float]:
    """Steps of the longest epoch seen, and the share of all data wait that fell on epochs' first steps."""
    at_turns = total = 0
    lengths: dict[int, int] = {}
    for log in logs:
        inside = measured_steps(log.steps, window)
        total += sum(step.data_wait_ns for step in inside)
        at_turns += sum(after.data_wait_ns for before, after in pairwise(inside) if after.epoch != before.epoch)
    for step in logs[0].steps:
        lengths[step.epoch] = lengths.get(step.epoch, 0) + 1
    return max(lengths.values(), default=0), at_turns / total if total else 0.0


def _share_from_stock(logs: Sequence[RankLog], window: Window, accumulation: int) -> float:
    """Largest share of a rank's measured steps that was fed from stock: results that waited before and not after."""
    shares = [
        (first.stages[-1].waiting - last.stages[-1].waiting) / accumulation / window.num_measured_steps
        for log in logs
        if len(log.snapshots) == 2
        for first, last in [log.snapshots]
        if first.stages and last.stages
    ]
    return max(shares, default=0.0)
