"""Argoverse 2, sensor dataset (Wilson et al., NeurIPS 2021): logs of feather tables and JPEGs.

Conventions are those of the dataset's own API (github.com/argoverse/av2-api).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec
import numpy as np
import pyarrow as pa
from msgspec import Meta
from numpy.typing import NDArray

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.adapter.boxes import boxes_by_key
from fuelrail.sharding.sources.adapter.frame import (
    NO_BOXES,
    BoxRows,
    Calibration,
    Clip,
    Frame,
    Image,
    Sensors,
    Sweep,
)
from fuelrail.sharding.sources.adapter.poses import Trajectory, pose
from fuelrail.sharding.sources.adapter.source import FrameSettings, FrameSource
from fuelrail.sharding.sources.adapter.vector_maps import MapWindows, VectorMap
from fuelrail.sharding.sources.shared.arrow import (
    QUATERNION,
    TRANSLATION,
    check_unique,
    names_in,
    read_feather,
    read_file,
    stacked,
    unique_pairs,
)
from fuelrail.sharding.sources.shared.foreign import read_json
from fuelrail.sharding.sources.shared.times import nearest

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.schema import F32, I64
    from fuelrail.sharding.sources.shared.scan_table import Reference

RING: Final = (
    "ring_front_center",
    "ring_front_left",
    "ring_front_right",
    "ring_side_left",
    "ring_side_right",
    "ring_rear_left",
    "ring_rear_right",
)
STEREO: Final = ("stereo_front_left", "stereo_front_right")
LIDAR: Final = "lidar"
SPLITS: Final = ("train", "val", "test")
CATEGORIES: Final = (
    "REGULAR_VEHICLE",
    "PEDESTRIAN",
    "BICYCLIST",
    "MOTORCYCLIST",
    "WHEELED_RIDER",
    "BOLLARD",
    "CONSTRUCTION_CONE",
    "SIGN",
    "CONSTRUCTION_BARREL",
    "STOP_SIGN",
    "MOBILE_PEDESTRIAN_CROSSING_SIGN",
    "LARGE_VEHICLE",
    "BUS",
    "BOX_TRUCK",
    "TRUCK",
    "VEHICULAR_TRAILER",
    "TRUCK_CAB",
    "SCHOOL_BUS",
    "ARTICULATED_BUS",
    "MESSAGE_BOARD_TRAILER",
    "BICYCLE",
    "MOTORCYCLE",
    "WHEELED_DEVICE",
    "WHEELCHAIR",
    "STROLLER",
    "DOG",
    "RAILED_VEHICLE",
    "ANIMAL",
    "OFFICIAL_SIGNALER",
    "TRAFFIC_LIGHT_TRAILER",
)
NEAREST_NS: Final = 25_000_000
"""Half the period of the ring cameras, as the dataset's API has it."""
SWEEP_NS: Final = 102_000_000
"""The longest sweep, with its jitter."""
MAX_GAP_S: Final = 0.02
"""Between two poses that one is interpolated from: each is then at most 10 ms away.

They are 5 ms apart mostly.
"""

_F64: Final = pa.float64()
_POSE: Final[dict[str, pa.DataType]] = dict.fromkeys((*QUATERNION, *TRANSLATION), _F64)
_INTRINSICS: Final[dict[str, pa.DataType]] = {
    "sensor_name": pa.string(),
    **dict.fromkeys(("fx_px", "fy_px", "cx_px", "cy_px"), _F64),
    "width_px": pa.int64(),
    "height_px": pa.int64(),
}
_SIZE: Final = ("length_m", "width_m", "height_m")
_BOXES: Final[dict[str, pa.DataType]] = {
    "timestamp_ns": pa.int64(),
    "track_uuid": pa.string(),
    "category": pa.string(),
    **dict.fromkeys(_SIZE, _F64),
    **_POSE,
    "num_interior_pts": pa.int64(),
}
_POINTS: Final[dict[str, pa.DataType]] = {
    **dict.fromkeys(("x", "y", "z", "intensity", "laser_number"), pa.float32()),
    "offset_ns": pa.int64(),
}
_TABLES: Final = (
    "calibration/intrinsics.feather",
    "calibration/egovehicle_SE3_sensor.feather",
    "city_SE3_egovehicle.feather",
)
_DIGITS: Final = 19
_CITY: Final = re.compile(r"____([A-Z]+)_city_")
MAP_LAYERS: Final = (
    "drivable_area",
    "ped_crossing",
    "lane_marking",
    "lane_border",
)
"""``lane_marking`` is painted, ``lane_border`` is where a lane ends without paint."""
_UNPAINTED: Final = ("NONE", "UNKNOWN")


