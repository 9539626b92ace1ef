"""A finished Fuelrail dataset as a source: to shuffle it anew, split, select or compress it otherwise.

Clips come in the order of their ids, frames ascending, so it doesn't matter in which order the shards hold them. Every
span is held against its digest when its members are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fuelrail.pipeline import codecs
from fuelrail.pipeline.attributes import ATTRIBUTES_FILE
from fuelrail.pipeline.dataset import check_span, open_dataset, read_members
from fuelrail.pipeline.errors import ConfigError, DatasetError, ShardError, SourceError
from fuelrail.pipeline.frames import is_framed, read_head
from fuelrail.pipeline.schema import BOXES, GEOMETRY, META, decode_meta, lidar_channel
from fuelrail.pipeline.settings import Settings, convert
from fuelrail.sharding.source import Channel, ScanInfo
from fuelrail.sharding.table import Reference, frame_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fuelrail.pipeline.index import IndexRow
    from fuelrail.sharding.table import ScanWriter

_INLINE: Final = (META, GEOMETRY, BOXES)
_OF_INDEX: Final = ("key", "clip_id", "split", "frame", "timestamp_ns")
_ROWS_AT_ONCE: Final = 1 << 14


class FuelrailOptions(Settings, frozen=True):
    """Options of the adapter. ``points``: keep lidar sweeps. ``fingerprint``: refuse any other dataset than this."""

    points: bool = True
    fingerprint: str | None = None


class FuelrailSource:
    """A local dataset folder."""

    kind = "fuelrail"

    def __init__(self, location: str, options: dict[str, Any]) -> None:
        """Open the dataset; raises SourceError where it cannot be, ConfigError for one of another fingerprint."""
        self._options = convert(options, FuelrailOptions, "options of source fuelrail")
        try:
            self._dataset = open_dataset(location)
        except DatasetError as error:
            raise SourceError(str(error)) from error
        there = self._dataset.manifest.fingerprint
        if self._options.fingerprint not in (None, there):
            raise ConfigError(f"'{location}' has the fingerprint {there}, wanted is {self._options.fingerprint}")
        self._read: tuple[int, dict[str, memoryview]] = (-1, {})

    @property
    def options(self) -> dict[str, Any]:
        """All options; the fingerprint is the dataset's."""
        return {**msgspec.structs.asdict(self._options), "fingerprint": self._dataset.manifest.fingerprint}

    @property
    def attribute_types(self) -> dict[str, type]:
        """The columns of ``attributes.parquet`` that do not stand in the index."""
        path = self._dataset.root / ATTRIBUTES_FILE
        if not path.is_file():
            return {}
        types: dict[str, type] = {}
        for field in pq.read_schema(path):
            if field.name not in _OF_INDEX:
                types[field.name] = _python_type(field)
        return types

    def open(self, ref: str) -> memoryview:
        """Raw bytes of a member; ``ref`` is its row and its field name."""
        number, _, field = ref.partition("/")
        at = int(number)
        if self._read[0] != at:
            row = self._dataset.index.row(at)
            span = self._read_bytes(row, row.length)
            shard = self._dataset.shard_path(row).name
            try:
                check_span(row, span, shard)
                self._read = (at, read_members(row, span, shard, dictionary=self._dataset.dictionary))
            except ShardError as error:
                raise SourceError(f"dataset '{self._dataset.root}' is damaged: {error}") from error
        return self._read[1][field]

    def scan(self, out: ScanWriter) -> ScanInfo:
        """Read index, attributes and the small members; write one row for each sample."""
        manifest = self._dataset.manifest
        rows = self._rows_by_clip()
        clip = None
        for at, attributes in self._attributes(rows):
            row = self._dataset.index.row(at)
            small = self._small_members(row)
            meta = decode_meta(small[META])
            if row.key != frame_key(row.clip_id, row.frame):
                raise SourceError(
                    f"sample '{row.key}' is not named after its clip '{row.clip_id}' and frame {row.frame}"
                )
            if row.clip_id != clip:
                clip = row.clip_id
                out.begin_clip(clip, meta.clip_name, meta.clip_token)
            members = []
            for entry in row.members:
                if entry.name in _INLINE or not (self._options.points or lidar_channel(entry.name) not in self._lidars):
                    continue
                camera = meta.cameras.get(entry.name.partition(".")[0])
                size = (0, 0) if camera is None else (camera.width, camera.height)
                members.append(Reference(entry.name, f"{at}/{entry.name}", entry.raw_bytes, *size))
            boxes = small.get(BOXES)
            out.append(meta, bytes(small[GEOMETRY]), None if boxes is None else bytes(boxes), members, attributes)
        splits = {
            name: sorted(set(self._dataset.index.strings("clip_id", s.first_sample, s.first_sample + s.num_samples)))
            for name, s in manifest.splits.items()
        }
        return ScanInfo(
            name=manifest.name,
            clips=out.clips,
            cameras=[Channel(camera.channel, camera.source_name) for camera in manifest.cameras],
            lidars=list(manifest.lidars),
            classes=list(manifest.classes),
            attributes=list(manifest.attributes),
            names=out.member_names(manifest.channels),
            time_base=manifest.time_base,
            ego_origin=manifest.ego_origin,
            license=manifest.license,
            splits=splits,
            facts={"provenance": manifest.provenance},
        )

    @property
    def _lidars(self) -> frozenset[str]:
        return frozenset(lidar.channel for lidar in self._dataset.manifest.lidars)

    def _rows_by_clip(self) -> list[int]:
        index = self._dataset.index
        clips = index.texts("clip_id").dictionary_encode().combine_chunks()
        rank = np.argsort(np.argsort(np.array(clips.dictionary.to_pylist(), dtype=object), kind="stable"))
        order = np.lexsort((index.column("frame"), rank[clips.indices.to_numpy()]))
        rows: list[int] = order.tolist()
        return rows

    def _attributes(self, rows: list[int]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Each row with its attributes, a part of the table in memory as Python objects."""
        path = self._dataset.root / ATTRIBUTES_FILE
        names = list(self.attribute_types)
        table = pq.read_table(path, columns=names) if names else None
        for first in range(0, len(rows), _ROWS_AT_ONCE):
            part = rows[first : first + _ROWS_AT_ONCE]
            values = [{} for _ in part] if table is None else table.take(pa.array(part)).to_pylist()
            yield from zip(part, values, strict=True)

    def _small_members(self, row: IndexRow) -> dict[str, Any]:
        """Metadata, geometry and boxes, decoded, without reading the rest of the span."""
        entries = [entry for entry in row.members if entry.name in _INLINE]
        end = max((entry.offset + entry.stored_bytes for entry in entries), default=0)
        head = self._read_head(row, end)
        found = {
            entry.name: codecs.decode(
                entry.codec,
                head[entry.offset : entry.offset + entry.stored_bytes],
                entry.raw_bytes,
                dictionary=self._dataset.dictionary,
            )
            for entry in entries
        }
        for needed in (META, GEOMETRY):
            if needed not in found:
                raise SourceError(f"sample '{row.key}' of dataset '{self._dataset.root}' has no {needed}")
        return found

    def _read_head(self, row: IndexRow, num_bytes: int) -> bytes:
        """The first bytes of a span, decoded if it is a frame."""
        path = self._dataset.shard_path(row)
        if not is_framed(path.name):
            return self._read_bytes(row, num_bytes)
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(row.offset)
                return read_head(file, num_bytes, shard=path.name, offset=row.offset, key=row.key)
        except ShardError as error:
            raise SourceError(f"dataset '{self._dataset.root}' is damaged: {error}") from error
        except OSError as error:
            raise SourceError(f"shard '{path}' cannot be read: {error.strerror}") from error

    def _read_bytes(self, row: IndexRow, num_bytes: int) -> bytes:
        path = self._dataset.shard_path(row)
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(row.offset)
                return file.read(num_bytes)
        except OSError as error:
            raise SourceError(f"shard '{path}' cannot be read: {error.strerror}") from error


def _python_type(field: pa.Field) -> type:
    for arrow, python in ((pa.bool_(), bool), (pa.int64(), int), (pa.float64(), float), (pa.string(), str)):
        if field.type == arrow:
            return python
    raise SourceError(f"{ATTRIBUTES_FILE}: column '{field.name}' is of type {field.type}")
