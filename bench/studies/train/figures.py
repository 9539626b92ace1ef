"""The figures of a run: from the records of its ranks to rates, shares and phases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np

from fuelrail.bench.measure.clock import (
    NS_PER_MS,
    NS_PER_S,
    Summary,
    summarise_ns,
)
from fuelrail.bench.measure.display import display
from fuelrail.bench.measure.occupancy import (
    Occupancy,
    Window,
    measured_steps,
    occupancy_of,
)
from fuelrail.bench.measure.records import (
    PHASES,
    RankLog,
    StageSnapshot,
    StepRecord,
)
from fuelrail.bench.studies.train.costs import (
    CostFit,
    Loss,
    cost_model,
    fit_cost,
    losses_of,
)

if TYPE_CHECKING:
    from fuelrail.bench.studies.train.settings import TrainSettings
    from fuelrail.pipeline.runtime.stages import StageClock

_S_PER_HOUR = 3600
# A transform waits if its threads do so for more of their time, and together keep less of a CPU
# busy.
_WAITS = 0.5


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """One phase of the step over all measured steps of all ranks; ``share`` is of the wall time."""

    phase: str
    time: Summary
    share: float


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of the whole world in the measured window.

    ``gpu_hours_per_million_samples`` = world size x wall time / samples. ``demand_samples_per_s``
    is what the accelerators would take if nothing kept them waiting: samples / busy time, summed
    over ranks; 0 where none computed.
    """

    samples_per_s: Annotated[float, display("samples/s")]
    images_per_s: Annotated[float, display("images/s")]
    demand_samples_per_s: float
    gpu_hours_per_million_samples: Annotated[float, display("GPU-hours per million samples")]
    cost_per_million_samples: Annotated[
        float | None,
        display("cost per million samples, in the price’s currency", digits=",.2f"),
    ]


class StageFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One loader stage in the measured window, summed over ranks: shares of its threads' time."""

    name: Annotated[str, display("stage")]
    num_threads: Annotated[int, display("threads, all ranks")]
    items_per_s: Annotated[float, display("items/s")]
    busy: Annotated[float, display("busy", digits=".1%")]
    starved: Annotated[float, display("starved", digits=".1%")]
    blocked: Annotated[float, display("blocked", digits=".1%")]


class TransformFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller's transform takes for a sample, the mean over ranks.

    Of that its thread had ``cpu_ms`` of CPU time and stood ``queued_ms`` in the queue for a CPU.
    ``cpus``: the CPUs that it keeps busy on a rank, all its threads together.
    """

    wall_ms: float
    cpu_ms: float
    queued_ms: float
    cpus: float

    @property
    def waits(self) -> bool:
        """Whether its threads mostly wait, and not for Python's lock, which keeps a CPU busy."""
        waited_ms = self.wall_ms - self.cpu_ms - self.queued_ms
        return waited_ms > _WAITS * self.wall_ms and self.cpus < _WAITS


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a run whose measured window is long enough.

    ``launch_share``: what the host took to queue the device's work, in parts of what the device
    took for it; near 1 the device waits for the host. ``mfu``: the model's arithmetic (the
    profile's, when emulated) over what the devices could have done in the wall time; None where
    either isn't known. ``waiting_share``: what the trainer's thread waited in forward, backward and
    optimiser, in parts of the wall time, where the CPU is the accelerator; ``queued_share``: what
    it stood in the queue for a CPU there. ``transform``: the caller's, where there is one.
    ``losses``: what padding and imbalance take; ``cost_fit``: a cost model, where one was asked
    for.
    """

    occupancy: Occupancy
    throughput: Throughput
    step_time: Annotated[Summary, display("step time", unit="ms")]
    phases: list[Phase]
    all_reduce_total: Summary
    stages: list[StageFigures]
    stand_in_share: float
    overrun_share: float
    overshoot_share: float
    launch_share: float = 0.0
    waiting_share: float = 0.0
    queued_share: float = 0.0
    mfu: Annotated[float | None, display("model FLOP utilisation", digits=".1%")] = None
    losses: dict[str, Loss] = {}
    cost_fit: CostFit | None = None
    transform: TransformFigures | None = None


def figures_of(settings: TrainSettings, logs: Sequence[RankLog], window: Window) -> Figures:
    """Return the figures of a run in its measured window, which must be long enough."""
    ranks = [measured_steps(log.steps, window) for log in logs]
    inside = [step for rank in ranks for step in rank]
    wall_ns = sum(step.wall_ns for step in inside)
    occupancy = occupancy_of([log.steps for log in logs], window)
    fit = None
    if settings.cost:
        # The emulated phases are the profile's: what depends on the samples is the stand-in's real
        # work.
        real = settings.accelerator != "emulated"
        times = [
            step.forward_ns + step.backward_ns if real else step.stand_in_ns for step in inside
        ]
        fit = fit_cost([step.sums for step in inside], np.array(times, np.float64))
    device_ns = sum(step.forward_ns + step.backward_ns + step.optimiser_ns for step in inside)
    samples_per_s = images_per_s = demand = 0.0
    for steps in ranks:
        # Each rank by its own clock: ranks of different hosts share none.
        wall_s = (steps[-1].end_ns - steps[0].start_ns) / NS_PER_S
        samples = sum(step.num_samples for step in steps)
        samples_per_s += samples / wall_s
        images_per_s += sum(step.num_images for step in steps) / wall_s
        busy_ns = sum(step.device_busy_ns for step in steps)
        demand += samples / (busy_ns / NS_PER_S) if busy_ns else 0.0
    transform = None
    uses = [
        log.end.transform for log in logs if log.end is not None and log.end.transform is not None
    ]
    if uses:
        num_calls = sum(use.num_calls for use in uses)
        cpu_ns = sum(use.cpu_ns for use in uses)
        transform = TransformFigures(
            wall_ms=sum(use.wall_ns for use in uses) / num_calls / NS_PER_MS,
            cpu_ms=cpu_ns / num_calls / NS_PER_MS,
            queued_ms=sum(use.queued_ns for use in uses) / num_calls / NS_PER_MS,
            cpus=cpu_ns / max(1, sum(use.span_ns for use in uses)),
        )
    gpu_hours = len(ranks) / samples_per_s / _S_PER_HOUR * 1e6
    return Figures(
        occupancy=occupancy,
        throughput=Throughput(
            samples_per_s=samples_per_s,
            images_per_s=images_per_s,
            demand_samples_per_s=demand,
            gpu_hours_per_million_samples=gpu_hours,
            cost_per_million_samples=None
            if settings.price_per_gpu_hour is None
            else gpu_hours * settings.price_per_gpu_hour,
        ),
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
        launch_share=sum(step.launch_ns for step in inside) / device_ns if device_ns else 0.0,
        waiting_share=sum(step.device_busy_ns - step.cpu_ns - step.queued_ns for step in inside)
        / wall_ns
        if settings.accelerator == "cpu"
        else 0.0,
        queued_share=sum(step.queued_ns for step in inside) / wall_ns,
        mfu=_mfu(settings, logs, inside),
        losses=losses_of(
            ranks,
            cost_model(settings.order) or (None if fit is None else fit.cost),
        ),
        cost_fit=fit,
        transform=transform,
    )


def _mfu(
    settings: TrainSettings,
    logs: Sequence[RankLog],
    steps: Sequence[StepRecord],
) -> float | None:
    """Return the use of all ranks' steps together; padding rows, which the device computes too,
    do not count.
    """
    profile = settings.profile
    facts = next((log.input for log in logs if log.input), None)
    header = next((log.header for log in logs if log.header), None)
    if profile is not None:
        gflop = profile.train_gflop
        peak = profile.peak_tflops
        per_image = profile.per == "image"
    else:
        gflop = None if facts is None or facts.train_flop is None else facts.train_flop / 1e9
        peak = None if header is None else header.peak_tflops
        per_image = False
    if gflop is None or peak is None:
        return None
    units = sum(step.num_images if per_image else step.num_samples for step in steps)
    if (
        settings.order is not None and settings.order.pack is not None and not per_image
    ):  # a unit is a row
        units = (
            sum(step.num_samples > 0 for step in steps)
            * settings.batch_size
            * settings.accumulation
        )
    return units * gflop * 1e9 / (sum(step.wall_ns for step in steps) / NS_PER_S * peak * 1e12)


def _stage_figures(
    snapshots: Sequence[Sequence[StageSnapshot]], wall_s: float
) -> list[StageFigures]:
    """Return the differences of the stage clocks over the window; none if a rank ended before
    its second snapshot.
    """
    if not all(len(rank) == 2 for rank in snapshots):
        return []
    figures = []
    for columns in zip(
        *(zip(first.stages, last.stages, strict=True) for first, last in snapshots),
        strict=True,
    ):

        def gain(
            name: str,
            columns: tuple[tuple[StageClock, StageClock], ...] = columns,
        ) -> float:
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
