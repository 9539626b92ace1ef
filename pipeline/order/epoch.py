"""One protocol for the epochs of all kinds of order: positions to entries.

An *order* (shuffled, windowed, sequential, weighted, mixed, lanes) has epochs of one length. An *epoch* maps positions
0 .. len - 1 to entries. Both are pure, so any number of threads may use them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from fuelrail.pipeline.order.permutation import PositionMap

NO_FLAGS: Final[Mapping[str, NDArray[Any]]] = MappingProxyType({})
"""The flags of orders that have none."""


class Entries(NamedTuple):
    """The entries at some positions; all arrays have the positions' shape."""

    parts: NDArray[np.int64]
    """Which dataset of a mix of datasets; 0 without such a mix."""
    samples: NDArray[np.int64]
    """The sample of that order's split."""
    valid: NDArray[np.bool_]
    """False: padding, such as a lane's that has ended."""
    flags: Mapping[str, NDArray[Any]] = NO_FLAGS
    """More that the order knows of each entry, under its name in a batch: ``lane`` and ``prev_exists`` of lanes."""


class Epoch(Protocol):
    """One epoch of an order."""

    @property
    def num_lanes(self) -> int:
        """Lanes that positions go round in turns; 1 for all kinds but ``lanes``."""

    def __len__(self) -> int:
        """Return the number of positions in the epoch."""

    def __call__(self, positions: ArrayLike, /) -> NDArray[np.int64]:
        """Return samples alone (int64, same shape) at ``positions``."""

    def entries(self, positions: ArrayLike, /) -> Entries:
        """Return entries at ``positions`` (integers in [0, len)); raises OrderError for others."""


class EndlessOrder(Protocol):
    """An order of epochs that all have one length; what `compile_order` returns for every kind.

    Three classes implement it: `CompiledOrder` (shuffled, windowed, sequential, each with or without weights),
    `LaneOrder`, and `MixedOrder`, whose parts are again such orders.
    """

    identity: dict[str, Any]
    """What a saved position depends on, in plain JSON types."""

    @property
    def epoch_length(self) -> int:
        """Positions in each epoch."""

    @property
    def num_selected(self) -> int:
        """Number of selected samples."""

    def selected(self) -> NDArray[np.int64]:
        """Return the selected samples, ascending: int64 (num_selected,)."""

    def expected_counts(self) -> NDArray[np.float64]:
        """Return how often each selected sample occurs in an epoch, averaged over epochs: float64 (num_selected,)."""

    def epoch(self, epoch: int, /) -> Epoch:
        """Return one epoch; raise OrderError for an epoch out of range."""


class MappedEpoch:
    """The epoch of one split: maps applied one after the other, from positions to samples."""

    __slots__ = ("_first", "_then")
    num_lanes: Final = 1

    def __init__(self, first: PositionMap, *then: Callable[[NDArray[np.int64]], NDArray[np.int64]]) -> None:
        self._first, self._then = first, then

    def __len__(self) -> int:
        return len(self._first)

    def __call__(self, positions: ArrayLike, /) -> NDArray[np.int64]:
        """Return samples (int64, same shape) at ``positions``; raises OrderError for positions outside."""
        values = self._first(positions)
        for step in self._then:
            values = step(values)
        return values

    def entries(self, positions: ArrayLike, /) -> Entries:
        """Return entries at ``positions``, all valid; raises OrderError for positions outside."""
        samples = self(positions)
        return Entries(np.zeros(samples.shape, np.int64), samples, np.ones(samples.shape, dtype=bool))
