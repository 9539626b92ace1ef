"""Memory of a device over one step, by kind: torch's allocator on a GPU, torch's tracker of tensors on the CPU.

Both are private parts of torch: ``tests/bench/measure/test_memory_line.py`` says which where a new torch moves them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from fuelrail.bench.measure.records import MemoryLine, RankWriter, StepRecord

if TYPE_CHECKING:
    from torch import Tensor, nn


KINDS: Final = ("parameters", "buffers", "optimiser", "gradients", "activations", "temporary", "communication", "other")
"""The kinds in the order of a plot's stack: what stays first, what comes and goes last."""
TRACKED: Final = {
    "Parameter": "parameters", "Sharded Param": "parameters", "Unsharded Param": "parameters", "Buffer": "buffers",
    "Optstate": "optimiser", "OptState": "optimiser", "Gradient": "gradients", "Sharded Grad": "gradients",
    "Unsharded Grad": "gradients", "Activation": "activations", "Temp": "temporary", "All Gather": "communication",
    "Reduce Scatter": "communication", "Inputs": "other", "Other": "other",
}  # fmt: skip
"""Our kind of each of the trackers' kinds."""
_MAX_POINTS: Final = 400
_MAX_EVENTS: Final = 1_000_000

Point = tuple[int, dict[str, int]]
"""Nanoseconds, and the bytes of each kind from then on."""


def following_memory(
    steps: Iterator[StepRecord], modules: Sequence[nn.Module], optimiser: torch.optim.Optimizer, writer: RankWriter
) -> Iterator[StepRecord]:
    """Follow the memory of the third of a run's steps: by then the optimiser has its state, and DDP its buckets."""
    buckets: list[Tensor] = []

    def note_buckets(*_: object) -> None:
        """Note the gradients that exist all the time: under DDP they are parts of its buckets."""
        copies = [module for module in modules if isinstance(module, DistributedDataParallel)]
        buckets[:] = [p.grad for module in copies for p in module.parameters() if p.grad is not None]

    handle = optimiser.register_step_pre_hook(note_buckets)
    before = list(islice(steps, 1))
    yield from before
    before = list(islice(steps, 1))
    yield from before
    handle.remove()
    if not before:
        return
    with memory_line(before[0].step + 1, modules, optimiser, writer.write, buckets):
        third = list(islice(steps, 1))
    yield from third
    yield from steps


@contextmanager
def memory_line(
    step: int,
    modules: Sequence[nn.Module],
    optimiser: torch.optim.Optimizer,
    write: Callable[[MemoryLine], None],
    buckets: Sequence[Tensor] = (),
) -> Iterator[None]:
    """Follow the memory while the block runs one step, then write the line. The step takes several times longer.

    ``modules`` are the model, or this rank's stages of it, ``buckets`` gradients that exist all the time. On the CPU
    temporary tensors of the optimiser's step count as its state; on a GPU the allocator knows addresses only, so
    activations include what is temporary.
    """
    if next(modules[0].parameters()).is_cuda:
        with _allocator_line(step, modules, optimiser, write):
            yield
    else:
        with _tracker_line(step, modules, optimiser, write, buckets):
            yield


@contextmanager
def _tracker_line(
    step: int,
    modules: Sequence[nn.Module],
    optimiser: torch.optim.Optimizer,
    write: Callable[[MemoryLine], None],
    buckets: Sequence[Tensor],
) -> Iterator[None]:
    points: list[Point] = []
    fsdp = isinstance(modules[0], FSDPModule)
    tracker = _following(FSDPMemTracker if fsdp else MemTracker, points, (modules[0], optimiser) if fsdp else ())
    tracker.track_external(*(() if fsdp else modules), optimiser)
    for gradient in buckets:
        tracker._update_and_maybe_create_winfos(gradient, _MemRefType.GRAD)  # noqa: SLF001
    start_ns = time.monotonic_ns()
    with tracker:
        yield
    write(_line(step, "tracker", points, start_ns, reserved=None))


def _following(kind: type[MemTracker], points: list[Point], arguments: Sequence[Any]) -> MemTracker:
    """Make a tracker that notes the bytes of each kind after each operator."""

    class Following(kind):  # type: ignore[misc, valid-type]
        def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any operator's
            result = super().__torch_dispatch__(*args, **kwargs)
            if result is not NotImplemented:
                points.append((time.monotonic_ns(), dict.fromkeys(KINDS, 0)))
                for kinds in self.get_tracker_snapshot().values():
                    for name, num_bytes in kinds.items():
                        if name != "Total":
                            points[-1][1][TRACKED[getattr(name, "value", name)]] += num_bytes
            return result

        def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> Any:  # noqa: ANN401 - as in torch
            # Parts of a batch call a module several times a step, which the tracker takes for another step.
            if not self._mod_tracker.is_bw:
                self.memory_tracking.pop(module, None)
            # What comes from outside is the batch, and no activation.
            if kind is MemTracker:
                self.track_external(*(t for t in tree_leaves(inputs) if _unknown(self, t)))
            return super()._pre_fw_hook(module, inputs)

    following: MemTracker = Following(*arguments)
    return following


