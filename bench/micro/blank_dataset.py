"""A dataset to read and not to decode: members of the usual sizes, with random content."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from fuelrail.pipeline.dataset import open_dataset
from fuelrail.pipeline.index import INDEX_FILE, IndexRow, MemberEntry, write_index
from fuelrail.pipeline.manifest import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST_FILE,
    FileEntry,
    Manifest,
    ShardEntry,
    SplitEntry,
    encode_manifest,
)
from fuelrail.pipeline.shardfile import END_OF_ARCHIVE, StoredMember, pack_sample

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
    shards: list[ShardEntry] = []
    for first in range(0, num_samples, samples_per_shard):
        count = min(samples_per_shard, num_samples - first)
        name, offset = f"train-{len(shards):06d}.tar", 0
        with (folder / name).open("wb") as file:
            for number in range(first, first + count):
                key = f"clip-{number:08d}"
                stored = [
                    StoredMember(field, rng.bytes(int(size * scale * rng.uniform(0.8, 1.2))))
                    for field, size in MEMBER_BYTES.items()
                ]
                span = pack_sample(key, stored)
                data = b"".join(span.pieces)
                file.write(data)
                members = tuple(
                    MemberEntry(member.field, at, len(member.data), len(member.data), "raw")
                    for member, at in zip(stored, span.offsets, strict=True)
                )
                digest = xxhash.xxh3_64_intdigest(data)
                rows.append(IndexRow(key, key, 0, number, len(shards), offset, len(data), digest, members))
                offset += len(data)
            file.write(END_OF_ARCHIVE)
        shards.append(
            ShardEntry(
                name=name, split="train", first_sample=first, num_samples=count, bytes=offset + len(END_OF_ARCHIVE),
                sha256="",
            )
        )  # fmt: skip
    write_index(folder / INDEX_FILE, rows, list(MEMBER_BYTES), ["raw"])
    index = (folder / INDEX_FILE).read_bytes()
    manifest = Manifest(
        format=FORMAT, version=FORMAT_VERSION, name="storage benchmark", fingerprint="", num_samples=num_samples,
        num_clips=num_samples, seed=0, order_unit="frame", cameras=(), lidars=(), classes=(), attributes=(),
        time_base="unix", ego_origin="rear_axle_ground", license=None, compression={},
        splits={
            "train": SplitEntry(
                first_sample=0, num_samples=num_samples, first_shard=0, num_shards=len(shards), num_clips=num_samples
            )
        },
        shards=tuple(shards),
        files=(FileEntry(name=INDEX_FILE, bytes=len(index), sha256=hashlib.sha256(index).hexdigest()),),
        provenance={},
    )  # fmt: skip
    (folder / MANIFEST_FILE).write_bytes(encode_manifest(manifest))
    return open_dataset(folder)
