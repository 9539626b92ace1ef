"""Finished Fuelrail datasets as a source: to merge, reshuffle, split, select or recompress them.

Clips come in the order of their ids, frames ascending, so it doesn't matter in which order the
shards hold them, nor in which order the datasets are named.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from fuelrail.pipeline.channels.sensors import choose_cameras, lies_on
from fuelrail.pipeline.errors import ConfigError, SchemaError, SourceError
from fuelrail.pipeline.format.manifest import Lineage
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
from fuelrail.pipeline.settings import Settings, convert, flag
from fuelrail.pipeline.text import shortened
from fuelrail.sharding.sources.fuelrail.merging import (
    check_alike,
    check_disjoint,
    joined,
    joined_types,
)
from fuelrail.sharding.sources.fuelrail.part import INLINE, DatasetPart, StoredSample
from fuelrail.sharding.sources.shared.scan_table import Reference, frame_key
from fuelrail.sharding.sources.source import Camera, ScanInfo

if TYPE_CHECKING:
    from fuelrail.sharding.sources.shared.scan_table import ScanWriter
    from fuelrail.sharding.sources.source import Reads

SEPARATOR = "\n"
"""Between the locations of several datasets: no path or URL has it."""


class FuelrailOptions(Settings, frozen=True):
    """Options of the adapter.

    ``points``: keep lidar sweeps. ``cameras``: keep these alone (none: all).

    ``fingerprint``: refuse any other dataset than this.

    The fingerprints of several datasets are joined by ``+``.
    """

    points: Annotated[
        bool,
        Meta(description="lidar sweeps; false, or --no-points, leaves them out"),
    ] = True
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
    settings_type = FuelrailOptions
    requires: ClassVar[Mapping[str, str]] = {}
    reads: Reads = "random"

    def __init__(self, location: str, options: dict[str, Any]) -> None:
        """Open them; SourceError where that fails or they do not fit, ConfigError for another
        fingerprint.
        """
        self._options = convert(options, FuelrailOptions, "options of source fuelrail")
        self._parts = [DatasetPart(item) for item in location.split(SEPARATOR)]
        fingerprint = self._fingerprint
        if self._options.fingerprint not in (None, fingerprint):
            named = "', '".join(location.split(SEPARATOR))
            raise ConfigError(
                f"'{named}' has the fingerprint {fingerprint}, expected {self._options.fingerprint}"
            )
        check_alike([part.dataset for part in self._parts])
        first = self._parts[0].dataset
        rig = [camera.channel for camera in first.manifest.cameras]
        self._cameras = choose_cameras(rig, self._options.cameras or None, first.location)
        self._camera_rows = tuple(map(rig.index, self._cameras))
        self._num_cameras = len(rig)
        images = itertools.product({*rig} - {*self._cameras}, IMAGE_EXTENSIONS)
        channels = [
            item for item in first.manifest.extra_channels if not lies_on(item, self._cameras)
        ]
        self._left_out = {
            *map(".".join, images),
            *(channel.field for channel in channels),
        }

    @property
    def _fingerprint(self) -> str:
        return "+".join(part.dataset.manifest.fingerprint for part in self._parts)

    @property
    def options(self) -> dict[str, Any]:
        """All options; the fingerprint is that of the datasets."""
        values = msgspec.structs.asdict(self._options)
        return {
            **values,
            "cameras": list(self._options.cameras),
            "fingerprint": self._fingerprint,
        }

    @property
    def attribute_types(self) -> dict[str, type]:
        """The columns of ``attributes.parquet`` that are not in the index."""
        return joined_types([part.attribute_types for part in self._parts])

    def open(self, ref: str) -> memoryview:
        """Read a member's raw bytes; ``ref`` is the number of its dataset, its row and its field
        name.
        """
        part, number, field = ref.split("/", 2)
        return self._parts[int(part)].read(int(number), field)

    def scan(self, out: ScanWriter) -> ScanInfo:
        """Read index, attributes and the small members; write one row for each sample."""
        manifests = [part.dataset.manifest for part in self._parts]
        clips = [(part.dataset.location, part.dataset.index.clip_ids()) for part in self._parts]
        check_disjoint(clips)
        owners = sorted((clip, number) for number, (_, ids) in enumerate(clips) for clip in ids)
        walks = [part.samples(out.disk) for part in self._parts]
        types = self.attribute_types
        for clip, number in owners:
            # A part's samples come clip by clip in the order of the ids, as the owners do.
            for position, sample in enumerate(next(walks[number])):
                attributes = {**dict.fromkeys(types), **sample.attributes}
                stored = sample._replace(attributes=attributes)
                self._append_sample(
                    out,
                    number=number,
                    stored=stored,
                    begins=None if position else clip,
                )
        first = manifests[0]
        splits: dict[str, list[str]] = {}
        for part in self._parts:
            for name, split in part.dataset.manifest.splits.items():
                ids = part.dataset.index.clip_ids(
                    split.first_sample, split.first_sample + split.num_samples
                )
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
            channels=tuple(
                channel for channel in first.extra_channels if lies_on(channel, self._cameras)
            ),
            classes=list(first.classes),
            attributes=list(first.attributes),
            names=out.member_names(
                [
                    channel_entry.name
                    for channel_entry in first.channels
                    if channel_entry.field != BOXES
                ]
            ),
            time_base=first.time_base,
            ego_origin=first.ego_origin,
            license=joined([manifest.license for manifest in manifests]),
            splits=splits,
            facts={"provenance": first.provenance}
            if len(manifests) == 1
            else {"merged": [{"name": m.name, "provenance": m.provenance} for m in manifests]},
            lineage=Lineage.from_parents(manifests),
        )

    def _append_sample(
        self,
        out: ScanWriter,
        number: int,
        stored: StoredSample,
        *,
        begins: str | None,
    ) -> None:
        """Append a sample of part ``number``; ``begins`` is the clip that begins with it."""
        row_number, entry, attributes = stored
        part = self._parts[number]
        small = part.small_members(entry)
        try:
            sample = decode_sample(entry.key, small)
            meta = sample.meta
            if len(self._cameras) < self._num_cameras:
                sample = sample.of_cameras(self._camera_rows, self._num_cameras)
                small[GEOMETRY] = encode_arrays(sample.geometry)
                cameras = {
                    name: camera for name, camera in meta.cameras.items() if name in self._cameras
                }
                stats = dict(meta.stats)
                sync = dict(meta.sync)
                if "max_sync_offset_ns" in stats:
                    offsets = [
                        abs(camera.timestamp_ns - meta.timestamp_ns) for camera in cameras.values()
                    ]
                    stats["max_sync_offset_ns"] = max(offsets, default=0)
                if "dropped" in sync:
                    sync["dropped"] = [name for name in sync["dropped"] if name in self._cameras]
                meta = msgspec.structs.replace(
                    meta,
                    cameras=cameras,
                    stats=stats,
                    sync=sync,
                )
                if "num_cameras" in attributes:
                    attributes["num_cameras"] = int(sample.geometry.cam_valid.sum())
        except SchemaError as error:
            where = f"dataset '{part.dataset.location}'"
            raise SourceError(f"sample '{entry.key}' of {where} is bad: {error}") from error
        if entry.key != frame_key(entry.clip_id, entry.frame):
            raise SourceError(
                f"sample '{entry.key}' is not named after its clip '{entry.clip_id}' and "
                f"frame {entry.frame}"
            )
        if (meta.key, meta.clip_id, meta.frame_idx) != (
            entry.key,
            entry.clip_id,
            entry.frame,
        ):
            raise SourceError(
                f"sample '{entry.key}': its {META} is of sample '{meta.key}', clip "
                f"'{meta.clip_id}', frame {meta.frame_idx}; the index has clip "
                f"'{entry.clip_id}', frame {entry.frame}"
            )
        if begins is not None:
            out.begin_clip(begins, meta.clip_name, meta.clip_token)
        members = []
        for member in entry.members:
            _check_channel(entry.key, member.name, part)
            is_points = lidar_channel(member.name) in part.lidars
            if (
                member.name in INLINE
                or member.name in self._left_out
                or (is_points and not self._options.points)
            ):
                continue
            camera_name = member.name.partition(".")[0]
            camera = meta.cameras.get(camera_name)
            size = (0, 0) if camera is None else (camera.width, camera.height)
            members.append(
                Reference(
                    member.name,
                    f"{number}/{row_number}/{member.name}",
                    member.raw_bytes,
                    *size,
                )
            )
        boxes = small.get(BOXES)
        out.append(
            meta,
            geometry=bytes(small[GEOMETRY]),
            boxes=None if boxes is None else bytes(boxes),
            members=members,
            attributes=attributes,
        )


def _check_channel(key: str, name: str, part: DatasetPart) -> None:
    """Raise SourceError for an image or a sweep of a channel that the manifest does not have."""
    channel, _, extension = name.partition(".")
    if name in part.fields:
        return
    rig = part.cameras if extension in IMAGE_EXTENSIONS else part.lidars
    if (
        extension in (*IMAGE_EXTENSIONS, POINTS_EXTENSION)
        and channel not in rig
        and not name.startswith("x_")
    ):
        raise SourceError(
            f"sample '{key}' of dataset '{part.dataset.location}' has the member "
            f"'{shortened(name)}', but the manifest has no sensor '{shortened(channel)}': "
            "`fuelrail verify` says more"
        )