def _unknown(tracker: MemTracker, value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.untyped_storage() not in tracker._WINFO  # noqa: SLF001


@contextmanager
def _allocator_line(
    step: int, modules: Sequence[nn.Module], optimiser: torch.optim.Optimizer, write: Callable[[MemoryLine], None]
) -> Iterator[None]:
    gradients: set[int] = set()

    def note_gradients(*_: object) -> None:
        gradients.update(_address(p.grad) for module in modules for p in module.parameters() if p.grad is not None)

    handle = optimiser.register_step_pre_hook(note_gradients)
    torch.cuda.memory._record_memory_history(max_entries=_MAX_EVENTS, stacks="python", context=None)  # noqa: SLF001
    start_ns = time.time_ns()
    try:
        yield
        snapshot = torch.cuda.memory._snapshot()  # noqa: SLF001
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)  # noqa: SLF001
        handle.remove()
    known = dict.fromkeys(gradients, "gradients")
    for module in modules:
        known |= {_address(tensor): "parameters" for tensor in module.parameters()}
        known |= {_address(tensor): "buffers" for tensor in module.buffers()}
    for state in optimiser.state.values():
        known |= {_address(value): "optimiser" for value in state.values() if isinstance(value, torch.Tensor)}
    points, reserved = points_of_snapshot(snapshot, torch.cuda.current_device(), known)
    write(_line(step, "allocator", points, start_ns, reserved))


def points_of_snapshot(
    snapshot: Mapping[str, Any], device: int, known: Mapping[int, str]
) -> tuple[list[Point], list[int]]:
    """Return bytes by kind, and bytes reserved, after each event of an allocator's snapshot.

    ``known`` says the kind of blocks by address. A block that was allocated more than once at an address is of the kind
    the last time, and an activation before. The snapshot is that of ``torch.cuda.memory._snapshot``.
    """
    segments = [segment for segment in snapshot["segments"] if segment["device"] == device]
    events = snapshot["device_traces"][device]
    # Backwards from the blocks at the end to those at the start.
    live = {
        block["address"]: block["size"]
        for segment in segments
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    reserved = sum(segment["total_size"] for segment in segments)
    last: dict[int, int] = {}
    for number in range(len(events) - 1, -1, -1):
        event = events[number]
        if event["action"] == "alloc":
            live.pop(event["addr"], None)
            last.setdefault(event["addr"], number)
        elif event["action"] == "free_completed":
            live[event["addr"]] = event["size"]
        elif event["action"] in ("segment_alloc", "segment_free"):
            reserved += -event["size"] if event["action"] == "segment_alloc" else event["size"]
    kinds = {address: known.get(address, "other") if address not in last else "other" for address in live}
    now = dict.fromkeys(KINDS, 0)
    for address, size in live.items():
        now[kinds[address]] += size
    points: list[Point] = []
    totals: list[int] = []
    for number, event in enumerate(events):
        address, size = event.get("addr"), event["size"]
        if event["action"] == "alloc":
            kinds[address] = known.get(address, "activations") if last[address] == number else "activations"
            now[kinds[address]] += size
        elif event["action"] == "free_completed":
            now[kinds.pop(address, "other")] -= size
        elif event["action"] in ("segment_alloc", "segment_free"):
            reserved += size if event["action"] == "segment_alloc" else -size
        else:
            continue
        points.append((event["time_us"] * 1000, dict(now)))
        totals.append(reserved)
    return points, totals


def _line(step: int, source: str, points: Sequence[Point], start_ns: int, reserved: Sequence[int] | None) -> MemoryLine:
    """Thin the points out: of each stretch the highest one stays, so peaks do."""
    width = max(1, -(-len(points) // _MAX_POINTS))
    kept = [
        max(range(first, min(first + width, len(points))), key=lambda number: sum(points[number][1].values()))
        for first in range(0, len(points), width)
    ]
    return MemoryLine(
        step=step,
        source=source,
        at_ms=[(points[number][0] - start_ns) / 1e6 for number in kept],
        allocated={
            kind: [points[number][1][kind] for number in kept]
            for kind in KINDS
            if any(points[number][1][kind] for number in kept)
        },
        reserved=None if reserved is None else [reserved[number] for number in kept],
    )


def _address(tensor: Tensor) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.untyped_storage().data_ptr())
