"""Waymo Open Dataset, perception, version 1: TFRecord files of ``Frame`` messages, whose pictures
are read in place.

Neither TensorFlow nor a library for protocol buffers is needed, and a scan reads less than 1 % of
the bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from fuelrail.pipeline.channels.sensors import LidarEntry
from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.adapter.frame import (
    Calibration,
    Clip,
    Frame,
    Sensors,
    Sweep,
)
from fuelrail.sharding.sources.adapter.members import Part
from fuelrail.sharding.sources.adapter.source import FrameSettings, FrameSource
from fuelrail.sharding.sources.adapter.vector_maps import MapWindows, VectorMap
from fuelrail.sharding.sources.shared.windows import opened
from fuelrail.sharding.sources.source import Camera
from fuelrail.sharding.sources.waymo.frame_heads import (
    CAMERAS,
    LABEL_TYPES,
    image_of,
    image_rows,
    read_camera_labels,
    read_context,
    read_frame,
    read_labels,
)
from fuelrail.sharding.sources.waymo.maps import MAP_LAYERS, parse_map
from fuelrail.sharding.sources.waymo.range_images import (
    POINT_COLUMNS,
    frame_points,
)
from fuelrail.sharding.sources.waymo.records import records

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.schema import F32
    from fuelrail.sharding.sources.shared.scan_table import Reference
    from fuelrail.sharding.sources.waymo.frame_heads import FrameHead
    from fuelrail.sharding.sources.waymo.records import FileRecord

LIDAR: Final = "lidar"
SPLITS: Final = {"training": "train", "validation": "val", "testing": "test"}
"""Folder to split."""
_SEGMENT: Final = re.compile(r"(?:individual_files_\w+?_)?segment-(.+?)(?:_with_camera_labels)?\Z")
_SUFFIX: Final = ".tfrecord"
_IDENTITY: Final = np.eye(4)


class WaymoSettings(FrameSettings, frozen=True, kw_only=True):
    """Options of the source."""

    boxes: Annotated[
        Literal["lidar", "camera_synced"],
        Meta(
            description=(
                "lidar: laser_labels at the frame's pose; camera_synced: those that a camera "
                "sees, moved to the time when it sees them"
            )
        ),
    ] = "lidar"
    boxes2d: Annotated[
        bool,
        Meta(
            description="true stores the labels in images as channels boxes2d_CAMERA, apart from "
            "boxes"
        ),
    ] = False


class WaymoFileSettings(WaymoSettings, frozen=True, kw_only=True):
    """Options of the source of TFRecord files."""

    map: Annotated[
        bool,
        Meta(description="true stores the vector map about ego as the channel map"),
    ] = False
    payload_crc: Annotated[
        bool,
        Meta(
            description="true checks the CRC32C of each record, which reads all bytes of all files"
        ),
    ] = False


W = TypeVar("W", bound=WaymoSettings)


class WaymoSource(FrameSource[W]):
    """What both versions have."""

    ego_origin = "rear_axle_ground"
    columns = {  # noqa: RUF012
        "location": str,
        "time_of_day": str,
        "weather": str,
        "night": bool,
        "rain": bool,
    }
    license = "Waymo Dataset License Agreement for Non-Commercial Use"

    def sensors(self) -> Sensors:
        """Return the five cameras in the order of their numbers, and the five lidars as one.

        Channels of cameras are ``cam_front`` etc., because lidars have the same names.
        """
        cameras = [Camera(channel(name), name) for name in CAMERAS.values()]
        return Sensors(
            cameras,
            [LidarEntry(channel=LIDAR, source_name="LIDAR", columns=POINT_COLUMNS)],
        )

    @property
    def image_boxes(self) -> dict[str, str]:  # type: ignore[override]  # by the options
        """All cameras, with the option."""
        text = "labelled in the image, with tracks of their own; row is -1"
        if self.settings.boxes2d:
            return {channel(name): text for name in CAMERAS.values()}
        return {}

    def category_names(self) -> tuple[str, ...]:
        """Return the types of labels, without the unknown one."""
        return LABEL_TYPES[1:]


class Waymo(WaymoSource[WaymoFileSettings]):
    """Waymo Open Dataset, perception, version 1: TFRecord files with five cameras at 10 Hz.

    PATH is a `.tfrecord` file, or holds such files or `training`, `validation` and `testing`. A
    file is a clip of 20 s. The cameras have two sizes: the loader takes them in groups.

    - An image has the pose at its `pose_timestamp`. A frame has its sweep's start as its time, and
      the pose and boxes of the sweep's middle: the dataset gives no others. Ego is the vehicle's
      frame.
    - The tracks of `boxes2d` (`camera_labels`) are separate, so `row` is -1. The map is that of the
      segment's first frame, moved by each frame's `map_pose_offset`: `lane` is a centre line,
      `road_line` is painted, `stop_sign` has one vertex.
    - Images are distorted (`opencv_radtan`); camera axes are turned to right, down, forward.
      Waymo's pixel 0 is a pixel's left edge: 0.5 is subtracted from the principal point. Metadata
      has exposure, read-out and its direction.
    - Attributes `night` and `rain` are null without time of day and weather.
    - Points are the first returns of the five lidars, in one channel `lidar` in ego at the frame's
      pose (`lidar2ego` is the identity): x, y, z, intensity, elongation. Only the top lidar's are
      compensated for ego's motion.
    """

    kind = "waymo"
    settings_type = WaymoFileSettings
    requires = {"google_crc32c": "fuelrail[waymo]"}  # noqa: RUF012 - a constant

    @cached_property
    def maps(self) -> MapWindows | None:  # type: ignore[override]  # by the options
        """The features of the map, with the option."""

        def read_map(place: str) -> VectorMap:
            data = Part.parse(place).read(self.files)
            return parse_map(data, f"file '{self.files.shown}/{place}'")

        return MapWindows(MAP_LAYERS, read_map) if self.settings.map else None

    def clips(self) -> Iterator[Clip]:
        """Yield a clip for each file: in the folders of splits, or in the root."""
        if self.file is not None:
            yield _make_clip(self.file, "")
            return
        names = self.files.listed()
        if "camera_image" in names or any(
            "camera_image" in self.files.listed(split_folder)
            for split_folder in SPLITS
            if split_folder in names
        ):
            raise SourceError(
                f"'{self.files.shown}' has Parquet files of version 2: its kind is waymo_v2"
            )
        for folder, split in SPLITS.items():
            if folder in names:
                for name in self.files.listed(folder):
                    if name.endswith(_SUFFIX):
                        yield _make_clip(f"{folder}/{name}", split)
        for name in names:
            if name.endswith(_SUFFIX):
                yield _make_clip(name, "")

    def frames(self, clip: Clip) -> Iterator[Frame]:
        """Yield a frame for each record of the file."""
        (name,) = clip.files
        at_url = self.files.path(name) is None
        frames: list[Frame] = []
        labels: list[list[bytes]] = []
        offsets: list[tuple[float, float, float]] = []
        span: tuple[int, int] | None = None
        with opened(self.files, name) as window:
            context = None
            first = ""
            place = window.where
            calibrations: dict[str, Calibration] = {}
            stats: dict[str, str] = {}
            for record in records(window, read_whole=at_url, payloads=self.settings.payload_crc):
                head = read_frame(
                    window,
                    record,
                    context,
                    boxes2d=self.settings.boxes2d,
                    has_map=self.settings.map,
                )
                try:
                    if head.context is not context:
                        segment, calibrations, stats = read_context(head.context)
                        if context is not None and segment != first:
                            raise SourceError(
                                f"{place}: record {record.number} is of {segment}, those "
                                f"before of {first}"
                            )
                        first = segment
                        context = head.context
                    frames.append(
                        self._make_frame(
                            name,
                            record=record,
                            head=head,
                            calibrations=calibrations,
                            stats=stats,
                        )
                    )
                    labels.append(head.labels)
                    offsets.append(head.map_offset)
                    span = span or head.map_span
                except ValueError as error:
                    raise SourceError(f"{place}: record {record.number}: {error}") from error
        if not any(frame.images for frame in frames):
            raise SourceError(f"{place}: none of the {len(frames)} frames has an image")
        boxes_found = list(
            read_labels(labels, place, camera_synced=self.settings.boxes == "camera_synced")
        )
        is_labelled = any(boxes.category for boxes in boxes_found)
        if self.maps is not None and span is None:
            self.noted["segments without a map"] += 1
        windows: list[list[Reference]] = [[] for _ in frames]
        if self.maps is not None and span is not None:
            ego2map = np.array([frame.ego2global for frame in frames])
            ego2map[:, :3, 3] += offsets
            windows = self.maps.references(f"{name}#{span[0]}+{span[1] - span[0]}", ego2map)
        for frame, boxes, members in zip(frames, boxes_found, windows, strict=True):
            yield msgspec.structs.replace(
                frame,
                boxes=boxes if is_labelled else None,
                members=members,
            )

    def points(self, ref: str) -> F32:
        """Read the first returns (P, 5) of all lidars, and the whole record."""
        return frame_points(bytes(self.open(ref)), f"file '{self.files.shown}/{ref}'")

    def _make_frame(
        self,
        file: str,
        record: FileRecord,
        head: FrameHead,
        calibrations: dict[str, Calibration],
        stats: dict[str, str],
    ) -> Frame:
        ego2global = np.array(head.pose).reshape(4, 4)
        images = {}
        for image in head.images:
            calibration = calibrations.get(image.name)
            if calibration is None:
                raise ValueError(
                    f"the camera {image.name} has no calibration; the context has "
                    f"{', '.join(calibrations)}"
                )
            ref = f"{file}#{image.offset}+{image.num_bytes}"
            pose = np.array(image.pose).reshape(4, 4)
            times = (image.shutter, image.trigger, image.done)
            images[channel(image.name)] = image_of(
                calibration,
                ref=ref,
                pose=pose,
                pose_timestamp=image.pose_timestamp,
                shutter_times=times,
            )
        boxes2d = {}
        if self.settings.boxes2d and head.camera_labels:  # then an image without labels has no box
            for image in head.images:
                boxes2d[channel(image.name)] = image_rows(np.empty((0, 4)), [], [])
            for name, boxes in map(read_camera_labels, head.camera_labels):
                boxes2d[channel(name)] = boxes
        sweep = Sweep(
            ref=f"{file}#{record.start}+{record.end - record.start}",
            timestamp_ns=head.timestamp_us * 1000,
            lidar2ego=_IDENTITY,
            ego2global=ego2global,
            num_bytes=head.laser_bytes,
        )
        return Frame(
            timestamp_ns=head.timestamp_us * 1000,
            ego2global=ego2global,
            images=images,
            sweeps={LIDAR: sweep} if head.laser_bytes else {},
            boxes2d=boxes2d,
            attributes=weather_columns(stats),
        )


def channel(camera: str) -> str:
    """Return the channel of a camera."""
    return f"cam_{camera.lower()}"


def weather_columns(stats: dict[str, str]) -> dict[str, str | bool | None]:
    """Return values of the columns; ``night`` and ``rain`` where the dataset states time of day
    and weather.
    """
    time = stats.get("time_of_day")
    weather = stats.get("weather")
    return {
        **stats,
        "night": None if time is None else time.lower() == "night",
        "rain": None if weather is None else weather.lower() == "rain",
    }


def _make_clip(name: str, split: str) -> Clip:
    stem = name.rpartition("/")[2].removesuffix(_SUFFIX)
    match = _SEGMENT.match(stem)
    return Clip(
        name=match[1] if match else stem,
        token=stem,
        split=split,
        files=(name,),
    )
