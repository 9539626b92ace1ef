"""How full packs are, and what packing costs: ours beside TRL's, Grain's and a greedy knapsack, on
the same lengths.

    PYTHONPATH=FOLDER_WITH_TRL_AND_GRAIN python -m fuelrail.bench.micro.packing WORK [--out FILE]
    [--samples N]

The lengths are lognormal(5, 1) cut to 16 .. 1024, and the documentation texts of Python's standard
library in bytes. Of each packer's packs, in the order in which they come, the dearest of 64 ranks
is found: in tokens, in the cost of a step (1200 n + n n for n tokens, as docs/packing.md has it)
and in its attention alone (n n). Ours are dealt by the cost of the step, as `Balance` does it. TRL
packs a table of all samples at once, Grain a stream into a number of open packs. Megatron-Energon
leaves the choice to the user, and its documentation shows a greedy knapsack over a buffer: the
largest sample that fits, until none does. A peer that is not installed is left out.

Then 10^7 lengths are packed, and a loader is timed with and without packs, in turns: how long its
trainer waits for batches, through the ends of epochs. The trainer sleeps as long for a sample in
both.
"""

from __future__ import annotations

import argparse
import bisect
import math
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from fuelrail.bench.measure.machine import MachineFacts, machine_facts
from fuelrail.bench.micro.source import documentation_texts, make_dataroot
from fuelrail.bench.report.files import publish_json
from fuelrail.loaders.config import Transforms
from fuelrail.loaders.integrations.sampler import BatchSampler
from fuelrail.loaders.loader import DataLoader
from fuelrail.pipeline.order.balance import deal
from fuelrail.pipeline.order.compile import CompiledOrder
from fuelrail.pipeline.order.cost import Cost
from fuelrail.pipeline.order.pack import Pack, PackedOrder
from fuelrail.pipeline.order.spec import OrderSpec
from fuelrail.pipeline.transforms.image import ImageAugment
from fuelrail.sharding.api import shard
from fuelrail.sharding.progress import Quiet

_BUDGETS = (2048, 8192, 32768)
_WINDOW = 4096
_RANKS = 64
_PACKS_PER_RANK = (1, 4)
_OPEN_PACKS = 64
_LINEAR = 1200
_EPOCHS = 3
_SAMPLE_S = 0.0015
"""What the trainer of the timed loader sleeps for a sample."""

Packs = list[list[int]]
"""The lengths of the samples of each pack."""


class RankFigures(msgspec.Struct, frozen=True):
    """The dearest of 64 ranks over the mean, averaged over whole steps; None without such a
    step.
    """

    packs_per_rank: int
    tokens: float | None = None
    step: float | None = None
    attention: float | None = None


class PackerFigures(msgspec.Struct, frozen=True):
    """One packer on some lengths: packs, share of the budget used, tokens lost, processor seconds
    per 10^6 samples.

    ``best_fill`` is that of the fewest packs that could hold these tokens.
    """

    lengths: str
    budget: int
    packer: str
    packs: int
    fill: float
    best_fill: float
    tokens_lost: int
    cpu_s_per_million: float
    ranks: list[RankFigures]


class LargeFigures(msgspec.Struct, frozen=True):
    """An epoch of many samples: packs, processor time to count them, and growth of the process's
    peak memory by it.
    """

    samples: int
    budget: int
    packs: int
    cpu_s: float
    peak_bytes: int


class WaitFigures(msgspec.Struct, frozen=True):
    """A trainer that takes batches: its steps, all time, time waiting, and the longest wait after
    the first batch.

    The first batch comes with the start of the loader's threads, which is not counted.
    """

    order: str
    epochs: int
    steps: int
    total_s: float
    wait_s: float
    longest_wait_ms: float


class PackingReport(msgspec.Struct, frozen=True):
    """All packers on all lengths and budgets in one run; many lengths; a loader with and without
    packs.
    """

    machine: MachineFacts
    samples: dict[str, int]
    figures: list[PackerFigures]
    large: LargeFigures | None = None
    waits: list[WaitFigures] = []


def ours(lengths: NDArray[np.int64], budget: int) -> Packs:
    """Return our packs, in the order of an epoch."""
    spec = OrderSpec(pack=Pack(budget=budget, cost="n", window=_WINDOW))
    return [
        lengths[batch].tolist()
        for batch in BatchSampler({"n": lengths}, spec, global_batch=1, drop_last=False)
    ]


