"""A dataset for the loader's benchmarks: six 1600x900 cameras a sample, of about 150 kB each."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pyarrow as pa

from fuelrail.bench.micro.decode import SOURCE_WH, made_image
from fuelrail.bench.micro.made_dataset import MadeSample, write_made_dataset
from fuelrail.bench.micro.metadata import CHANNELS, sample_members
from fuelrail.pipeline.channels.sensors import CameraEntry, channel_table
from fuelrail.pipeline.format import codecs
from fuelrail.pipeline.format.dataset import Dataset, open_dataset
from fuelrail.pipeline.format.index.samples import INDEX_FILE, ROWS_PER_BATCH, write_index
from fuelrail.pipeline.format.index.tables import write_tables
from fuelrail.pipeline.format.manifest import MANIFEST_FILE, encode_manifest
from fuelrail.pipeline.sample.schema import GEOMETRY, META, Geometry, Meta, decode_arrays, encode_arrays
from fuelrail.sharding.write.packer import RawMember

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


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
        name: getattr(geometry, name)[:0] for name in ("lidar2ego", "lidar_ego2global", "lidar_timestamp_ns")
    }
    sizes_wh = np.tile(np.array(SOURCE_WH, np.int32), (len(channels), 1))
    of_cameras = ("cam_valid", "cam_timestamp_ns", "intrinsics", "dist", "cam2ego", "cam_ego2global")
    of_the_first = {name: getattr(geometry, name)[: len(channels)] for name in of_cameras}
    members[GEOMETRY] = encode_arrays(replace(geometry, img_wh=sizes_wh, **of_the_first, **without_lidar))
    meta = msgspec.json.decode(members[META], type=Meta)
    meta = msgspec.structs.replace(meta, cameras={channel: meta.cameras[channel] for channel in channels})
    bounds = [num_samples * number // num_shards for number in range(num_shards + 1)]

    def samples() -> Iterator[MadeSample]:
        for number in range(num_samples):
            key = f"scene-{number // 40:04d}-{number % 40:06d}"
            own = msgspec.json.encode(msgspec.structs.replace(meta, key=key, clip_id=key[:10], frame_idx=number % 40))
            small = [RawMember(name, codecs.ZSTD, data) for name, data in {**members, META: own}.items()]
            images = [RawMember(f"{channel}.jpg", codecs.RAW, picture) for channel in channels]
            yield MadeSample(key, key[:10], number % 40, 0, [*small, *images])

    manifest = write_made_dataset(folder, np.diff(bounds).tolist(), samples())
    cameras = tuple(
        CameraEntry(channel=channel, source_name=channel.upper(), sizes=(SOURCE_WH,)) for channel in channels
    )
    manifest = msgspec.structs.replace(manifest, channels=channel_table(cameras, manifest.lidars), fingerprint="")
    (folder / MANIFEST_FILE).write_bytes(encode_manifest(manifest))
    return open_dataset(folder)


def write_large(folder: Path, source: Dataset, num_samples: int) -> Dataset:
    """A dataset of ``num_samples`` whose index repeats the entries of ``source``, which has one shard; and open it.

    The index's first block of rows comes from the index writer, the others are copies of it.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    index, (shard,) = source.index, source.shards
    (folder / shard.name).hardlink_to(source.root / shard.name)
    block = folder / "block.arrow"
    rows = (index.row(number % len(index)) for number in range(ROWS_PER_BATCH))
    write_index(block, rows, index.names, index.codecs)
    with pa.memory_map(str(block)) as mapped:
        reader = pa.ipc.open_file(mapped)
        batch = reader.get_batch(0)
        with pa.OSFile(str(folder / INDEX_FILE), "wb") as sink, pa.ipc.new_file(sink, reader.schema) as writer:
            for first in range(0, num_samples, ROWS_PER_BATCH):
                writer.write_batch(batch.slice(0, min(ROWS_PER_BATCH, num_samples - first)))
    block.unlink()
    ((name, split),) = source.manifest.splits.items()
    manifest = msgspec.structs.replace(
        source.manifest, num_samples=num_samples,
        files=tuple(write_tables(folder, [shard._replace(num_samples=num_samples)])),
        splits={name: msgspec.structs.replace(split, num_samples=num_samples)},
    )  # fmt: skip
    (folder / MANIFEST_FILE).write_bytes(encode_manifest(manifest))
    return open_dataset(folder)
