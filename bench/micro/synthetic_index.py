"""Datasets without sensor data: manifest, index and attributes of any size, to measure what orders and resuming cost.

The shards they name do not exist. All that concerns order, batching and the index runs on them as on real data.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet as pq

from fuelrail.pipeline.format.index.attributes_file import ATTRIBUTES_FILE
from fuelrail.pipeline.format.index.row import IndexRow, MemberEntry
from fuelrail.pipeline.format.index.samples import INDEX_FILE, write_index
from fuelrail.pipeline.format.index.shards import ShardEntry, shard_name
from fuelrail.pipeline.format.index.tables import write_tables
from fuelrail.pipeline.format.manifest import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST_FILE,
    FileEntry,
    Lineage,
    Manifest,
    SplitEntry,
    encode_manifest,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence

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
            clip_id, at = f"clip-{clip[sample]:07d}", int(frame[sample])
            shard, within = divmod(place, samples_per_shard)
            members = (MemberEntry("meta.json", 512, 1000, 2000, "zstd", 0),)
            key, offset = f"{clip_id}-{at:06d}", within * _SPAN_BYTES
            yield IndexRow(key, clip_id, at, at * 500_000_000, shard, offset, _SPAN_BYTES, 0, members)

    write_index(folder / INDEX_FILE, rows(), ["meta.json"], ["zstd"])
    if attributes is not None:
        keys = [f"clip-{c:07d}-{f:06d}" for c, f in zip(clip.tolist(), frame.tolist(), strict=True)]
        pq.write_table(pa.table({"key": keys, **attributes}).take(stored), folder / ATTRIBUTES_FILE)
    lengths = [min(samples_per_shard, num_samples - first) for first in range(0, num_samples, samples_per_shard)]
    return write_manifest(
        folder, lengths, num_clips=len(clip_lengths), seed=shuffle_seed or 0, split=split,
        order_unit="clip" if shuffle_seed is None else "frame",
    )  # fmt: skip


def write_manifest(
    folder: Path, shard_lengths: Sequence[int], *, num_clips: int, split: str, seed: int = 0, order_unit: str = "frame",
    shard_bytes: Sequence[int] | None = None,
) -> Manifest:  # fmt: skip
    """Write tables and manifest of a dataset of one split without cameras, whose index is in the folder."""
    firsts = np.cumsum([0, *shard_lengths]).tolist()
    shards = tuple(
        ShardEntry(
            name=shard_name(split, number), split=split, first_sample=firsts[number], num_samples=length,
            bytes=0 if shard_bytes is None else shard_bytes[number], sha256="0" * 64,
        )
        for number, length in enumerate(shard_lengths)
    )  # fmt: skip
    whole = SplitEntry(
        first_sample=0, num_samples=firsts[-1], first_shard=0, num_shards=len(shards), num_clips=num_clips
    )
    entries = write_tables(folder, shards)
    manifest = dataset_manifest(
        {split: whole}, entries, sum(shard.bytes for shard in shards), num_clips=num_clips, seed=seed,
        order_unit=order_unit,
    )  # fmt: skip
    (folder / MANIFEST_FILE).write_bytes(encode_manifest(manifest))
    return manifest


def dataset_manifest(
    splits: Mapping[str, SplitEntry], files: Sequence[FileEntry], num_bytes: int, *, num_clips: int, seed: int = 0,
    order_unit: str = "frame",
) -> Manifest:  # fmt: skip
    """The manifest of a dataset without cameras that has these splits and files."""
    return Manifest(
        format=FORMAT, version=FORMAT_VERSION, name="synthetic", fingerprint="",
        num_samples=sum(split.num_samples for split in splits.values()), num_clips=num_clips, num_bytes=num_bytes,
        seed=seed, order_unit=order_unit, channels=(), classes=(), attributes=(), time_base="unix",
        ego_origin="rear_axle_ground", license=None, compression={}, provenance={}, lineage=Lineage(),
        files=tuple(files), splits=dict(splits),
    )  # fmt: skip
