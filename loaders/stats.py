"""What a loader says of its own work."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from fuelrail.loaders.storage import StorageStats
    from fuelrail.pipeline.stages import StageClock


class LoaderStats(NamedTuple):
    """What the loader did since it was made: its stages' clocks, and the batches handed out."""

    stages: tuple[StageClock, ...]
    batches: int
    samples: int
    images: int
    waited_s: float
    """Time that the trainer waited for batches."""
    elapsed_s: float
    """Time since the first iteration began."""
    storage: StorageStats
    """What was read, fetched, found in the cache."""
    bad_samples: int
    """Distinct bad samples that were substituted."""
