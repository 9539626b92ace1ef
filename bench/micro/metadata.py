"""What a sample costs before its first pixel: metadata, index rows and its place in the order,
beside usual libraries.

    python -m fuelrail.bench.micro.metadata [--out FILE]

Decoding all metadata of a six-camera sample should take less than 100 microseconds of Python time.
"""

from __future__ import annotations

import io
import itertools
import json
import sys
import tarfile
import tempfile
import tracemalloc
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import safetensors.numpy
import torch.utils.data

from fuelrail.bench.micro.source import (
    CAMERAS,
    NUM_BOXES,
    NUM_POINTS,
    make_dataroot,
)
from fuelrail.bench.micro.timing import Effort, TimedContest, compare, main
from fuelrail.loaders.integrations.sampler import BatchSampler
from fuelrail.pipeline.format.index.row import IndexRow, MemberEntry
from fuelrail.pipeline.format.index.samples import (
    ROWS_PER_BATCH,
    SampleIndex,
    write_index,
)
from fuelrail.pipeline.order.batching import World
from fuelrail.pipeline.sample.schema import (
    BOXES,
    GEOMETRY,
    META,
    decode_points,
    decode_sample,
    encode_points,
)
from fuelrail.sharding.api import shard
from fuelrail.sharding.progress import Quiet

_FIELDS = (
    META,
    GEOMETRY,
    BOXES,
    *(f"{channel.lower()}.jpg" for channel in CAMERAS),
    "lidar_top.npy",
)

_NUM_ROWS = 250_000
_MANY_ROWS = 10**9


def sample_members(work: Path) -> tuple[str, dict[str, bytes]]:
    """Make key and metadata of a sample with six cameras and as many boxes as nuScenes' in the
    new folder ``work``.
    """
    source = work / "source"
    out = work / "dataset"
    make_dataroot(source, 2, lidar=False, size=(320, 180))
    shard(
        f"nuscenes:{source}",
        out,
        options={"version": "v1.0-bench"},
        layout="none",
        workers=1,
        progress=Quiet(),
    )
    with tarfile.open(next(out.glob("*.tar"))) as tar:
        contents = {
            name: file.read()
            for name in tar.getnames()
            if (file := tar.extractfile(name)) is not None
        }
    key = next(iter(contents)).partition(".")[0]
    return key, {name: contents[f"{key}.{name}"] for name in (META, GEOMETRY, BOXES)}


def index_rows(count: int) -> Iterator[IndexRow]:
    """Yield rows of a dataset with six cameras and a lidar."""
    members = tuple(
        MemberEntry(
            name=name,
            offset=4096 * i + 512,
            stored_bytes=3000,
            raw_bytes=3000,
            codec="raw",
            xxh3=0,
        )
        for i, name in enumerate(_FIELDS)
    )
    for i in range(count):
        clip_id = f"scene-{i // 40:06d}"
        yield IndexRow(
            key=f"{clip_id}-{i % 40:06d}",
            clip_id=clip_id,
            frame=i % 40,
            timestamp_ns=i * 500_000_000,
            shard=i // 300,
            offset=0,
            length=40960,
            xxh3=i,
            members=members,
        )


def pyarrow_row(
    table: pa.Table,
    number: int,
    names: Sequence[str],
    codecs: Sequence[str],
) -> dict[str, Any]:
    """Return the same row through pyarrow's own conversion to Python."""
    row: dict[str, Any]
    (row,) = table.slice(number, 1).to_pylist()
    for member in row["members"]:
        member["name"] = names[member["name"]]
        member["codec"] = codecs[member["codec"]]
    return row


def torch_epoch(num_ranks: int) -> int:
    """Draw an epoch of one rank from torch's own samplers, in batches of 64; return the number
    of indices.
    """
    rows: Any = range(_NUM_ROWS)
    sampler: Any = torch.utils.data.DistributedSampler(
        rows,
        num_replicas=num_ranks,
        rank=0,
        shuffle=True,
    )
    batches = torch.utils.data.BatchSampler(sampler, 64, drop_last=True)
    return sum(len(batch) for batch in batches)


def our_epoch(num_ranks: int) -> int:
    """Draw the same from ours."""
    sampler = BatchSampler(_NUM_ROWS, global_batch=64 * num_ranks, world=World(0, num_ranks))
    return sum(len(batch) for batch in sampler)


def our_counted_epoch(num_ranks: int) -> int:
    """Draw the same from ours as a trainer does, with the position known after each batch."""
    sampler = BatchSampler(_NUM_ROWS, global_batch=64 * num_ranks, world=World(0, num_ranks))
    return sum(len(batch) for batch in sampler.count())


def first_batch() -> list[int]:
    """Draw the first batch of 64 of very many rows."""
    first: list[int] = next(iter(BatchSampler(_MANY_ROWS, global_batch=64)))
    return first


def first_batch_bytes() -> int:
    """Return the most memory that is allocated until then [bytes]."""
    tracemalloc.start()
    try:
        first_batch()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def measure_order(effort: Effort) -> Iterator[TimedContest]:
    """Yield comparisons of samplers, and the time to a first batch."""
    for num_ranks in (1, 8):
        yield compare(
            f"an epoch of {_NUM_ROWS} rows in batches of 64, one rank of {num_ranks}",
            {
                "torch's DistributedSampler": partial(torch_epoch, num_ranks),
                "fuelrail.order": partial(our_epoch, num_ranks),
                "fuelrail.order, counted": partial(our_counted_epoch, num_ranks),
            },
            effort,
        )
    title = f"the first batch of 64 of {_MANY_ROWS} rows, with {first_batch_bytes()} bytes at most"
    yield compare(title, {"fuelrail.order": first_batch}, effort)


def measure(effort: Effort) -> Iterator[TimedContest]:
    """Yield all comparisons: the order, sample metadata, the header of a sweep, a row of the
    index.
    """
    yield from measure_order(effort)
    with tempfile.TemporaryDirectory() as folder:
        key, members = sample_members(Path(folder) / "work")
    yield compare(
        f"metadata of one sample: {len(CAMERAS)} cameras, {NUM_BOXES} boxes",
        {
            "json + safetensors": lambda: (
                json.loads(members[META]),
                safetensors.numpy.load(members[GEOMETRY]),
                safetensors.numpy.load(members[BOXES]),
            ),
            "fuelrail, checked against the schema": lambda: decode_sample(key, members),
        },
        effort,
    )
    sweep = encode_points(np.zeros((NUM_POINTS, 5), np.float32))
    yield compare(
        f"one sweep of {NUM_POINTS} points",
        {
            "numpy.load": lambda: np.load(io.BytesIO(sweep)),
            "fuelrail, a view": lambda: decode_points(sweep),
        },
        effort,
    )
    count = ROWS_PER_BATCH + ROWS_PER_BATCH // 4
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index.arrow"
        write_index(path, index_rows(count), _FIELDS, ["raw"])
        index = SampleIndex(path)
        rng = np.random.default_rng(0)
        drawn = rng.permutation(count)[:5000]
        rows = itertools.cycle(drawn.tolist())
        with pa.memory_map(str(path)) as source:
            table = pa.ipc.open_file(source).read_all()
            yield compare(
                f"one row of an index of {count}, {len(_FIELDS)} members",
                {
                    "pyarrow": lambda: pyarrow_row(table, next(rows), index.names, index.codecs),
                    "fuelrail": lambda: index.row(next(rows)),
                },
                effort,
            )


if __name__ == "__main__":
    sys.exit(main(None, "metadata", measure))
