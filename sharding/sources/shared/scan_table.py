"""The scan table: one Arrow row for each sample of a source; what planning and writing work on.

What plans, selections and indices are made of are columns. What a shard is made of is one more,
MessagePack: of each sample the small members (meta, geometry, boxes) as bytes and the sensor
members as references with their sizes, so that a shard is written from the table and the sensor
files alone, and a sample, which no plan leaves beside the one before it, is read in one piece. The
file is written in batches of ``ROWS_PER_BATCH`` rows, its columns are read memory-mapped and its
samples one by one, so its size is bounded by the disk and not by memory.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.format.codecs import member_cap
from fuelrail.pipeline.format.index.attributes_file import (
    MAX_COLUMNS,
    MAX_TEXT_BYTES,
    NUM_OF_SAMPLES,
)
from fuelrail.pipeline.format.tar import check_key
from fuelrail.pipeline.sample.schema import (
    BOXES,
    GEOMETRY,
    META,
    POINTS_EXTENSION,
    SWEEPS_FIELD,
    Meta,
    encode_meta,
)
from fuelrail.pipeline.storage.columns import Disk, numpy_dtype
from fuelrail.pipeline.text import shortened

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import U64
    from fuelrail.sharding.sources.shared.pictures import Depth

ROWS_PER_BATCH: Final = 1024
ROWS_PER_PART: Final = 16 * ROWS_PER_BATCH
CLIP_NUMBER: Final = "clip number"
"""Column of :meth:`ScanTable.attribute_parts`; no attribute's name has a blank."""

_MAX_PENDING_BYTES: Final = 256 << 20
"""The limit of the small members of a batch, made in memory; Arrow's offsets in a batch end at 2
GiB.
"""

_MOST_PLACES: Final = 1024  # batches: 4 KiB for each

_SAMPLE: Final = "sample"
_COLUMNS: Final = [
    pa.field("key", pa.string(), nullable=False),
    pa.field("clip", pa.int32(), nullable=False),
    pa.field("frame", pa.int32(), nullable=False),
    pa.field("timestamp_ns", pa.int64(), nullable=False),
    pa.field("size_bytes", pa.int64(), nullable=False),
    pa.field(_SAMPLE, pa.binary(), nullable=False),
]
_CAPS: Final = {name: member_cap(name) for name in (META, GEOMETRY, BOXES)}
_ATTRIBUTE_TYPES: Final = {
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
}
_PREFIX: Final = "attribute."


