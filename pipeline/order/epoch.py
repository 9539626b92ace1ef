"""One protocol for the epochs of all kinds of order: positions to entries.

An *order* (shuffled, windowed, sequential, weighted, mixed, lanes) has epochs of one length. An
*epoch* maps positions 0 .. len - 1 to entries. Both are pure, so any number of threads may use
them.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from fuelrail.pipeline.dtypes import I64, Mask
    from fuelrail.pipeline.order.permutation import PositionMap

DIGEST_CHARS: Final = 16

NO_FLAGS: Final[Mapping[str, NDArray[Any]]] = MappingProxyType({})
"""The flags of orders that have none."""


def digest(*arrays: ArrayLike) -> str:
    """Return the digest of whole numbers that a state names."""
    sha256 = hashlib.sha256()
    for array in arrays:
        numbers = np.asarray(array).astype("<i8")
        sha256.update(numbers.tobytes())
    return sha256.hexdigest()[:DIGEST_CHARS]


class Entries(NamedTuple):
    """The entries at some positions; all arrays have the positions' shape."""

    parts: I64
    """Which dataset of a mix of datasets; 0 without such a mix."""
    samples: I64
    """The sample of that order's split."""
    valid: Mask
    """False: padding, such as a lane's that has ended."""
    flags: Mapping[str, NDArray[Any]] = NO_FLAGS
    """More that the order knows of each entry, under its name in a batch: ``lane`` and
    ``prev_exists`` of lanes.
    """


class Occurrences(NamedTuple):
    """Where some samples are shown in an epoch, by sample and then by position; both int64 (k,)."""

    indices: I64
    """Places in the list of samples that was asked for; one comes as often as its sample is
    shown.
    """
    positions: I64

    @classmethod
    def sorted(cls, indices: I64, positions: I64) -> Occurrences:
        """Return both in order."""
        by_sample = np.lexsort((positions, indices))
        return cls(indices[by_sample], positions[by_sample])


class Epoch(ABC):
    """One epoch of an order. Pure, so any number of threads may use it."""

    __slots__ = ()
    num_lanes: int = 1
    """Lanes that positions go round in turns; 1 for all kinds but ``lanes``."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of positions in the epoch."""

    def __call__(self, positions: ArrayLike, /) -> I64:
        """Return samples alone (int64, same shape; in packs as many as these hold) at
        ``positions``.
        """
        return self.entries(positions).samples

    @abstractmethod
    def entries(self, positions: ArrayLike, /) -> Entries:
        """Return entries at ``positions`` (integers in [0, len)); raises OrderError for others."""

    @abstractmethod
    def find(self, samples: ArrayLike, part: int = 0, /) -> Occurrences:
        """Return where ``samples`` (n,) of a part are shown, padding included: the inverse of
        :meth:`entries`.

        Samples that the order does not select are shown nowhere. Numbers outside the split are an
        OrderError, or are shown nowhere.
        """


class EndlessOrder(Protocol):
    """An order of epochs that all have one length; what `compile_order` returns for every kind.

    Three classes implement it: `CompiledOrder` (shuffled, windowed, sequential, each with or
    without weights), `LaneOrder`, and `MixedOrder`, whose parts are again such orders.
    """

    identity: dict[str, Any]
    """What a saved position depends on, in plain JSON types."""

    @property
    def epoch_length(self) -> int:
        """Positions in each epoch."""

    @property
    def num_selected(self) -> int:
        """Number of selected samples."""

    def selected(self) -> I64:
        """Return the selected samples, ascending: int64 (num_selected,)."""

    def epoch(self, epoch: int, /) -> Epoch:
        """Return one epoch; raise OrderError for an epoch out of range."""


class CopyMap(Protocol):
    """A map from copies to samples; a sample may have several copies, or none."""

    def __call__(self, copies: I64, /) -> I64:
        """Return samples (int64, same shape) of ``copies``."""

    def find(self, samples: I64, /) -> Occurrences:
        """Return the copies of ``samples`` (n,)."""


class SelectedSamples:
    """The selected samples of a split as a map: number among them to number in the split."""

    __slots__ = ("_selected",)

    def __init__(self, selected: NDArray[np.integer]) -> None:
        """Take the samples, ascending, each once."""
        self._selected = selected

    def __call__(self, numbers: I64, /) -> I64:
        """Return samples of the split (int64, same shape)."""
        return self._selected[numbers].astype(np.int64)

    def find(self, samples: I64, /) -> Occurrences:
        """Return the numbers of ``samples`` (n,) among the selected ones; others have none."""
        places = np.searchsorted(self._selected, samples)
        last = len(self._selected) - 1
        is_selected = self._selected[np.minimum(places, last)] == samples
        indices = np.flatnonzero(is_selected)
        return Occurrences(indices, places[indices])


class MappedEpoch(Epoch):
    """The epoch of one split: maps applied one after the other, from positions to samples."""

    __slots__ = ("_copy_maps", "_first")

    def __init__(self, first: PositionMap, *copy_maps: CopyMap) -> None:
        self._first = first
        self._copy_maps = copy_maps

    def __len__(self) -> int:
        return len(self._first)

    def __call__(self, positions: ArrayLike, /) -> I64:
        """Return samples (int64, same shape) at ``positions``; raises OrderError for positions
        outside.
        """
        values = self._first(positions)
        for copy_map in self._copy_maps:
            values = copy_map(values)
        return values

    def entries(self, positions: ArrayLike, /) -> Entries:
        """Return entries at ``positions``, all valid; raises OrderError for positions outside."""
        samples = self(positions)
        return Entries(
            parts=np.zeros_like(samples),
            samples=samples,
            valid=np.ones_like(samples, dtype=bool),
        )

    def find(self, samples: ArrayLike, _: int = 0, /) -> Occurrences:
        """Return where ``samples`` (n,) are shown; raises OrderError for numbers that no copy of
        the split has.
        """
        values = np.asarray(samples, dtype=np.int64)
        indices = np.arange(len(values))
        for copy_map in reversed(self._copy_maps):
            copies, values = copy_map.find(values)
            indices = indices[copies]
        positions = self._first.inverse(values)
        return Occurrences.sorted(indices, positions)
