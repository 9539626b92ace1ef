"""Finished Fuelrail datasets as a source: to merge, reshuffle, split, select or recompress them.

Clips come in the order of their ids, frames ascending, so it doesn't matter in which order the shards hold them, nor in
which order the datasets are named.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

import msgspec
import numpy as np
import pyarrow as pa
from msgspec import Meta
from numpy.typing import NDArray

from fuelrail.pipeline.channels.sensors import choose_cameras, lies_on
from fuelrail.pipeline.errors import ConfigError, DatasetError, MemberError, SchemaError, ShardError, SourceError
from fuelrail.pipeline.format import codecs
from fuelrail.pipeline.format.dataset import check_span, open_dataset, read_members
from fuelrail.pipeline.format.index.attributes_file import ATTRIBUTES_FILE
from fuelrail.pipeline.format.manifest import Lineage
from fuelrail.pipeline.format.zstd_frames import is_framed, read_head
from fuelrail.pipeline.sample.schema import (
    BOXES,
    GEOMETRY,
    IMAGE_EXTENSIONS,
    META,
    POINTS_EXTENSION,
    decode_sample,
    encode_arrays,
    lidar_channel,
)
from fuelrail.pipeline.sample.schema import Meta as SampleMeta
from fuelrail.pipeline.settings import Settings, convert, flag
from fuelrail.pipeline.storage.files import open_file
from fuelrail.pipeline.storage.filesystem import filesystem
from fuelrail.pipeline.storage.retry import fault_of
from fuelrail.pipeline.text import shown
from fuelrail.sharding.sources.merging import check_alike, check_disjoint, joined, joined_types
from fuelrail.sharding.sources.shared.scan_table import Reference, frame_key
from fuelrail.sharding.sources.source import Camera, ScanInfo

if TYPE_CHECKING:
    from fuelrail.pipeline.format.index.row import IndexRow
    from fuelrail.pipeline.sample.schema import Sample as DecodedSample
    from fuelrail.pipeline.storage.columns import Disk
    from fuelrail.sharding.sources.shared.scan_table import ScanWriter
    from fuelrail.sharding.sources.source import Reads

SEPARATOR = "\n"
"""Between the locations of several datasets: no path or URL has it."""

INLINE: Final = (META, GEOMETRY, BOXES)

_OF_INDEX: Final = ("key", "clip_id", "split", "frame", "timestamp_ns")

_ROWS_AT_ONCE: Final = 1 << 9

_LOOKS_BETWEEN: Final = 8

Sample = tuple[tuple[int, "IndexRow"], dict[str, Any]]
"""A row's number and the row, and its attributes."""


class FuelrailOptions(Settings, frozen=True):
    """Options of the adapter. ``points``: keep lidar sweeps. ``cameras``: keep these alone (none: all).

    ``fingerprint``: refuse any other dataset than this.

    The fingerprints of several datasets are joined by ``+``.
    """

    points: Annotated[bool, Meta(description="lidar sweeps; false, or --no-points, leaves them out")] = True
    cameras: Annotated[
        tuple[str, ...],
        flag(
            "cameras to keep, such as cam_front,cam_back (default: all)",
            parse=lambda text: [name.strip() for name in text.split(",")],
        ),
    ] = ()
    fingerprint: str | None = None


