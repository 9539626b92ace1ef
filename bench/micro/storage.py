"""How fast stored bytes come: from the page cache, over a bad network, from S3, through a cache. As ratios in one run.

* *raw*: all members of all samples, warm page cache, one process, one thread. With the check on, beside ``pread`` into
  a reused buffer and xxh3, and beside the webdataset library. With it off, beside SPDL's tar reader if it is installed
  (``pip install spdl``).
* *http*: an HTTP server on loopback with 20 ms of latency, beside itself with 1 % of the requests failing or stalling.
* *s3*: an S3 server (moto) on loopback, beside s3fs reading sample by sample, if both are installed.
* *cache*: hit rates of a cache of a quarter of the dataset over shuffled epochs: ours in a run, and the optimum and LRU
  in a simulation.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import xxhash

from fuelrail.bench.machine import machine_facts
from fuelrail.bench.micro.blank_dataset import make_dataset
from fuelrail.bench.micro.fault_server import FaultServerProcess
from fuelrail.bench.micro.s3_server import s3_server, upload
from fuelrail.bench.micro.timing import QUICK, Comparison, Effort, Report, compare, render
from fuelrail.loaders.foresight import FarthestFirst, Foresight
from fuelrail.loaders.storage import StorageStats, open_storage
from fuelrail.pipeline.dataset import open_dataset, read_members

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fuelrail.pipeline.dataset import Dataset

PAGE_BYTES = 4096
PARTS = ("raw", "http", "s3", "cache")


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    """What it took to ride out the faults of one pass."""

    spans: int
    requests: int
    retries: int
    hedges: int
    hedges_won: int
    order_kept_nothing_lost: bool


class HitRates(msgspec.Struct, frozen=True, kw_only=True):
    """Hits over reads from the second epoch on."""

    capacity_of_dataset: float
    epochs: int
    run: float
    optimum: float
    lru: float


class StorageReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report: comparisons, and what ratios cannot say."""

    benchmark: str
    machine: Any
    comparisons: list[Comparison]
    faults: Requests | None
    hit_rates: HitRates | None


# Raw


def measure_raw(effort: Effort, dataset: Dataset) -> Iterator[Comparison]:
    """Local reading, in a seeded random order; beside readers that only go forward, in stored order."""
    order = np.random.default_rng(1).permutation(len(dataset.index)).tolist()
    checked, unchecked = open_storage(dataset, "mapped"), open_storage(dataset, "mapped", verify=False)

    def ours() -> None:
        for index in order:
            row = dataset.index.row(index)
            read_members(row, checked.span(index, row), "")

    def ours_first_pass() -> None:
        fresh = open_storage(dataset, "mapped")
        for index in order:
            row = dataset.index.row(index)
            read_members(row, fresh.span(index, row), "")

    rows = [dataset.index.row(index) for index in order]
    buffer = memoryview(bytearray(max(row.length for row in rows)))

    def pread() -> None:
        files = [os.open(dataset.root / shard.name, os.O_RDONLY) for shard in dataset.manifest.shards]
        for row in rows:
            view = buffer[: row.length]
            os.preadv(files[row.shard], [view], row.offset)
            xxhash.xxh3_64_intdigest(view)
        for file in files:
            os.close(file)

    candidates: dict[str, Callable[[], object]] = {
        "pread into a reused buffer + xxh3": pread,
        "fuelrail, mapped + xxh3": ours,
        "fuelrail, mapped + xxh3, pages not mapped yet": ours_first_pass,
    }
    yield compare("raw read, every byte checked", candidates, effort)
    yield compare(
        "raw read, beside webdataset", {"webdataset": partial(_webdataset, dataset), "fuelrail": ours}, effort
    )
    if importlib.util.find_spec("spdl") is None:
        return

    def unchecked_members(touch: Callable[[memoryview], object] | None) -> None:
        for index in range(len(dataset.index)):
            row = dataset.index.row(index)
            for data in read_members(row, unchecked.span(index, row), "", verify=False).values():
                if touch is not None:
                    touch(data)

    for title, touch in (("one byte of every page touched", _touch), ("views only", None)):
        yield compare(
            f"raw read, check off, {title}",
            {
                "SPDL iter_tarfile on maps": partial(_spdl, _maps(dataset), touch),
                "fuelrail": partial(unchecked_members, touch),
            },
            effort,
        )


def _touch(data: memoryview) -> object:
    return np.frombuffer(data, np.uint8)[::PAGE_BYTES].sum()


