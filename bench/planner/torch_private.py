"""Private parts of torch that the planner needs, all of them in one place.

Nothing public says what lies in memory after each operator without running it, or lets one rank of
a cluster run without the others: the memory trackers, the fake process group and DTensor's caches
do, and a release of torch may move them. :func:`private_parts` finds them or says which torch has
them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from fuelrail.pipeline.errors import FuelrailError

__all__ = [
    "Bytes",
    "FakeTensorMode",
    "bytes_by_kind",
    "fake_group",
    "launches",
    "private_parts",
    "tree_leaves",
    "tree_map",
    "watch_growth",
]

Bytes = dict[str, tuple[int, int]]
_GROWS = torch.device("meta")  # on which the tracker sees nothing else


class PrivateParts(NamedTuple):
    """What of torch is private: the fake store, two memory trackers, how DTensors find
    placements, their caches.
    """

    fake_store: Any
    tracker: Any
    sharded_tracker: Any
    propagator: Any
    forget: tuple[Callable[[], None], ...]


def private_parts() -> PrivateParts:
    """Return what is private. Raises FuelrailError where this torch has it elsewhere."""
    try:
        from torch._C import (
            _clear_DTensor_sharding_propagator_cache as forget_native,
        )
        from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
        from torch.distributed._tools.mem_tracker import MemTracker
        from torch.distributed.tensor._redistribute import (
            _gen_transform_infos,
            clear_redistribute_planner_cache,
        )
        from torch.distributed.tensor._sharding_prop import ShardingPropagator
        from torch.distributed.tensor.debug import (
            _clear_python_sharding_prop_cache as forget_python,
        )
        from torch.testing._internal.distributed.fake_pg import FakeStore

        attrgetter("_update_snap", "_update_peak_stats")(MemTracker)  # which _watch_growth replaces
        attrgetter("_propagate_tensor_meta_non_cached")(ShardingPropagator)
    except (ImportError, AttributeError) as error:
        raise FuelrailError(
            f"torch {torch.__version__} has moved a part that the planner runs ({error}); "
            "it was tested with torch 2.13: install that, in an environment of its own "
            "where training needs another"
        ) from error
    forget = (
        forget_native,
        forget_python,
        clear_redistribute_planner_cache,
        _gen_transform_infos.cache_clear,
    )
    return PrivateParts(
        fake_store=FakeStore,
        tracker=MemTracker,
        sharded_tracker=FSDPMemTracker,
        propagator=ShardingPropagator,
        forget=forget,
    )


@contextmanager
def fake_group(rank: int, world: int) -> Iterator[None]:
    """Run the body as rank ``rank`` of ``world``, with torch's fake process group in place of the
    other ranks.

    Raises FuelrailError where the process has a group of its own.
    """
    if dist.is_initialized():
        raise FuelrailError(
            "the planner needs a process without a process group; call it in one of its own"
        )
    parts = private_parts()
    find = parts.propagator._propagate_tensor_meta_non_cached  # noqa: SLF001 - torch's

    def propagate_untracked(*args: Any) -> Any:
        """Find the shapes of DTensors: torch runs operators at global sizes for it, which neither
        the memory tracker nor the counter may count.
        """
        with _disable_current_modes():
            return find(*args)

    hook = sys.excepthook  # to which each group adds its rank
    dist.init_process_group("fake", rank=rank, world_size=world, store=parts.fake_store())
    parts.propagator._propagate_tensor_meta_non_cached = propagate_untracked  # noqa: SLF001
    try:
        yield
    finally:
        parts.propagator._propagate_tensor_meta_non_cached = find  # noqa: SLF001
        dist.destroy_process_group()
        sys.excepthook = hook
        # DTensor's caches know a mesh by its ranks: the next fake group of the same ranks would get
        # entries of this one, which is gone.
        for forget in parts.forget:
            forget()


@cache
def launches(func: Any) -> bool:
    """Return whether an operator computes something, rather than make a view or an empty tensor."""
    returns = func._schema.returns  # noqa: SLF001 - its only place
    is_view = any(
        returned.alias_info is not None and not returned.alias_info.is_write for returned in returns
    )
    name = func._schema.name  # noqa: SLF001
    return not is_view and name.startswith("aten::") and not name.startswith("aten::empty")


def bytes_by_kind(tracker: Any, rows: int) -> Bytes:
    """Return the bytes in memory now: those that do not depend on the ``rows``, and those of a
    row.
    """
    if tracker.sizes_by_kind is not None:
        return cast("Bytes", tracker.sizes_by_kind)
    sizes_by_kind: Bytes = {}
    snapshot = tracker._curr_mem_snap  # noqa: SLF001 - its own method copies them
    for device, sizes in snapshot.items():
        for kind, size in sizes.items():
            name = str(getattr(kind, "value", kind)).replace("Other", "Inputs and buckets")
            if name != "Total" and size:
                fixed, grows = sizes_by_kind.get(name, (0, 0))
                sizes_by_kind[name] = (
                    (fixed, grows + size // rows) if device == _GROWS else (fixed + size, grows)
                )
    tracker.sizes_by_kind = sizes_by_kind
    return sizes_by_kind


def watch_growth(tracker: Any, rows: int) -> None:
    """Let the tracker count what grows with the rows as another device's, and look for no peaks:
    it takes long.

    The tracker keeps ``sizes_by_kind`` until a block of memory comes, goes or changes.
    """
    update = tracker._update_snap  # noqa: SLF001
    tracker.sizes_by_kind = None

    def noted(kind: Any, block: Any, **old: Any) -> None:
        if kind.name == "ADD" and block.mem_consumed % rows == 0:
            block.device = _GROWS
        tracker.sizes_by_kind = None
        update(kind, block, **old)

    tracker._update_snap = noted  # noqa: SLF001
    tracker._update_peak_stats = lambda _: None  # noqa: SLF001
