"""A clip's frames become rows of the scan table: keys, metadata, geometry, neighbours, counts,
and what is left out.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from fuelrail.pipeline.channels.series import parts_of_series
from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.sample.schema import SCHEMA, CameraMeta, Mask, Meta, encode_stacked
from fuelrail.sharding.sources.adapter.arrays import (
    clip_arrays,
    stacked_geometry,
)
from fuelrail.sharding.sources.adapter.boxes import clip_boxes
from fuelrail.sharding.sources.adapter.channels import (
    clip_series,
    image_boxes,
    value_members,
)
from fuelrail.sharding.sources.adapter.classes import count_column
from fuelrail.sharding.sources.adapter.frame import (
    FRAME,
    Absent,
    Image,
    thinned,
)
from fuelrail.sharding.sources.adapter.members import (
    DAMAGED,
    NO_POSE,
    NOT_IN_CLIP,
    NOTED,
    Entry,
    MemberFinder,
    StampedReference,
    check_inside,
    facts_by_name,
)
from fuelrail.sharding.sources.shared.scan_table import frame_key

if TYPE_CHECKING:
    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.pipeline.dtypes import I32
    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.sharding.sources.adapter.arrays import ClipArrays
    from fuelrail.sharding.sources.adapter.boxes import ClipBoxes
    from fuelrail.sharding.sources.adapter.classes import ClassMap
    from fuelrail.sharding.sources.adapter.frame import Clip, Frame, Sensors
    from fuelrail.sharding.sources.adapter.poses import Trajectory
    from fuelrail.sharding.sources.shared.files import SourceFiles
    from fuelrail.sharding.sources.shared.pictures import ImagePolicy
    from fuelrail.sharding.sources.shared.scan_report import (
        Findings,
        ScanReport,
    )
    from fuelrail.sharding.sources.shared.scan_table import ScanWriter

NO_IMAGE: Final = "no camera image"
_AT_ONCE: Final = 256
_HOLE_S: Final = 10.0
_HOLE_STEPS: Final = 10
"""The least gap between frames that is noted, in steps of a clip, and in seconds."""
_HOLES: Final = (
    f"holes in clips (over {_HOLE_S:g} s and {_HOLE_STEPS} steps), over which temporal "
    "windows reach: give the parts clips of their own"
)
_NS_PER_HOUR: Final = 3_600_000_000_000
_CLIP_ID: Final = re.compile(r"[a-z0-9_-]{1,64}\Z")
_COLUMN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
RESERVED_COLUMNS: Final = (
    "key",
    "clip",
    "frame",
    "clip_name",
    "num_cameras",
    "num_boxes",
)
"""Columns that every dataset has of its own samples; no source has others of these names."""
COMMON_COLUMNS: Final[dict[str, type]] = {
    "clip_name": str,
    "log_id": str,
    "vehicle": str,
    "num_cameras": int,
    "num_boxes": int,
    "speed_mps": float,
    "hour_utc": float,
}


def attribute_types(classes: Iterable[str], columns: Mapping[str, type]) -> dict[str, type]:
    """Return the columns of attributes: those of all sources, a count for each class, and the
    source's own.
    """
    return {
        **COMMON_COLUMNS,
        **dict.fromkeys(map(count_column, classes), int),
        **columns,
    }


def may_be_attribute(name: str) -> bool:
    """Return whether a source may call a column of attributes so: a word, and none of Fuelrail's
    own names.

    A source may give the columns ``log_id``, ``vehicle``, ``speed_mps`` and ``hour_utc``, which all
    datasets have, of their own types (:func:`fitting_type`); its values replace those that are
    worked out.
    """
    return bool(_COLUMN.match(name)) and name not in RESERVED_COLUMNS


def fitting_type(name: str, kind: type | None) -> type | None:
    """Return the type of a source's column of attributes whose values are of ``kind``; None
    where it cannot be one.
    """
    common = COMMON_COLUMNS.get(name, kind)
    is_fitting = common is kind or (common is float and kind is int)
    return common if is_fitting else None


def clip_id(name: str, token: str = "", *, is_taken: bool = False) -> str:
    """Return a legal id for a clip: its name if that is one, else a slug with a hash of the name.

    ``is_taken``: other clips of the source have the name.
    """
    if _CLIP_ID.match(name) and not name.startswith("__") and not is_taken:
        return name
    slug = re.sub(r"[^a-z0-9_-]+", "-", name.lower())[:48].strip("-_")
    digest = hashlib.sha256((token or name).encode()).hexdigest()
    return f"{slug or 'clip'}-{digest[:8]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipRows:
    """Writes the rows of one clip after the other.

    ``columns`` are the names of all attributes; ``policy`` and ``points`` are options of the
    source, ``make_images`` is its method; ``sync`` says how images were matched.
    """

    out: ScanWriter
    files: SourceFiles
    sensors: Sensors
    classes: ClassMap
    report: ScanReport
    findings: Findings
    columns: list[str]
    policy: ImagePolicy
    sync: str
    points: bool
    has_poses: bool
    is_unix: bool
    make_images: Callable[[Sequence[str]], Iterator[tuple[str, Buffer]]]
    channels: Sequence[Channel] = ()

    def add(
        self,
        clip: Clip,
        frames: Sequence[Frame],
        trajectory: Trajectory | None,
        rate: float = 0.0,
    ) -> None:
        """Write a clip's rows, at most ``rate`` a second (0: all).

        Raises SourceError for what spoils the whole clip, and notes smaller faults.
        """
        where = f"clip '{clip.name}'"
        if not frames:
            raise SourceError(f"{where} has no frames")
        self._check_frames(where, frames)
        series = clip_series(self.channels, clip, frames)
        times = np.array([frame.timestamp_ns for frame in frames])
        due = set(thinned(times, rate).tolist())
        frames = [frame for frame in frames if frame.timestamp_ns in due]
        arrays = clip_arrays(
            self.sensors,
            frames,
            trajectory,
            has_poses=self.has_poses,
        )
        stamp = self._compute_stamp(clip)
        finder = MemberFinder(
            files=self.files,
            sensors=self.sensors,
            findings=self.findings,
            report=self.report,
            points=self.points,
            policy=self.policy,
            make_images=self.make_images,
        )
        has_pose = ~np.isnan(arrays.cam_ego2global[..., 0, 0])
        images_found, members_found = finder.find(where, frames, has_pose)
        mask = self._select_frames(where, frames, images_found, arrays)
        self._check_sweep_poses(where, images_found, mask, arrays)
        boxes = self._convert_boxes(where, frames, mask, arrays)
        order = np.flatnonzero(mask)
        if not len(order):
            return
        self.out.begin_clip(
            clip.id or clip_id(clip.name),
            clip_name=clip.name,
            clip_token=clip.token or clip.name,
        )
        facts = _ClipFacts(
            rows=self,
            clip=clip,
            frames=frames,
            mask=mask,
            arrays=arrays,
            boxes=boxes,
        )
        cameras = [camera.channel for camera in self.sensors.cameras]
        sizes, is_there = self._collect_image_sizes(frames, images_found)
        num_cameras = is_there.sum(1).tolist()
        rank = {channel.field: number for number, channel in enumerate(self.channels)}
        parts = {
            name: dict(
                zip(
                    order.tolist(),
                    parts_of_series(times, numbers, arrays.time_ns[order]),
                    strict=True,
                )
            )
            for name, (times, numbers) in series.items()
        }
        for first in range(0, len(order), _AT_ONCE):
            rows = order[first : first + _AT_ONCE]
            geometry = stacked_geometry(
                where,
                sensors=self.sensors,
                frames=frames,
                sizes=sizes[rows],
                is_there=is_there[rows],
                arrays=arrays,
                rows=rows,
            )
            sizes_shown = np.where(is_there[rows, :, None], geometry.img_wh, -1)
            self.report.note_principal_points(cameras, geometry.intrinsics, sizes_shown)
            for row, encoded in zip(rows.tolist(), encode_stacked(geometry), strict=True):
                present_members = [
                    entry for entry in images_found[row].values() if not isinstance(entry, str)
                ]
                members = [entry.reference for entry in present_members]
                meta = facts.meta(row, images_found[row])
                attributes = facts.attributes(row, num_cameras[row])
                extra_members = [entry.reference for entry in members_found[row]]
                if self.channels:
                    place = f"{where}: frame {row}"
                    values = {name: series_parts[row] for name, series_parts in parts.items()}
                    extra_members += value_members(
                        self.channels, {**frames[row].values, **values}, place
                    )
                    present = [entry.name.partition(".")[0] for entry in members]
                    extra_members += image_boxes(
                        self.channels,
                        boxes=frames[row].boxes2d,
                        cameras=present,
                        classes=self.classes,
                        where=place,
                    )
                if extra_members:
                    members += sorted(
                        extra_members,
                        key=lambda member: rank.get(member.name, -1),
                    )
                files = [
                    entry.stamp for entry in (*present_members, *members_found[row]) if entry.stamp
                ]
                stamps = xxhash.xxh3_64_intdigest(" ".join([stamp, *files]).encode())
                self.out.append(
                    meta,
                    geometry=encoded,
                    boxes=boxes.encoded[row],
                    members=members,
                    attributes=attributes,
                    stamp=stamps,
                )
        self.report.samples += len(order)
        self._note_cameras(frames, is_there, arrays, order)

    def _check_frames(self, where: str, frames: Sequence[Frame]) -> None:
        channels = set(self.sensors.channels)
        before = -1
        for number, frame in enumerate(frames):
            if frame.timestamp_ns <= before:
                if frame.timestamp_ns < 0:
                    problem = "is negative"
                else:
                    problem = f"is not later than {before} of the frame before it"
                raise SourceError(
                    f"{where}: the time of frame {number}, {frame.timestamp_ns} ns, {problem}"
                )
            before = frame.timestamp_ns
            channels_of_frame = frame.images.keys() | frame.sweeps.keys()
            if not channels_of_frame <= channels:
                unknown = channels_of_frame - channels
                names = ", ".join(sorted(channels))
                raise SourceError(
                    f"{where}: frame {number} has the sensor '{min(unknown)}', the rig has {names}"
                )
        steps_s = np.diff([frame.timestamp_ns for frame in frames]) * 1e-9
        hole_s = _HOLE_S
        if len(steps_s):
            hole_s = max(_HOLE_S, _HOLE_STEPS * float(np.median(steps_s)))
        self.report.note(_HOLES, int(np.count_nonzero(steps_s > hole_s)))

    def _compute_stamp(self, clip: Clip) -> str:
        for name in clip.files:
            check_inside(name, f"clip '{clip.name}'")
        facts = facts_by_name(self.files, clip.files)
        for name, file_facts in facts.items():
            if file_facts is None:
                raise SourceError(
                    f"clip '{clip.name}': file '{self.files.shown}/{name}' is not there"
                )
        return " ".join(
            f"{file_facts.num_bytes}-{file_facts.stamp}"
            for file_facts in facts.values()
            if file_facts is not None
        )

    def _select_frames(
        self,
        where: str,
        frames: Sequence[Frame],
        images_found: Sequence[Mapping[str, Entry]],
        arrays: ClipArrays,
    ) -> Mask:
        """Return which frames are samples (F,); count those left out, and note what the policy
        refuses.
        """
        mask = np.ones(len(frames), np.bool_)
        has_pose = ~np.isnan(arrays.ego2global[:, 0, 0])
        channels = {camera.channel for camera in self.sensors.cameras}
        for number, row in enumerate(images_found):
            lacking = {
                channel: reason for channel, reason in row.items() if isinstance(reason, str)
            }
            if not lacking and has_pose[number]:
                continue
            absent = {channel: why for channel, why in lacking.items() if channel in channels}
            images = frames[number].images
            refused = {
                channel: why
                for channel, why in absent.items()
                if why not in (NOT_IN_CLIP, NOTED)
                and not getattr(images.get(channel), "absent", "")
            }
            if not has_pose[number] or len(absent) == len(channels):
                mask[number] = False
                causes = f" ({', '.join(sorted(set(refused.values())))})" if refused else ""
                self.report.drop(NO_IMAGE + causes if has_pose[number] else NO_POSE)
            left_out = {
                channel: self.policy.damaged if why == DAMAGED else self.policy.missing
                for channel, why in refused.items()
            }
            dropping = next(
                (channel for channel, reason in left_out.items() if reason == "drop"),
                None,
            )
            if dropping is not None and mask[number]:
                mask[number] = False
                self.report.drop(f"{dropping}: {refused[dropping]}")
            for channel, why in refused.items():
                image = images.get(channel)
                if why == DAMAGED:
                    self.report.damaged[channel] = self.report.damaged.get(channel, 0) + 1
                elif left_out[channel] == "error":
                    named = (
                        f" '{self.files.shown}/{image.ref}'"
                        if image is not None and image.ref
                        else ""
                    )
                    video = image.ref.partition(FRAME)[0] if isinstance(image, Absent) else ""
                    self.findings.add_cause(
                        channel,
                        cause=f"{why} {video}",
                        place=f"{where}: frame {number}",
                        fault=f"has no image of {channel}{named} ({why})",
                        remedy="; the option missing_camera=mask leaves the member out, "
                        "missing_camera=drop the whole frame",
                    )
            if mask[number]:
                for channel, why in lacking.items():
                    self.report.mask(channel, why)
        return mask

    def _check_sweep_poses(
        self,
        where: str,
        images_found: Sequence[Mapping[str, Entry]],
        mask: Mask,
        arrays: ClipArrays,
    ) -> None:
        """Note the sweeps of samples that have no ego pose."""
        has_no_pose = np.isnan(arrays.lidar_ego2global[..., 0, 0])
        is_unplaced = has_no_pose & mask[:, None]
        for number, lidar in enumerate(self.sensors.lidars):
            for frame_number in np.flatnonzero(is_unplaced[:, number]).tolist():
                if isinstance(
                    images_found[frame_number].get(lidar.channel),
                    StampedReference,
                ):
                    self.findings.add_cause(
                        lidar.channel,
                        cause=NO_POSE,
                        place=f"{where}: frame {frame_number}",
                        fault=f"has a sweep of {lidar.channel} without an ego pose at its time",
                        remedy="; the pose of each sweep, or poses before and after it, are "
                        "needed; the option points=false leaves sweeps out",
                    )

    def _convert_boxes(
        self,
        where: str,
        frames: Sequence[Frame],
        mask: Mask,
        arrays: ClipArrays,
    ) -> ClipBoxes:
        rows = []
        for frame, is_kept in zip(frames, mask.tolist(), strict=True):
            if is_kept:
                rows.append(frame.boxes)
            else:
                rows.append(None)
        try:
            return clip_boxes(
                rows,
                timestamp_ns=arrays.time_ns,
                ego2global=arrays.ego2global,
                classes=self.classes,
                report=self.report,
            )
        except SourceError as error:
            raise SourceError(f"{where}: {error}") from error

    def _collect_image_sizes(
        self,
        frames: Sequence[Frame],
        images_found: Sequence[Mapping[str, Entry]],
    ) -> tuple[I32, Mask]:
        """Return the sizes (F, N, 2) [px], -1 where there is no image."""
        channels = [camera.channel for camera in self.sensors.cameras]
        sizes = []
        is_there = []
        for frame, row in zip(frames, images_found, strict=True):
            for channel in channels:
                result = row[channel]
                is_there.append(not isinstance(result, str))
                if isinstance(result, str):
                    image = _find_absent_image(frame, channel)
                    sizes.append((-1, -1) if image is None else image.size)
                else:
                    sizes.append((result.reference.width, result.reference.height))
        shape = (len(images_found), len(channels))
        mask = np.array(is_there, np.bool_).reshape(shape)
        size_pairs = np.array(sizes, np.int32)
        return size_pairs.reshape(*shape, 2), mask

    def _note_cameras(
        self,
        frames: Sequence[Frame],
        is_there: Mask,
        arrays: ClipArrays,
        order: NDArray[np.intp],
    ) -> None:
        """Count distorted images, and note the largest time offsets."""
        is_there = is_there[order]
        offset_ns = (
            np.where(
                is_there,
                np.abs(arrays.cam_time_ns - arrays.time_ns[:, None])[order],
                0,
            )
            .max(0)
            .tolist()
        )
        for number, camera in enumerate(self.sensors.cameras):
            channel = camera.channel
            self.report.offset(channel, offset_ns[number])
            images = [
                frames[frame_number].images[channel]
                for frame_number in order[is_there[:, number]].tolist()
            ]
            bent = sum(
                isinstance(image, Image) and bool(image.calibration.dist) for image in images
            )
            if bent:
                self.report.distorted[channel] = self.report.distorted.get(channel, 0) + bent


def _find_absent_image(frame: Frame, channel: str) -> Image | None:
    """Return the image of a camera that stays in the sample where its bytes are absent, and has
    a size.
    """
    image = frame.images.get(channel)
    if isinstance(image, Image) and image.stays and min(image.size) > 0:
        return image
    return None


class _ClipFacts:
    """Metadata and attributes of a clip's frames; frames keep their numbers, and a dropped one
    is not a neighbour.
    """

    def __init__(
        self,
        rows: ClipRows,
        clip: Clip,
        frames: Sequence[Frame],
        mask: Mask,
        arrays: ClipArrays,
        boxes: ClipBoxes,
    ) -> None:
        self._clip = clip
        self._frames = frames
        self._id = clip.id or clip_id(clip.name)
        self._sync = rows.sync or rows.policy.missing
        self._is_unix = rows.is_unix
        self._has_frame = np.pad(mask, 1).tolist()
        self._cameras = [camera.channel for camera in rows.sensors.cameras]
        names = [count_column(name) for name in rows.classes.names]
        is_column = [name in rows.columns for name in names]
        columns = zip(names, is_column, strict=True)
        self._counted = [name for name, has_column in columns if has_column]
        self._counts = boxes.class_counts[:, is_column].tolist()
        self._num_boxes = [
            None if data is None else number
            for data, number in zip(boxes.encoded, boxes.num_boxes, strict=True)
        ]
        self._speeds = np.linalg.norm(arrays.motion[:, 0], axis=1).tolist()
        self._nothing = {
            **dict.fromkeys(rows.columns),
            "clip_name": clip.name,
            "log_id": clip.log_id or clip.name,
            "vehicle": clip.vehicle,
        }

    def meta(
        self,
        frame_number: int,
        images_found: Mapping[str, Entry],
    ) -> Meta:
        """Return the metadata of a frame; dataset, split and license are filled in when shards
        are written.
        """
        frame = self._frames[frame_number]
        clip = self._clip
        key = self._id
        cameras: dict[str, CameraMeta] = {}
        latest_ns = 0
        time_ns = frame.timestamp_ns
        number = self._num_boxes[frame_number]
        for name in self._cameras:
            result = images_found[name]
            image = frame.images.get(name)
            if not isinstance(image, Image) or (isinstance(result, str) and not image.stays):
                continue
            latest_ns = max(latest_ns, abs(image.timestamp_ns - time_ns))
            if isinstance(result, str):
                size = image.size
                if min(size) <= 0:
                    continue
            else:
                size = (result.reference.width, result.reference.height)
            cameras[name] = CameraMeta(
                token=image.token,
                timestamp_ns=image.timestamp_ns,
                width=size[0],
                height=size[1],
                dist_model=image.calibration.dist_model,
                rolling_shutter=image.calibration.rolling_shutter,
                readout_ns=image.readout_ns,
                exposure_ns=image.exposure_ns,
            )
        return Meta(
            schema=SCHEMA,
            dataset="",
            key=frame_key(key, frame_number),
            sample_token=frame.token or frame_key(key, frame_number),
            clip_id=key,
            clip_token=clip.token or clip.name,
            clip_name=clip.name,
            log_id=clip.log_id or clip.name,
            vehicle=clip.vehicle,
            frame_idx=frame_number,
            num_frames=len(self._frames),
            prev_key=frame_key(key, frame_number - 1) if self._has_frame[frame_number] else None,
            next_key=frame_key(key, frame_number + 1)
            if self._has_frame[frame_number + 2]
            else None,
            timestamp_ns=time_ns,
            is_key_frame=frame.is_key_frame,
            split="",
            cameras=cameras,
            tags=clip.tags,
            stats={
                "max_sync_offset_ns": latest_ns,
                **({} if number is None else {"num_boxes": number}),
            },
            sync={
                "policy": self._sync,
                "dropped": [name for name in self._cameras if isinstance(images_found[name], str)],
            },
        )

    def attributes(self, frame_number: int, num_cameras: int) -> dict[str, Any]:
        """Return the row of ``attributes.parquet``; what is not known is null."""
        frame = self._frames[frame_number]
        speed = self._speeds[frame_number]
        values: dict[str, Any] = {
            **self._nothing,
            "num_cameras": num_cameras,
            "num_boxes": self._num_boxes[frame_number],
            "speed_mps": None if math.isnan(speed) else speed,
            "hour_utc": frame.timestamp_ns % (24 * _NS_PER_HOUR) / _NS_PER_HOUR
            if self._is_unix
            else None,
        }
        if self._num_boxes[frame_number] is not None:
            values.update(zip(self._counted, self._counts[frame_number], strict=True))
        values.update(self._clip.attributes)
        values.update(
            (name, value)
            for name, value in frame.attributes.items()
            if value is not None or name not in COMMON_COLUMNS
        )
        return values
