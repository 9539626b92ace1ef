"""Edits of finished datasets after which all digests are right: what a writer's mistake or an attacker leaves."""

from __future__ import annotations

import contextlib
import hashlib
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from fuelrail.pipeline.errors import FuelrailError
from fuelrail.pipeline.format import codecs
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.format.index.blocks import BlockFile
from fuelrail.pipeline.format.index.row import IndexRow, MemberEntry
from fuelrail.pipeline.format.index.samples import INDEX_FILE, write_index
from fuelrail.pipeline.format.index.shards import SHARDS_FILE, ShardTable
from fuelrail.pipeline.format.index.tables import (
    file_entry,
    seal_tables,
    write_tables,
)
from fuelrail.pipeline.format.manifest import (
    Manifest,
    encode_manifest,
    load_manifest,
)
from fuelrail.pipeline.format.tar import (
    END_OF_ARCHIVE,
    StoredMember,
    member_header,
)
from fuelrail.sharding.write.packer import dali_index

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def reseal(
    out: Path,
    change: Callable[[Manifest], Manifest] = lambda manifest: manifest,
) -> None:
    """Make the manifest agree with changed files again, and change it."""
    manifest: Manifest = load_manifest(out)
    shards = []
    for shard in ShardTable(BlockFile(out / SHARDS_FILE), manifest):
        data = (out / shard.name).read_bytes()
        idx = (out / shard.idx_name).read_bytes() if shard.idx_bytes else b""
        stated = {
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            "idx_bytes": len(idx),
        }
        shards.append(
            shard._replace(
                **stated,
                idx_sha256=hashlib.sha256(idx).hexdigest() if idx else "",
            )
        )
    with contextlib.suppress(FuelrailError):  # an index that none can read stays as it is
        write_tables(out, shards)
    seal_tables(out)
    files = tuple(file_entry(out / file.name) for file in manifest.files)
    num_bytes = sum(shard.bytes for shard in shards)
    manifest = msgspec.structs.replace(manifest, num_bytes=num_bytes, files=files)
    (out / "dataset.json").write_bytes(encode_manifest(change(manifest)))


def replace_index(out: Path, dataset, rows, names=None) -> None:
    """Another index in the place of the dataset's, by a rename: rows may still be read from the old one."""
    write_index(
        out / "new",
        rows,
        names or dataset.index.names,
        [*dict.fromkeys((*dataset.index.codecs, "raw"))],
    )
    (out / "new").rename(out / INDEX_FILE)


def rewrite(out: Path, position: int, change: Callable, key: str | None = None) -> IndexRow:
    """Write one sample's shard and the index again, with its raw members changed, all digests right.

    ``change`` changes the dict of raw members by field name, or returns a list of pairs to store instead; no name is
    checked. Returns the sample's old row.
    """
    dataset = open_dataset(out)
    target = dataset.index.row(position)
    shard = dataset.shards[target.shard]
    rows = [dataset.index.row(index) for index in range(len(dataset.index))]
    shard_bytes = (out / shard.name).read_bytes()
    data = bytearray()
    names = dict.fromkeys(dataset.index.names)
    for index in range(shard.first_sample, shard.first_sample + shard.num_samples):
        row = rows[index]
        raw = {
            m.name: bytes(
                codecs.decode(
                    m.codec,
                    shard_bytes[row.offset + m.offset :][: m.stored_bytes],
                    m.raw_bytes,
                )
            )
            for m in row.members
        }
        codec = {m.name: m.codec for m in row.members}
        pairs = list(raw.items())
        if index == position:
            changed = change(raw)
            pairs = changed if isinstance(changed, list) else list(raw.items())
            row = row._replace(key=key or row.key)
        names |= dict.fromkeys(name for name, _ in pairs)
        kinds = [codec.get(name, "raw") for name, _ in pairs]
        stored = [
            StoredMember(n + codecs.suffix(c), codecs.encode(c, d))
            for (n, d), c in zip(pairs, kinds, strict=True)
        ]
        span, offsets = pack_unchecked(row.key, stored)
        entries = tuple(
            MemberEntry(
                name=name,
                offset=offset,
                stored_bytes=len(member.data),
                raw_bytes=len(raw_data),
                codec=kind,
                xxh3=xxhash.xxh3_64_intdigest(member.data),
            )
            for (name, raw_data), kind, offset, member in zip(
                pairs, kinds, offsets, stored, strict=True
            )
        )
        rows[index] = IndexRow(
            *row[:5],
            len(data),
            len(span),
            xxhash.xxh3_64_intdigest(span),
            entries,
        )
        data += span
    (out / shard.name).write_bytes(data + END_OF_ARCHIVE)
    (out / shard.name).with_suffix(".idx").write_bytes(
        dali_index(rows[shard.first_sample : shard.first_sample + shard.num_samples])
    )
    replace_index(out, dataset, rows, list(names))
    reseal(out)
    return target


def pack_unchecked(key: str, stored: list[StoredMember]) -> tuple[bytes, list[int]]:
    """A span as `pack_sample` makes it, whatever the names are."""
    span = bytearray()
    offsets = []
    for field, data in stored:
        span += member_header(f"{key}.{field}", len(data))
        offsets.append(len(span))
        span += bytes(data) + bytes(-len(data) % 512)
    return bytes(span), offsets


def edit_attributes(out: Path, column: str, position: int, value: object) -> None:
    """Change one value of ``attributes.parquet``."""
    table = pq.read_table(out / "attributes.parquet")
    values = table[column].to_pylist()
    values[position] = value
    column_index = table.column_names.index(column)
    pq.write_table(
        table.set_column(
            column_index,
            table.schema.field(column_index),
            pa.array(values, table.schema.types[column_index]),
        ),
        out / "attributes.parquet",
    )
    reseal(out)
