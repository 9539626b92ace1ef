"""Hostile datasets: a small one taken apart, edited, and put together with all digests right, as an attacker would.

::

    with edited(small, tmp_path / "evil") as parts:
        parts.samples[0].members["meta.json"] = Member(b"[" * 100_000)
        parts.manifest["name"] = "\\x1b]0;x\\x07"

Editing happens in the order of the attributes: samples, rows of the index, files, the manifest, and last the folder as
it is, with no digest mended after that.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from fuelrail.pipeline.errors import FuelrailError
from fuelrail.pipeline.format import codecs
from fuelrail.pipeline.format.dataset import (
    open_dataset,
    open_kind,
    read_members,
)
from fuelrail.pipeline.format.index.attributes_file import ATTRIBUTES_FILE
from fuelrail.pipeline.format.index.row import IndexRow, MemberEntry
from fuelrail.pipeline.format.index.samples import INDEX_FILE, write_index
from fuelrail.pipeline.format.index.tables import seal_tables, write_tables
from fuelrail.pipeline.format.layers import EITHER, LayerManifest
from fuelrail.pipeline.format.manifest import (
    MANIFEST_FILE,
    Manifest,
    encode_manifest,
)
from fuelrail.pipeline.format.tar import (
    BLOCK_BYTES,
    END_OF_ARCHIVE,
    member_header,
)
from support.datasets import build_dataset
from support.layers import write_layer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fuelrail.pipeline.format.index.shards import ShardEntry


@dataclass
class Member:
    """One member: raw bytes and codec; ``stored`` and ``raw_bytes`` where they are to differ from what follows."""

    raw: bytes
    codec: str = "raw"
    stored: bytes | None = None
    raw_bytes: int | None = None
    field: str | None = None

    @property
    def bytes_stored(self) -> bytes:
        return bytes(codecs.encode(self.codec, self.raw)) if self.stored is None else self.stored


@dataclass
class SampleParts:
    """One sample: its row of the index as it was, and its members by field name."""

    row: IndexRow
    members: dict[str, Member]
    key: str | None = None


@dataclass
class Parts:
    """A dataset taken apart. The functions edit what is made of the parts before them."""

    root: Path
    manifest: dict[str, Any]
    shards: list[str]
    samples: list[SampleParts]
    edit_span: Callable[[int, bytes], bytes] = lambda _, span: span
    edit_rows: Callable[[list[IndexRow]], list[IndexRow]] = list
    edit_table: Callable[[pa.Table], pa.Table] = lambda table: table
    num_bytes: object = None
    edit_shards: Callable[[list[ShardEntry]], list[ShardEntry]] = list
    edit_files: dict[str, Callable[[bytes], bytes]] = field(default_factory=dict)
    edit_folder: Callable[[Path], object] = lambda _: None


def small_dataset(root: Path) -> Path:
    """Eight samples of two clips in two shards, with attributes."""
    build_dataset(root, {"train": (4, 4)}, size=(64, 48))
    dataset = open_dataset(root)
    rows = [dataset.index.row(index) for index in range(8)]
    columns = {
        name: [getattr(row, name) for row in rows]
        for name in ("key", "clip_id", "frame", "timestamp_ns")
    }
    pq.write_table(
        pa.table({**columns, "split": ["train"] * 8, "night": [True, False] * 4}),
        root / ATTRIBUTES_FILE,
    )
    with edited(root, root) as parts:
        parts.manifest["files"].append({"name": ATTRIBUTES_FILE, "bytes": 0, "sha256": ""})
    return root


def small_layer(base: Path, root: Path) -> Path:
    """A layer of five of the eight samples, with ``rows.npy``."""
    return write_layer(base, root, [5, 1, 2, 7, 0])


def take_apart(root: Path) -> Parts:
    dataset = open_kind(root, EITHER)
    samples = []
    for index in range(len(dataset.index)):
        row = dataset.index.row(index)
        data = dataset.shard_path(row).read_bytes()[row.offset : row.offset + row.length]
        raw = read_members(row, data, "x.tar")
        samples.append(
            SampleParts(
                row,
                {entry.name: Member(bytes(raw[entry.name]), entry.codec) for entry in row.members},
            )
        )
    manifest = json.loads((root / MANIFEST_FILE).read_bytes())
    return Parts(root, manifest, [entry.name for entry in dataset.shards], samples)


@contextlib.contextmanager
def edited(root: Path, out: Path) -> Iterator[Parts]:
    """The parts of the dataset ``root``, written to ``out`` with all digests mended when the block ends."""
    parts = take_apart(root)
    yield parts
    if out != root:
        shutil.copytree(root, out)
    rows = _write_shards(out, parts)
    rows = parts.edit_rows(rows)
    names = list(dict.fromkeys(entry.name for row in rows for entry in row.members))
    kinds = sorted({entry.codec for row in rows for entry in row.members} | {"raw"})
    write_index(out / INDEX_FILE, rows, names, kinds)
    _edit_index(out / INDEX_FILE, parts.edit_table)
    shards = parts.edit_shards([_shard_now(entry, out) for entry in open_kind(root, EITHER).shards])
    with contextlib.suppress(
        FuelrailError
    ):  # of an index that none can read, the keys stay as they are
        write_tables(out, shards)
    for name, edit in parts.edit_files.items():
        (out / name).write_bytes(edit((out / name).read_bytes()))
    seal_tables(out)
    with contextlib.suppress(TypeError, ValueError):
        parts.manifest["num_bytes"] = parts.num_bytes or sum(shard.bytes for shard in shards)
    for entry in _listed(parts.manifest["files"]):
        with contextlib.suppress(OSError, ValueError, TypeError):  # a name or a list that is none
            _state(entry, out)
    (out / MANIFEST_FILE).write_bytes(sealed(parts.manifest))
    parts.edit_folder(out)


def _shard_now(entry: ShardEntry, out: Path) -> ShardEntry:
    data = (out / entry.name).read_bytes()
    (out / entry.idx_name).unlink(missing_ok=True)  # no dataset needs one
    return entry._replace(bytes=len(data), sha256=hashlib.sha256(data).hexdigest(), idx_bytes=0)


def sealed(manifest: dict[str, Any]) -> bytes:
    """The bytes of ``dataset.json`` with the fingerprint of that content."""
    try:
        return encode_manifest(
            msgspec.convert(manifest, LayerManifest if "base" in manifest else Manifest)
        )
    except (msgspec.MsgspecError, UnicodeEncodeError, OverflowError):
        blank = json.dumps(
            {**manifest, "fingerprint": ""},
            sort_keys=True,
            separators=(",", ":"),
        )
        return json.dumps(
            {
                **manifest,
                "fingerprint": hashlib.sha256(blank.encode()).hexdigest(),
            }
        ).encode()


def _listed(entries: object) -> list[Any]:
    return entries if isinstance(entries, list) else []


def _state(entry: dict[str, Any], out: Path) -> None:
    data = (out / entry["name"]).read_bytes()
    entry["bytes"], entry["sha256"] = (
        len(data),
        hashlib.sha256(data).hexdigest(),
    )


def _write_shards(out: Path, parts: Parts) -> list[IndexRow]:
    rows = []
    names = parts.shards
    data = [bytearray() for _ in names]
    for sample in parts.samples:
        key = sample.row.key if sample.key is None else sample.key
        span = b""
        entries = []
        for name, member in sample.members.items():
            stored = member.bytes_stored
            stated = member.field or name + codecs.suffix(member.codec)
            span += member_header(f"{key}.{stated}", len(stored))
            raw_bytes = len(member.raw) if member.raw_bytes is None else member.raw_bytes
            entries.append(
                MemberEntry(
                    name=name,
                    offset=len(span),
                    stored_bytes=len(stored),
                    raw_bytes=raw_bytes,
                    codec=member.codec,
                    xxh3=xxhash.xxh3_64_intdigest(stored),
                )
            )
            span += stored + bytes(-len(stored) % BLOCK_BYTES)
        shard = data[sample.row.shard]
        span = parts.edit_span(len(rows), bytes(span))
        rows.append(
            sample.row._replace(
                key=key,
                offset=len(shard),
                length=len(span),
                xxh3=xxhash.xxh3_64_intdigest(span),
                members=tuple(entries),
            )
        )
        shard += span
    for name, content in zip(names, data, strict=True):
        (out / name).write_bytes(bytes(content) + END_OF_ARCHIVE)
    return rows


def _edit_index(path: Path, edit: Callable[[pa.Table], pa.Table]) -> None:
    with pa.ipc.open_file(path.read_bytes()) as file:
        table = file.read_all()
    table = edit(table)
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema) as writer:
        for batch in table.combine_chunks().to_batches():
            writer.write_batch(batch)
    path.write_bytes(sink.getvalue())
