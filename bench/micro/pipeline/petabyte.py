"""Datasets of 10^7 to 10^9 rows without bytes: what they cost to open, to order, to resume, to filter, to look up.

``python -m fuelrail.bench.micro.pipeline.petabyte FOLDER [--rows N ...] [--out FILE]``. Tables are made by arithmetic.
Shards, keys and attributes are whole; so is the index up to ``WHOLE_ROWS`` rows. Beyond, its footer is whole but all
record batches are one and the same, which saves 20 GB: opening, orders and resuming look at the footer only. Over 10^8
rows the table of keys is left out, which saves 32 GB more: it is opened at the first look-up. Each step is measured in
a process of its own, and the dataset is removed after it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from fuelrail.bench.measure.machine import MachineFacts, machine_facts
from fuelrail.bench.report.files import publish_json
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.format.index.checks import footer_blocks
from fuelrail.pipeline.format.index.keys import ENTRY, write_entries
from fuelrail.pipeline.format.index.samples import INDEX_FILE, ROWS_PER_BATCH, index_schema
from fuelrail.pipeline.format.index.shards import SHARDS_SCHEMA
from fuelrail.pipeline.format.index.tables import seal_tables
from fuelrail.pipeline.format.manifest import MANIFEST_FILE, SplitEntry, encode_manifest
from fuelrail.pipeline.order.compile import compile_order
from fuelrail.pipeline.order.spec import OrderSpec
from support.cameras import dataset_manifest
from support.fault_server import FaultServer, Misbehaviour

if TYPE_CHECKING:
    from fuelrail.pipeline.format.dataset import Dataset

WHOLE_ROWS = 10_000_000
MOST_FILTERED = 100_000_000
_MOST_SHARDS = 4_000_000
_SPAN_BYTES = 1 << 20
_CLIP = 40
_WHOLE_ONLY = ("length of all spans", "1,000 keys", "1,000 keyed rows", "1,000 keyed rows, again")


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step in a process of its own: median of ``runs``, and memory over that of the imports before it."""

    name: str
    num_rows: int
    num_shards: int
    milliseconds: float
    memory_bytes: int
    runs: int


class KeysAtAUrl(msgspec.Struct, frozen=True, kw_only=True):
    """Look-ups of keys, with their rows of the index, at a server that waits ``latency_ms`` before each answer.

    A keyed read fetches its sample's bytes at the same time as its row.
    """

    latency_ms: float
    first_ms: float
    background_s: float
    """From the first look-up until the table of keys was here."""
    next_ms: float
    """Median of ``num_next`` look-ups after that."""
    num_next: int
    requests_of_next: dict[str, int]


class PetabyteReport(msgspec.Struct, frozen=True, kw_only=True):
    """All steps, and the bytes of the files of each dataset."""

    benchmark: str
    machine: MachineFacts
    files: dict[str, dict[str, int]]
    steps: list[Step]
    requests_to_open_at_a_url: dict[str, int]
    keys_at_a_url: dict[str, KeysAtAUrl]
    not_run: list[str]


