"""The planner's memory and collectives against real steps: the CPU allocator's peak, and bytes counted in gloo runs.

Every pair of model and strategy trains real steps, alone or on 2, 4 and 8 ranks of this host. Memory: the allocator's
peak in a step, by the profiler's memory events, beyond what lay there before, plus weights, buffers, inputs and DDP's
buckets. Two things are left out, for they belong to this host's kernels and not to the model: what gloo itself
allocates for a collective, and what a convolution's kernel allocates and frees itself (``allocator_bytes`` has the
peak with that too). It is the least of five steps, as a late thread of gloo holds a block for longer. Bytes: those of
all collectives of a step, by kind and axis of the mesh. The planner shapes the same ranks in this process, and sees no
run.

``tests/slow/test_planner_truth.py`` runs all pairs.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fuelrail.bench.measure.collectives import Collective, Counter
from fuelrail.bench.planner.fake_rank import Inputs
from fuelrail.bench.planner.shape import shape_of
from fuelrail.bench.planner.torch_private import private_parts
from fuelrail.bench.trainer.models.settings import MODELS
from fuelrail.bench.trainer.strategies.settings import (
    ParallelSettings,
    degrees_of,
)
from support.ranks import run_ranks

if TYPE_CHECKING:
    from fuelrail.bench.trainer.models.settings import ModelSettings

ALONE = 0.01
SHARDED = 0.04
_CAMERAS = 2
_HEIGHT = 64
_WIDTH = 128
_ROWS = 4
_REPEATS = 5
_PATIENCE_S = 1500
# Of tiny models the small change would count: scalars, and the allocator's own steps of 64 bytes.
SIZES: dict[str, ModelSettings] = {
    "gpt": msgspec.structs.replace(MODELS["gpt-tiny"], width=64, context=64, vocabulary=256),
    "vit": msgspec.structs.replace(MODELS["vit-tiny"], width=64),
    "resnet": msgspec.structs.replace(MODELS["resnet-tiny"], width=16),
    "bev": msgspec.structs.replace(MODELS["bev-tiny"], width=32),
}


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """One training step: model, strategy, number of ranks."""

    model: str
    world: int
    parallel: ParallelSettings


class Real(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank really allocated and sent; ``allocator_bytes`` with the scratch memory of convolutions' kernels."""

    pair: Pair
    rank: int
    peak_bytes: int
    allocator_bytes: int
    collectives: list[Collective]


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """A rank beside the planner's; ``error`` is predicted over real peak, less 1."""

    pair: Pair
    rank: int
    real_bytes: int
    allocator_bytes: int
    predicted_bytes: int
    error: float
    within: bool
    same_collectives: bool
    differences: list[str]


def pairs() -> Iterator[Pair]:
    """All pairs."""
    for model in SIZES:
        for recompute in ("none", "selective", "full"):
            yield Pair(
                model=model,
                world=1,
                parallel=ParallelSettings(recompute=recompute),
            )
        for strategy in ("ddp", "zero1", "zero2", "fsdp2"):
            yield Pair(
                model=model,
                world=2,
                parallel=ParallelSettings(strategy=strategy),
            )
        yield Pair(
            model=model,
            world=2,
            parallel=ParallelSettings(strategy="fsdp2", recompute="full"),
        )
        yield Pair(model=model, world=4, parallel=ParallelSettings(strategy="hsdp"))
    for model in ("gpt", "vit"):
        pipeline = ParallelSettings(strategy="pipeline", micro_batches=4)
        yield Pair(model=model, world=2, parallel=ParallelSettings(strategy="tensor"))
        yield Pair(model=model, world=2, parallel=pipeline)
        yield Pair(
            model=model,
            world=4,
            parallel=ParallelSettings(mesh="dp_shard=2,tp=2"),
        )
        yield Pair(
            model=model,
            world=4,
            parallel=ParallelSettings(mesh="pp=2,dp_shard=2", micro_batches=4),
        )
        yield Pair(model=model, world=8, parallel=ParallelSettings(strategy="fsdp2"))
        yield Pair(
            model=model,
            world=8,
            parallel=ParallelSettings(mesh="pp=2,dp_shard=2,tp=2", micro_batches=4),
        )


