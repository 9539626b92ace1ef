"""Datasets of any samples, for benchmarks: packed as ``fuelrail shard`` packs them, with index and manifest."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from fuelrail.bench.micro.datasets import write_manifest
from fuelrail.pipeline.format.codecs import DEFAULT_ZSTD_LEVEL
from fuelrail.pipeline.format.index.samples import INDEX_FILE, write_index
from fuelrail.sharding.write.blocks import ReadBuffer
from fuelrail.sharding.write.packer import ShardPacker

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from fuelrail.pipeline.format.index.row import IndexRow
    from fuelrail.pipeline.format.manifest import Manifest
    from fuelrail.sharding.write.packer import RawMember


class MadeSample(NamedTuple):
    """One sample to write."""

    key: str
    clip_id: str
    frame: int
    timestamp_ns: int
    members: Sequence[RawMember]


def write_made_dataset(folder: Path, shard_lengths: Sequence[int], samples: Iterable[MadeSample]) -> Manifest:
    """Write a new folder: split ``train``, no cameras named in its manifest, the samples in their order."""
    folder.mkdir(parents=True)
    buffer, coming = ReadBuffer(), iter(samples)
    rows: list[IndexRow] = []
    sizes: list[int] = []
    for shard, length in enumerate(shard_lengths):
        with (folder / f"train-{shard:06d}.tar").open("wb") as file:
            packer = ShardPacker(file, shard, DEFAULT_ZSTD_LEVEL, None, buffer)
            for sample in islice(coming, length):
                packer.add(*sample)
                buffer.clear()
            packed = packer.close()
        rows += packed.rows
        sizes.append(packed.num_bytes)
    members = [member for row in rows for member in row.members]
    names, codecs = dict.fromkeys(member.name for member in members), sorted({member.codec for member in members})
    write_index(folder / INDEX_FILE, rows, list(names), codecs)
    num_clips = len({row.clip_id for row in rows})
    return write_manifest(folder, shard_lengths, num_clips=num_clips, split="train", shard_bytes=sizes)


def even_lengths(num_samples: int, samples_per_shard: int) -> list[int]:
    """Shards of this number of samples each, the last one of the rest."""
    return [min(samples_per_shard, num_samples - first) for first in range(0, num_samples, samples_per_shard)]
