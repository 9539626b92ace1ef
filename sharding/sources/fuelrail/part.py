"""One finished Fuelrail dataset as a part of a source: its clips, samples and members."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from fuelrail.pipeline.errors import MemberError, ShardError, SourceError
from fuelrail.pipeline.format import codecs
from fuelrail.pipeline.format.dataset import check_span, read_members
from fuelrail.pipeline.format.index.attributes_file import ATTRIBUTES_FILE
from fuelrail.pipeline.format.zstd_frames import is_framed, read_head
from fuelrail.pipeline.sample.schema import BOXES, GEOMETRY, META, decode_sample
from fuelrail.pipeline.storage.files import open_file
from fuelrail.pipeline.storage.filesystem import filesystem
from fuelrail.pipeline.storage.retry import fault_of
from fuelrail.sharding.sources.fuelrail.merging import open_source

if TYPE_CHECKING:
    from fuelrail.pipeline.format.index.row import IndexRow
    from fuelrail.pipeline.storage.columns import Disk

INLINE: Final = (META, GEOMETRY, BOXES)

_PYTHON_TYPES: Final = {
    pa.bool_(): bool,
    pa.int64(): int,
    pa.float64(): float,
    pa.string(): str,
}
_OF_INDEX: Final = ("key", "clip_id", "split", "frame", "timestamp_ns")

_ROWS_AT_ONCE: Final = 1 << 9

_LOOKS_BETWEEN: Final = 8


class StoredSample(NamedTuple):
    """A row of the index with its number, and its attributes."""

    number: int
    row: IndexRow
    attributes: dict[str, Any]


class DatasetPart:
    """A dataset that is read from.

    ``cameras`` and ``lidars`` are the channels of its sensors, ``fields`` the field names of its
    other channels.
    """

    def __init__(self, location: str) -> None:
        """Open it; raises SourceError where it cannot be."""
        self.dataset = open_source(location)
        self._remote = filesystem(self.dataset.url) if self.dataset.url is not None else None
        self._read: tuple[int, dict[str, memoryview]] = (-1, {})
        self._num_looks = 0
        manifest = self.dataset.manifest
        self.cameras = frozenset(camera.channel for camera in manifest.cameras)
        self.lidars = frozenset(lidar.channel for lidar in manifest.lidars)
        self.fields = frozenset(channel.field for channel in manifest.extra_channels)

    @property
    def attribute_types(self) -> dict[str, type]:
        """The columns of ``attributes.parquet`` that are not in the index."""
        file = self.dataset.attributes_file()
        if not file.exists:
            return {}
        schema = file.schema(len(self.dataset.index))
        types = {}
        for field in schema:
            if field.name in _OF_INDEX:
                continue
            if field.type not in _PYTHON_TYPES:
                raise SourceError(
                    f"{ATTRIBUTES_FILE}: column '{field.name}' is of type {field.type}"
                )
            types[field.name] = _PYTHON_TYPES[field.type]
        return types

    def samples(self, disk: Disk) -> Iterator[Iterator[StoredSample]]:
        """Yield the samples of each clip by frame, in the order of the ids.

        Their attributes are copied to ``disk``.
        """
        index = self.dataset.index
        clips = index.texts("clip_id").dictionary_encode().combine_chunks()
        ids = np.array(clips.dictionary.to_pylist(), dtype=object)
        rank = np.argsort(np.argsort(ids, kind="stable"))
        clip_ranks = rank[clips.indices.to_numpy()]
        rows = np.lexsort((index.column("frame"), clip_ranks))
        names = list(self.attribute_types)
        table = disk.table(self.dataset.attributes_file().batches(names)) if names else None

        def samples() -> Iterator[StoredSample]:
            # Few attributes are Python objects at a time.
            for first in range(0, len(rows), _ROWS_AT_ONCE):
                part = rows[first : first + _ROWS_AT_ONCE]
                values: list[dict[str, Any]] = [{} for _ in part]
                if table is not None:
                    values = disk.take(table, part).to_pylist()
                for number, attributes in zip(part.tolist(), values, strict=True):
                    yield StoredSample(number, self._read_row(number), attributes)

        for _, clip in itertools.groupby(samples(), lambda sample: sample.row.clip_id):
            yield clip

    def small_members(self, row: IndexRow) -> dict[str, Any]:
        """Decode metadata, geometry and boxes without reading the rest of the span."""
        entries = [entry for entry in row.members if entry.name in INLINE]
        begin = min((entry.offset for entry in entries), default=0)
        end = max((entry.offset + entry.stored_bytes for entry in entries), default=0)
        if begin < 0 or end > codecs.MAX_SAMPLE_BYTES:
            raise SourceError(
                f"dataset '{self.dataset.location}' is damaged: members outside of sample "
                f"'{row.key}'"
            )
        shard = self.dataset.shards.name_of(row)
        decode_head = partial(read_head, num_bytes=end, shard=shard, offset=row.offset, key=row.key)
        try:
            if not is_framed(shard):
                head = self._read_bytes(row, end)
            elif self._remote is not None:
                head = decode_head(io.BytesIO(self._read_bytes(row, row.length)))
            else:
                with open_file(self.dataset.shard_path(row)) as file:
                    file.seek(row.offset)
                    head = decode_head(file)
        except ShardError as error:
            raise SourceError(f"dataset '{self.dataset.location}' is damaged: {error}") from error
        except OSError as error:
            raise SourceError(
                f"shard '{self.dataset.location}/{shard}' cannot be read: {error.strerror}"
            ) from error
        decoded: dict[str, Any] = {}
        for name, offset, stored_bytes, raw_bytes, codec, _ in entries:
            stored = head[offset : offset + stored_bytes]
            try:
                decoded[name] = codecs.decode(
                    codec,
                    stored,
                    raw_bytes,
                    dictionary=self.dataset.dictionary,
                )
            except MemberError as error:
                place = f"{row.key}.{name} of dataset '{self.dataset.location}'"
                raise SourceError(f"{place} cannot be decoded: {error.message}") from error
        for required in (META, GEOMETRY):
            if required not in decoded:
                raise SourceError(
                    f"sample '{row.key}' of dataset '{self.dataset.location}' has no {required}"
                )
        return decoded

    def read(self, number: int, field: str) -> memoryview:
        """Return a member of a row, decoded; those of one row are decoded together."""
        if self._read[0] != number or field not in self._read[1]:
            row = self._read_row(number)
            span = self._read_bytes(row, row.length)
            shard = self.dataset.shards.name_of(row)
            try:
                check_span(row, span, shard)
                members = read_members(
                    row,
                    span=span,
                    shard=shard,
                    dictionary=self.dataset.dictionary,
                )
                decode_sample(row.key, members, self.fields)
            except (ShardError, MemberError) as error:
                raise SourceError(
                    f"dataset '{self.dataset.location}' is damaged: {error}"
                ) from error
            self._read = (
                number,
                {name: members[name] for name in members if name not in INLINE},
            )
        return self._read[1].pop(field)  # each is asked for once, and a large one is not to stay

    def _read_row(self, number: int) -> IndexRow:
        """Return a row of the index by itself: all rows together would fill this process's
        memory.
        """
        self._num_looks += 1
        if self._num_looks % _LOOKS_BETWEEN == 0:
            self.dataset.index.release()
        return self.dataset.index.row(number)

    def _read_bytes(self, row: IndexRow, num_bytes: int) -> bytes:
        """Read the first bytes of a span as they are stored."""
        path = self.dataset.shard_path(row)
        try:
            if self._remote is not None:
                fs, root = self._remote
                data: bytes = fs.cat_file(
                    f"{root}/{path.name}",
                    start=row.offset,
                    end=row.offset + num_bytes,
                )
                return data
            with open_file(path) as file:
                file.seek(row.offset)
                return file.read(num_bytes)
        except Exception as error:
            why = (
                error.strerror
                if isinstance(error, OSError) and error.strerror
                else fault_of(error).text
            )
            raise SourceError(
                f"shard '{self.dataset.location}/{path.name}' cannot be read: {why}"
            ) from error