def _batch() -> dict[str, Any]:
    import torch

    return {
        "img": torch.zeros(_ROWS, _CAMERAS, 3, _HEIGHT, _WIDTH, dtype=torch.uint8),
        "cam_valid": torch.ones(_ROWS, _CAMERAS),
        "intrinsics": torch.eye(3).expand(_ROWS, _CAMERAS, 3, 3).contiguous(),
        "cam2ego": torch.eye(4).expand(_ROWS, _CAMERAS, 4, 4).contiguous(),
        "valid": torch.ones(_ROWS),
        "sample_key": list("abcd"),
    }


def real(pair: Pair, rank: int) -> Real:
    """Train three steps of a pair as one of its ranks, and measure the third."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from fuelrail.bench.trainer.models.build import build_model
    from fuelrail.bench.trainer.strategies.parallel import parallelise

    options = msgspec.structs.replace(
        pair.parallel, micro_batches=pair.parallel.micro_batches or _ROWS
    )
    parallel = parallelise(partial(build_model, SIZES[pair.model]), options)
    # The mean over ranks of the share of real samples, four bytes a step, is in no plan.
    parallel.real_share = lambda *_: None
    inputs = parallel.inputs(_batch())
    for _ in range(2):
        parallel.forward_backward(inputs)
        parallel.update()
    peaks = []
    allocator_peaks = []
    sent = []
    for _ in range(_REPEATS):
        counter = Counter(parallel.mesh)
        gc.collect()  # what an earlier step or pair left counts as negative when it is freed in this one
        with (
            profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled,
            counter,
        ):
            parallel.forward_backward(inputs)
        parallel.update()
        tree = profiled.profiler.kineto_results.experimental_event_tree()
        peaks.append(_peak(tree, scratch=False))
        allocator_peaks.append(_peak(tree, scratch=True))
        sent.append(counter.collectives())
    assert all(collectives == sent[0] for collectives in sent), "every step sends the same"
    tensors = [
        tensor for part in parallel.models for tensor in (*part.parameters(), *part.buffers())
    ]
    held = sum(_local(tensor).nbytes for tensor in tensors) + sum(
        tensor.nbytes for tensor in inputs
    )
    if parallel.mesh is None and pair.world > 1:
        held += sum(parameter.nbytes for part in parallel.models for parameter in part.parameters())
    assert torch.get_num_threads() == 1, "one thread, so that scratch memory is of one"
    return Real(
        pair=pair,
        rank=rank,
        peak_bytes=min(peaks) + held,
        allocator_bytes=min(allocator_peaks) + held,
        collectives=sent[0],
    )


def _peak(tree: Sequence[Any], *, scratch: bool) -> int:
    """Most bytes at once of what this thread allocated, without gloo's own copies of what a collective sends.

    ``tree``: the profiler's events. ``scratch``: with what a convolution's kernel allocates and frees itself. A block
    that was there before and is freed meanwhile counts as negative. The profiler does not see what a thread of gloo
    frees: such a block ends where its address is allocated again.
    """
    allocations: list[
        tuple[int, int, int, bool, int]
    ] = []  # time, address, size, ours, number of the convolution within
    waiting = [(event, 0, event.start_tid == 1) for event in tree]
    while waiting:
        event, within, mine = waiting.pop()
        if within == 0 and event.name.startswith("aten::conv"):
            within = event.id
        mine = mine and event.start_tid == 1 and not event.name.startswith("c10d::")
        waiting += [(child, within, mine) for child in event.children]
        if event.name == "[memory]":
            fields = event.extra_fields
            allocations.append(
                (
                    event.start_time_ns,
                    fields.ptr,
                    fields.alloc_size,
                    mine,
                    within,
                )
            )
    allocations.sort()
    left_out: set[int] = set()  # events of blocks that are not counted
    unseen: dict[int, int] = {}  # bytes that were freed without an event before one
    live: dict[int, int] = {}  # address to the event that allocated it
    for number, (_, address, size, mine, within) in enumerate(allocations):
        if size > 0:
            if (start := live.get(address)) is not None and start not in left_out:
                unseen[number] = allocations[start][2]
            live[address] = number
            if not mine:
                left_out.add(number)
        elif (start := live.pop(address, None)) is not None and (
            start in left_out or (not scratch and within and allocations[start][4] == within)
        ):
            left_out |= {start, number}
    now = peak = 0
    for number, (_, _, size, _, _) in enumerate(allocations):
        now += (0 if number in left_out else size) - unseen.get(number, 0)
        peak = max(peak, now)
    return peak


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def run_rank(cases: Path, out: Path) -> None:
    """One rank of a world: all pairs of a file, one after the other."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment] # its copies in a layout of its own are no part of a model
    dist.init_process_group("gloo")
    measured = []
    for pair in msgspec.json.decode(cases.read_bytes(), type=list[Pair]):
        measured.append(real(pair, dist.get_rank()))
        for forget in (
            private_parts().forget
        ):  # or the next mesh of these ranks would send over this one's groups
            forget()
    (out / f"rank-{dist.get_rank()}.json").write_bytes(msgspec.json.encode(measured))
    dist.barrier()  # or ZeRO's end aborts the process
    dist.destroy_process_group()


