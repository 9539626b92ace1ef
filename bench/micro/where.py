"""Batches from a process of their own beside batches from threads: rate, what the trainer's Python
notices, CPU.

``python -m fuelrail.bench.micro.where WORK [--shared] [--out FILE]``. Both loaders run over the
same samples in turns (six 1600x900 images each to 704x256, two decoding threads). *Rate*: nothing
but the loader works. *Steps*: the trainer's thread executes a fixed piece of Python that takes
about a millisecond alone, as one that launches kernels does, while the loader refills its queue;
the distribution of its duration is what a launch loop would notice. With ``--shared`` instead: the
CPU time of four ranks that get the same batches from one process (``where="node"``), beside one
rank's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import msgspec

from fuelrail.bench.measure.machine import CpuWatch, MachineFacts, machine_facts
from fuelrail.bench.measure.processes import tree_cpu_s
from fuelrail.bench.micro.source import make_dataroot
from fuelrail.bench.report.files import publish_json
from fuelrail.bench.trainer.models.settings import MODEL_IMAGE
from fuelrail.loaders.config import Transforms
from fuelrail.loaders.loader import DataLoader
from fuelrail.pipeline.order.batching import World
from fuelrail.sharding.api import shard
from fuelrail.sharding.progress import Quiet

_BATCH = 8
_STEPS = 40
"""Steps of the trainer for each batch."""
_SHARING = 4
"""Ranks that get the same batches."""
_HANG_S = 600.0
_TRANSFORMS = Transforms(image=MODEL_IMAGE)


class WhereReport(msgspec.Struct, frozen=True, kw_only=True):
    """Rates by where batches are made: images a second of each round; percentiles of the
    trainer's steps [ms].
    """

    benchmark: str
    machine: MachineFacts
    num_samples: int
    images_per_s: dict[str, list[float]]
    rate_ratio: float
    """The process's rate over that of threads, median of the rounds."""
    step_p50_ms: dict[str, float]
    step_p99_ms: dict[str, float]


class SharedReport(msgspec.Struct, frozen=True, kw_only=True):
    """CPU seconds of an epoch of all processes, by number of ranks, of each round; the median of
    their ratios.

    ``disturbed``: what other processes used.
    """

    benchmark: str
    machine: MachineFacts
    num_samples: int
    cpu_s: dict[int, list[float]]
    cpu_ratio: float
    disturbed: str | None


def _rank(dataset: Path, rank: int, count: int, job: str, barrier: Any) -> None:
    """Be one of ``count`` ranks of one model: an epoch, and one between two pairs of meetings
    with the parent.
    """
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count), "MASTER_PORT": job}
    where = "node" if count > 1 else None
    options: Any = {
        "shuffle": True,
        "drop_last": True,
        "num_workers": 2,
        "world": World(0, 1),
        "where": where,
        "transforms": _TRANSFORMS,
    }
    with DataLoader(dataset, _BATCH, **options) as loader:
        for _ in range(2):
            for _batch in loader:
                pass
            barrier.wait()
            barrier.wait()


def _epoch_cpu_s(dataset: Path, count: int, job: str) -> float:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(count + 1, timeout=_HANG_S)
    ranks = [
        context.Process(target=_rank, args=(dataset, rank, count, job, barrier))
        for rank in range(count)
    ]
    for rank in ranks:
        rank.start()
    used_s = []
    for _ in range(2):
        barrier.wait()
        used_s.append(tree_cpu_s(os.getpid()))
        barrier.wait()
    for rank in ranks:
        rank.join()
    return used_s[1] - used_s[0]


def _step() -> float:
    started_s = time.perf_counter()
    for _ in range(20_000):
        pass
    return 1e3 * (time.perf_counter() - started_s)


