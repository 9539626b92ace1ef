"""A dataset to read and not to decode: members of the usual sizes, with random content."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xxhash

from fuelrail.bench.synthetic_index import file_entry, write_manifest
from fuelrail.pipeline.dataset import open_dataset
from fuelrail.pipeline.index import INDEX_FILE, IndexRow, MemberEntry, write_index
from fuelrail.pipeline.shardfile import END_OF_ARCHIVE, StoredMember, pack_sample
from fuelrail.sharding.blocks import BlockWriter

if TYPE_CHECKING:
    from pathlib import Path

    from fuelrail.pipeline.dataset import Dataset

MEMBER_BYTES = {"meta.json": 2500, "geometry.safetensors": 3500, "boxes.safetensors": 6000} | {
    f"cam_{number}.jpg": 145_000 for number in range(6)
}
"""A sample of six cameras as nuScenes has it; content is random, for nothing here decodes it."""


def make_dataset(folder: Path, num_samples: int, samples_per_shard: int, scale: float = 1.0) -> Dataset:
    """A dataset of random members, all stored raw, sizes varying by a fifth."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    rows: list[IndexRow] = []
    lengths = [min(samples_per_shard, num_samples - first) for first in range(0, num_samples, samples_per_shard)]
    sizes: list[int] = []
    for shard, length in enumerate(lengths):
        offset = 0
        with (folder / f"train-{shard:06d}.tar").open("wb") as opened:
            file = BlockWriter(opened)  # as sharding writes
            for number in range(shard * samples_per_shard, shard * samples_per_shard + length):
                key = f"clip-{number:08d}"
                stored = [
                    StoredMember(field, rng.bytes(int(size * scale * rng.uniform(0.8, 1.2))))
                    for field, size in MEMBER_BYTES.items()
                ]
                span = pack_sample(key, stored)
                data = b"".join(span.pieces)
                file.write([data])
                members = tuple(
                    MemberEntry(member.field, at, len(member.data), len(member.data), "raw")
                    for member, at in zip(stored, span.offsets, strict=True)
                )
                digest = xxhash.xxh3_64_intdigest(data)
                rows.append(IndexRow(key, key, 0, number, shard, offset, len(data), digest, members))
                offset += len(data)
            file.write([END_OF_ARCHIVE])
            file.flush()
        sizes.append(offset + len(END_OF_ARCHIVE))
    write_index(folder / INDEX_FILE, rows, list(MEMBER_BYTES), ["raw"])
    files = [file_entry(folder / INDEX_FILE)]
    write_manifest(folder, lengths, num_clips=num_samples, split="train", files=files, shard_bytes=sizes)
    return open_dataset(folder)