def _maps(dataset: Dataset) -> list[memoryview]:
    import mmap

    maps = []
    for shard in dataset.manifest.shards:
        with (dataset.root / shard.name).open("rb") as file:
            maps.append(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
    return maps


def _spdl(maps: list[memoryview], touch: Callable[[memoryview], object] | None) -> None:
    from spdl.io import iter_tarfile

    for shard in maps:
        for _, data in iter_tarfile(shard):
            if touch is not None:
                touch(data)


def _webdataset(dataset: Dataset) -> None:
    from webdataset.tariterators import group_by_keys, tar_file_iterator

    for shard in dataset.manifest.shards:
        with (dataset.root / shard.name).open("rb") as file:
            for _ in group_by_keys({**member, "__url__": shard.name} for member in tar_file_iterator(file)):
                pass


# HTTP


def stream(dataset: Dataset, backend: str, look_ahead: int = 64) -> StorageStats:
    """Read all samples once, in a seeded order, asked for up to ``look_ahead`` samples ahead; xxh3 checks each.

    Raises where one is lost or in another's place.
    """
    order = np.random.default_rng(2).permutation(len(dataset.index)).tolist()
    storage = open_storage(dataset, backend)
    session = storage.session()
    rows = [(index, dataset.index.row(index)) for index in order]
    bundle = max(1, look_ahead // 4)
    pending: list[Callable[[], memoryview]] = []
    for at in range(len(rows)):
        while len(pending) < min(len(rows), at + look_ahead):
            pending += session.request(rows[len(pending) : len(pending) + bundle])
        if pending[at]().nbytes != rows[at][1].length:
            raise RuntimeError(f"sample {at} of the order came as another one")
        pending[at] = _taken
    stats = storage.stats()
    session.close()
    storage.close()
    return stats


def _taken() -> memoryview:
    raise AssertionError("a span is taken once")


def measure_http(effort: Effort, folder: Path, num_samples: int) -> tuple[Comparison, Requests]:
    """A server with 20 ms of latency, beside itself with faults."""
    source = make_dataset(folder / "source", num_samples, 100, scale=0.25)
    with (
        FaultServerProcess(source.root, latency_s=0.02) as good,
        FaultServerProcess(source.root, latency_s=0.02, part=0.01, stall_s=60.0) as bad,
    ):
        datasets = {server.url: open_dataset(server.url, cache_dir=folder / "index") for server in (good, bad)}
        comparison = compare(
            "HTTP on loopback, 20 ms latency",
            {
                "no faults": partial(stream, datasets[good.url], "remote"),
                "1 % of requests fail or stall": partial(stream, datasets[bad.url], "remote"),
            },
            effort,
        )
        stats = [stream(datasets[bad.url], "remote") for _ in range(3)]
    return comparison, Requests(
        spans=sum(one.spans for one in stats),
        requests=sum(one.requests for one in stats),
        retries=sum(one.retries for one in stats),
        hedges=sum(one.hedges for one in stats),
        hedges_won=sum(one.hedges_won for one in stats),
        order_kept_nothing_lost=all(one.spans == num_samples for one in stats),
    )


# S3


def measure_s3(effort: Effort, folder: Path, num_samples: int) -> Iterator[Comparison]:
    """Beside s3fs, sample by sample. Shards are small, for moto handles a whole object for each range of it."""
    import s3fs

    source = make_dataset(folder / "source", num_samples, 8, scale=0.25)
    with s3_server():
        dataset = open_dataset(upload(source.root, "bench"), cache_dir=folder / "index")
        rows = [dataset.index.row(index) for index in np.random.default_rng(2).permutation(num_samples).tolist()]
        names = [shard.name for shard in dataset.manifest.shards]
        fs = s3fs.S3FileSystem(skip_instance_cache=True)

        def one_by_one() -> None:
            for row in rows:
                data = fs.cat_file(f"bench/dataset/{names[row.shard]}", start=row.offset, end=row.offset + row.length)
                if xxhash.xxh3_64_intdigest(data) != row.xxh3:
                    raise RuntimeError("s3fs brought other bytes")

        clients = ["fsspec"] + (["obstore"] if importlib.util.find_spec("obstore") else [])
        ours = {f"fuelrail, {client}": partial(stream, dataset, client) for client in clients}
        yield compare("S3 (moto) on loopback", {"s3fs, sample by sample": one_by_one, **ours}, effort)


# Cache


def measure_cache(folder: Path, num_samples: int, num_epochs: int = 5) -> HitRates:
    """Hit rates of a cache of a quarter of the samples over shuffled epochs."""
    dataset = make_dataset(folder / "source", num_samples, 50, scale=0.02)
    rng = np.random.default_rng(3)
    sequence = np.concatenate([rng.permutation(num_samples) for _ in range(num_epochs)])
    capacity = num_samples // 4
    budget = int(dataset.index.column("length").mean() * capacity)
    storage = open_storage(dataset, cache_dir=folder / "cache", cache_size=budget)
    session = storage.session(Foresight(lambda first, count: sequence[first : first + count], 2 * num_samples), 1)
    warm = storage.stats()
    for number, index in enumerate(sequence.tolist()):
        session.request([(index, dataset.index.row(index))])[0]()
        if number == num_samples - 1:
            warm = storage.stats()
    done = storage.stats()
    later = len(sequence) - num_samples
    return HitRates(
        capacity_of_dataset=capacity / num_samples,
        epochs=num_epochs,
        run=(done.cache_hits - warm.cache_hits) / later,
        optimum=1 - (_misses(sequence.tolist(), capacity) - num_samples) / later,
        lru=1 - (_lru_misses(sequence.tolist(), capacity) - num_samples) / later,
    )


def _misses(sequence: list[int], capacity: int) -> int:
    resident: set[int] = set()
    rows = np.array(sequence)
    foresight = Foresight(lambda first, count: rows[first : first + count], len(sequence) * 2)
    policy = FarthestFirst(foresight, resident.__contains__)
    policy.rebuild(rows[:0], 0)
    misses = 0
    for now, row in enumerate(sequence):
        policy.advance(now)
        if row in resident:
            continue
        misses += 1
        after = policy.next_use(row)
        if len(resident) == capacity:
            victim = policy.pop()
            assert victim is not None
            if victim[1] <= after:
                policy.add(*victim)
                continue
            resident.remove(victim[0])
        resident.add(row)
        policy.add(row, after)
    return misses


def _lru_misses(sequence: list[int], capacity: int) -> int:
    resident: dict[int, None] = {}
    misses = 0
    for row in sequence:
        if row in resident:
            del resident[row]
        else:
            misses += 1
            if len(resident) == capacity:
                del resident[next(iter(resident))]
        resident[row] = None
    return misses


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables and, with ``--out``, write the report as JSON."""
    parser = argparse.ArgumentParser(prog="python -m fuelrail.bench.micro.storage", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--quick", action="store_true", help="call everything a few times, to see that it runs")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure")
    parser.add_argument("--folder", type=Path, help="where to put the data, about 0.6 GB (None: a temporary folder)")
    options = parser.parse_args(argv)
    effort = QUICK if options.quick else Effort(num_rounds=9, min_lap_s=0.0)
    comparisons: list[Comparison] = []
    faults = rates = None
    folder = Path(tempfile.mkdtemp(prefix="fuelrail-storage-", dir=options.folder))
    try:
        if "raw" in options.parts:
            dataset = make_dataset(folder / "raw", 20 if options.quick else 600, 300)
            # Short laps: many rounds, so that what else the machine does meets all candidates alike.
            comparisons += measure_raw(effort if options.quick else Effort(num_rounds=41, min_lap_s=0.0), dataset)
        if "http" in options.parts:
            compared, faults = measure_http(effort, folder / "http", 20 if options.quick else 600)
            comparisons.append(compared)
        if "s3" in options.parts and all(map(importlib.util.find_spec, ("moto", "flask", "s3fs"))):
            comparisons += measure_s3(effort, folder / "s3", 16 if options.quick else 160)
        if "cache" in options.parts:
            rates = measure_cache(folder / "cache", 40 if options.quick else 400)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report = StorageReport(
        benchmark="storage", machine=machine_facts(), comparisons=comparisons, faults=faults, hit_rates=rates
    )
    print(render(Report(benchmark="storage", machine=report.machine, comparisons=comparisons)))  # noqa: T201
    for extra in (faults, rates):
        if extra is not None:
            print(f"  {msgspec.to_builtins(extra)}")  # noqa: T201
    if options.out is not None:
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    return 0


if __name__ == "__main__":
    # The faults are injected; a line for each would bury the tables.
    logging.getLogger("fuelrail").setLevel(logging.ERROR)
    sys.exit(main())
