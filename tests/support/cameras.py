"""A made dataset with six 1600x900 cameras a sample, of about 150 kB each, and what else makes datasets of any samples.

Datasets are packed as ``fuelrail shard`` packs them, with index and manifest.
"""

from __future__ import annotations

import io
import shutil
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from PIL import Image

from fuelrail.pipeline.channels.sensors import CameraEntry, channel_table
from fuelrail.pipeline.format import codecs
from fuelrail.pipeline.format.codecs import DEFAULT_ZSTD_LEVEL
from fuelrail.pipeline.format.dataset import Dataset, open_dataset
from fuelrail.pipeline.format.index.samples import INDEX_FILE, write_index
from fuelrail.pipeline.format.index.shards import ShardEntry, shard_name
from fuelrail.pipeline.format.index.tables import write_tables
from fuelrail.pipeline.format.manifest import (
    MANIFEST_FILE,
    Manifest,
    SplitEntry,
    encode_manifest,
)
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
    decode_arrays,
    encode_arrays,
    encode_meta,
)
from fuelrail.sharding.write.packer import RawMember, ShardPacker
from fuelrail.sharding.write.read_buffer import ReadBuffer
from support.datasets import dataset_manifest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from fuelrail.pipeline.format.index.row import IndexRow


SOURCE_WH = (1600, 900)
CHANNELS = (
    "cam_front",
    "cam_front_right",
    "cam_front_left",
    "cam_back",
    "cam_back_left",
    "cam_back_right",
)
NUM_BOXES = 34  # nuScenes' mean
KEY = "scene-0061-000012"
_INTRINSICS = [[1266.0, 0.0, 816.0], [0.0, 1266.0, 491.0], [0.0, 0.0, 1.0]]