def measure(world: int, pairs: Sequence[Pair], folder: Path) -> list[Real]:
    """Run the pairs on this number of ranks."""
    cases = folder / "pairs.json"
    cases.write_bytes(msgspec.json.encode(list(pairs)))
    run_ranks(
        world,
        "-m",
        "support.planner_truth",
        cases,
        folder,
        timeout_s=_PATIENCE_S,
    )
    written = [folder / f"rank-{rank}.json" for rank in range(world)]
    return [
        real for path in written for real in msgspec.json.decode(path.read_bytes(), type=list[Real])
    ]


def compare(measured: Real) -> Compared:
    """Shape the same rank and put it beside the real one."""
    pair = measured.pair
    degrees = degrees_of(pair.parallel, pair.world)
    parts = pair.parallel.micro_batches or 1
    inputs = Inputs(
        micro_batch=_ROWS // parts,
        micro_batches=parts,
        cameras=_CAMERAS,
        height=_HEIGHT,
        width=_WIDTH,
    )
    shape = shape_of(SIZES[pair.model], pair.parallel, degrees, inputs, rank=measured.rank)
    predicted = shape.peak_bytes - shape.memory["moments"]
    expected = {
        (collective.kind, collective.axis): collective
        for collective in shape.collectives
        if collective.kind in _COMPARED
    }
    counted = {
        (collective.kind, collective.axis): collective
        for collective in measured.collectives
        if collective.kind in _COMPARED
    }
    if set(counted) == {("all_reduce", "world")}:  # DDP's, which has no mesh
        counted = {("all_reduce", "dp_replicate"): counted["all_reduce", "world"]}
    differences = [
        f"{kind} on {axis}: {_said(expected.get((kind, axis)))} predicted, {_said(counted.get((kind, axis)))} counted"
        for kind, axis in sorted(expected.keys() | counted.keys())
        if _bytes(expected.get((kind, axis))) != _bytes(counted.get((kind, axis)))
    ]
    error = predicted / measured.peak_bytes - 1
    limit = ALONE if pair.world == 1 else SHARDED
    return Compared(
        pair=pair,
        rank=measured.rank,
        real_bytes=measured.peak_bytes,
        allocator_bytes=measured.allocator_bytes,
        predicted_bytes=predicted,
        error=error,
        within=abs(error) <= limit,
        same_collectives=not differences,
        differences=differences,
    )


_COMPARED = ("all_reduce", "all_gather", "reduce_scatter")


def _bytes(collective: Collective | None) -> int:
    return 0 if collective is None else collective.bytes


def _said(collective: Collective | None) -> str:
    return "none" if collective is None else f"{collective.bytes} bytes in {collective.count}"


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), Path(sys.argv[2]))