class Argoverse2Settings(FrameSettings, frozen=True, kw_only=True):
    """Options of the source."""

    match: Annotated[
        Literal["forward", "nearest"],
        Meta(
            description=(
                "the image of a camera for a sweep: forward, the first one during it; nearest, "
                "the closest to its start, at most 25 ms away"
            )
        ),
    ] = "forward"
    stereo: Annotated[
        bool,
        Meta(description="true takes the two stereo cameras too, which run at 5 Hz"),
    ] = False
    boxes: Annotated[
        bool,
        Meta(description="false leaves boxes out; train and val must have them otherwise"),
    ] = True
    map: Annotated[
        bool,
        Meta(description="true stores the vector map about ego as the channel map"),
    ] = False


class Argoverse2(FrameSource[Argoverse2Settings]):
    """Argoverse 2 sensor logs: seven ring cameras, lidar and boxes at 10 Hz.

    PATH holds `train`, `val` and `test`, or logs. A log is a clip. A sample is a lidar sweep, or a
    time with boxes but no sweep.

    - An image's ego pose is `city_SE3_egovehicle` at the image's own time, interpolated between
      rows at most 20 ms apart. Times count from a clock of the vehicle.
    - Images are rectified: `k1`, `k2` and `k3` describe the lens that was, and are not applied.
    - Points are in ego at the start of their sweep, compensated for ego's motion (`lidar2ego` is
      the identity): x, y, z (stored as float16), intensity, ring (the laser), time [s] since the
      sweep began. Boxes are in ego at that time too.
    - Some sweeps, mostly at the ends of logs, lack images: use `missing_camera=drop` or `mask`
      (with `stereo=true`, whose cameras run at 5 Hz, `mask`).
    """

    kind = "argoverse2"
    settings_type = Argoverse2Settings
    time_base = "vehicle_clock"
    ego_origin = "rear_axle"
    columns = {"location": str}  # noqa: RUF012 - a constant
    license = "CC BY-NC-SA 4.0"

    def sensors(self) -> Sensors:
        """Return the cameras in the order of the dataset's API, and the two lidars as one sweep."""
        columns = ("x", "y", "z", "intensity", "ring", "time")
        return Sensors.from_names(self._cameras, {LIDAR: columns})

    @property
    def _cameras(self) -> tuple[str, ...]:
        if self.settings.stereo:
            return (*RING, *STEREO)
        return RING

    @cached_property
    def maps(self) -> MapWindows | None:  # type: ignore[override]  # by the options
        """The vector maps of logs, with the option."""

        def read_map(name: str) -> VectorMap:
            return parse_map(read_file(self.files, name), f"map '{self.files.shown}/{name}'")

        return MapWindows(MAP_LAYERS, read_map) if self.settings.map else None

    def category_names(self) -> tuple[str, ...]:
        """Return the 30 names of the dataset."""
        return CATEGORIES

    def clips(self) -> Iterator[Clip]:
        """Yield the logs in the folders of splits, or in the root."""
        names = self.files.listed()
        if "calibration" in names:
            raise SourceError(f"'{self.files.shown}' is one log; give the folder that holds it")
        folders: list[tuple[str, str]] = []
        for split in SPLITS:
            if split in names:
                folders += [(split, log) for log in self.files.listed(split)]
        folders += [("", log) for log in names if log not in SPLITS]
        for split, log in folders:
            if "." in log:
                continue  # logs are named by a UUID
            folder = f"{split}/{log}" if split else log
            if {
                "calibration",
                "sensors",
                "city_SE3_egovehicle.feather",
            }.isdisjoint(self.files.listed(folder)):
                continue
            cities = [
                match[1]
                for name in names_in(self.files, folder, "map")
                if (match := _CITY.search(name))
            ]
            city = {"location": cities[0]} if cities else {}
            names_of_log = (*_TABLES, *self._list_maps(folder))
            files = tuple(f"{folder}/{name}" for name in names_of_log)
            yield Clip(
                name=log,
                split=split,
                tags=city,
                attributes=city,
                files=files,
            )

    def poses(self, clip: Clip) -> Trajectory:
        """Return the poses of ``city_SE3_egovehicle``, which has a row for each time of a
        sensor.
        """
        name = f"{_join_folder(clip)}/city_SE3_egovehicle.feather"
        types = {"timestamp_ns": pa.int64(), **_POSE}
        rows = read_feather(self.files, name, types)
        where = f"table '{self.files.shown}/{name}'"
        rotations = stacked(rows, QUATERNION)
        poses = pose(rotations, stacked(rows, TRANSLATION), where)
        return Trajectory(
            timestamp_ns=rows["timestamp_ns"],
            ego2global=poses,
            where=where,
            max_gap_s=MAX_GAP_S,
        )

    def frames(self, clip: Clip) -> Iterator[Frame]:
        """Yield a frame for each sweep, and for each time that has boxes."""
        folder = _join_folder(clip)
        stamps = self._list_stamps(folder, "sensors", "lidar", suffix=".feather")
        name = f"{folder}/annotations.feather"
        boxes = None
        labelled = np.empty(0, np.int64)
        if self.settings.boxes and "annotations.feather" in self.files.listed(folder):
            labels = read_feather(self.files, name, _BOXES)
            where = f"table '{self.files.shown}/{name}'"
            unique_pairs(labels, ("timestamp_ns", "track_uuid"), where, "time and track")
            rows = BoxRows(
                centre=stacked(labels, TRANSLATION),
                size_lwh=stacked(labels, _SIZE),
                rotation_wxyz=stacked(labels, QUATERNION),
                category=labels["category"].tolist(),
                track=labels["track_uuid"].tolist(),
                num_lidar_pts=labels["num_interior_pts"],
            )
            labelled = labels["timestamp_ns"]
            boxes = boxes_by_key(rows, labelled)
        elif self.settings.boxes and clip.split in ("train", "val"):
            raise SourceError(
                f"table '{self.files.shown}/{name}' is not there; boxes=false leaves boxes out"
            )
        times = np.unique(np.concatenate([stamps, labelled]))
        if not len(times):
            raise SourceError(
                f"log '{self.files.shown}/{folder}' has no lidar sweeps and no boxes, so no frames"
            )
        images = self._find_images(folder, times)
        is_swept = np.isin(times, stamps).tolist()
        names = self._list_maps(_join_folder(clip))
        if self.maps is not None and not names:
            self.noted["logs without a vector map"] += 1
        windows: list[list[Reference]] = [[] for _ in times]
        if self.maps is not None and names:
            windows = self.maps.references(
                f"{_join_folder(clip)}/{names[0]}", self.poses(clip).at(times)
            )
        for number, time in enumerate(times.tolist()):
            name = f"{folder}/sensors/lidar/{time}.feather"
            yield Frame(
                timestamp_ns=time,
                images=images[number],
                sweeps={LIDAR: Sweep(ref=name, timestamp_ns=time, lidar2ego=np.eye(4))}
                if is_swept[number]
                else {},
                boxes=None if boxes is None else boxes.get(time, NO_BOXES),
                members=windows[number],
            )

    def _list_maps(self, folder: str) -> list[str]:
        """Return the log's vector map, if it is wanted and exists."""
        names = names_in(self.files, folder, "map") if self.settings.map else []
        return [f"map/{name}" for name in names if name.startswith("log_map_archive_")][:1]

    def points(self, ref: str) -> F32:
        """Read (P, 6): x, y, z [m] in ego at the sweep's time, intensity 0 to 255, laser 0 to 63,
        time since then [s].

        The file has x, y and z as float16, so they are exact to 3 cm beyond 32 m.
        """
        columns = read_feather(self.files, ref, _POINTS)
        columns["offset_ns"] = columns["offset_ns"] * 1e-9
        points = np.stack([columns[name] for name in _POINTS], 1)
        return points.astype(np.float32)

    def _list_stamps(self, folder: str, *parts: str, suffix: str) -> I64:
        """Return the times in the names of a sensor's files, ascending; none without its folder."""
        names = [name for name in names_in(self.files, folder, *parts) if name.endswith(suffix)]
        texts = [name.removesuffix(suffix) for name in names]
        bad = [
            name
            for name, text in zip(names, texts, strict=True)
            if not text.isdecimal() or len(text) > _DIGITS
        ]
        if bad:
            where = "/".join((self.files.shown, folder, *parts))
            raise SourceError(
                f"file '{where}/{bad[0]}' has no time in its name; expected NANOSECONDS{suffix}"
            )
        return np.sort(np.array(texts, np.int64))

    def _find_images(self, folder: str, times: I64) -> list[dict[str, Image]]:
        """Return for each of these times (F,) [ns] the images by camera."""
        # What all images of a camera have, by camera.
        names = [
            f"{folder}/calibration/{name}.feather"
            for name in ("intrinsics", "egovehicle_SE3_sensor")
        ]
        lenses = read_feather(self.files, names[0], _INTRINSICS)
        mount_types = {"sensor_name": pa.string(), **_POSE}
        mounts = read_feather(self.files, names[1], mount_types)
        for table, name in zip((lenses, mounts), names, strict=True):
            check_unique(
                table["sensor_name"].tolist(),
                f"table '{self.files.shown}/{name}'",
                "the sensor",
            )
        where = f"table '{self.files.shown}/{names[1]}'"
        rotations = stacked(mounts, QUATERNION)
        sensor2ego = pose(rotations, stacked(mounts, TRANSLATION), where)
        by_name = dict(zip(mounts["sensor_name"].tolist(), sensor2ego, strict=True))
        calibrations = {}
        for row, name in enumerate(lenses["sensor_name"].tolist()):
            fx, fy, cx, cy, width, height = (
                lenses[column][row] for column in list(_INTRINSICS)[1:]
            )
            k = np.array(
                [
                    [fx, 0, cx],
                    [0, fy, cy],
                    [0, 0, 1],
                ]
            )
            if name in by_name:
                calibrations[name] = Calibration(
                    intrinsics=k,
                    sensor2ego=by_name[name],
                    width=int(width),
                    height=int(height),
                )
        images: list[dict[str, Image]] = [{} for _ in times]
        num_images = 0
        for name in self._cameras:
            stamps = self._list_stamps(folder, "sensors", "cameras", name, suffix=".jpg")
            num_images += len(stamps)
            if not len(stamps):
                continue
            if name not in calibrations:
                raise SourceError(
                    f"log '{self.files.shown}/{folder}' has images of {name}, but no row "
                    "for it in both tables of its calibration"
                )
            chosen = matched(stamps, times, self.settings.match).tolist()
            ordered = stamps.tolist()
            for frame_number, number in enumerate(chosen):
                if number >= 0:
                    time = ordered[number]
                    ref = f"{folder}/sensors/cameras/{name}/{time}.jpg"
                    images[frame_number][name] = Image(
                        ref=ref,
                        timestamp_ns=time,
                        calibration=calibrations[name],
                    )
        if not num_images:
            raise SourceError(
                f"log '{self.files.shown}/{folder}' has no images in "
                "sensors/cameras/CAMERA/TIME.jpg"
            )
        return images