def measure(dataset: Path, num_samples: int, rounds: int) -> WhereReport:
    """Run epochs of each candidate in turns; the first round is not counted."""
    make = partial(
        DataLoader,
        dataset,
        _BATCH,
        shuffle=True,
        drop_last=True,
        num_workers=2,
        seed=0,
        transforms=_TRANSFORMS,
    )
    loaders = {"threads": make(), "process": make(where="process")}
    rates: dict[str, list[float]] = {name: [] for name in loaders}
    steps: dict[str, list[float]] = {
        "nothing": [_step() for _ in range(_STEPS * 10)],
        **{name: [] for name in loaders},
    }
    for _ in range(rounds + 1):
        for name, loader in loaders.items():
            batches = iter(loader)
            images = next(batches)["img"].shape[1] * _BATCH * (len(loader) - 1)
            started_s = time.perf_counter()
            for _batch in batches:
                pass
            rates[name].append(images / (time.perf_counter() - started_s))
            for _batch in islice(loader, max(2, len(loader) // 4)):
                steps[name] += [_step() for _ in range(_STEPS)]
    for loader in loaders.values():
        loader.close()
    rates = {name: values[1:] for name, values in rates.items()}
    return WhereReport(
        benchmark="where",
        machine=machine_facts(),
        num_samples=num_samples,
        images_per_s=rates,
        rate_ratio=median(
            process_rate / threads_rate
            for threads_rate, process_rate in zip(*rates.values(), strict=True)
        ),
        step_p50_ms={name: median(values) for name, values in steps.items()},
        step_p99_ms={name: quantiles(values, n=100)[98] for name, values in steps.items()},
    )


def measure_shared(dataset: Path, num_samples: int, rounds: int) -> SharedReport:
    """Run an epoch on one rank and on ranks that share its batches, in turns."""
    watch = CpuWatch(partial(tree_cpu_s, os.getpid()))
    cpu_s: dict[int, list[float]] = {1: [], _SHARING: []}
    for number in range(rounds):
        for count, values in cpu_s.items():
            values.append(_epoch_cpu_s(dataset, count, f"{os.getpid()}-{number}"))
    return SharedReport(
        benchmark="where --shared",
        machine=machine_facts(),
        num_samples=num_samples,
        cpu_s=cpu_s,
        cpu_ratio=median(shared / alone for alone, shared in zip(*cpu_s.values(), strict=True)),
        disturbed=watch.use().disturbed,
    )


def _print(report: WhereReport | SharedReport) -> None:
    if isinstance(report, SharedReport):
        print(f"CPU of {_SHARING} ranks that share batches / of one rank: {report.cpu_ratio:.3f}")  # noqa: T201
        return
    for name, values in report.images_per_s.items():
        print(f"{name:<10} {median(values):8.1f} images/s")  # noqa: T201
    print(f"process / threads: {report.rate_ratio:.3f}")  # noqa: T201
    for name, value in report.step_p50_ms.items():
        print(  # noqa: T201
            f"steps beside {name:<10} p50 {value:6.3f} ms  p99 {report.step_p99_ms[name]:7.3f} ms"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Write the data, measure, print a table and, with ``--out``, write the report."""
    parser = argparse.ArgumentParser(prog="python -m fuelrail.bench.micro.where")
    parser.add_argument("work", type=Path, metavar="WORK", help="new folder for the dataset")
    parser.add_argument(
        "--samples", type=int, default=512, help="samples of an epoch (default: %(default)s)"
    )
    parser.add_argument(
        "--shared", action="store_true", help="measure the CPU time of ranks that share batches"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="epochs of each candidate (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report as JSON")
    options = parser.parse_args(argv)
    source = options.work / "source"
    dataset = options.work / "dataset"
    make_dataroot(source, options.samples, lidar=False, num_files=8)
    shard(
        f"nuscenes:{source}",
        dataset,
        options={"version": "v1.0-bench"},
        workers=1,
        progress=Quiet(),
    )
    report = (measure_shared if options.shared else measure)(
        dataset, options.samples, options.rounds
    )
    _print(report)
    if options.out is not None:
        publish_json(options.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