class Reference(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sensor member that lies in the source.

    ``name`` is the field name (``cam_front.jpg``), ``ref`` what the source's ``open`` takes,
    ``bytes`` the size there; ``width`` and ``height`` [px] are what the source says of an image, 0
    for other members. ``is_estimate``: the source makes the bytes when they are read, so that
    ``bytes`` is about their number.
    """

    name: str
    ref: str
    bytes: int
    width: int = 0
    height: int = 0
    is_estimate: bool = False


class ClipInfo(msgspec.Struct, kw_only=True):
    """One clip: id (part of the keys), the source's name and token for it, its run of rows in
    the scan table.
    """

    clip_id: str
    clip_name: str
    clip_token: str
    first_row: int
    num_samples: int


class ScanRow(NamedTuple):
    """One sample as a shard is made of it: small members as bytes, sensor members as references."""

    key: str
    clip: int
    frame: int
    timestamp_ns: int
    meta: bytes
    geometry: bytes
    boxes: bytes | None
    members: tuple[Reference, ...]


_ROW_DECODER: Final = msgspec.msgpack.Decoder(ScanRow)


def decode_row(data: bytes) -> ScanRow:
    """Decode a row from the bytes that :meth:`ScanTable.encoded_row` gives."""
    row: ScanRow = _ROW_DECODER.decode(data)
    return row


def frame_key(clip_id: str, frame: int) -> str:
    """Return the key of frame number ``frame`` of a clip: ``{clip_id}-{frame:06d}``."""
    return f"{clip_id}-{frame:06d}"


def frame_keys(clip_ids: pa.Array, frames: pa.Array) -> pa.Array:
    """Do :func:`frame_key` for many frames."""
    return pc.binary_join_element_wise(
        clip_ids, pc.utf8_lpad(pc.cast(frames, pa.string()), 6, "0"), "-"
    )


class ScanWriter:
    """Writes a scan table; clips one after the other, frames in order, one batch in memory.

    Keys are unique by construction: clip ids are unique, and frames count up within a clip.
    ``attributes`` are the columns for ``attributes.parquet``: name to bool, int, float or str; a
    value may be None. ``is_check``: the table is made to find faults, so that the source is to look
    at both ends of each image.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        attributes: Mapping[str, type],
        *,
        is_check: bool = False,
    ) -> None:
        max_attributes = MAX_COLUMNS - NUM_OF_SAMPLES
        if len(attributes) > max_attributes:
            raise SourceError(
                f"the source has {len(attributes):,} attributes, and the table of a dataset "
                f"takes {max_attributes:,}: leave columns out, or make arrays of columns that "
                "belong together"
            )
        self._is_check = is_check
        self._attributes = tuple(attributes)
        columns = [
            pa.field(_PREFIX + name, _ATTRIBUTE_TYPES[kind]) for name, kind in attributes.items()
        ]
        self._schema = pa.schema([*_COLUMNS, *columns])
        self.disk = Disk(Path(path).parent)
        """For what the source must look up while it scans: columns on the disk of the table."""
        self._stamps = self.disk.column(np.uint64)
        self._sink = pa.OSFile(str(path), "wb")
        self._writer = pa.ipc.new_file(self._sink, self._schema)
        self._pending: list[tuple[Any, ...]] = []
        self._pending_bytes = 0
        self._pending_stamps = list[int]()
        self._kinds: dict[str, tuple[int, bool]] = {}
        self._num_rows = 0
        self._last_frame = -1
        self._ids: set[str] = set()
        self._has_boxes = False
        self.clips: list[ClipInfo] = []

    def depth(self, requested: Depth, damaged_image: str) -> Depth:
        """Return how much of each image a source with these options must read."""
        if requested == "head" and (self._is_check or damaged_image != "error"):
            return "ends"
        return requested

    def begin_clip(self, clip_id: str, clip_name: str, clip_token: str) -> None:
        """Start the next clip; raises SourceError for an id that already was or that is not a
        legal key.
        """
        check_key(clip_id)
        if clip_id in self._ids:
            raise SourceError(f"duplicate clip id '{clip_id}' in the source (clip '{clip_name}')")
        self._ids.add(clip_id)
        self._last_frame = -1
        self.clips.append(
            ClipInfo(
                clip_id=clip_id,
                clip_name=clip_name,
                clip_token=clip_token,
                first_row=self._num_rows,
                num_samples=0,
            )
        )

    def append(
        self,
        meta: Meta,
        geometry: bytes,
        boxes: bytes | None,
        members: Sequence[Reference],
        attributes: Mapping[str, Any],
        stamp: int = 0,
    ) -> None:
        """Add the clip's next frame; frame number, key and time are those of ``meta``.

        ``stamp`` (64 bits) changes when a file of the sample is written again, as far as the file
        system reports it; it is not part of the table, for copies of a source are the same source.
        ``meta.dataset``, ``meta.split`` and ``meta.license`` may be blank: they are filled in when
        shards are written. Raises SourceError for a member over the cap, and for a frame that does
        not follow the one before.
        """
        clip = self.clips[-1]
        key = frame_key(clip.clip_id, meta.frame_idx)
        if (meta.clip_id, meta.key) != (clip.clip_id, key):
            raise SourceError(
                f"sample '{meta.key}' of clip '{meta.clip_id}' takes the place of '{key}' "
                "of the source"
            )
        if meta.frame_idx <= self._last_frame:
            raise SourceError(
                f"sample '{key}' comes after frame {self._last_frame} of its clip: the "
                "source has it twice, or numbers its frames from less than 0"
            )
        self._last_frame = meta.frame_idx
        blob = encode_meta(meta)
        size = 0
        for name, data in ((META, blob), (GEOMETRY, geometry), (BOXES, boxes)):
            if data is not None:
                if len(data) > _CAPS[name]:
                    _check_cap(name, name, len(data), key)
                self._pending_bytes += len(data)
                size += tar_bytes(len(data) // 2)
        for member in members:
            name = member.name
            num_bytes = member.bytes
            kind = self._kinds.get(name)
            if kind is None:
                kind = self._kinds[name] = (
                    member_cap(name),
                    _is_compressible(name),
                )
            if num_bytes > kind[0]:
                _check_cap(name, member.ref, num_bytes, key)
            size += tar_bytes(num_bytes // 2 if kind[1] else num_bytes)
        if self._pending_bytes > _MAX_PENDING_BYTES:
            raise SourceError(
                f"the metadata, geometry and boxes of {len(self._pending) + 1} samples up "
                f"to '{key}' have {self._pending_bytes} bytes, allowed for {ROWS_PER_BATCH} "
                f"are {_MAX_PENDING_BYTES}"
            )
        number = len(self.clips) - 1
        row = ScanRow(
            key=meta.key,
            clip=number,
            frame=meta.frame_idx,
            timestamp_ns=meta.timestamp_ns,
            meta=blob,
            geometry=geometry,
            boxes=boxes,
            members=tuple(members),
        )
        encoded = msgspec.msgpack.encode(row)
        self._pending.append(
            (
                *row[:4],
                size,
                encoded,
                *[attributes[name] for name in self._attributes],
            )
        )
        self._has_boxes |= boxes is not None
        clip.num_samples += 1
        self._num_rows += 1
        self._pending_stamps.append(stamp)
        if len(self._pending) == ROWS_PER_BATCH:
            self._flush()

    def member_names(self, channels: Sequence[str]) -> list[str]:
        """Return all field names that occurred: meta, geometry, boxes, the channels in rig
        order, others by name.
        """
        rank = {channel: position for position, channel in enumerate(channels)}

        def place(name: str) -> tuple[int, str]:
            channel = name.split(".")[0]
            return rank.get(channel, len(rank)), name

        boxes = [BOXES] if self._has_boxes else []
        return [META, GEOMETRY, *boxes, *sorted(self._kinds, key=place)]

    @property
    def stamps(self) -> U64:
        """The stamp of each row, once all rows are there."""
        return self._stamps.values

    def close(self) -> None:
        """Write what is pending and the file's footer."""
        if self._pending:
            self._flush()
        self._writer.close()
        self._sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _flush(self) -> None:
        columns = zip(*self._pending, strict=True)
        arrays = [
            pa.array(values, field.type)
            for values, field in zip(columns, self._schema, strict=True)
        ]
        for array, field in zip(arrays, self._schema, strict=True):
            if field.name.startswith(_PREFIX) and pa.types.is_string(field.type):
                longest = pc.max(pc.binary_length(array)).as_py() or 0
                if longest > MAX_TEXT_BYTES:
                    row = pc.index(pc.binary_length(array), longest).as_py()
                    name = field.name.removeprefix(_PREFIX)
                    raise SourceError(
                        f"attribute '{name}' of sample {shortened(self._pending[row][0])} "
                        f"has {longest} bytes, allowed are {MAX_TEXT_BYTES}; shorten it"
                    )
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        self._writer.write_batch(batch)
        self._stamps.append(np.array(self._pending_stamps, np.uint64))
        self._pending = []
        self._pending_bytes = 0
        self._pending_stamps = []


def _check_cap(
    name: str,
    place: str,
    num_bytes: int,
    key: str,
) -> None:
    if num_bytes > member_cap(name):
        raise SourceError(
            f"'{place}' ({name} of sample {key}) has {num_bytes} bytes; such a member has "
            f"{member_cap(name)} at most"
        )


def tar_bytes(data_bytes: int) -> int:
    """Return the bytes that a member of ``data_bytes`` takes in a tar: header block and padded
    data.
    """
    return 512 + -(-data_bytes // 512) * 512


def stored_estimate(member: Reference) -> int:
    """Estimate the stored size of a sensor member for planning: arrays shrink to about half,
    encoded images do not.
    """
    if _is_compressible(member.name):
        return member.bytes // 2
    return member.bytes


def _is_compressible(name: str) -> bool:
    return name.endswith((f".{POINTS_EXTENSION}", SWEEPS_FIELD))


def uncompressed_share(members: Sequence[Reference]) -> float:
    """Return the size of a sample's sensor members that all stay raw, as a multiple of
    :func:`stored_estimate`.
    """
    estimate = sum(map(stored_estimate, members))
    if estimate:
        return sum(member.bytes for member in members) / estimate
    return 1.0


class ScanTable:
    """A scan table read back: whole columns, memory-mapped, for the plan, single rows for the
    writer.

    Pages that were looked at do not stay in this process's memory, so that the peak is the same for
    any table. Not for two threads at once.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        with Path(path).open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        mapped = pa.py_buffer(self._map)
        self._start = mapped.address
        self._file = pa.ipc.open_file(pa.BufferReader(mapped))
        self._bytes = pa.OSFile(os.fspath(path))
        self._places: dict[int, tuple[int, memoryview]] = {}
        batches = self._file.num_record_batches
        last = int(self._file.get_batch(batches - 1).num_rows) if batches else 0
        self._length: int = max(batches - 1, 0) * ROWS_PER_BATCH + last

    def __len__(self) -> int:
        return self._length

    def numbers(self, name: str) -> NDArray[Any]:
        """Return a whole column without nulls (clip, frame, timestamp_ns, size_bytes) as numpy."""
        dtype = numpy_dtype(self._file.schema.field(name).type)
        column = np.empty(self._length, dtype)
        for number, batch in enumerate(self._all_batches()):
            values = batch.column(name).to_numpy()
            column[number * ROWS_PER_BATCH :][: len(values)] = values
        return column

    def row(self, number: int) -> ScanRow:
        """Return one row."""
        return decode_row(self.encoded_row(number))

    def encoded_row(self, number: int) -> bytes:
        """Return one row as bytes, which are the same for the same content; :func:`decode_row`
        takes them.
        """
        batch = number // ROWS_PER_BATCH
        place = self._places.get(batch)
        if place is None:
            if len(self._places) == _MOST_PLACES:
                self._places.clear()
            column = self._file.get_batch(batch).column(_SAMPLE)
            _, ends, encoded = column.buffers()
            place = (
                encoded.address - self._start,
                memoryview(bytes(ends)).cast("i"),
            )
            self._places[batch] = place
        start, ends = place
        row = number % ROWS_PER_BATCH
        begin = ends[row]
        data: bytes = self._bytes.read_at(ends[row + 1] - begin, start + begin)
        return data

    def key_batches(self) -> Iterator[pa.Array]:
        """Yield the keys, in order, a batch of rows at a time."""
        for batch in self._all_batches():
            yield batch.column("key")

    def attribute_parts(self) -> Iterator[pa.Table]:
        """Yield key, number of the clip, frame, time and all attributes, in order,
        ``ROWS_PER_PART`` rows at a time.
        """
        names = ["key", "clip", "frame", "timestamp_ns", *self._attributes]
        pending: list[Any] = []
        for batch in self._all_batches():
            pending.append(batch.select(names))
            if len(pending) * ROWS_PER_BATCH == ROWS_PER_PART:
                yield self._part(pending)
                pending = []
        if pending:
            yield self._part(pending)

    def _part(self, batches: list[Any]) -> pa.Table:
        table = pa.Table.from_batches(batches).combine_chunks()
        return table.rename_columns(
            [
                CLIP_NUMBER if name == "clip" else name.removeprefix(_PREFIX)
                for name in table.column_names
            ]
        )

    @property
    def _attributes(self) -> list[str]:
        return [name for name in self._file.schema.names if name.startswith(_PREFIX)]

    def _all_batches(self) -> Iterator[Any]:
        for number in range(self._file.num_record_batches):
            yield self._file.get_batch(number)
            self._map.madvise(mmap.MADV_DONTNEED)
