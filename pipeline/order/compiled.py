"""The order of one split's samples: selected, weighted, and permuted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fuelrail.pipeline.order.epoch import CopyMap, MappedEpoch, SelectedSamples
from fuelrail.pipeline.order.permutation import derive_key
from fuelrail.pipeline.order.spec import OrderSpec, position_map

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fuelrail.pipeline.order.weights import SystematicSampling


class CompiledOrder:
    """The epochs of an order over one split. Immutable; safe to call from any number of threads.

    ``identity`` is what a saved position depends on, in plain JSON types: the specification, and
    digests of what its filter, keys and weights came to.
    """

    def __init__(
        self,
        spec: OrderSpec,
        identity: dict[str, Any],
        shard_lengths: Sequence[int],
        selected: NDArray[np.int64] | None = None,
        sampling: SystematicSampling | None = None,
    ) -> None:
        """Take ``selected`` samples of the split, ascending, each once (None: all), and their
        ``sampling``.
        """
        self.spec = spec
        self.identity = identity
        self._sampling = sampling
        self._bounds = np.cumsum([0, *shard_lengths])
        self.num_selected = int(self._bounds[-1]) if selected is None else len(selected)
        self._selected: NDArray[np.integer] | None = None
        if selected is not None:
            self._bounds = np.searchsorted(selected, self._bounds)
            small = np.int32 if int(selected[-1]) <= np.iinfo(np.int32).max else np.int64
            self._selected = selected.astype(small)
        self.epoch_length = self.num_selected if sampling is None else sampling.length

    def selected(self) -> NDArray[np.int64]:
        """Return the selected samples, ascending: int64 (num_selected,)."""
        return (
            np.arange(self.num_selected)
            if self._selected is None
            else self._selected.astype(np.int64)
        )

    def epoch(self, epoch: int, /) -> MappedEpoch:
        """Return the order of one epoch: positions 0 ..

        epoch_length - 1 to samples of the split.
        """
        bounds = self._bounds
        copy_maps: list[CopyMap] = []
        if self._sampling is not None:
            copies = self._sampling.epoch(derive_key("order weights", self.spec.seed, epoch))
            bounds = np.array(copies.first_copies(bounds.tolist()))
            copy_maps.append(copies)
        if self._selected is not None:
            copy_maps.append(SelectedSamples(self._selected))
        lengths = np.diff(bounds)
        return MappedEpoch(
            position_map(self.spec, lengths[lengths > 0].tolist(), epoch),
            *copy_maps,
        )