def rows_per_shard(num_rows: int) -> int:
    """25, or more where there would be over 4 million shards."""
    return max(num_rows // _MOST_SHARDS, 25)


def keys_of(rows: range) -> list[str]:
    """The keys of some rows."""
    return [f"clip-{row // _CLIP:08d}-{row % _CLIP:06d}" for row in rows]


def _batch(rows: range, schema: pa.Schema) -> pa.RecordBatch:
    number, count = np.arange(rows.start, rows.stop), len(rows)
    kind = schema.field("members").type.value_type
    sizes = [np.full(count, 1000)] * 2
    values = (*[np.zeros(count, np.int16)] * 2, np.full(count, 512), *sizes, np.zeros(count, np.uint64))
    parts = [pa.array(value, field.type) for value, field in zip(values, kind, strict=True)]
    members = pa.ListArray.from_arrays(
        np.arange(count + 1, dtype=np.int32), pa.StructArray.from_arrays(parts, fields=kind)
    )
    keys = keys_of(rows)
    columns = [
        pa.array(keys), pa.array([key[:13] for key in keys]), (number % _CLIP).astype(np.int32), number * 500_000_000,
        (number // 25).astype(np.int32), number % 25 * _SPAN_BYTES,
        np.full(count, _SPAN_BYTES), np.zeros(count, np.uint64), members,
    ]  # fmt: skip
    return pa.RecordBatch.from_arrays([pa.array(column) for column in columns], schema=schema)


def _write_index(path: Path, num_rows: int) -> None:
    schema = index_schema(["meta.json"], ["raw"])
    num_batches = -(-num_rows // ROWS_PER_BATCH)
    whole = num_rows <= WHOLE_ROWS
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for number in range(num_batches):
            first = number * ROWS_PER_BATCH
            last = min(first + ROWS_PER_BATCH, num_rows)
            writer.write_batch(_batch(range(first, last if whole or number in (0, num_batches - 1) else first), schema))
    if not whole:
        data = np.memmap(path, np.uint8, "r+")
        at, count, size = footer_blocks(data.data)
        blocks = data[at : at + count * size].reshape(count, size)
        blocks[1:-1] = blocks[0]
        data.flush()


def make(folder: Path, num_rows: int) -> None:
    """Write such a dataset: one split, shards of 25 rows, an attribute that is true for one row in ten."""
    folder.mkdir(parents=True)
    each = rows_per_shard(num_rows)
    num_shards = num_rows // each
    firsts = np.arange(num_shards) * each
    digests = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(32), num_shards, [None, pa.py_buffer(bytes(32 * num_shards))]
    )
    zeros = np.zeros(num_shards, np.int64)
    sizes = np.full(num_shards, each * _SPAN_BYTES + 1024)
    columns = [pa.array(firsts), pa.array(sizes), digests, pa.array(zeros.astype(np.uint8)), pa.array(zeros), digests]
    with pa.OSFile(str(folder / "shards.arrow"), "wb") as sink, pa.ipc.new_file(sink, SHARDS_SCHEMA) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=SHARDS_SCHEMA))
    _write_index(folder / INDEX_FILE, num_rows)
    entries = np.zeros(num_rows if num_rows <= MOST_FILTERED else 0, ENTRY)
    entries["row"] = rows = np.arange(len(entries))
    entries["shard"], entries["offset"], entries["length"] = rows // 25, rows % 25 * _SPAN_BYTES, _SPAN_BYTES
    del rows
    if num_rows <= WHOLE_ROWS:
        entries["xxh3"] = [xxhash.xxh3_64_intdigest(key.encode()) for key in keys_of(range(num_rows))]
        entries = entries[np.argsort(entries["xxh3"])]
    else:  # spread evenly, but not those of the keys: the look-up is measured up to WHOLE_ROWS
        entries["xxh3"] = np.arange(len(entries), dtype=np.uint64) * np.uint64(2**64 // num_rows)
    write_entries(folder / "keys.arrow", entries)
    del entries
    with pq.ParquetWriter(folder / "attributes.parquet", pa.schema([("night", pa.bool_())])) as parquet:
        for first in range(0, num_rows, 1 << 20):
            night = np.arange(first, min(first + (1 << 20), num_rows)) % 10 == 0
            parquet.write_table(pa.table({"night": night}))
    files = seal_tables(folder)
    split = SplitEntry(
        first_sample=0, num_samples=num_rows, first_shard=0, num_shards=num_shards, num_clips=num_rows // _CLIP
    )
    manifest = dataset_manifest({"train": split}, files, int(sizes.sum()), num_clips=num_rows // _CLIP)
    (folder / MANIFEST_FILE).write_bytes(encode_manifest(manifest))


def _order(kind: str, **options: Any) -> Callable[[Dataset], object]:  # noqa: ANN401
    def work(dataset: Dataset) -> object:
        spec = OrderSpec(kind=kind, seed=7, **options)  # type: ignore[arg-type]
        epoch = compile_order(spec, dataset, "train").epoch(0)
        at = len(epoch) * 7 // 10
        return epoch(np.arange(at, at + 1000))

    return work


def _read_rows(dataset: Dataset) -> object:
    """Find 1,000 samples by key, and read their rows of the index: all of a keyed read but its bytes."""
    for key in keys_of(range(0, len(dataset), max(len(dataset) // 1000, 1))):
        dataset.index.row(dataset.position(key))
    return None


def _look_up(dataset: Dataset) -> object:
    keys = keys_of(range(0, len(dataset), max(len(dataset) // 1000, 1)))
    assert all(dataset.find(key) is not None for key in keys)
    return None


def keys_at_a_url(dataset: Dataset, server: FaultServer, latency_s: float = 0.05, num_next: int = 50) -> KeysAtAUrl:
    """Look keys up in a dataset that the server serves, of which nothing but its opening was fetched."""
    server.misbehave = lambda _: Misbehaviour(latency_s)
    rows = range(0, len(dataset), len(dataset) // (num_next + 1))
    took = []
    for number, row in enumerate(rows[: num_next + 1]):
        started = time.perf_counter()
        assert dataset.find(keys_of(range(row, row + 1))[0]) == row
        took.append(time.perf_counter() - started)
        if number == 0:
            for thread in threading.enumerate():
                if thread.name == "fetch keys.arrow":
                    thread.join()
            background_s, before = time.perf_counter() - started, len(server.requests)
    return KeysAtAUrl(
        latency_ms=latency_s * 1000, first_ms=took[0] * 1000, background_s=background_s,
        next_ms=statistics.median(took[1:]) * 1000, num_next=num_next,
        requests_of_next=dict(Counter(request.name for request in server.requests[before:])),
    )  # fmt: skip


STEPS: dict[str, Callable[[Dataset], object]] = {
    "open": lambda dataset: dataset,
    "order and resume, shuffled": _order("shuffled"),
    "order and resume, windowed": _order("windowed", window=1000),
    "filter: night": _order("shuffled", filter="night"),
    "length of all spans": lambda dataset: dataset.index.column("length"),
    "1,000 keys": _look_up,
    "1,000 keyed rows": _read_rows,
    "1,000 keyed rows, again": _read_rows,
}


def _child(folder: str, name: str) -> None:
    """Print milliseconds, and bytes of memory that the step added."""
    if name == "open":
        started = time.perf_counter()
        before = _memory("VmRSS")
        open_dataset(folder)
    else:
        dataset = open_dataset(folder)
        if name.endswith(", again"):
            STEPS[name](dataset)
        before, started = _memory("VmRSS"), time.perf_counter()
        STEPS[name](dataset)
    print((time.perf_counter() - started) * 1000, max(_memory("VmHWM") - before, 0))  # noqa: T201


def _memory(entry: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return int(next(line for line in status.splitlines() if line.startswith(entry)).split()[1]) * 1024


def measure(folder: Path, name: str, num_rows: int, runs: int) -> Step:
    """Measure a step in processes of its own."""
    command = [sys.executable, "-m", __spec__.name, str(folder), "--child", name]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = []
    for _ in range(runs):
        output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
        found.append([float(value) for value in output.split()])
    times, memory = zip(*found, strict=True)
    return Step(
        name=name, num_rows=num_rows, num_shards=num_rows // rows_per_shard(num_rows), runs=runs,
        milliseconds=statistics.median(times), memory_bytes=int(max(memory)),
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and, with ``--out``, write the report as JSON."""
    parser = argparse.ArgumentParser(prog="python -m fuelrail.bench.micro.pipeline.petabyte")
    parser.add_argument("folder", type=Path, help="folder to make the datasets in; 36 bytes a row, 8 GB at most")
    parser.add_argument("--rows", type=int, nargs="+", default=[10**7, 10**8], help="sizes of the datasets")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        _child(options.folder, options.child)
        return 0
    steps: list[Step] = []
    files: dict[str, dict[str, int]] = {}
    requests: dict[str, int] = {}
    look_up: dict[str, KeysAtAUrl] = {}
    not_run: list[str] = []
    for num_rows in options.rows:
        folder = options.folder / str(num_rows)
        try:
            make(folder, num_rows)
            files[str(num_rows)] = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
            for name in STEPS:
                if name in _WHOLE_ONLY and num_rows > WHOLE_ROWS:
                    not_run.append(f"{name}, {num_rows:,} rows: the index has one record batch many times")
                elif name == "filter: night" and num_rows > MOST_FILTERED:
                    not_run.append(f"{name}, {num_rows:,} rows: its result takes 8 bytes a row in memory")
                else:
                    steps.append(measure(folder, name, num_rows, options.runs))
                    step = steps[-1]
                    print(f"{num_rows:.0e} {name}: {step.milliseconds:.1f} ms, {step.memory_bytes / 1e6:.1f} MB")  # noqa: T201
            with FaultServer(folder) as server:
                remote = open_dataset(server.url, cache_dir=options.folder / "cache")
                requests[str(num_rows)] = len(server.requests)
                if num_rows <= WHOLE_ROWS:
                    look_up[str(num_rows)] = keys_at_a_url(remote, server)
                    print(look_up[str(num_rows)])  # noqa: T201
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(options.folder / "cache", ignore_errors=True)
    report = PetabyteReport(
        benchmark="petabyte", machine=machine_facts(), files=files, steps=steps,
        requests_to_open_at_a_url=requests, keys_at_a_url=look_up, not_run=not_run,
    )  # fmt: skip
    if options.out is not None:
        publish_json(options.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