class FuelrailSource:
    """Fuelrail datasets: a folder or a URL, or several, each on a line of its own."""

    kind = "fuelrail"
    settings = FuelrailOptions
    requires: ClassVar[Mapping[str, str]] = {}
    reads: Reads = "random"

    def __init__(self, location: str, options: dict[str, Any]) -> None:
        """Open them; SourceError where that fails or they do not fit, ConfigError for another fingerprint."""
        self._options = convert(options, FuelrailOptions, "options of source fuelrail")
        self._parts = [DatasetPart(one) for one in location.split(SEPARATOR)]
        there = self._fingerprint
        if self._options.fingerprint not in (None, there):
            named = "', '".join(location.split(SEPARATOR))
            raise ConfigError(f"'{named}' has the fingerprint {there}, expected {self._options.fingerprint}")
        check_alike([part.dataset for part in self._parts])
        first = self._parts[0].dataset
        rig = [camera.channel for camera in first.manifest.cameras]
        self._cameras = choose_cameras(rig, self._options.cameras or None, first.location)
        self._camera_rows, self._num_cameras = tuple(map(rig.index, self._cameras)), len(rig)
        images = itertools.product({*rig} - {*self._cameras}, IMAGE_EXTENSIONS)
        channels = [one for one in first.manifest.extra_channels if not lies_on(one, self._cameras)]
        self._left_out = {*map(".".join, images), *(channel.field for channel in channels)}

    @property
    def _fingerprint(self) -> str:
        return "+".join(part.dataset.manifest.fingerprint for part in self._parts)

    @property
    def options(self) -> dict[str, Any]:
        """All options; the fingerprint is that of the datasets."""
        given = msgspec.structs.asdict(self._options)
        return {**given, "cameras": list(self._options.cameras), "fingerprint": self._fingerprint}

    @property
    def attribute_types(self) -> dict[str, type]:
        """The columns of ``attributes.parquet`` that do not stand in the index."""
        return joined_types([part.attribute_types for part in self._parts])

    def open(self, ref: str) -> memoryview:
        """Read a member's raw bytes; ``ref`` is the number of its dataset, its row and its field name."""
        part, number, field = ref.split("/", 2)
        return self._parts[int(part)].read(int(number), field)

    def scan(self, out: ScanWriter) -> ScanInfo:
        """Read index, attributes and the small members; write one row for each sample."""
        manifests = [part.dataset.manifest for part in self._parts]
        clips = [(part.dataset.location, part.clip_ids()) for part in self._parts]
        check_disjoint(clips)
        owners = sorted((clip, number) for number, (_, ids) in enumerate(clips) for clip in ids)
        walks = [part.samples(out.database) for part in self._parts]
        types = self.attribute_types
        for clip, number in owners:
            # A part's samples come clip by clip in the order of the ids, as the owners do.
            for position, (row, attributes) in enumerate(next(walks[number])):
                self._append(out, number, row, {**dict.fromkeys(types), **attributes}, clip if not position else None)
        first = manifests[0]
        splits: dict[str, list[str]] = {}
        for part in self._parts:
            for name, ids in part.splits().items():
                splits[name] = sorted([*splits.get(name, []), *ids])
        return ScanInfo(
            name=joined([manifest.name for manifest in manifests]) or "",
            clips=out.clips,
            cameras=[
                Camera(camera.channel, camera.source_name)
                for camera in first.cameras
                if camera.channel in self._cameras
            ],
            lidars=list(first.lidars),
            channels=tuple(channel for channel in first.extra_channels if lies_on(channel, self._cameras)),
            classes=list(first.classes),
            attributes=list(first.attributes),
            names=out.member_names([one.name for one in first.channels if one.field != BOXES]),
            time_base=first.time_base,
            ego_origin=first.ego_origin,
            license=joined([manifest.license for manifest in manifests]),
            splits=splits,
            facts={"provenance": first.provenance}
            if len(manifests) == 1
            else {"merged": [{"name": m.name, "provenance": m.provenance} for m in manifests]},
            lineage=Lineage.of(manifests),
        )

    def _append(
        self, out: ScanWriter, number: int, row: tuple[int, IndexRow], attributes: dict[str, Any], begins: str | None
    ) -> None:
        at, entry = row
        part = self._parts[number]
        small = part.small_members(entry)
        try:
            sample = decode_sample(entry.key, small)
            meta = sample.meta
            if len(self._cameras) < self._num_cameras:
                sample = sample.of_cameras(self._camera_rows, self._num_cameras)
                small[GEOMETRY] = encode_arrays(sample.geometry)
                meta = _of_cameras(meta, self._cameras)
                if "num_cameras" in attributes:
                    attributes["num_cameras"] = int(sample.geometry.cam_valid.sum())
        except SchemaError as error:
            where = f"dataset '{part.dataset.location}'"
            raise SourceError(f"sample '{entry.key}' of {where} is bad: {error}") from error
        if entry.key != frame_key(entry.clip_id, entry.frame):
            raise SourceError(
                f"sample '{entry.key}' is not named after its clip '{entry.clip_id}' and frame {entry.frame}"
            )
        if (meta.key, meta.clip_id, meta.frame_idx) != (entry.key, entry.clip_id, entry.frame):
            raise SourceError(
                f"sample '{entry.key}': its {META} is of sample '{meta.key}', clip '{meta.clip_id}', frame "
                f"{meta.frame_idx}; the index has clip '{entry.clip_id}', frame {entry.frame}"
            )
        if begins is not None:
            out.begin_clip(begins, meta.clip_name, meta.clip_token)
        members = []
        for member in entry.members:
            _check_channel(entry.key, member.name, part)
            is_points = lidar_channel(member.name) in part.lidars
            if member.name in INLINE or member.name in self._left_out or (is_points and not self._options.points):
                continue
            camera = meta.cameras.get(member.name.partition(".")[0])
            size = (0, 0) if camera is None else (camera.width, camera.height)
            members.append(Reference(member.name, f"{number}/{at}/{member.name}", member.raw_bytes, *size))
        boxes = small.get(BOXES)
        out.append(meta, bytes(small[GEOMETRY]), None if boxes is None else bytes(boxes), members, attributes)


