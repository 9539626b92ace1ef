"""Orders: positions mapped a second on one core, beside numpy's in-memory shuffle, and memory for a billion samples.

``python -m fuelrail.bench.micro.order [--out FILE]``. numpy's ``Generator.permutation`` is what most samplers
do: it makes the whole list of n at once. An order maps only the positions that are asked for, of any n. Both get the
same work here: numpy shuffles ``NUM_POSITIONS`` samples, an order maps as many positions.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from fuelrail.bench.measure.machine import MachineFacts, machine_facts
from fuelrail.bench.micro.timing import QUICK, Comparison, Effort, Report, compare, render
from fuelrail.bench.report.files import publish_json
from fuelrail.pipeline.format.attributes import ClipTable
from fuelrail.pipeline.order.compile import CompiledOrder
from fuelrail.pipeline.order.lanes import LaneOrder
from fuelrail.pipeline.order.mix import MixedOrder
from fuelrail.pipeline.order.permutation import KeyedPermutation
from fuelrail.pipeline.order.spec import Layout, Order, OrderSpec
from fuelrail.pipeline.order.weights import SystematicSampling

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NUM_POSITIONS = 1_000_000
LARGE = 1_000_000_000
SMALL = 1_000
TABLED = 4_000_000
_LARGE_SHARD = 100_000


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Peak resident memory of a process that maps ``NUM_POSITIONS`` positions of an order of ``num_samples``."""

    kind: str
    num_samples: int
    peak_rss_bytes: int


class OrderReport(msgspec.Struct, frozen=True, kw_only=True):
    """Speed in calls of ``num_positions`` positions each, and the memory of orders of two lengths."""

    benchmark: str
    machine: MachineFacts
    num_positions: int
    positions_per_s: dict[str, float]
    positions_per_cpu_s: dict[str, float]
    comparisons: list[Comparison]
    memory: list[Memory]


def make_order(kind: str, num_samples: int) -> Order:
    """An order of the given kind; windows of 16 shards of 100,000 samples."""
    full, rest = divmod(num_samples, _LARGE_SHARD)
    layout = Layout((_LARGE_SHARD,) * full + ((rest,) if rest else ()))
    return Order(OrderSpec(kind="windowed", window=16) if kind == "windowed" else OrderSpec(kind="shuffled"), layout, 0)


def candidates(num_positions: int) -> dict[str, Callable[[], object]]:
    """numpy's shuffle of ``num_positions`` beside as many positions of orders of a billion samples.

    Lanes and weights look things up in tables of the samples: ``TABLED`` of these.
    """
    positions = np.arange(num_positions) + LARGE // 2
    shuffled = KeyedPermutation(LARGE, 1)
    tabled = np.arange(num_positions) + TABLED // 4
    lanes = LaneOrder(ClipTable.build(np.arange(TABLED) // 40, np.arange(TABLED) % 40), 64).epoch(0)
    weights = SystematicSampling(np.random.default_rng(0).random(TABLED), TABLED)
    weighted = CompiledOrder(OrderSpec(), {}, (TABLED,), None, weights).epoch(0)
    parts = [CompiledOrder(OrderSpec(seed=seed), {}, (LARGE,)) for seed in (1, 2)]
    return {
        "numpy Generator.permutation": partial(np.random.default_rng(0).permutation, num_positions),
        "shuffled, n = 1e6": partial(KeyedPermutation(num_positions, 1), np.arange(num_positions)),
        "shuffled, n = 1e9": partial(shuffled, positions),
        "shuffled, n = 1e9, inverse": partial(shuffled.inverse, positions),
        "windowed, n = 1e9": partial(make_order("windowed", LARGE), positions),
        "sequential, n = 1e9": partial(Order(OrderSpec(kind="sequential"), Layout((LARGE,)), 0), positions),
        "mix 3:1 of n = 1e9": partial(MixedOrder(parts, (3, 1)).epoch(0), positions),
        "lanes, n = 4e6": partial(lanes.entries, tabled),
        "weighted, n = 4e6": partial(weighted, tabled),
    }


def cpu_s_per_call(work: Callable[[], object]) -> float:
    """CPU time of one call [s], median of nine: what other programs on the machine disturb least."""
    work()
    taken = []
    for _ in range(9):
        started = time.process_time()
        work()
        taken.append(time.process_time() - started)
    return median(taken)


def measure_memory(kind: str, num_samples: int) -> Memory:
    """Peak memory, measured in a process of its own."""
    command = [sys.executable, "-m", __spec__.name, "--child", kind, str(num_samples)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # it finds what this process found
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    return Memory(kind=kind, num_samples=num_samples, peak_rss_bytes=int(output))


def _child(kind: str, num_samples: int) -> int:
    order = make_order(kind, num_samples)
    for first in range(0, NUM_POSITIONS, 1000):
        order((np.arange(first, first + 1000) * 7919) % num_samples)
    # Not getrusage: its peak is that of the process which started this one, if that was larger.
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(peak.split()[1]) * 1024  # the kernel counts in KiB


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and, with ``--out``, write the report as JSON."""
    parser = argparse.ArgumentParser(prog="python -m fuelrail.bench.micro.order")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--quick", action="store_true", help="call everything a few times, to see that it runs")
    parser.add_argument("--child", nargs=2, metavar=("KIND", "N"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        print(_child(options.child[0], int(options.child[1])))  # noqa: T201
        return 0
    num_positions = 10_000 if options.quick else NUM_POSITIONS
    works = candidates(num_positions)
    comparison = compare(f"{num_positions:,} positions", works, QUICK if options.quick else Effort())
    memory = [measure_memory(kind, n) for kind in ("shuffled", "windowed") for n in (SMALL, LARGE)]
    report = OrderReport(
        benchmark="order",
        machine=machine_facts(),
        num_positions=num_positions,
        positions_per_s={entry.name: num_positions / entry.seconds_per_call for entry in comparison.entries},
        positions_per_cpu_s={name: num_positions / max(cpu_s_per_call(work), 1e-9) for name, work in works.items()},
        comparisons=[comparison],
        memory=memory,
    )
    print(render(Report(benchmark=report.benchmark, machine=report.machine, comparisons=report.comparisons)))  # noqa: T201
    for name, rate in report.positions_per_s.items():
        per_cpu_s = report.positions_per_cpu_s[name]
        print(f"  {name}: {rate / 1e6:.1f} million positions/s, {per_cpu_s / 1e6:.1f} per CPU second")  # noqa: T201
    for entry in memory:
        print(f"  {entry.kind}, n = {entry.num_samples:.0e}: peak {entry.peak_rss_bytes / 1e6:.1f} MB")  # noqa: T201
    if options.out is not None:
        publish_json(options.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
