"""Which samples of a split follow one another in time: the table that temporal windows and lanes look things up in.

Samples may be stored in any order (shuffled frame by frame, or clip by clip); this sorts their numbers by clip and
frame once. Memory: 16 bytes a sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from fuelrail.pipeline.errors import IndexFileError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from fuelrail.pipeline.dataset import Dataset

_FRAME_BITS: Final = 32
FRAME_LIMIT: Final = 2**31
"""Frame numbers lie in [0, FRAME_LIMIT), so that half of a key's frame bits keep clips apart."""


@dataclass(frozen=True, slots=True)
class ClipTable:
    """The n samples of a split sorted by clip, then by frame; a sample's place in that sorting is its *rank*.

    Clips come in the order of their first stored sample.
    """

    keys: NDArray[np.int64]
    """(n,), ascending: clip number * 2**32 + frame, by rank."""
    samples: NDArray[np.integer]
    """(n,): sample number (0 is the split's first) by rank."""
    ranks: NDArray[np.integer]
    """(n,): rank by sample number."""

    @classmethod
    def build(cls, clips: ArrayLike, frames: ArrayLike) -> Self:
        """Sort samples by their clip's number and their frame's (both (n,), 0 or more).

        Raises IndexFileError for a frame number out of range, or that stands twice in its clip.
        """
        frame = np.asarray(frames, dtype=np.int64)
        if len(frame) and not (frame.min() >= 0 and frame.max() < FRAME_LIMIT):
            raise IndexFileError(f"frame numbers must be in 0 .. 2**31 - 1, got {frame.min()} .. {frame.max()}")
        keys = (np.asarray(clips, dtype=np.int64) << _FRAME_BITS) + frame
        small = np.int32 if len(keys) <= np.iinfo(np.int32).max else np.int64
        in_order: NDArray[np.integer] = np.arange(len(keys)).astype(small)
        if (keys[1:] > keys[:-1]).all():
            return cls(keys, in_order, in_order)
        samples: NDArray[np.integer] = np.argsort(keys, kind="stable").astype(small)
        ranks = np.empty_like(in_order)
        ranks[samples] = in_order
        keys = keys[samples]
        if (twice := np.flatnonzero(keys[1:] == keys[:-1])).size:
            first, second = samples[twice[0]], samples[twice[0] + 1]
            raise IndexFileError(f"samples {first} and {second} of the split are the same frame of the same clip")
        return cls(keys, samples, ranks)

    @classmethod
    def of_split(cls, dataset: Dataset, split: str) -> Self:
        """The table of one split of a dataset; raises ConfigError for an unknown split, IndexFileError as `build`."""
        entry = dataset.split(split)
        first, end = entry.first_sample, entry.first_sample + entry.num_samples
        return cls.build(dataset.index.clip_numbers(first, end), dataset.index.column("frame", first, end))

    def __len__(self) -> int:
        return len(self.keys)

    def clip_numbers(self) -> NDArray[np.int64]:
        """The number of each rank's clip: int64 (n,), ascending."""
        return self.keys >> _FRAME_BITS
