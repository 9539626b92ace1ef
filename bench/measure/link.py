"""An emulated link between emulated accelerators: collectives last as long as a slower network would take.

A collective of n bytes lasts n / bandwidth + latency, one after another, where n is what a large ring sends per rank:
twice the tensor's bytes in an all-reduce, the larger of input and output in a gather or scatter, the tensor's in a
send. The ranks really communicate too, through the host's memory; that time comes on top, and is small.

DDP's buckets are the accelerator's own business and overlap its backward pass. All other collectives hold the rank up:
what a device would hide of them is not modelled.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from fuelrail.bench.measure.accelerator import EmulatedAccelerator

# Of operators that move data; waits, barriers and receivers do not.
_MOVING = ("allreduce", "all_reduce", "allgather", "all_gather", "reduce_scatter", "send", "broadcast", "alltoall")


class EmulatedLink(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, holds every collective of this thread for the time that the accelerator's link takes."""

    def __init__(self, accelerator: EmulatedAccelerator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._accelerator = accelerator

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - an operator
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - what the operator returns
        """Wait before a collective; the peers' links are as slow, so all of them start it late."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own collectives come here by themselves
        if func.namespace in ("c10d", "_c10d_functional") and not self._accelerator.reducing:
            name = str(func)
            if any(word in name for word in _MOVING):
                self._accelerator.communicate(moved_bytes(name, args))
        return func(*args, **(kwargs or {}))


def moved_bytes(name: str, args: Sequence[Any]) -> int:
    """Bytes that a rank sends in a collective: see the module's docstring."""
    sizes = [_bytes(argument) for argument in args[:2]]
    if "reduce" in name and "scatter" not in name:
        return 2 * sizes[0]
    if name.startswith("_c10d_functional.all_gather"):
        return sizes[0] * int(args[1])
    return max(sizes, default=0)


def _bytes(argument: object) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(argument) if isinstance(leaf, Tensor))


def link_of(accelerator: EmulatedAccelerator) -> AbstractContextManager[Any]:
    """The accelerator's link, to be entered around training; nothing where its profile names none."""
    return nullcontext() if accelerator.profile.link_gb_per_s is None else EmulatedLink(accelerator)
