"""Collectives as a rank sees them, counted by kind and axis of the mesh, and its FLOP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Of operators that move data; waits, barriers and receivers do not.
_KINDS = {
    "all_reduce": ("allreduce", "all_reduce"),
    "reduce_scatter": ("reduce_scatter",),
    "all_gather": ("allgather", "all_gather"),
    "broadcast": ("broadcast",),
    "all_to_all": ("alltoall", "all_to_all"),
    "send": ("c10d.send",),
}

# Attention on a CPU is an operator of its own, which torch's registry does not know. Its backward
# pass computes the scores again: a tenth more than the papers' formulas where attention is all
# there is.
_ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"


def collective_of(func: Any, args: Sequence[Any]) -> tuple[str, int] | None:
    """Return a collective's kind and the bytes of its whole tensor; None for other operators."""
    if func.namespace not in ("c10d", "_c10d_functional"):
        return None
    name = str(func)
    kind = next(
        (kind for kind, words in _KINDS.items() if any(word in name for word in words)),
        None,
    )
    if kind is None:
        return None
    sizes = [
        sum(
            leaf.numel() * leaf.element_size()
            for leaf in tree_leaves(argument)
            if isinstance(leaf, Tensor)
        )
        for argument in args[:2]
    ]
    if name.startswith("_c10d_functional.all_gather"):
        return kind, sizes[0] * int(args[1])  # what comes together is in its result only
    return kind, max(sizes, default=0)


class Collective(msgspec.Struct, frozen=True, kw_only=True):
    """Collectives of one kind over one axis; ``bytes`` are those of the whole tensors."""

    kind: str
    axis: str
    ranks: int
    count: int
    bytes: int


def summed(collectives: Sequence[Collective], times: int = 1) -> list[Collective]:
    """Add up those of one kind and axis."""
    totals: dict[tuple[str, str, int], list[int]] = {}
    for collective in collectives:
        noted = totals.setdefault((collective.kind, collective.axis, collective.ranks), [0, 0])
        noted[0] += collective.count * times
        noted[1] += collective.bytes * times
    return [
        Collective(kind=kind, axis=axis, ranks=ranks, count=count, bytes=size)
        for (kind, axis, ranks), (count, size) in sorted(totals.items())
    ]


_name_of = cache(str)


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts this rank's FLOP, those of attention and of convolutions among them, and what is sent
    by kind and axis.

    While entered, it sees each operator on this rank's own tensors: those of a DTensor come by
    themselves. Torch's own counter takes a DTensor's operators at their global size.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        groups = (
            {}
            if mesh is None
            else {axis: mesh.get_group(axis) for axis in mesh.mesh_dim_names or ()}
        )
        self._axes = {str(group.group_name): (axis, group.size()) for axis, group in groups.items()}
        self._found: dict[tuple[str, str, int], list[int]] = {}
        self.flop = 0
        self.attention = 0
        self.convolution = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator, then count it."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if (
            func is torch.ops.prim.device.default
        ):  # half of all calls under fake tensors, and no other mode's business
            return args[0].device
        result = func(*args, **(kwargs or {}))
        self.count(func, args, {**(kwargs or {}), "out_val": result})
        return result

    def count(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Count an operator that ran; ``kwargs`` has its result as ``out_val``."""
        name = _name_of(func)
        moved = collective_of(func, args)
        if moved is not None:
            kind, size = moved
            names = [name for name in map(_group_name, args) if name in self._axes]
            axis, ranks = self._axes[names[-1]] if names else ("world", dist.get_world_size())
            noted = self._found.setdefault((kind, axis, ranks), [0, 0])
            noted[0] += 1
            noted[1] += size
        elif name.startswith(f"{_ATTENTION}_backward"):
            self._attend(sdpa_backward_flop_count(args[0].shape, *_query_shapes(args[1:4])))  # type: ignore[no-untyped-call]
        elif name.startswith(_ATTENTION):
            self._attend(sdpa_flop_count(*_query_shapes(args[:3])))  # type: ignore[no-untyped-call]
        elif func.overloadpacket in flop_registry:
            flop = flop_registry[func.overloadpacket](*args, **kwargs)
            self.flop += flop
            self.convolution += flop if "convolution" in name else 0

    def _attend(self, flop: int) -> None:
        self.flop += flop
        self.attention += flop

    def collectives(self) -> list[Collective]:
        """Return the counted collectives."""
        return [
            Collective(kind=kind, axis=axis, ranks=ranks, count=count, bytes=size)
            for (kind, axis, ranks), (count, size) in sorted(self._found.items())
        ]


def _query_shapes(tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Return the shapes of query, key and value as if these two had the heads of the queries."""
    heads = tensors[0].shape[1]
    return [(tensor.shape[0], heads, *tensor.shape[2:]) for tensor in tensors]


def _group_name(argument: object) -> str:
    """Name of a collective's group, which operators take by name or as an object; "" for other
    arguments.
    """
    if isinstance(argument, str):
        return argument
    if isinstance(argument, torch.ScriptObject):
        try:
            return str(dist.ProcessGroup.unbox(argument).group_name)
        except RuntimeError:
            return ""  # how to reduce, which is an object too
    return ""
