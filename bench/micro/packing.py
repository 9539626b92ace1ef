"""How full packs are, and what packing costs: ours beside TRL's, Grain's and a greedy knapsack, on the same lengths.

    PYTHONPATH=FOLDER_WITH_TRL_AND_GRAIN python -m fuelrail.bench.micro.packing [--out FILE] [--samples N]

The lengths are lognormal(5, 1) cut to 16 .. 1024, and the documentation texts of Python's standard library in words.
TRL packs a table of all samples at once, Grain a stream into a number of open packs. Megatron-Energon leaves the choice
to the user, and its documentation shows a greedy knapsack over a buffer: the largest sample that fits, until none does.
A peer that is not installed is left out.
"""

from __future__ import annotations

import argparse
import ast
import bisect
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from fuelrail.bench.measure.machine import MachineFacts, machine_facts
from fuelrail.bench.report.files import publish_json
from fuelrail.loaders.integrations.sampler import BatchSampler
from fuelrail.pipeline.order.balance import Balance
from fuelrail.pipeline.order.batching import World
from fuelrail.pipeline.order.pack import Pack
from fuelrail.pipeline.order.spec import OrderSpec

_BUDGETS = (2048, 8192, 32768)
_WINDOW = 4096
_RANKS = 64
_OPEN_PACKS = 64


class PackerFigures(msgspec.Struct, frozen=True):
    """One packer on some lengths: packs, share of the budget used, tokens lost, processor seconds per 10^6 samples."""

    lengths: str
    budget: int
    packer: str
    packs: int
    fill: float
    tokens_lost: int
    cpu_s_per_million: float
    dearest_rank: float | None
    """The dearest of 64 ranks that take packs in turn, over the mean, averaged over steps; None without a full step."""


class PackingReport(msgspec.Struct, frozen=True):
    """All packers on all lengths and budgets, in one run."""

    machine: MachineFacts
    samples: dict[str, int]
    figures: list[PackerFigures]


def text_lengths(folder: Path) -> NDArray[np.int64]:
    """Return the number of words of each documentation text in the modules below a folder, 1 .. 1024."""
    found: list[int] = []
    for file in sorted(folder.glob("**/*.py")):
        if "site-packages" in file.parts:
            continue
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):  # files that test the parser
            continue
        nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef))
        found += [min(len(text.split()), 1024) for node in nodes if (text := ast.get_docstring(node))]
    return np.array([length for length in found if length])


def ours(lengths: NDArray[np.int64], budget: int) -> list[int]:
    """Return the costs of our packs, dealt to 64 ranks as their batches come."""
    spec = OrderSpec(pack=Pack(budget=budget, cost="n", window=_WINDOW), balance=Balance(cost="n"))
    sampler = BatchSampler({"n": lengths}, spec, global_batch=1, drop_last=False, world=World())
    return [int(lengths[batch].sum()) for batch in sampler]


def knapsack(lengths: NDArray[np.int64], budget: int) -> list[int]:
    """Return the costs of the packs of a greedy knapsack over buffers of the window."""
    costs = []
    shuffled = np.random.default_rng(0).permutation(lengths)
    for first in range(0, len(lengths), _WINDOW):
        left = sorted(shuffled[first : first + _WINDOW].tolist())
        while left:
            room = budget
            while (at := bisect.bisect_right(left, room)) > 0:
                room -= left.pop(at - 1)
            costs.append(budget - room)
    return costs


def trl_packs(lengths: NDArray[np.int64], budget: int) -> list[int]:
    """Return the costs of TRL's packs of a data set of such sequences."""
    import datasets  # type: ignore[import-not-found,unused-ignore]
    from trl.data_utils import pack_dataset  # type: ignore[import-not-found,unused-ignore]

    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_dict({"input_ids": [[0] * n for n in lengths.tolist()]})
    packed = pack_dataset(rows, budget, "bfd", {"batch_size": None, "keep_in_memory": True})
    return [sum(each) for each in packed["seq_lengths"]]


def grain_packs(lengths: NDArray[np.int64], budget: int) -> list[int]:
    """Return the costs of Grain's first-fit packs over a shuffled stream, with 64 of them open."""
    import grain  # type: ignore[import-not-found,unused-ignore]

    stream = grain.MapDataset.source(lengths.tolist()).shuffle(seed=0).map(lambda n: {"x": np.zeros(n, np.int8)})
    packed = grain.experimental.FirstFitPackIterDataset(
        stream.to_iter_dataset(), length_struct={"x": budget}, num_packing_bins=_OPEN_PACKS
    )
    return [int((pack["x_segment_ids"] > 0).sum()) for pack in packed]


def measure(lengths: dict[str, NDArray[np.int64]]) -> PackingReport:
    """Pack all lengths at all budgets with each packer that is installed."""
    packers: dict[str, Callable[[NDArray[np.int64], int], list[int]]] = {
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
                costs = pack(values, budget)
                spent = time.process_time() - started
                steps = np.array(costs[: len(costs) // _RANKS * _RANKS]).reshape(-1, _RANKS)
                dearest = float((steps.max(1) / steps.mean(1)).mean()) if steps.size else None
                fill, lost = sum(costs) / budget / len(costs), int(values.sum()) - sum(costs)
                rate = spent / len(values) * 1e6
                figures.append(PackerFigures(name, budget, packer, len(costs), fill, lost, rate, dearest))
    return PackingReport(machine_facts(), {name: len(values) for name, values in lengths.items()}, figures)


def main(argv: list[str]) -> int:
    """Measure, print a table, and write the report where that is asked."""
    parser = argparse.ArgumentParser(prog="packing", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="file for the report as JSON")
    parser.add_argument("--samples", type=int, default=100_000, help="lengths of the lognormal set")
    arguments = parser.parse_args(argv)
    drawn = np.random.default_rng(0).lognormal(5, 1, arguments.samples)
    texts = text_lengths(Path(sysconfig.get_path("stdlib")))
    report = measure({"lognormal": np.clip(drawn, 16, 1024).astype(np.int64), "docstrings": texts})
    for one in report.figures:
        print(  # noqa: T201
            f"{one.lengths:<11} {one.budget:>6} {one.packer:<45} fill {one.fill:.4f} lost {one.tokens_lost:>8} "
            f"{one.cpu_s_per_million:8.2f} s/10^6 dearest of 64 {one.dearest_rank or 0:.3f}"
        )
    if arguments.out is not None:
        publish_json(arguments.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
