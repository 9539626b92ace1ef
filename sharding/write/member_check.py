"""The check of samples on their way into a shard: a sample that breaks a rule is refused before the
shard is published.

The rules are those of :mod:`fuelrail.pipeline.format.rules`. Names, metadata and points are checked
sample by sample; geometry and boxes of many samples at once, which takes a sixth of the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from fuelrail.pipeline.channels.selection import check_members
from fuelrail.pipeline.errors import MemberError, SourceError
from fuelrail.pipeline.format.rules import (
    Rig,
    are_sound,
    broken_boxes,
    broken_calibration,
    broken_meta,
    broken_names,
    broken_points,
    broken_rig,
    broken_sweeps,
    unsafe_ending,
)
from fuelrail.pipeline.sample.schema import (
    BOXES,
    GEOMETRY,
    IMAGE_EXTENSIONS,
    META,
    POINTS_EXTENSION,
    SWEEPS_FIELD,
    Boxes,
    Geometry,
    Meta,
    decode_arrays,
    decode_meta,
    decode_points,
    decode_sweeps,
    lidar_channel,
)
from fuelrail.sharding.sources.shared.scan_report import Findings

if TYPE_CHECKING:
    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.sharding.sources.shared.scan_table import ScanTable

_AT_ONCE: Final = 64
"""Samples whose geometry and boxes are checked together."""

_IMAGES: Final = tuple(f".{extension}" for extension in IMAGE_EXTENSIONS)


class MemberCheck:
    """Checks the samples of one shard; each ``add`` and ``close`` raise SourceError for a sample
    that breaks a rule.

    ``source`` names the source in errors, ``channels`` are those other than cameras, lidars and
    boxes.
    """

    def __init__(self, rig: Rig, source: str, channels: Sequence[Channel] = ()) -> None:
        self._rig = rig
        self._source = source
        self._channels = channels
        self._pending: list[tuple[str, Geometry, Boxes | None]] = []

    def add(self, key: str, meta: Meta, members: Mapping[str, Buffer]) -> None:
        """Check the next sample, of raw members by field name; array members are not kept but
        geometry and boxes.
        """
        rig = self._rig
        field = ""
        try:
            for field, text in broken_names(tuple(members), rig):
                raise self._error(key, field, text)
            for field in members:
                unsafe = unsafe_ending(field)
                if unsafe is not None:
                    raise self._error(key, field, unsafe)
            field = GEOMETRY
            geometry = decode_arrays(members[GEOMETRY], Geometry)
            images = {
                name.partition(".")[0]
                for name in members
                if name.endswith(_IMAGES) and name[:2] != "x_" and name not in rig.fields
            }
            other_rig = broken_rig(geometry, images, rig)
            if other_rig is not None:
                raise self._error(key, field, other_rig)
            for field, text in broken_meta(meta, geometry, rig):
                raise self._error(key, field, text)
            field = BOXES
            boxes = None
            if BOXES in members:
                boxes = decode_arrays(members[BOXES], Boxes)
            for field, data in members.items():
                if field in rig.fields or field.startswith("x_"):
                    continue
                if field.endswith(SWEEPS_FIELD):
                    for text in broken_sweeps(decode_sweeps(data), lidar_channel(field), rig):
                        raise self._error(key, field, text)
                elif field.endswith(f".{POINTS_EXTENSION}"):
                    for text in broken_points(decode_points(data), lidar_channel(field), rig):
                        raise self._error(key, field, text)
            if self._channels:
                sizes = {
                    name: (camera_meta.width, camera_meta.height)
                    for name, camera_meta in meta.cameras.items()
                    if name in images
                }
                for field, text in check_members(members, self._channels, sizes):
                    raise self._error(key, field, text)
        except MemberError as error:
            raise self._error(key, field, error.message) from error
        self._pending.append((key, geometry, boxes))
        if len(self._pending) == _AT_ONCE:
            self.close()

    def close(self) -> None:
        """Check what is pending."""
        pending = self._pending
        self._pending = []
        geometries = [geometry for _, geometry, _ in pending]
        if not pending or are_sound(
            geometries,
            [boxes for _, _, boxes in pending if boxes is not None],
            self._rig,
        ):
            return
        for key, geometry, boxes in pending:
            for text in broken_calibration(geometry):
                raise self._error(key, GEOMETRY, text)
            if boxes is not None:
                for text in broken_boxes(boxes, self._rig):
                    raise self._error(key, BOXES, text)

    def _error(self, key: str, member: str, text: str) -> SourceError:
        return SourceError(f"sample {key} of {self._source} cannot be stored: {member}: {text}")


def check_rows(table: ScanTable, rig: Rig, source: str) -> None:
    """Check of all rows of a scan what :class:`MemberCheck` will, but for the members that the
    source reads.

    Raises SourceError with all that is wrong, the first 20 of each clip.
    """
    findings = Findings()
    for number in range(len(table)):
        row = table.row(number)
        members: dict[str, Buffer] = {META: row.meta, GEOMETRY: row.geometry}
        if row.boxes is not None:
            members[BOXES] = row.boxes
        # Images by their names: what has a width is one.
        members.update((member.name, b"") for member in row.members if member.width)
        check = MemberCheck(rig, source)
        with findings.collecting(f"clip {row.clip}"):
            check.add(row.key, decode_meta(row.meta), members)
            check.close()
    findings.check()
