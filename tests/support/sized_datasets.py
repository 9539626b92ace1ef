"""Datasets of any size without images.

:func:`write_synthetic_index` writes manifest, index and attributes of any size, to measure what orders and resuming
cost; the shards they name do not exist. :func:`make_dataset` writes members of the usual sizes with random content, to
read and not to decode.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet as pq

from fuelrail.pipeline.format.codecs import RAW
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.format.index.attributes_file import ATTRIBUTES_FILE
from fuelrail.pipeline.format.index.row import IndexRow, MemberEntry
from fuelrail.pipeline.format.index.samples import INDEX_FILE, write_index
from fuelrail.sharding.write.packer import RawMember
from support.cameras import MadeSample, write_made_dataset, write_manifest

if TYPE_CHECKING:
    from fuelrail.pipeline.format.dataset import Dataset
    from fuelrail.pipeline.format.manifest import Manifest

_SPAN_BYTES = 1 << 20


def write_synthetic_index(
    root: str | os.PathLike[str],
    clip_lengths: Sequence[int],
    *,
    samples_per_shard: int = 256,
    shuffle_seed: int | None = None,
    attributes: Mapping[str, Sequence[Any]] | None = None,
    split: str = "train",
) -> Manifest:
    """Write such a dataset of one split: clips of the given lengths, stored clip by clip or shuffled by a seed.

    ``attributes`` are columns with a value for each sample, clip by clip; a ``key`` column stands before them.
    """
    folder = Path(root)
    folder.mkdir(parents=True)
    num_samples = sum(clip_lengths)
    clip = np.repeat(np.arange(len(clip_lengths)), clip_lengths)
    frame = np.arange(num_samples) - np.repeat(np.cumsum(clip_lengths) - clip_lengths, clip_lengths)
    stored = np.arange(num_samples)
    if shuffle_seed is not None:
        stored = np.random.default_rng(shuffle_seed).permutation(num_samples)

    def rows() -> Iterator[IndexRow]:
        for place, sample in enumerate(stored.tolist()):
            clip_id = f"clip-{clip[sample]:07d}"
            frame_index = int(frame[sample])
            shard, within = divmod(place, samples_per_shard)
            members = (
                MemberEntry(
                    name="meta.json",
                    offset=512,
                    stored_bytes=1000,
                    raw_bytes=2000,
                    codec="zstd",
                    xxh3=0,
                ),
            )
            key = f"{clip_id}-{frame_index:06d}"
            offset = within * _SPAN_BYTES
            yield IndexRow(
                key=key,
                clip_id=clip_id,
                frame=frame_index,
                timestamp_ns=frame_index * 500_000_000,
                shard=shard,
                offset=offset,
                length=_SPAN_BYTES,
                xxh3=0,
                members=members,
            )

    write_index(folder / INDEX_FILE, rows(), ["meta.json"], ["zstd"])
    if attributes is not None:
        keys = [f"clip-{c:07d}-{f:06d}" for c, f in zip(clip.tolist(), frame.tolist(), strict=True)]
        pq.write_table(
            pa.table({"key": keys, **attributes}).take(stored),
            folder / ATTRIBUTES_FILE,
        )
    lengths = [
        min(samples_per_shard, num_samples - first)
        for first in range(0, num_samples, samples_per_shard)
    ]
    return write_manifest(
        folder,
        lengths,
        num_clips=len(clip_lengths),
        seed=shuffle_seed or 0,
        split=split,
        order_unit="clip" if shuffle_seed is None else "frame",
    )


def even_lengths(num_samples: int, samples_per_shard: int) -> list[int]:
    """Shards of this number of samples each, the last one of the rest."""
    return [
        min(samples_per_shard, num_samples - first)
        for first in range(0, num_samples, samples_per_shard)
    ]


MEMBER_BYTES = {
    "meta.json": 2500,
    "geometry.safetensors": 3500,
    "boxes.safetensors": 6000,
} | {f"cam_{number}.jpg": 145_000 for number in range(6)}
"""A sample of six cameras as nuScenes has it; content is random, for nothing here decodes it."""


def make_dataset(
    folder: Path, num_samples: int, samples_per_shard: int, scale: float = 1.0
) -> Dataset:
    """A dataset of random members, all stored raw, sizes varying by a fifth."""
    rng = np.random.default_rng(0)

    def samples() -> Iterator[MadeSample]:
        for number in range(num_samples):
            key = f"clip-{number:08d}"
            members = [
                RawMember(
                    name,
                    RAW,
                    rng.bytes(int(size * scale * rng.uniform(0.8, 1.2))),
                )
                for name, size in MEMBER_BYTES.items()
            ]
            yield MadeSample(
                key=key,
                clip_id=key,
                frame=0,
                timestamp_ns=number,
                members=members,
            )

    write_made_dataset(folder, even_lengths(num_samples, samples_per_shard), samples())
    return open_dataset(folder)
