"""Streaming a dataset over HTTP with faults, and from S3 beside s3fs."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import xxhash

from fuelrail.bench.micro.blank_dataset import make_dataset
from fuelrail.bench.micro.fault_server import FaultServerProcess
from fuelrail.bench.micro.s3_server import s3_server, upload
from fuelrail.bench.micro.timing import Comparison, Effort, compare
from fuelrail.loaders.storage import StorageStats, open_storage
from fuelrail.pipeline.dataset import open_dataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fuelrail.pipeline.dataset import Dataset


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    """What it took to ride out the faults of one pass."""

    spans: int
    requests: int
    retries: int
    hedges: int
    hedges_won: int
    order_kept_nothing_lost: bool


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
