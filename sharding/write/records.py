"""Records of finished shards: what the index and a resumed run need; deleted when the dataset is finished."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import msgspec

from fuelrail.pipeline.format.index.row import IndexRow
from fuelrail.pipeline.format.index.shards import ShardEntry
from fuelrail.pipeline.format.manifest import WORK_FOLDER

if TYPE_CHECKING:
    from fuelrail.sharding.output.folder import Output

_RECORDS: Final = f"{WORK_FOLDER}/records"


class ShardRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a written shard: its entry, its rows of the index, its images' sizes (w, h).

    ``source_sha256`` is of all that it was made from, but for the bytes of the source's files: rows of the scan table,
    which have metadata and the names and sizes of files, and what all rows of a run have in common. ``source_stamp`` is
    those files' times of change, or the ETags that a store gives them.
    """

    stem: str
    shard: ShardEntry
    rows: list[IndexRow]
    image_sizes: dict[str, list[tuple[int, int]]]
    source_sha256: str
    source_stamp: int = 0


def publish_listing(out: Output, shard: ShardEntry, listing: bytes) -> ShardEntry:
    """Publish a shard's DALI index, if it has one; return its entry with that.

    In the frame layout, which DALI does not read, it has none.
    """
    if not listing:
        return shard
    with out.publish(shard.idx_name) as file:
        file.write(listing)
    return shard._replace(idx_bytes=len(listing), idx_sha256=hashlib.sha256(listing).hexdigest())


def record_name(stem: str) -> str:
    """Return the name of a shard's record in OUT."""
    return f"{_RECORDS}/{stem}.msgpack"


def load_record(out: Output, stem: str) -> ShardRecord | None:
    """Return a shard's record; None where there is none, or none that can be read."""
    data = out.read(record_name(stem))
    try:
        return None if data is None else msgspec.msgpack.decode(data, type=ShardRecord)
    except msgspec.DecodeError:
        return None


def store_record(out: Output, record: ShardRecord) -> None:
    """Store a shard's record, before the shard gets its name: without a record, a shard may be any file."""
    with out.publish(record_name(record.stem)) as file:
        file.write(msgspec.msgpack.encode(record))


def store_version_tag(out: Output, record: ShardRecord) -> None:
    """Store the ETag of a shard that was just published, so that a resumed run need not read it."""
    if tag := out.version_tag(record.shard.name):
        with out.publish(f"{_RECORDS}/{record.stem}.tag") as file:
            file.write(tag.encode())


def is_whole(out: Output, record: ShardRecord) -> bool:
    """Return whether OUT holds shard and DALI index as recorded: by version tag if there is one, else by a read."""
    shard = record.shard
    if shard.idx_bytes and not out.holds(shard.idx_name, shard.idx_bytes, shard.idx_sha256):
        return False
    tag = out.read(f"{_RECORDS}/{record.stem}.tag")
    if tag is not None and tag.decode(errors="replace") == out.version_tag(shard.name):
        return True
    return out.holds(shard.name, shard.bytes, shard.sha256)
