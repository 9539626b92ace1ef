"""The source of a run's bytes: number of samples, number of repeats, and bytes that storage read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from fuelrail.bench.measure.machine import DatasetFacts
    from fuelrail.bench.measure.records import RankLog
    from fuelrail.bench.studies.train.settings import TrainSettings

# A run whose storage read a smaller share of its bytes was fed by the page cache.
_FROM_STORAGE = 0.05

_FROM_CACHE = 0.5


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


def warnings_of_source(source: DataSource) -> Iterator[str]:
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