def matched(stamps: I64, times: I64, match: str) -> NDArray[np.intp]:
    """Return for each time (F,) [ns] of a sweep the number of the image, -1 for none; ``stamps``
    (I,) [ns] ascend.

    "forward": the first one in the sweep, which ends with the next one's start and after 102 ms at
    most. "nearest": the closest one, at most 25 ms away.
    """
    if match == "nearest":
        rows = nearest(stamps, times)
        distance = np.abs(stamps[rows] - times)
        return np.where(distance <= NEAREST_NS, rows, -1)
    after = np.searchsorted(stamps, times)
    next_starts = np.append(times[1:], np.iinfo(np.int64).max)
    ends = np.minimum(next_starts, times + SWEEP_NS)
    first_stamps = stamps[np.minimum(after, len(stamps) - 1)]
    inside = (after < len(stamps)) & (first_stamps < ends)
    return np.where(inside, after, -1)


def _join_folder(clip: Clip) -> str:
    return f"{clip.split}/{clip.name}" if clip.split else clip.name


class _Point(msgspec.Struct, frozen=True, gc=False):
    x: float
    y: float


class _Lane(msgspec.Struct, frozen=True):
    left_lane_boundary: list[_Point]
    right_lane_boundary: list[_Point]
    left_lane_mark_type: str = "UNKNOWN"
    right_lane_mark_type: str = "UNKNOWN"


