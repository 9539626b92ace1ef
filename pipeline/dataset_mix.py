"""Several datasets by ratio, as one order: each is compiled on its own, `fuelrail.pipeline.mix` lays them into blocks.

::

    order = compile_mix({"city": 3, "highway": 1}, OrderSpec(seed=7, filter="not night"), datasets, "train")
    parts, samples = order.epoch(0).entries(positions)

The specification holds in each dataset for itself: its filter, its weights, its windows of shards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from fuelrail.pipeline.compiled_order import CompiledOrder, compile_order
from fuelrail.pipeline.errors import OrderError
from fuelrail.pipeline.mix import MAX_BLOCK, MixedOrder
from fuelrail.pipeline.order import ORDER_VERSION
from fuelrail.pipeline.permutation import derive_key

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fuelrail.pipeline.clips import ClipTable
    from fuelrail.pipeline.dataset import Dataset
    from fuelrail.pipeline.mix import MixedEpoch
    from fuelrail.pipeline.order import OrderSpec
    from fuelrail.pipeline.windows import FrameWindow


class DatasetMixOrder:
    """The epochs of several datasets mixed; as `compiled_order.CompiledOrder`, its epochs also tell the datasets."""

    def __init__(self, spec: OrderSpec, mixed: MixedOrder[CompiledOrder], identity: dict[str, Any]) -> None:
        self.spec, self.mixed, self.identity = spec, mixed, identity
        self.epoch_length = mixed.epoch_length

    def epoch(self, epoch: int) -> MixedEpoch:
        """The order of one epoch; raises OrderError for an epoch out of range."""
        return self.mixed.epoch(epoch)


def compile_mix(
    ratios: Mapping[str, int],
    spec: OrderSpec,
    datasets: Mapping[str, Dataset],
    split: str = "train",
    *,
    window: FrameWindow | None = None,
    clips: Sequence[ClipTable | None] | None = None,
) -> DatasetMixOrder:
    """Apply ``spec`` to a split of each dataset and mix them: ``ratios`` samples of each in every block.

    ``window`` and ``clips`` (of each dataset) are as in `compile_order`. Raises OrderError for ratios that do not name
    the datasets or are not whole numbers of 1 or more, for an order that is not to be mixed (``lanes``, ``subset`` and
    a mix of its own), and what `compile_order` raises.
    """
    check_ratios(ratios, datasets)
    if spec.kind == "lanes" or spec.mix is not None or spec.subset is not None:
        what = "kind 'lanes'" if spec.kind == "lanes" else "a mix of its own" if spec.mix else "a subset"
        raise OrderError(f"an order with {what} is of one dataset; mix datasets by kind, filter, weights, epoch_length")
    orders = []
    for at, (name, dataset) in enumerate(datasets.items()):
        seed = derive_key("order mix part", spec.seed, at) % 2**63
        own = msgspec.structs.replace(spec, seed=seed, epoch_length=None)
        try:
            order = compile_order(own, dataset, split, window=window, clips=None if clips is None else clips[at])
        except OrderError as error:
            raise OrderError(f"dataset {name!r}: {error}") from error
        assert isinstance(order, CompiledOrder)
        orders.append(order)
    mixed = MixedOrder(orders, [ratios[name] for name in datasets], seed=spec.seed, epoch_length=spec.epoch_length)
    parts = {name: order.identity for name, order in zip(datasets, orders, strict=True)}
    identity = {
        "version": ORDER_VERSION,
        "kind": spec.kind,
        "seed": spec.seed,
        "mix": {name: ratios[name] for name in datasets},
        "epoch_length": mixed.epoch_length,
        "parts": parts,
    }
    return DatasetMixOrder(spec, mixed, identity)


def check_ratios(ratios: object, datasets: Mapping[str, object]) -> None:
    """Raise OrderError unless ``ratios`` gives each dataset a whole number of 1 or more, MAX_BLOCK in sum."""
    example = f"{{{', '.join(f'{name!r}: 1' for name in datasets)}}}"
    rule = f"it gives each dataset a whole number of 1 or more, {MAX_BLOCK} in sum, such as {example}"
    if not hasattr(ratios, "items"):
        raise OrderError(f"mix={ratios!r} is no mix: {rule}")
    given = dict(ratios.items())
    if given.keys() != datasets.keys():
        raise OrderError(f"mix={given!r} names {_names(given)}, the datasets are {_names(datasets)}: {rule}")
    if not all(type(ratio) is int and ratio >= 1 for ratio in given.values()) or sum(given.values()) > MAX_BLOCK:
        raise OrderError(f"mix={given!r} is no mix: {rule}")


def _names(named: Mapping[str, object]) -> str:
    return ", ".join(map(repr, named)) or "none"
