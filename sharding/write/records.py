"""Records of finished shards: what the index and a resumed run need; deleted when the dataset is
finished.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Final

import msgspec

from fuelrail.pipeline.format.index.row import IndexRow
from fuelrail.pipeline.format.index.shards import ShardEntry
from fuelrail.pipeline.format.manifest import WORK_FOLDER

if TYPE_CHECKING:
    from fuelrail.sharding.output.folder import Output

_RECORDS: Final = f"{WORK_FOLDER}/records"
_LARGEST: Final = (1 << 63) - 1


class ShardRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a written shard: its entry, its rows of the index, its images' sizes (w, h).

    ``source_sha256`` is of all that it was made from, but for the bytes of the source's files: rows
    of the scan table, which have metadata and the names and sizes of files, and what all rows of a
    run have in common. ``source_stamp`` is those files' times of change, or the ETags that a store
    gives them.
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
    digest = hashlib.sha256(listing).hexdigest()
    return shard._replace(idx_bytes=len(listing), idx_sha256=digest)


def record_name(stem: str) -> str:
    """Return the name of a shard's record in OUT."""
    return f"{_RECORDS}/{stem}.msgpack"


def load_record(out: Output, stem: str) -> ShardRecord | None:
    """Return a shard's record; None where there is none that has the names of this shard and
    numbers that an index can hold.

    Where there is none, the shard is written again.
    """
    data = out.read(record_name(stem))
    if data is None:
        return None
    try:
        record = msgspec.msgpack.decode(data, type=ShardRecord)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    shard = record.shard
    if record.stem != stem or shard.name not in (f"{stem}.tar", f"{stem}.tar.zst"):
        return None
    if len(record.rows) != shard.num_samples:
        return None
    if not 0 <= shard.bytes <= _LARGEST or not 0 <= shard.idx_bytes <= _LARGEST:
        return None
    if not _is_sha256(shard.sha256):
        return None
    if shard.idx_bytes and not _is_sha256(shard.idx_sha256):
        return None
    for row in record.rows:
        is_inside = 0 <= row.offset <= row.offset + row.length <= shard.bytes
        is_frame = abs(row.frame) < 1 << 31
        is_time = abs(row.timestamp_ns) <= _LARGEST
        is_hash = row.xxh3 >= 0
        if not (is_inside and is_frame and is_time and is_hash):
            return None
        for entry in row.members:
            sizes = (entry.offset, entry.stored_bytes, entry.raw_bytes)
            if min(sizes) < 0 or max(sizes) > _LARGEST or entry.xxh3 < 0:
                return None
    return record


def _is_sha256(text: str) -> bool:
    return re.fullmatch("[0-9a-f]{64}", text) is not None


def store_record(out: Output, record: ShardRecord) -> None:
    """Store a shard's record, before the shard gets its name: without a record, a shard may be
    any file.
    """
    with out.publish(record_name(record.stem)) as file:
        file.write(msgspec.msgpack.encode(record))


def store_version_tag(out: Output, record: ShardRecord) -> None:
    """Store the ETag of a shard that was just published, so that a resumed run need not read it."""
    tag = out.version_tag(record.shard.name)
    if tag:
        with out.publish(f"{_RECORDS}/{record.stem}.tag") as file:
            file.write(tag.encode())


def is_whole(out: Output, record: ShardRecord) -> bool:
    """Return whether OUT holds shard and DALI index as recorded: by version tag if there is one,
    else by a read.
    """
    shard = record.shard
    has_listing = shard.idx_bytes > 0
    if has_listing and not out.holds(shard.idx_name, shard.idx_bytes, shard.idx_sha256):
        return False
    tag = out.read(f"{_RECORDS}/{record.stem}.tag")
    if tag:
        stored_tag = tag.decode(errors="replace")
        if stored_tag == out.version_tag(shard.name):
            return True
    return out.holds(shard.name, shard.bytes, shard.sha256)
