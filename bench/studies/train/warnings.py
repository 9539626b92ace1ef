"""What may be wrong with a run's figures, and where its bytes came from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from fuelrail.bench.measure.occupancy import Window, measured_steps
from fuelrail.bench.trainer.strategies.settings import not_promised

if TYPE_CHECKING:
    from fuelrail.bench.measure.machine import DatasetFacts
    from fuelrail.bench.measure.records import RankLog
    from fuelrail.bench.studies.train.figures import Figures
    from fuelrail.bench.studies.train.settings import TrainSettings

# Shares of the wall time or of the steps below which there is no warning.
_NOISE, _NOTABLE = 0.01, 0.02
# A run whose storage read a smaller share of its bytes was fed by the page cache.
_FROM_STORAGE, _FROM_CACHE = 0.05, 0.5


class DataSource(msgspec.Struct, frozen=True, kw_only=True):
    """The samples that all ranks took, warm-up included.

    ``num_distinct``: different samples among them. ``passes``: how many times the run went through the split.
    ``stored_bytes``: what the samples taken have in the shards, repeats included. ``read_bytes``: what this host's
    storage read for the ranks; None where that is not known (no ``/proc/self/io``, a rank that was cut off, a URL).
    """

    num_taken: int
    num_distinct: int
    passes: float
    stored_bytes: int
    read_bytes: int | None

    @property
    def from_storage(self) -> float | None:
        """Share of the bytes that storage read, at most 1; the page cache had the rest. None where unknown."""
        if self.read_bytes is None or not self.stored_bytes:
            return None
        return min(1.0, self.read_bytes / self.stored_bytes)

    def sentence(self) -> str:
        """Return the facts as text."""
        taken = (
            f"The run took {self.num_taken:,} samples, {self.num_distinct:,} distinct ones: {self.passes:.1f} times "
            f"through the split, {self.stored_bytes / 1e6:,.0f} MB as stored."
        )
        share = self.from_storage
        if share is None:
            return f"{taken} It is unknown whether the bytes came from the page cache."
        rest = "" if share == 1 else "; the rest came from the page cache"
        return f"{taken} Storage read {share:.0%} of these bytes{rest}."


def data_source(settings: TrainSettings, logs: Sequence[RankLog], dataset: DatasetFacts) -> DataSource | None:
    """Return what the ranks took; None for a run that loads nothing, or if the size of the dataset is unknown."""
    if not {"loading", "storage"}.isdisjoint(settings.leave_out) or dataset.mean_sample_bytes is None:
        return None
    taken = sum(step.num_samples for log in logs for step in log.steps)
    read = [log.end.read_bytes if log.end else None for log in logs]
    known = "://" not in settings.dataset and all(count is not None for count in read)
    return DataSource(
        num_taken=taken,
        # Every order delivers each sample of its epoch once, so samples repeat only from the second epoch on.
        num_distinct=min(taken, dataset.num_samples),
        passes=taken / dataset.num_samples,
        stored_bytes=round(taken * dataset.mean_sample_bytes),
        read_bytes=sum(count or 0 for count in read) if known else None,
    )


def _of_the_source(source: DataSource) -> Iterator[str]:
    """Yield the reasons why the run says little about a large dataset."""
    share = source.from_storage
    if share is not None and share < _FROM_STORAGE:
        yield (
            f"The bytes came from the page cache (storage read {share:.0%} of them), so this run says nothing about "
            f"storage: it took {source.num_taken:,} samples, {source.num_distinct:,} distinct ones, "
            f"{source.passes:.1f} times through the split. A dataset larger than memory is read from storage in every "
            "epoch."
        )
    elif share is not None and share < _FROM_CACHE:
        yield (
            f"Storage read {share:.0%} of the bytes, the page cache had the rest. A dataset larger than memory is read "
            "from storage in every epoch."
        )
    elif share is None and source.passes >= 2:
        yield (
            f"The run went {source.passes:.1f} times through {source.num_distinct:,} samples: later epochs may have "
            "been read from a cache."
        )


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
        found += _of_the_source(source)
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
            "What lengthened the step counts as “other”, so occupancy is a lower bound."
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
    """Return the steps of the longest epoch seen, and the share of all data wait that fell on epochs' first steps."""
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
    """Return the largest share of a rank's steps fed from stock: results that waited before and not after."""
    shares = [
        (first.stages[-1].waiting - last.stages[-1].waiting) / accumulation / window.num_measured_steps
        for log in logs
        if len(log.snapshots) == 2
        for first, last in [log.snapshots]
        if first.stages and last.stages
    ]
    return max(shares, default=0.0)
