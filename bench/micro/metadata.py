"""What a sample costs before its first pixel: metadata parsed and index rows looked up, beside the usual libraries.

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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import safetensors.numpy

from fuelrail.bench.micro.source import CAMERAS, NUM_BOXES, NUM_POINTS, make_dataset
from fuelrail.bench.micro.timing import Effort, TimedContest, compare, main
from fuelrail.pipeline.format.index.row import IndexRow, MemberEntry
from fuelrail.pipeline.format.index.samples import ROWS_PER_BATCH, SampleIndex, write_index
from fuelrail.pipeline.sample.schema import (
    BOXES,
    GEOMETRY,
    META,
    decode_points,
    decode_sample,
    encode_points,
)

_FIELDS = (META, GEOMETRY, BOXES, *(f"{channel.lower()}.jpg" for channel in CAMERAS), "lidar_top.npy")


def sample_members(work: Path) -> tuple[str, dict[str, bytes]]:
    """Make key and metadata of a sample with six cameras and as many boxes as nuScenes' in the new folder ``work``."""
    dataset = make_dataset(work, 2, size=(320, 180), layout="none")
    with tarfile.open(next(dataset.glob("*.tar"))) as shard:
        found = {name: file.read() for name in shard.getnames() if (file := shard.extractfile(name)) is not None}
    key = next(iter(found)).partition(".")[0]
    return key, {name: found[f"{key}.{name}"] for name in (META, GEOMETRY, BOXES)}


def index_rows(count: int) -> Iterator[IndexRow]:
    """Yield rows of a dataset with six cameras and a lidar."""
    members = tuple(MemberEntry(name, 4096 * i + 512, 3000, 3000, "raw", 0) for i, name in enumerate(_FIELDS))
    for i in range(count):
        clip_id = f"scene-{i // 40:06d}"
        yield IndexRow(f"{clip_id}-{i % 40:06d}", clip_id, i % 40, i * 500_000_000, i // 300, 0, 40960, i, members)


def pyarrow_row(table: pa.Table, number: int, names: Sequence[str], codecs: Sequence[str]) -> dict[str, Any]:
    """Return the same row through pyarrow's own conversion to Python."""
    row: dict[str, Any] = table.slice(number, 1).to_pylist()[0]
    for member in row["members"]:
        member["name"], member["codec"] = names[member["name"]], codecs[member["codec"]]
    return row


def measure(effort: Effort) -> Iterator[TimedContest]:
    """Yield all comparisons: sample metadata, the header of a sweep, a row of the index."""
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
        {"numpy.load": lambda: np.load(io.BytesIO(sweep)), "fuelrail, a view": lambda: decode_points(sweep)},
        effort,
    )
    count = ROWS_PER_BATCH + ROWS_PER_BATCH // 4
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index.arrow"
        write_index(path, index_rows(count), _FIELDS, ["raw"])
        index = SampleIndex(path)
        with pa.memory_map(str(path)) as source:
            table = pa.ipc.open_file(source).read_all()
            rows = itertools.cycle(np.random.default_rng(0).permutation(count)[:5000].tolist())
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
