"""What a sample costs before its first pixel: metadata parsed and index rows looked up, beside the usual libraries.

    python -m fuelrail.bench.micro.metadata [--out FILE]

DESIGN: decoding all metadata of a six-camera sample must stay under 100 microseconds of Python time.
"""

from __future__ import annotations

import io
import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import safetensors.numpy

from fuelrail.bench.micro.timing import Comparison, Effort, compare, main
from fuelrail.pipeline.format.index.row import IndexRow, MemberEntry
from fuelrail.pipeline.format.index.samples import ROWS_PER_BATCH, SampleIndex, write_index
from fuelrail.pipeline.rigid import rigid
from fuelrail.pipeline.sample.schema import (
    BOXES,
    GEOMETRY,
    META,
    NUM_DIST,
    SCHEMA,
    Boxes,
    CameraMeta,
    Geometry,
    Meta,
    decode_points,
    decode_sample,
    encode_arrays,
    encode_meta,
    encode_points,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CHANNELS = ("cam_front", "cam_front_right", "cam_front_left", "cam_back", "cam_back_left", "cam_back_right")
_INTRINSICS = [[1266.0, 0.0, 816.0], [0.0, 1266.0, 491.0], [0.0, 0.0, 1.0]]
NUM_BOXES = 34  # nuScenes' mean
NUM_POINTS = 34_720  # of one sweep there
KEY = "scene-0061-000012"
_FIELDS = (META, GEOMETRY, BOXES, *(f"{channel}.jpg" for channel in CHANNELS), "lidar_top.npy")


def sample_members() -> dict[str, bytes]:
    """``meta.json``, geometry and boxes of one sample with six cameras, a lidar and as many boxes as usual."""
    rng = np.random.default_rng(0)
    count = len(CHANNELS)
    time_ns = 1_532_402_927_647_951_000
    unknown = np.full(3, np.nan)

    def poses(number: int) -> Any:  # noqa: ANN401
        return rigid(rng.normal(size=(number, 4)), rng.uniform(-1000, 1000, (number, 3)))

    meta = Meta(
        schema=SCHEMA, dataset="nuscenes", key=KEY, sample_token="ca9a282c9e77460f8360f564131a8af5",
        clip_id="scene-0061", clip_token="cc8c0bf57f984915a77078b10eb33198", clip_name="scene-0061",
        log_id="n015-2018-07-24-11-22-45+0800", vehicle="n015", frame_idx=12, num_frames=39,
        prev_key="scene-0061-000011", next_key="scene-0061-000013", timestamp_ns=time_ns, is_key_frame=True,
        split="train", tags={"location": "singapore-onenorth", "night": False, "rain": False},
        cameras={
            channel: CameraMeta(token="e3d495d4ac534d54b321f50006683844", timestamp_ns=time_ns, width=1600, height=900)
            for channel in CHANNELS
        },
    )  # fmt: skip
    geometry = Geometry(
        cam_valid=np.ones(count, np.uint8), cam_timestamp_ns=time_ns + np.arange(count),
        img_wh=np.tile(np.array([1600, 900], np.int32), (count, 1)),
        intrinsics=np.tile(_INTRINSICS, (count, 1, 1)), dist=np.full((count, NUM_DIST), np.nan), cam2ego=poses(count),
        cam_ego2global=poses(count), ego2global=poses(1)[0], lidar2ego=poses(1), lidar_ego2global=poses(1),
        lidar_timestamp_ns=np.array([time_ns]), ego_velocity=unknown, ego_accel=unknown, ego_rates=unknown,
    )  # fmt: skip
    rotation = np.zeros((NUM_BOXES, 4), np.float32)
    rotation[:, 0] = 1
    boxes = Boxes(
        boxes3d=rng.uniform(0.5, 4.0, (NUM_BOXES, 7)).astype(np.float32), rotation_wxyz=rotation,
        velocity=rng.random((NUM_BOXES, 3), np.float32), label=np.full(NUM_BOXES, -1, np.int16),
        instance_id=np.arange(NUM_BOXES), num_lidar_pts=np.ones(NUM_BOXES, np.int32),
        num_radar_pts=np.ones(NUM_BOXES, np.int32), visibility=np.ones(NUM_BOXES, np.int8),
        attribute=np.full(NUM_BOXES, -1, np.int16), valid=np.ones(NUM_BOXES, np.uint8),
    )  # fmt: skip
    return {META: encode_meta(meta), GEOMETRY: encode_arrays(geometry), BOXES: encode_arrays(boxes)}


def index_rows(count: int) -> Iterator[IndexRow]:
    """Rows of a dataset with six cameras and a lidar."""
    members = tuple(MemberEntry(name, 4096 * i + 512, 3000, 3000, "raw", 0) for i, name in enumerate(_FIELDS))
    for i in range(count):
        clip_id = f"scene-{i // 40:06d}"
        yield IndexRow(f"{clip_id}-{i % 40:06d}", clip_id, i % 40, i * 500_000_000, i // 300, 0, 40960, i, members)


def pyarrow_row(table: pa.Table, number: int, names: Sequence[str], codecs: Sequence[str]) -> dict[str, Any]:
    """The same row through pyarrow's own conversion to Python."""
    row: dict[str, Any] = table.slice(number, 1).to_pylist()[0]
    for member in row["members"]:
        member["name"], member["codec"] = names[member["name"]], codecs[member["codec"]]
    return row


def measure(effort: Effort) -> Iterator[Comparison]:
    """All comparisons: sample metadata, the header of a sweep, a row of the index."""
    members = sample_members()
    yield compare(
        f"metadata of one sample: {len(CHANNELS)} cameras, {NUM_BOXES} boxes",
        {
            "json + safetensors": lambda: (
                json.loads(members[META]),
                safetensors.numpy.load(members[GEOMETRY]),
                safetensors.numpy.load(members[BOXES]),
            ),
            "fuelrail, checked against the schema": lambda: decode_sample(KEY, members),
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