def knapsack(lengths: NDArray[np.int64], budget: int) -> Packs:
    """Return the packs of a greedy knapsack over buffers of the window."""
    packs = []
    shuffled = np.random.default_rng(0).permutation(lengths)
    for first in range(0, len(lengths), _WINDOW):
        remaining = sorted(shuffled[first : first + _WINDOW].tolist())
        while remaining:
            pack: list[int] = []
            room = budget
            while (fit_end := bisect.bisect_right(remaining, room)) > 0:
                pack.append(remaining.pop(fit_end - 1))
                room -= pack[-1]
            packs.append(pack)
    return packs


def trl_packs(lengths: NDArray[np.int64], budget: int) -> Packs:
    """Return TRL's packs of a data set of such sequences."""
    import datasets  # type: ignore[import-not-found,unused-ignore]
    from trl.data_utils import pack_dataset  # type: ignore[import-not-found,unused-ignore]

    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_dict({"input_ids": [[0] * n for n in lengths.tolist()]})
    packed = pack_dataset(rows, budget, "bfd", {"batch_size": None, "keep_in_memory": True})
    return list(packed["seq_lengths"])


def grain_packs(lengths: NDArray[np.int64], budget: int) -> Packs:
    """Return Grain's first-fit packs over a shuffled stream, with 64 of them open."""
    import grain  # type: ignore[import-not-found,unused-ignore]

    stream = (
        grain.MapDataset.source(lengths.tolist())
        .shuffle(seed=0)
        .map(lambda n: {"x": np.zeros(n, np.int8)})
    )
    packed = grain.experimental.FirstFitPackIterDataset(
        stream.to_iter_dataset(), length_struct={"x": budget}, num_packing_bins=_OPEN_PACKS
    )
    return [np.bincount(pack["x_segment_ids"])[1:].tolist() for pack in packed]


def dearest(packs: Packs, packs_per_rank: int, *, is_dealt: bool) -> RankFigures:
    """Return the dearest rank where each takes that many packs of a step: dealt by the cost of a
    step, or in turn.
    """
    size = _RANKS * packs_per_rank
    tokens, attention = (
        np.array([sum(n**power for n in pack) for pack in packs]) for power in (1, 2)
    )
    costs = np.array([tokens, _LINEAR * tokens + attention, attention])
    shares = []
    for first in range(0, len(packs) - size + 1, size):
        rows = first + (
            deal(costs[1, first : first + size], _RANKS) if is_dealt else np.arange(size)
        )
        ranks = costs[:, rows].reshape(3, _RANKS, packs_per_rank).sum(2)
        shares.append(ranks.max(1) / ranks.mean(1))
    return RankFigures(packs_per_rank, *(np.mean(shares, axis=0).tolist() if shares else ()))