def made_image(quality: int = 85) -> bytes:
    """A 1600x900 JPEG, 4:2:0, of about 150 kB: noise whose amplitude falls with frequency, and some edges."""
    width, height = SOURCE_WH
    rng = np.random.default_rng(0)
    fy = np.fft.fftfreq(height)[:, None]
    fx = np.fft.rfftfreq(width)[None]
    spectrum = np.maximum(np.hypot(fy, fx), 1 / width) ** -1.6
    planes = []
    for _ in range(3):
        field = np.fft.irfft2(
            np.fft.rfft2(rng.standard_normal((height, width))) * spectrum,
            s=(height, width),
        )
        planes.append(128 + 45 * field / field.std())
    picture = np.stack(planes, axis=-1)
    for _ in range(60):
        x = int(rng.integers(width))
        y = int(rng.integers(height))
        picture[y : y + int(rng.integers(9, 160)), x : x + int(rng.integers(9, 240))] += (
            rng.uniform(-60, 60, 3)
        )
    with io.BytesIO() as file:
        pixels = np.clip(picture, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(file, "jpeg", quality=quality, subsampling="4:2:0")
        return file.getvalue()


def sample_members() -> dict[str, bytes]:
    """``meta.json``, geometry and boxes of one sample with six cameras, a lidar and as many boxes as usual."""
    rng = np.random.default_rng(0)
    count = len(CHANNELS)
    time_ns = 1_532_402_927_647_951_000
    unknown = np.full(3, np.nan)

    def poses(number: int) -> Any:
        return rigid(rng.normal(size=(number, 4)), rng.uniform(-1000, 1000, (number, 3)))

    meta = Meta(
        schema=SCHEMA,
        dataset="nuscenes",
        key=KEY,
        sample_token="ca9a282c9e77460f8360f564131a8af5",
        clip_id="scene-0061",
        clip_token="cc8c0bf57f984915a77078b10eb33198",
        clip_name="scene-0061",
        log_id="n015-2018-07-24-11-22-45+0800",
        vehicle="n015",
        frame_idx=12,
        num_frames=39,
        prev_key="scene-0061-000011",
        next_key="scene-0061-000013",
        timestamp_ns=time_ns,
        is_key_frame=True,
        split="train",
        tags={"location": "singapore-onenorth", "night": False, "rain": False},
        cameras={
            channel: CameraMeta(
                token="e3d495d4ac534d54b321f50006683844",
                timestamp_ns=time_ns,
                width=1600,
                height=900,
            )
            for channel in CHANNELS
        },
    )
    geometry = Geometry(
        cam_valid=np.ones(count, np.uint8),
        cam_timestamp_ns=time_ns + np.arange(count),
        img_wh=np.tile(np.array([1600, 900], np.int32), (count, 1)),
        intrinsics=np.tile(_INTRINSICS, (count, 1, 1)),
        dist=np.full((count, NUM_DIST), np.nan),
        cam2ego=poses(count),
        cam_ego2global=poses(count),
        ego2global=poses(1)[0],
        lidar2ego=poses(1),
        lidar_ego2global=poses(1),
        lidar_timestamp_ns=np.array([time_ns]),
        ego_velocity=unknown,
        ego_accel=unknown,
        ego_rates=unknown,
    )
    rotation = np.zeros((NUM_BOXES, 4), np.float32)
    rotation[:, 0] = 1
    boxes = Boxes(
        boxes3d=rng.uniform(0.5, 4.0, (NUM_BOXES, 7)).astype(np.float32),
        rotation_wxyz=rotation,
        velocity=rng.random((NUM_BOXES, 3), np.float32),
        label=np.full(NUM_BOXES, -1, np.int16),
        instance_id=np.arange(NUM_BOXES),
        num_lidar_pts=np.ones(NUM_BOXES, np.int32),
        num_radar_pts=np.ones(NUM_BOXES, np.int32),
        visibility=np.ones(NUM_BOXES, np.int8),
        attribute=np.full(NUM_BOXES, -1, np.int16),
        valid=np.ones(NUM_BOXES, np.uint8),
    )
    return {
        META: encode_meta(meta),
        GEOMETRY: encode_arrays(geometry),
        BOXES: encode_arrays(boxes),
    }


def write_cameras(
    folder: Path,
    num_samples: int,
    *,
    num_shards: int = 4,
    image: bytes | None = None,
    channels: Sequence[str] = CHANNELS,
) -> Dataset:
    """Write it again and open it; all images are one picture (``image``: a JPEG of 1600x900 to take), no lidar.

    ``channels`` are the first cameras of the rig, or all.
    """
    shutil.rmtree(folder, ignore_errors=True)
    picture = made_image() if image is None else image
    members = sample_members()
    geometry = decode_arrays(members[GEOMETRY], Geometry)
    without_lidar = {
        name: getattr(geometry, name)[:0]
        for name in ("lidar2ego", "lidar_ego2global", "lidar_timestamp_ns")
    }
    sizes_wh = np.tile(np.array(SOURCE_WH, np.int32), (len(channels), 1))
    of_cameras = (
        "cam_valid",
        "cam_timestamp_ns",
        "intrinsics",
        "dist",
        "cam2ego",
        "cam_ego2global",
    )
    of_the_first = {name: getattr(geometry, name)[: len(channels)] for name in of_cameras}
    members[GEOMETRY] = encode_arrays(
        replace(geometry, img_wh=sizes_wh, **of_the_first, **without_lidar)
    )
    meta = msgspec.json.decode(members[META], type=Meta)
    meta = msgspec.structs.replace(
        meta, cameras={channel: meta.cameras[channel] for channel in channels}
    )
    bounds = [num_samples * number // num_shards for number in range(num_shards + 1)]

    def samples() -> Iterator[MadeSample]:
        for number in range(num_samples):
            key = f"scene-{number // 40:04d}-{number % 40:06d}"
            sample_meta = msgspec.json.encode(
                msgspec.structs.replace(meta, key=key, clip_id=key[:10], frame_idx=number % 40)
            )
            small = [
                RawMember(name, codecs.ZSTD, data)
                for name, data in {**members, META: sample_meta}.items()
            ]
            images = [RawMember(f"{channel}.jpg", codecs.RAW, picture) for channel in channels]
            yield MadeSample(
                key=key,
                clip_id=key[:10],
                frame=number % 40,
                timestamp_ns=0,
                members=[*small, *images],
            )

    manifest = write_made_dataset(folder, np.diff(bounds).tolist(), samples())
    cameras = tuple(
        CameraEntry(channel=channel, source_name=channel.upper(), sizes=(SOURCE_WH,))
        for channel in channels
    )
    manifest = msgspec.structs.replace(
        manifest,
        channels=channel_table(cameras, manifest.lidars),
        fingerprint="",
    )
    (folder / MANIFEST_FILE).write_bytes(encode_manifest(manifest))
    return open_dataset(folder)


class MadeSample(NamedTuple):
    """One sample to write."""

    key: str
    clip_id: str
    frame: int
    timestamp_ns: int
    members: Sequence[RawMember]


def write_made_dataset(
    folder: Path, shard_lengths: Sequence[int], samples: Iterable[MadeSample]
) -> Manifest:
    """Write a new folder: split ``train``, no cameras named in its manifest, the samples in their order."""
    folder.mkdir(parents=True)
    buffer = ReadBuffer()
    coming = iter(samples)
    rows: list[IndexRow] = []
    sizes: list[int] = []
    for shard, length in enumerate(shard_lengths):
        with (folder / f"train-{shard:06d}.tar").open("wb") as file:
            packer = ShardPacker(
                file=file,
                number=shard,
                level=DEFAULT_ZSTD_LEVEL,
                dictionary=None,
                buffer=buffer,
            )
            for sample in islice(coming, length):
                packer.add(*sample)
                buffer.clear()
            packed = packer.close()
        rows += packed.rows
        sizes.append(packed.num_bytes)
    members = [member for row in rows for member in row.members]
    names = dict.fromkeys(member.name for member in members)
    used = sorted({member.codec for member in members})
    write_index(folder / INDEX_FILE, rows, list(names), used)
    num_clips = len({row.clip_id for row in rows})
    return write_manifest(
        folder,
        shard_lengths,
        num_clips=num_clips,
        split="train",
        shard_bytes=sizes,
    )


def write_manifest(
    folder: Path,
    shard_lengths: Sequence[int],
    *,
    num_clips: int,
    split: str,
    seed: int = 0,
    order_unit: str = "frame",
    shard_bytes: Sequence[int] | None = None,
) -> Manifest:
    """Write tables and manifest of a dataset of one split without cameras, whose index is in the folder."""
    firsts = np.cumsum([0, *shard_lengths]).tolist()
    shards = tuple(
        ShardEntry(
            name=shard_name(split, number),
            split=split,
            first_sample=firsts[number],
            num_samples=length,
            bytes=0 if shard_bytes is None else shard_bytes[number],
            sha256="0" * 64,
        )
        for number, length in enumerate(shard_lengths)
    )
    split_entry = SplitEntry(
        first_sample=0,
        num_samples=firsts[-1],
        first_shard=0,
        num_shards=len(shards),
        num_clips=num_clips,
    )
    entries = write_tables(folder, shards)
    manifest = dataset_manifest(
        {split: split_entry},
        entries,
        sum(shard.bytes for shard in shards),
        seed=seed,
        order_unit=order_unit,
    )
    (folder / MANIFEST_FILE).write_bytes(encode_manifest(manifest))
    return manifest
