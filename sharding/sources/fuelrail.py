"""Finished Fuelrail datasets as a source: to merge, shuffle anew, split, select or compress otherwise.

Clips come in the order of their ids, frames ascending, so it doesn't matter in which order the shards hold them, nor in
which order the datasets are named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from fuelrail.pipeline.errors import ConfigError, SchemaError, SourceError
from fuelrail.pipeline.schema import (
    BOXES,
    GEOMETRY,
    IMAGE_EXTENSIONS,
    META,
    POINTS_EXTENSION,
    decode_sample,
    lidar_channel,
)
from fuelrail.pipeline.settings import Settings, convert
from fuelrail.pipeline.text import shown
from fuelrail.sharding.source import Channel, ScanInfo
from fuelrail.sharding.sources.fuelrail_part import INLINE, DatasetPart
from fuelrail.sharding.sources.merged import check_alike, check_disjoint, joined, joined_types
from fuelrail.sharding.table import Reference, frame_key

if TYPE_CHECKING:
    from fuelrail.pipeline.index import IndexRow
    from fuelrail.sharding.table import ScanWriter

SEPARATOR = "\n"
"""Between the locations of several datasets: no path or URL has it."""


class FuelrailOptions(Settings, frozen=True):
    """Options of the adapter. ``points``: keep lidar sweeps. ``fingerprint``: refuse any other dataset than this.

    The fingerprints of several datasets are joined by ``+``.
    """

    points: bool = True
    fingerprint: str | None = None


class FuelrailSource:
    """Dataset folders or URLs, joined by :data:`SEPARATOR`."""

    kind = "fuelrail"

    def __init__(self, location: str, options: dict[str, Any]) -> None:
        """Open them; SourceError where that fails or they do not fit, ConfigError for another fingerprint."""
        self._options = convert(options, FuelrailOptions, "options of source fuelrail")
        self._parts = [DatasetPart(one) for one in location.split(SEPARATOR)]
        there = self._fingerprint
        if self._options.fingerprint not in (None, there):
            named = "', '".join(location.split(SEPARATOR))
            raise ConfigError(f"'{named}' has the fingerprint {there}, wanted is {self._options.fingerprint}")
        check_alike([part.dataset for part in self._parts])

    @property
    def _fingerprint(self) -> str:
        return "+".join(part.dataset.manifest.fingerprint for part in self._parts)

    @property
    def options(self) -> dict[str, Any]:
        """All options; the fingerprint is that of the datasets."""
        return {**msgspec.structs.asdict(self._options), "fingerprint": self._fingerprint}

    @property
    def attribute_types(self) -> dict[str, type]:
        """The columns of ``attributes.parquet`` that do not stand in the index."""
        return joined_types([part.attribute_types for part in self._parts])

    def open(self, ref: str) -> memoryview:
        """Raw bytes of a member; ``ref`` is its dataset's number, its row and its field name."""
        part, number, field = ref.split("/", 2)
        return self._parts[int(part)].read(int(number), field)

    def scan(self, out: ScanWriter) -> ScanInfo:
        """Read index, attributes and the small members; write one row for each sample."""
        manifests = [part.dataset.manifest for part in self._parts]
        clips = [(part.dataset.location, part.clip_ids()) for part in self._parts]
        check_disjoint(clips)
        owners = sorted((clip, number) for number, (_, ids) in enumerate(clips) for clip in ids)
        walks = [part.samples(out.spill) for part in self._parts]
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
            cameras=[Channel(camera.channel, camera.source_name) for camera in first.cameras],
            lidars=list(first.lidars),
            classes=list(first.classes),
            attributes=list(first.attributes),
            names=out.member_names(first.channels),
            time_base=first.time_base,
            ego_origin=first.ego_origin,
            license=joined([manifest.license for manifest in manifests]),
            splits=splits,
            facts={"provenance": first.provenance}
            if len(manifests) == 1
            else {"merged": [{"name": m.name, "provenance": m.provenance} for m in manifests]},
        )

    def _append(
        self, out: ScanWriter, number: int, row: tuple[int, IndexRow], attributes: dict[str, Any], begins: str | None
    ) -> None:
        at, entry = row
        part = self._parts[number]
        small = part.small_members(entry)
        try:
            meta = decode_sample(entry.key, small).meta
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
            if member.name in INLINE or (is_points and not self._options.points):
                continue
            camera = meta.cameras.get(member.name.partition(".")[0])
            size = (0, 0) if camera is None else (camera.width, camera.height)
            members.append(Reference(member.name, f"{number}/{at}/{member.name}", member.raw_bytes, *size))
        boxes = small.get(BOXES)
        out.append(meta, bytes(small[GEOMETRY]), None if boxes is None else bytes(boxes), members, attributes)


def _check_channel(key: str, name: str, part: DatasetPart) -> None:
    """Raise SourceError for an image or a sweep of a channel that the manifest does not have."""
    channel, _, extension = name.partition(".")
    rig = part.cameras if extension in IMAGE_EXTENSIONS else part.lidars
    if extension in (*IMAGE_EXTENSIONS, POINTS_EXTENSION) and channel not in rig and not name.startswith("x_"):
        raise SourceError(
            f"sample '{key}' of dataset '{part.dataset.location}' has the member '{shown(name)}', but the manifest has "
            f"no sensor '{shown(channel)}': `fuelrail verify` says more"
        )