def _of_cameras(meta: SampleMeta, names: Collection[str]) -> SampleMeta:
    """Return the metadata of a sample, of these cameras alone."""
    cameras = {name: camera for name, camera in meta.cameras.items() if name in names}
    stats, sync = dict(meta.stats), dict(meta.sync)
    if "max_sync_offset_ns" in stats:
        offsets = [abs(camera.timestamp_ns - meta.timestamp_ns) for camera in cameras.values()]
        stats["max_sync_offset_ns"] = max(offsets, default=0)
    if "dropped" in sync:
        sync["dropped"] = [name for name in sync["dropped"] if name in names]
    return msgspec.structs.replace(meta, cameras=cameras, stats=stats, sync=sync)


def _check_channel(key: str, name: str, part: DatasetPart) -> None:
    """Raise SourceError for an image or a sweep of a channel that the manifest does not have."""
    channel, _, extension = name.partition(".")
    if name in part.fields:
        return
    rig = part.cameras if extension in IMAGE_EXTENSIONS else part.lidars
    if extension in (*IMAGE_EXTENSIONS, POINTS_EXTENSION) and channel not in rig and not name.startswith("x_"):
        raise SourceError(
            f"sample '{key}' of dataset '{part.dataset.location}' has the member '{shown(name)}', but the manifest has "
            f"no sensor '{shown(channel)}': `fuelrail verify` says more"
        )


