"""What speaks against a run's figures: each reason in a sentence or two, for the report to say before anybody asks."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from fuelrail.bench.data_source import doubts_of_source
from fuelrail.bench.occupancy import measured_steps

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fuelrail.bench.cpu_watch import CpuUse
    from fuelrail.bench.data_source import DataSource
    from fuelrail.bench.occupancy import Window
    from fuelrail.bench.records import RankLog
    from fuelrail.bench.train_report import Figures
    from fuelrail.bench.trainer.settings import TrainSettings

# Shares of the wall time or of the steps below which nothing is said.
_NOISE = 0.01
_NOTABLE = 0.02


def doubts(
    settings: TrainSettings,
    logs: Sequence[RankLog],
    window: Window,
    figures: Figures | None,
    cpu: CpuUse | None,
    source: DataSource | None = None,
) -> list[str]:
    """All doubts about a run; ``figures`` is None when its window is too short, ``source`` when nothing was loaded."""
    found = [*_of_the_run(settings, logs), *_of_the_input(settings, logs)]
    if cpu is not None and cpu.disturbed:
        found.append(
            f"Other processes used {cpu.others:.1f} of {cpu.usable:g} CPUs during the run, this run {cpu.own:.1f}. "
            "Repeat it on an idle machine for valid figures."
        )
    if source is not None and figures is not None:
        found += doubts_of_source(source)
    if figures is not None:
        found += [*_of_the_emulation(figures), *_of_the_window(settings, logs, window, figures)]
    return found


def ranks_disagree(logs: Sequence[RankLog]) -> bool:
    """Whether ranks that came to their end did so with different weights."""
    return len({log.end.parameters_xxh3 for log in logs if log.end}) > 1


def _of_the_run(settings: TrainSettings, logs: Sequence[RankLog]) -> Iterator[str]:
    if settings.leave_out:
        yield f"This run left out {' and '.join(settings.leave_out)}: it shows what that costs, and trains nothing."
    elif ranks_disagree(logs):
        yield "The ranks ended with different weights: their gradients were not the same. Don't trust this run."
    if any(step.loss is None for log in logs for step in log.steps):
        yield "The loss was not finite in some steps: lower the learning rate. The times are as they are."


def _of_the_input(settings: TrainSettings, logs: Sequence[RankLog]) -> Iterator[str]:
    facts = next((log.input for log in logs if log.input), None)
    if facts is None:
        return
    if not facts.labelled:
        yield "The first batch had no boxes: times are as they are, the loss means little."
    if settings.profile is not None:
        reference = settings.profile.reference_input
        want = (reference.cameras, reference.width, reference.height)
        got = (facts.num_cameras, facts.width, facts.height)
        if want != got:
            yield (
                f"The profile's times hold for {want[0]} x {want[1]}x{want[2]} pixels, the batches had "
                f"{got[0]} x {got[1]}x{got[2]}: the emulated step is not this input's."
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
            "What of that lengthened the step counts as “other”, so occupancy is a lower bound. Ranks that may "
            "schedule themselves in real time (CAP_SYS_NICE) wake in time."
        )


def _of_the_window(settings: TrainSettings, logs: Sequence[RankLog], window: Window, figures: Figures) -> Iterator[str]:
    wait_share = next(phase.share for phase in figures.phases if phase.phase == "data_wait")
    steps_per_epoch, at_turns = _waits_at_turns(logs, window)
    if wait_share > _NOTABLE and at_turns > 0.5:
        yield (
            f"{at_turns:.0%} of the data wait fell on the first step of an epoch, and an epoch of this split has only "
            f"{steps_per_epoch} steps: the loader fills its queues anew at each turn. In an epoch of a thousand steps "
            "the same turn would hardly show."
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