class _Crossing(msgspec.Struct, frozen=True):
    edge1: list[_Point]
    edge2: list[_Point]


class _Area(msgspec.Struct, frozen=True):
    area_boundary: list[_Point]


class _File(msgspec.Struct, frozen=True):
    drivable_areas: dict[str, _Area]
    pedestrian_crossings: dict[str, _Crossing]
    lane_segments: dict[str, _Lane]


def parse_map(data: bytes, where: str) -> VectorMap:
    """Parse the lines of a log's map; lanes share a common border.

    Raise SourceError, naming ``where``.
    """
    document = read_json(data, where, _File, "is not a vector map of Argoverse 2")
    outlines = [
        (0, [*element.area_boundary, *element.area_boundary[:1]])
        for element in document.drivable_areas.values()
    ]
    outlines += [
        (1, [*element.edge1, *reversed(element.edge2), *element.edge1[:1]])
        for element in document.pedestrian_crossings.values()
    ]
    for lane in document.lane_segments.values():
        outlines.append(
            (
                3 if lane.left_lane_mark_type in _UNPAINTED else 2,
                lane.left_lane_boundary,
            )
        )
        outlines.append(
            (
                3 if lane.right_lane_mark_type in _UNPAINTED else 2,
                lane.right_lane_boundary,
            )
        )
    lines = dict.fromkeys(
        (layer, tuple((element.x, element.y) for element in points)) for layer, points in outlines
    )
    lines_kept = [(layer, points) for layer, points in lines if len(points) > 1]
    return VectorMap.from_lines(
        [np.array(points) for _, points in lines_kept],
        [layer for layer, _ in lines_kept],
        where,
    )