class DatasetPart:
    """A dataset that is read from."""

    def __init__(self, location: str) -> None:
        """Open it; raises SourceError where it cannot be."""
        try:
            self.dataset = open_dataset(location)
        except DatasetError as error:
            raise SourceError(str(error)) from error
        self._remote = filesystem(self.dataset.url) if self.dataset.url is not None else None
        self._read: tuple[int, dict[str, memoryview]] = (-1, {})
        self._num_looks = 0

    @property
    def cameras(self) -> frozenset[str]:
        """Channels of its cameras."""
        return frozenset(camera.channel for camera in self.dataset.manifest.cameras)

    @property
    def lidars(self) -> frozenset[str]:
        """Channels of its lidars."""
        return frozenset(lidar.channel for lidar in self.dataset.manifest.lidars)

    @property
    def fields(self) -> frozenset[str]:
        """Field names of its channels other than cameras, lidars and boxes."""
        return frozenset(channel.field for channel in self.dataset.manifest.extra_channels)

    @property
    def attribute_types(self) -> dict[str, type]:
        """The columns of ``attributes.parquet`` that do not stand in the index."""
        file = self.dataset.attributes_file()
        if not file.exists:
            return {}
        schema = file.schema(len(self.dataset.index))
        return {field.name: _python_type(field) for field in schema if field.name not in _OF_INDEX}

    def clip_ids(self) -> list[str]:
        """Return the ids of the dataset's clips, sorted."""
        return self.dataset.index.clip_ids()

    def splits(self) -> dict[str, list[str]]:
        """Return the ids of the clips of each split, sorted."""
        return {
            name: self.dataset.index.clip_ids(s.first_sample, s.first_sample + s.num_samples)
            for name, s in self.dataset.manifest.splits.items()
        }

    def samples(self, disk: Disk) -> Iterator[Iterator[Sample]]:
        """Yield the samples of each clip by frame, in the order of the ids. Their attributes are copied to ``disk``."""
        numbered = ((at, self._row(at), attributes) for at, attributes in self._attributes(disk))
        for _, clip in itertools.groupby(numbered, lambda sample: sample[1].clip_id):
            yield (((at, row), attributes) for at, row, attributes in clip)

    def small_members(self, row: IndexRow) -> dict[str, Any]:
        """Decode metadata, geometry and boxes without reading the rest of the span."""
        entries = [entry for entry in row.members if entry.name in INLINE]
        end = max((entry.offset + entry.stored_bytes for entry in entries), default=0)
        if min((entry.offset for entry in entries), default=0) < 0 or end > codecs.MAX_SAMPLE_BYTES:
            raise SourceError(f"dataset '{self.dataset.location}' is damaged: members outside of sample '{row.key}'")
        head = self._read_head(row, end)
        found: dict[str, Any] = {}
        for name, offset, stored_bytes, raw_bytes, codec, _ in entries:
            stored = head[offset : offset + stored_bytes]
            try:
                found[name] = codecs.decode(codec, stored, raw_bytes, dictionary=self.dataset.dictionary)
            except MemberError as error:
                place = f"{row.key}.{name} of dataset '{self.dataset.location}'"
                raise SourceError(f"{place} cannot be decoded: {error.message}") from error
        for needed in (META, GEOMETRY):
            if needed not in found:
                raise SourceError(f"sample '{row.key}' of dataset '{self.dataset.location}' has no {needed}")
        return found

    def read(self, at: int, field: str) -> memoryview:
        """Return a member of row number ``at``, decoded; those of one row are decoded together."""
        if self._read[0] != at or field not in self._read[1]:
            row = self._row(at)
            span = self._read_bytes(row, row.length)
            shard = self.dataset.shards.name_of(row)
            try:
                check_span(row, span, shard)
                members = read_members(row, span, shard, dictionary=self.dataset.dictionary)
                self._check(decode_sample(row.key, members, self.fields))
            except (ShardError, MemberError) as error:
                raise SourceError(f"dataset '{self.dataset.location}' is damaged: {error}") from error
            self._read = (at, {name: members[name] for name in members if name not in INLINE})
        return self._read[1].pop(field)  # each is asked for once, and a large one is not to stay

    def _check(self, sample: DecodedSample) -> None:
        for lidar in self.dataset.manifest.lidars:
            points, wanted = sample.points.get(lidar.channel), len(lidar.columns)
            if points is not None and points.shape[1] != wanted:
                raise SchemaError(
                    f"points of {points.shape[1]} columns, the manifest has {wanted}",
                    key=sample.key,
                    member=f"{lidar.channel}.{POINTS_EXTENSION}",
                )

    def _row(self, at: int) -> IndexRow:
        """Return a row of the index by itself: all rows together would fill this process's memory."""
        self._num_looks += 1
        if self._num_looks % _LOOKS_BETWEEN == 0:
            self.dataset.index.release()
        return self.dataset.index.row(at)

    def _attributes(self, disk: Disk) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield each row in the order of clips and frames, with its attributes, of which few are Python objects."""
        rows, names = self._rows_by_clip(), list(self.attribute_types)
        table = disk.table(self.dataset.attributes_file().batches(names)) if names else None
        for first in range(0, len(rows), _ROWS_AT_ONCE):
            part = rows[first : first + _ROWS_AT_ONCE]
            values = [{} for _ in part] if table is None else disk.take(table, part).to_pylist()
            yield from zip(part.tolist(), values, strict=True)

    def _rows_by_clip(self) -> NDArray[np.int64]:
        index = self.dataset.index
        clips = index.texts("clip_id").dictionary_encode().combine_chunks()
        rank = np.argsort(np.argsort(np.array(clips.dictionary.to_pylist(), dtype=object), kind="stable"))
        return np.lexsort((index.column("frame"), rank[clips.indices.to_numpy()]))

    def _read_head(self, row: IndexRow, num_bytes: int) -> bytes:
        """Read the first bytes of a span, decoded if it is a frame."""
        name = self.dataset.shards.name_of(row)
        if not is_framed(name):
            return self._read_bytes(row, num_bytes)
        try:
            if self._remote is not None:
                file = io.BytesIO(self._read_bytes(row, row.length))
                return read_head(file, num_bytes, shard=name, offset=row.offset, key=row.key)
            with open_file(self.dataset.shard_path(row)) as shard:
                shard.seek(row.offset)
                return read_head(shard, num_bytes, shard=name, offset=row.offset, key=row.key)
        except ShardError as error:
            raise SourceError(f"dataset '{self.dataset.location}' is damaged: {error}") from error
        except OSError as error:
            raise SourceError(f"shard '{self.dataset.location}/{name}' cannot be read: {error.strerror}") from error

    def _read_bytes(self, row: IndexRow, num_bytes: int) -> bytes:
        """Read the first bytes of a span as they are stored."""
        path = self.dataset.shard_path(row)
        try:
            if self._remote is not None:
                fs, root = self._remote
                data: bytes = fs.cat_file(f"{root}/{path.name}", start=row.offset, end=row.offset + num_bytes)
                return data
            with open_file(path) as file:
                file.seek(row.offset)
                return file.read(num_bytes)
        except Exception as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else fault_of(error).text
            raise SourceError(f"shard '{self.dataset.location}/{path.name}' cannot be read: {why}") from error


def _python_type(field: pa.Field) -> type:
    for arrow, python in ((pa.bool_(), bool), (pa.int64(), int), (pa.float64(), float), (pa.string(), str)):
        if field.type == arrow:
            return python
    raise SourceError(f"{ATTRIBUTES_FILE}: column '{field.name}' is of type {field.type}")
