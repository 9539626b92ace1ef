"""What a user of a shard writer has to write around it for a nuScenes dataroot: tables read, joined and stored.

The other writers of the sharding benchmark are handed each frame's files. Here the same writer makes samples that a
detector can be trained from: images, and as JSON the calibration, pose and time of each sensor and the frame's boxes as
the tables have them, in global. Still missing, next to Fuelrail's: boxes and velocities in the vehicle's frame, checks,
shuffling, digests, an index.
"""

from __future__ import annotations

import contextlib
import io
import json
from typing import TYPE_CHECKING, Any

from fuelrail.bench.micro.sharding_source import packed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_TABLES = (
    "sample", "sample_data", "sensor", "calibrated_sensor", "ego_pose", "sample_annotation", "instance", "category",
)  # fmt: skip
Row = dict[str, Any]


def write_joined(root: Path, folder: Path, shard_bytes: int) -> None:
    """``webdataset.ShardWriter``, with what the tables say of each frame."""
    import webdataset

    with (
        contextlib.redirect_stdout(io.StringIO()),
        webdataset.ShardWriter(str(folder / "%06d.tar"), maxsize=shard_bytes, verbose=0) as writer,
    ):
        for sample, files in joined_frames(root):
            writer.write({**sample, **{name: packed(path) for name, path in files.items()}})


def joined_frames(root: Path) -> Iterator[tuple[Row, dict[str, Path]]]:
    """Of each frame key and metadata, and its files by field name."""
    folder = next(path.parent for path in root.glob("*/sample_data.json"))
    tables = {name: _by_token(folder / f"{name}.json") for name in _TABLES}
    sensors: dict[str, list[Row]] = {token: [] for token in tables["sample"]}
    for row in tables["sample_data"].values():
        if row["is_key_frame"] and row["filename"].endswith((".jpg", ".bin")):
            sensors[row["sample_token"]].append(row)
    boxes: dict[str, list[Row]] = {token: [] for token in tables["sample"]}
    for row in tables["sample_annotation"].values():
        category = tables["category"][tables["instance"][row["instance_token"]]["category_token"]]["name"]
        boxes[row["sample_token"]].append({**row, "category": category})
    for token, sample in tables["sample"].items():
        described, files = {}, {}
        for row in sensors[token]:
            calibrated = tables["calibrated_sensor"][row["calibrated_sensor_token"]]
            channel = tables["sensor"][calibrated["sensor_token"]]["channel"].lower()
            described[channel] = {**row, "calibration": calibrated, "pose": tables["ego_pose"][row["ego_pose_token"]]}
            files[f"{channel}.{'bin.zst' if row['filename'].endswith('.bin') else 'jpg'}"] = root / row["filename"]
        meta = {**sample, "sensors": described, "boxes": boxes[token]}
        yield {"__key__": token, "meta.json": json.dumps(meta).encode()}, files


def _by_token(path: Path) -> dict[str, Row]:
    return {row["token"]: row for row in json.loads(path.read_bytes())}