def measure_large(num_samples: int, budget: int = 32768) -> LargeFigures:
    """Count the packs of an epoch of this number of samples, of lognormal lengths."""
    rng = np.random.default_rng(0)
    costs = np.empty(num_samples, np.int32)
    for first in range(
        0, num_samples, 100_000
    ):  # in parts, so that the peak memory is that of packing
        part = costs[first : first + 100_000]
        part[:] = np.clip(rng.lognormal(5, 1, len(part)), 16, 1024)
    base = CompiledOrder(OrderSpec(), {}, (num_samples,))
    order = PackedOrder(base, Pack(budget=budget, cost="n", window=_WINDOW), (costs,), 0)
    before = _peak_bytes()
    started = time.process_time()
    packs = order.length(0)
    return LargeFigures(
        samples=num_samples,
        budget=budget,
        packs=packs,
        cpu_s=time.process_time() - started,
        peak_bytes=_peak_bytes() - before,
    )


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_waits(work: Path, num_samples: int) -> list[WaitFigures]:
    """Train by turns on batches of eight samples, and on packs of about eight, of frames that
    cost 1 .. 40.
    """
    source = work / "source"
    dataset = work / "dataset"
    make_dataroot(source, num_samples, lidar=False, size=(96, 64), num_files=8, full_tables=False)
    shard(
        f"nuscenes:{source}",
        dataset,
        options={"version": "v1.0-bench"},
        workers=1,
        progress=Quiet(),
    )
    pack = Pack(budget=164, cost=Cost(linear={"frame": 1}, constant=1), window=_WINDOW)
    image = Transforms(
        image=ImageAugment(height=64, width=96, resize="stretch"), cameras=("cam_front",)
    )
    orders = {"plain": (OrderSpec(), 8), "packs": (OrderSpec(pack=pack), 1)}
    loaders = {
        name: DataLoader(dataset, size, order=order, transforms=image)
        for name, (order, size) in orders.items()
    }
    waits: dict[str, list[float]] = {name: [] for name in loaders}
    total = dict.fromkeys(loaders, 0.0)
    for epoch in range(_EPOCHS):
        for name, loader in loaders.items():
            batches = iter(loader)
            started = time.perf_counter()
            requested_s = started
            for batch in batches:
                waits[name].append(time.perf_counter() - requested_s)
                time.sleep(_SAMPLE_S * len(batch["sample_key"]))
                requested_s = time.perf_counter()
            total[name] += requested_s - started
            if not epoch:
                total[name] -= waits[name].pop(0)
    for loader in loaders.values():
        loader.close()
    return [
        WaitFigures(
            order=name,
            epochs=_EPOCHS,
            steps=len(durations),
            total_s=total[name],
            wait_s=sum(durations),
            longest_wait_ms=1e3 * max(durations),
        )
        for name, durations in waits.items()
    ]


def measure(lengths: dict[str, NDArray[np.int64]]) -> PackingReport:
    """Pack all lengths at all budgets with each packer that is installed."""
    packers: dict[str, Callable[[NDArray[np.int64], int], Packs]] = {
        "fuelrail": ours,
        "greedy knapsack (as Energon's documentation)": knapsack,
        "TRL pack_dataset bfd": trl_packs,
        "Grain first fit": grain_packs,
    }
    figures = []
    for name, values in lengths.items():
        for budget in _BUDGETS:
            for packer, pack in packers.items():
                try:
                    pack(values[:64], budget)  # imports
                except ImportError:
                    continue
                started = time.process_time()
                packs = pack(values, budget)
                rate = (time.process_time() - started) / len(values) * 1e6
                used = sum(map(sum, packs))
                full = int(values.sum()) / budget
                ranks = [
                    dearest(packs, num_packs, is_dealt=pack is ours)
                    for num_packs in _PACKS_PER_RANK
                ]
                fill = used / budget / len(packs)
                best = full / math.ceil(full)
                lost = int(values.sum()) - used
                figures.append(
                    PackerFigures(
                        lengths=name,
                        budget=budget,
                        packer=packer,
                        packs=len(packs),
                        fill=fill,
                        best_fill=best,
                        tokens_lost=lost,
                        cpu_s_per_million=rate,
                        ranks=ranks,
                    )
                )
    return PackingReport(
        machine_facts(), {name: len(values) for name, values in lengths.items()}, figures
    )


def main(argv: list[str]) -> int:
    """Measure, print the rows of the report, and write it where that is asked."""
    parser = argparse.ArgumentParser(prog="packing", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "work", type=Path, metavar="WORK", help="new folder for the dataset of the timed loader"
    )
    parser.add_argument("--out", type=Path, help="file for the report as JSON")
    parser.add_argument("--samples", type=int, default=100_000, help="lengths of the lognormal set")
    parser.add_argument("--large", type=int, default=10_000_000, help="lengths of the large set")
    parser.add_argument("--frames", type=int, default=8192, help="samples of the timed loader")
    arguments = parser.parse_args(argv)
    large = measure_large(
        arguments.large
    )  # first, for the peak memory is that of the process so far
    drawn = np.random.default_rng(0).lognormal(5, 1, arguments.samples)
    texts = np.array([min(len(text.encode()), 1024) for text in documentation_texts()])
    report = measure({"lognormal": np.clip(drawn, 16, 1024).astype(np.int64), "docstrings": texts})
    report = msgspec.structs.replace(
        report, large=large, waits=measure_waits(arguments.work, arguments.frames)
    )
    for row in (*report.figures, large, *report.waits):
        print(msgspec.json.encode(row).decode())  # noqa: T201
    if arguments.out is not None:
        publish_json(arguments.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
