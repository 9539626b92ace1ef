"""Mix datasets, or parts of one, by ratio: exact in every block, each in its own order and through its own epochs.

With ratios 4:2:1 each block of 7 consecutive positions holds 4, 2 and 1 samples of the three, in an arrangement that
is shuffled for each block; a global batch that is a multiple of 7 always holds the same shares. A dataset's
samples come in the order that it would have alone. When its epoch ends, its next one begins in the middle of the
mix's, and the mix's next epoch continues it: over time every sample of a dataset comes equally
often, for any sizes. All of it is arithmetic, so any position is known without the ones before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fuelrail.pipeline.errors import OrderError
from fuelrail.pipeline.order.epoch import EndlessOrder, Entries, Epoch
from fuelrail.pipeline.order.permutation import MAX_LENGTH, KeyedPermutation, as_positions, derive_key
from fuelrail.pipeline.settings import Settings, check_types

MAX_BLOCK: Final = 1024
"""Largest sum of the ratios: finding a place in a block costs time in proportion to it."""

_CHUNK: Final = 16384  # positions at a time, as in `fuelrail.pipeline.order.spec`


class Mix(Settings, frozen=True):
    """Parts of a dataset, one for each value of an attribute, mixed by ratio: ``{"true": 1, "false": 3}``.

    Values are written as text; samples with others, or with none, are left out.
    """

    attribute: str
    ratios: dict[str, int]
    """Samples of each value in a block, 1 or more; at most ``MAX_BLOCK`` in sum."""

    def __post_init__(self) -> None:
        check_types(self, OrderError)


class MixedOrder:
    """The epochs of a mix of ``orders`` by whole-number ``ratios``.

    ``epoch_length`` is rounded up to whole blocks; None: as long as it takes until every sample of every order has
    come once. ``is_one_split``: the orders are of parts of one dataset's split, so the part of every entry is 0.
    Raises OrderError for ratios that are not 1 or more, or whose sum is over ``MAX_BLOCK``.
    """

    def __init__(
        self,
        orders: Sequence[EndlessOrder],
        ratios: Sequence[int],
        *,
        seed: int = 0,
        epoch_length: int | None = None,
        is_one_split: bool = False,
    ) -> None:
        if not orders or len(orders) != len(ratios):
            raise OrderError(f"a mix needs a ratio for each of its datasets, got {len(orders)} and {len(ratios)}")
        if min(ratios) < 1 or sum(ratios) > MAX_BLOCK:
            raise OrderError(f"ratios must be integers >= 1, at most {MAX_BLOCK} in sum, got {list(ratios)}")
        if not 0 <= seed < 2**63:
            raise OrderError(f"mix seed must be in 0 .. 2**63 - 1, got {seed}")
        if epoch_length is not None and epoch_length < 1:
            raise OrderError(f"a mixed epoch must have at least 1 position, got {epoch_length}")
        self.orders, self.ratios, self.seed = tuple(orders), tuple(map(int, ratios)), seed
        self.block, self.is_one_split = sum(self.ratios), is_one_split
        wanted = (
            max(-(-order.epoch_length // ratio) for order, ratio in zip(self.orders, self.ratios, strict=True))
            if epoch_length is None
            else -(-epoch_length // self.block)
        )
        self.num_blocks = wanted
        self.epoch_length = wanted * self.block
        self.identity: dict[str, Any] = {
            "kind": "mix",
            "seed": seed,
            "ratios": list(self.ratios),
            "epoch_length": self.epoch_length,
            "parts": [order.identity for order in self.orders],
        }

    @property
    def num_selected(self) -> int:
        """Number of selected samples of all orders."""
        return sum(order.num_selected for order in self.orders)

    def selected(self) -> NDArray[np.int64]:
        """Return the selected samples of parts of one split, ascending: int64 (num_selected,)."""
        return np.sort(np.concatenate([order.selected() for order in self.orders]))

    def expected_counts(self) -> NDArray[np.float64]:
        """Return how often each sample of :meth:`selected` occurs in an epoch, averaged over epochs: float64."""
        counts = [
            order.expected_counts() * (self.num_blocks * ratio / order.epoch_length)
            for order, ratio in zip(self.orders, self.ratios, strict=True)
        ]
        stored = np.argsort(np.concatenate([order.selected() for order in self.orders]))
        return np.concatenate(counts)[stored]

    def epoch(self, epoch: int, /) -> MixedEpoch:
        """Return one epoch; raise OrderError for a negative epoch, or one whose samples are too many to count."""
        if epoch < 0 or (epoch + 1) * self.epoch_length > MAX_LENGTH:
            raise OrderError(f"epoch must be 0 or more and end before position 2**62 of the mix, got {epoch}")
        return MixedEpoch(self, epoch)


class MixedEpoch:
    """One epoch of a mix: :meth:`entries` maps positions to datasets and samples."""

    __slots__ = ("_epoch_of", "_first_block", "_mix", "_words")
    num_lanes: Final = 1

    def __init__(self, mix: MixedOrder, epoch: int) -> None:
        self._mix, self._first_block = mix, epoch * mix.num_blocks
        # Distinct random-looking words, one for each place of each block: sorting a block's shuffles it.
        self._words = KeyedPermutation(MAX_LENGTH, derive_key("order mix", mix.seed))
        # Positions come in runs: of each dataset one epoch or two at a time.
        self._epoch_of: Callable[[int, int], Epoch] = lru_cache(maxsize=2 * len(mix.orders))(
            lambda part, number: mix.orders[part].epoch(number)
        )

    def __len__(self) -> int:
        return self._mix.epoch_length

    def __call__(self, positions: ArrayLike, /) -> NDArray[np.int64]:
        """Return samples alone (int64, same shape) at ``positions``, for mixes of parts of one split."""
        return self.entries(positions).samples

    def entries(self, positions: ArrayLike, /) -> Entries:
        """Return parts and samples at ``positions``, all valid; raise OrderError for positions outside."""
        wanted = as_positions(positions, len(self))
        flat = wanted.reshape(-1)
        parts, samples = np.empty_like(flat), np.empty_like(flat)
        for first in range(0, flat.size, _CHUNK):
            here = slice(first, first + _CHUNK)
            self._fill(flat[here], parts[here], samples[here])
        if self._mix.is_one_split:
            parts[:] = 0
        valid = np.ones(wanted.shape, dtype=bool)
        return Entries(parts.reshape(wanted.shape), samples.reshape(wanted.shape), valid)

    def _fill(self, positions: NDArray[np.int64], parts: NDArray[np.int64], samples: NDArray[np.int64]) -> None:
        """Write the entries at ``positions`` (n,) into the other two (n,)."""
        mix = self._mix
        block, place = np.divmod(positions, mix.block)
        blocks, which = _distinct(block + self._first_block)
        words = self._words(blocks[:, None] * mix.block + np.arange(mix.block))
        arranged = np.repeat(np.arange(len(mix.ratios)), mix.ratios)[np.argsort(words, axis=1)]  # (blocks, places)
        at_place = which * mix.block + place
        parts[:] = arranged.reshape(-1)[at_place]
        for part, (order, ratio) in enumerate(zip(mix.orders, mix.ratios, strict=True)):
            here = np.flatnonzero(parts == part)
            if not here.size:
                continue
            earlier = np.cumsum(arranged == part, axis=1).reshape(-1)[at_place[here]] - 1
            turn = blocks[which[here]] * ratio + earlier  # how many samples of this dataset came before, ever
            epochs, at = np.divmod(turn, order.epoch_length)
            for epoch in _distinct(epochs)[0].tolist():
                inside = epochs == epoch
                samples[here[inside]] = self._epoch_of(part, epoch)(at[inside])


def _distinct(values: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the distinct values, ascending, and which of them each value (n,) is; sorts only if needed."""
    steps = np.diff(values)
    if (steps < 0).any():
        distinct, which = np.unique(values, return_inverse=True)
        return distinct, which
    new = np.concatenate(([True], steps > 0))
    return values[new], np.cumsum(new) - 1
