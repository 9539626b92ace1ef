"""Streaming a dataset over HTTP with faults, and from S3 beside s3fs.

The server is a process of its own, on a core of its own where there are two; the client has the others.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import xxhash

from fuelrail.bench.micro.datasets import make_dataset
from fuelrail.bench.micro.timing import Comparison, Effort, compare
from fuelrail.loaders.storage import StorageStats, open_storage
from fuelrail.pipeline.format.dataset import open_dataset
from support.fault_server import FaultServerProcess
from support.s3_server import nginx_server, s3_server, upload

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from fuelrail.pipeline.format.dataset import Dataset

LOOK_AHEAD = 256
"""Samples, of 0.22 MB each: a quarter of the bytes that a loader looks ahead by itself."""


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    """What it took to ride out the faults, in all laps together."""

    spans: int
    requests: int
    retries: int
    hedges: int
    hedges_won: int
    order_kept_nothing_lost: bool


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader's passes took besides time."""

    name: str
    requests_per_sample: float
    client_cpu_s_per_gb: float
    server_cpu_s_per_gb: float


def stream(dataset: Dataset, backend: str, look_ahead: int = LOOK_AHEAD, epochs: int = 1) -> StorageStats:
    """Read all samples ``epochs`` times, in a seeded order, asked for up to ``look_ahead`` samples ahead.

    xxh3 checks each. Raises where one is lost or in another's place.
    """
    rng = np.random.default_rng(2)
    order = [index for _ in range(epochs) for index in rng.permutation(len(dataset.index)).tolist()]
    storage = open_storage(dataset, backend)
    session = storage.session()
    rows = [(index, dataset.index.row(index)) for index in order]
    bundle = max(1, look_ahead // 16)
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


def measure_http(
    effort: Effort, folder: Path, num_samples: int, passes_per_lap: Sequence[int]
) -> tuple[list[Comparison], Requests]:
    """A server with 20 ms of latency, beside itself with faults, in laps of this number of passes.

    Each lap starts again: client, connections, and knowledge of what is usual. In a short lap the start and a fault at
    the very end weigh more; a long one tells the rate in the long run.
    """
    source = make_dataset(folder / "source", num_samples, 100, scale=0.25)
    with (
        FaultServerProcess(source.root, latency_s=0.02) as good,
        FaultServerProcess(source.root, latency_s=0.02, part=0.01, stall_s=60.0) as bad,
        apart(good.pid, bad.pid),
    ):
        datasets = {server.url: open_dataset(server.url, cache_dir=folder / "index") for server in (good, bad)}
        stats: list[StorageStats] = []
        comparisons = [
            compare(
                f"HTTP on loopback, 20 ms latency, laps of {passes * num_samples} samples",
                {
                    "no faults": partial(stream, datasets[good.url], "remote", epochs=passes),
                    "1 % of requests fail or stall": partial(_counted, stats, datasets[bad.url], passes),
                },
                effort,
            )
            for passes in passes_per_lap
        ]
    return comparisons, Requests(
        spans=sum(one.spans for one in stats),
        requests=sum(one.requests for one in stats),
        retries=sum(one.retries for one in stats),
        hedges=sum(one.hedges for one in stats),
        hedges_won=sum(one.hedges_won for one in stats),
        order_kept_nothing_lost=all(one.spans % num_samples == 0 for one in stats),
    )


def _counted(stats: list[StorageStats], dataset: Dataset, epochs: int) -> None:
    stats.append(stream(dataset, "remote", epochs=epochs))


def measure_s3(effort: Effort, folder: Path, *, quick: bool) -> tuple[Comparison, list[Cost]]:
    """Beside s3fs, sample by sample; the server is nginx if it is installed, else moto.

    With moto there is less to read, in small shards: it handles a whole object for each range of it.
    """
    import s3fs

    has_nginx = shutil.which("nginx") is not None
    num_samples = 16 if quick else 600 if has_nginx else 160
    source = make_dataset(folder / "source", num_samples, 100 if has_nginx else 8, scale=0.25)
    with contextlib.ExitStack() as stack:
        if has_nginx:
            server = stack.enter_context(nginx_server(source.root, "bench"))
            url = "s3://bench/dataset"
        else:
            server = stack.enter_context(s3_server())
            url = upload(source.root, "bench")
        stack.enter_context(apart(server.pid))
        dataset = open_dataset(url, cache_dir=folder / "index")
        rows = [dataset.index.row(index) for index in np.random.default_rng(2).permutation(num_samples).tolist()]
        names = [shard.name for shard in dataset.shards]
        fs = s3fs.S3FileSystem(skip_instance_cache=True)

        def one_by_one() -> int:
            for row in rows:
                data = fs.cat_file(f"bench/dataset/{names[row.shard]}", start=row.offset, end=row.offset + row.length)
                if xxhash.xxh3_64_intdigest(data) != row.xxh3:
                    raise RuntimeError("s3fs brought other bytes")
            return len(rows)

        readers: dict[str, Callable[[], int]] = {"s3fs, sample by sample": one_by_one}
        for client in ["fsspec"] + (["obstore"] if importlib.util.find_spec("obstore") else []):
            readers[f"fuelrail, {client}"] = partial(_num_requests, dataset, client)
        comparison = compare(f"S3 ({server.name}) on loopback", readers, effort)
        num_bytes = sum(row.length for row in rows)
        costs = [_cost(name, reader, server.pid, num_samples, num_bytes) for name, reader in readers.items()]
    return comparison, costs


def _num_requests(dataset: Dataset, client: str) -> int:
    return stream(dataset, client).requests


def _cost(name: str, reader: Callable[[], int], server: int, num_samples: int, num_bytes: int) -> Cost:
    num_passes = 5
    client_s, server_s = -cpu_s(os.getpid()), -cpu_s(server)
    requests = sum(reader() for _ in range(num_passes))
    client_s, server_s = client_s + cpu_s(os.getpid()), server_s + cpu_s(server)
    gigabytes = num_passes * num_bytes / 1e9
    return Cost(
        name=name,
        requests_per_sample=requests / (num_passes * num_samples),
        client_cpu_s_per_gb=client_s / gigabytes,
        server_cpu_s_per_gb=server_s / gigabytes,
    )


@contextlib.contextmanager
def apart(*servers: int) -> Iterator[bool]:
    """Keep these processes on the last core and this one on the others meanwhile; False where there is one core only.

    Threads that begin meanwhile stay where their creator is.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        yield False
        return
    for server in servers:
        pin(server, cores[-1:])
    pin(os.getpid(), cores[:-1])
    try:
        yield True
    finally:
        pin(os.getpid(), cores)


def pin(process: int, cores: Collection[int]) -> None:
    """Let all threads of a process run on these cores only."""
    for thread in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)


def cpu_s(process: int) -> float:
    """CPU seconds that a process took so far, by the kernel's clock ticks."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
