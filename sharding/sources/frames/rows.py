"""A clip's frames become rows of the scan table: keys, metadata, geometry, neighbours, counts, and what is left out."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import xxhash

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.sample.schema import SCHEMA, CameraMeta, Meta, encode_arrays, encode_stacked
from fuelrail.sharding.sources.frames.arrays import clip_arrays, stacked_geometry
from fuelrail.sharding.sources.frames.boxes import clip_boxes
from fuelrail.sharding.sources.frames.channels import image_boxes
from fuelrail.sharding.sources.frames.classes import count_column
from fuelrail.sharding.sources.frames.frame import Image
from fuelrail.sharding.sources.frames.members import (
    NO_POSE,
    NOT_IN_CLIP,
    NOTED,
    Found,
    MemberFinder,
    check_inside,
    facts_by_name,
)
from fuelrail.sharding.sources.scan_table import frame_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.pipeline.sample.schema import Boxes
    from fuelrail.sharding.sources.files import SourceFiles
    from fuelrail.sharding.sources.frames.arrays import ClipArrays
    from fuelrail.sharding.sources.frames.classes import ClassMap
    from fuelrail.sharding.sources.frames.frame import Clip, Frame, Sensors
    from fuelrail.sharding.sources.frames.poses import Trajectory
    from fuelrail.sharding.sources.scan_report import Findings, ScanReport
    from fuelrail.sharding.sources.scan_table import Reference, ScanWriter

NO_IMAGE: Final = "no camera image"
_AT_ONCE: Final = 256
_NS_PER_HOUR: Final = 3_600_000_000_000
_CLIP_ID: Final = re.compile(r"[a-z0-9_-]{1,64}\Z")
_COMMON: Final[dict[str, type]] = {
    "clip_name": str,
    "log_id": str,
    "vehicle": str,
    "num_cameras": int,
    "num_boxes": int,
    "speed_mps": float,
    "hour_utc": float,
}


def attribute_types(classes: Iterable[str], columns: Mapping[str, type]) -> dict[str, type]:
    """The columns of attributes: those of all sources, a count for each class, and the source's own."""
    return {**_COMMON, **dict.fromkeys(map(count_column, classes), int), **columns}


def clip_id(name: str) -> str:
    """A legal id for a clip: its name where that is one, else a slug with a hash of the name."""
    if _CLIP_ID.match(name) and not name.startswith("__"):
        return name
    slug = re.sub(r"[^a-z0-9_-]+", "-", name.lower())[:48].strip("-_")
    return f"{slug or 'clip'}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipRows:
    """Writes the rows of one clip after the other.

    ``columns`` are the names of all attributes; ``missing_camera``, ``points`` are options of the source.
    """

    out: ScanWriter
    files: SourceFiles
    sensors: Sensors
    classes: ClassMap
    report: ScanReport
    findings: Findings
    columns: list[str]
    missing_camera: str
    points: bool
    has_poses: bool
    is_unix: bool
    channels: Sequence[Channel] = ()

    def add(self, clip: Clip, frames: Sequence[Frame], trajectory: Trajectory | None) -> None:
        """Write a clip's rows; raises SourceError for what spoils the whole clip, and notes smaller faults."""
        where = f"clip '{clip.name}'"
        if not frames:
            raise SourceError(f"{where} has no frames")
        self._check_frames(where, frames)
        arrays = clip_arrays(self.sensors, frames, trajectory, has_poses=self.has_poses)
        stamp = self._stamp(clip)
        finder = MemberFinder(self.files, self.sensors, self.findings, self.points)
        found = finder.find(where, frames, ~np.isnan(arrays.cam_ego2global[..., 0, 0]))
        kept = self._kept(where, frames, found, arrays)
        boxes = self._boxes(where, frames, kept, arrays)
        order = np.flatnonzero(kept)
        if not len(order):
            return
        self.out.begin_clip(clip_id(clip.name), clip.name, clip.token or clip.name)
        facts = _ClipFacts(self, clip, frames, kept)
        for first in range(0, len(order), _AT_ONCE):
            rows = order[first : first + _AT_ONCE]
            geometry = stacked_geometry(where, self.sensors, frames, self._image_sizes(found, rows), arrays, rows)
            for at, encoded in zip(rows.tolist(), encode_stacked(geometry), strict=True):
                there = [one for one in found[at].values() if isinstance(one, Found)]
                members, own = [one.reference for one in there], boxes[at]
                meta = facts.meta(at, members, own)
                attributes = facts.attributes(at, arrays, members, own)
                if self.channels:
                    cameras, place = [one.name.partition(".")[0] for one in members], f"{where}: frame {at}"
                    members += image_boxes(self.channels, frames[at].boxes2d, cameras, self.classes, place)
                stamps = xxhash.xxh3_64_intdigest(" ".join([stamp, *(one.stamp for one in there)]).encode())
                self.out.append(meta, encoded, None if own is None else encode_arrays(own), members, attributes, stamps)
        self.report.samples += len(order)
        self._note_cameras(frames, found, order)

    def _check_frames(self, where: str, frames: Sequence[Frame]) -> None:
        channels = set(self.sensors.channels)
        before = -1
        for at, frame in enumerate(frames):
            if frame.timestamp_ns <= before:
                what = "is negative" if frame.timestamp_ns < 0 else f"is not later than {before} of the frame before it"
                raise SourceError(f"{where}: the time of frame {at}, {frame.timestamp_ns} ns, {what}")
            before = frame.timestamp_ns
            if unknown := (frame.images.keys() | frame.sweeps.keys()) - channels:
                known = ", ".join(sorted(channels))
                raise SourceError(f"{where}: frame {at} has the sensor '{min(unknown)}', the rig has {known}")

    def _stamp(self, clip: Clip) -> str:
        for name in clip.files:
            check_inside(name, f"clip '{clip.name}'")
        facts = facts_by_name(self.files, clip.files)
        for name, found in facts.items():
            if found is None:
                raise SourceError(f"clip '{clip.name}': file '{self.files.shown}/{name}' is not there")
        return " ".join(f"{found.num_bytes}-{found.stamp}" for found in facts.values() if found is not None)

    def _kept(
        self, where: str, frames: Sequence[Frame], found: Sequence[Mapping[str, Found | str]], arrays: ClipArrays
    ) -> NDArray[np.bool_]:
        """Which frames are samples (F,); counts what is left out, and notes what the policy refuses."""
        kept = np.ones(len(frames), np.bool_)
        has_pose = ~np.isnan(arrays.ego2global[:, 0, 0])
        channels = [camera.channel for camera in self.sensors.cameras]
        for at, row in enumerate(found):
            absent = {channel: row[channel] for channel in channels if isinstance(row[channel], str)}
            refused = {channel: why for channel, why in absent.items() if why not in (NOT_IN_CLIP, NOTED)}
            if not has_pose[at] or len(absent) == len(channels):
                kept[at] = False
                self.report.drop(NO_IMAGE if has_pose[at] else NO_POSE)
            elif refused and self.missing_camera == "drop":
                kept[at] = False
                channel, why = next(iter(refused.items()))
                self.report.drop(f"{channel}: {why}")
            for channel, why in refused.items() if self.missing_camera == "error" else ():
                image = frames[at].images.get(channel)
                named = f" '{self.files.shown}/{image.ref}'" if image is not None and image.ref else ""
                self.findings.add(
                    channel,
                    f"{where}: frame {at} has no image of {channel}{named} ({why}); the option missing_camera=mask "
                    "leaves the member out, missing_camera=drop the whole frame",
                )
            for channel, why in row.items() if kept[at] else ():
                if isinstance(why, str):
                    self.report.mask(channel, why)
        return kept

    def _boxes(
        self, where: str, frames: Sequence[Frame], kept: NDArray[np.bool_], arrays: ClipArrays
    ) -> list[Boxes | None]:
        rows = [frame.boxes if is_kept else None for frame, is_kept in zip(frames, kept.tolist(), strict=True)]
        try:
            return clip_boxes(rows, arrays.time_ns, arrays.ego2global, self.classes, self.report)
        except SourceError as error:
            raise SourceError(f"{where}: {error}") from error

    def _image_sizes(self, found: Sequence[Mapping[str, Found | str]], rows: NDArray[np.intp]) -> NDArray[np.int32]:
        """(R, N, 2) [px], -1 where there is no image."""
        sizes = [
            (one.reference.width, one.reference.height) if isinstance(one, Found) else (-1, -1)
            for at in rows.tolist()
            for one in (found[at][camera.channel] for camera in self.sensors.cameras)
        ]
        return np.array(sizes, np.int32).reshape(len(rows), -1, 2)

    def _note_cameras(
        self, frames: Sequence[Frame], found: Sequence[Mapping[str, Found | str]], order: NDArray[np.intp]
    ) -> None:
        """Count distorted images, and note the largest time offsets."""
        for camera in self.sensors.cameras:
            offset_ns, bent, channel = 0, 0, camera.channel
            for at in order.tolist():
                image = frames[at].images.get(channel)
                if isinstance(found[at][channel], Found) and isinstance(image, Image):
                    offset_ns = max(offset_ns, abs(image.timestamp_ns - frames[at].timestamp_ns))
                    bent += bool(image.dist)
            self.report.offset(channel, offset_ns)
            if bent:
                self.report.distorted[channel] = self.report.distorted.get(channel, 0) + bent


class _ClipFacts:
    """Metadata and attributes of a clip's frames; frames keep their numbers, and a dropped one is no neighbour."""

    def __init__(self, rows: ClipRows, clip: Clip, frames: Sequence[Frame], kept: NDArray[np.bool_]) -> None:
        self._rows, self._clip, self._frames = rows, clip, frames
        self._id = clip_id(clip.name)
        self._has_frame = np.pad(kept, 1).tolist()
        self._cameras = [camera.channel for camera in rows.sensors.cameras]
        self._counts = [count_column(name) for name in rows.classes.names]
        self._nothing = dict.fromkeys(rows.columns)

    def meta(self, at: int, members: Sequence[Reference], boxes: Boxes | None) -> Meta:
        """The metadata of a frame; dataset, split and license are filled in when shards are written."""
        frame, clip, key = self._frames[at], self._clip, self._id
        sizes = {one.name.partition(".")[0]: (one.width, one.height) for one in members}
        cameras: dict[str, CameraMeta] = {}
        latest_ns = 0
        for name in self._cameras:
            image = frame.images.get(name)
            if name in sizes and isinstance(image, Image):
                latest_ns = max(latest_ns, abs(image.timestamp_ns - frame.timestamp_ns))
                cameras[name] = CameraMeta(
                    token=image.token,
                    timestamp_ns=image.timestamp_ns,
                    width=sizes[name][0],
                    height=sizes[name][1],
                    dist_model=image.dist_model,
                    rolling_shutter=image.rolling_shutter,
                    readout_ns=image.readout_ns,
                    exposure_ns=image.exposure_ns,
                )
        return Meta(
            schema=SCHEMA,
            dataset="",
            key=frame_key(key, at),
            sample_token=frame.token or frame_key(key, at),
            clip_id=key,
            clip_token=clip.token or clip.name,
            clip_name=clip.name,
            log_id=clip.log_id or clip.name,
            vehicle=clip.vehicle,
            frame_idx=at,
            num_frames=len(self._frames),
            prev_key=frame_key(key, at - 1) if self._has_frame[at] else None,
            next_key=frame_key(key, at + 1) if self._has_frame[at + 2] else None,
            timestamp_ns=frame.timestamp_ns,
            is_key_frame=frame.is_key_frame,
            split="",
            cameras=cameras,
            tags=clip.tags,
            stats={"max_sync_offset_ns": latest_ns, **({} if boxes is None else {"num_boxes": len(boxes.label)})},
            sync={
                "policy": self._rows.missing_camera,
                "dropped": [name for name in self._cameras if name not in sizes],
            },
        )

    def attributes(
        self, at: int, arrays: ClipArrays, members: Sequence[Reference], boxes: Boxes | None
    ) -> dict[str, Any]:
        """The row of ``attributes.parquet``; what is not known is null."""
        clip, frame = self._clip, self._frames[at]
        speed = float(np.linalg.norm(arrays.motion[at, 0]))
        found: dict[str, Any] = {
            **self._nothing,
            "clip_name": clip.name,
            "log_id": clip.log_id or clip.name,
            "vehicle": clip.vehicle,
            "num_cameras": sum(one.width > 0 for one in members),
            "num_boxes": None if boxes is None else len(boxes.label),
            "speed_mps": None if np.isnan(speed) else speed,
            "hour_utc": frame.timestamp_ns % (24 * _NS_PER_HOUR) / _NS_PER_HOUR if self._rows.is_unix else None,
        }
        if boxes is not None:
            counts = np.bincount(boxes.label + 1, minlength=len(self._counts) + 1).tolist()[1:]
            found.update((name, count) for name, count in zip(self._counts, counts, strict=False) if name in found)
        return {**found, **clip.attributes, **frame.attributes}
