"""Waymo Open Dataset, perception, version 2: a Parquet file for each component of each segment.

A row of a file is slow to reach, since row groups are large, so the run stages pictures in the
order of clips. Files of one release differ in the types of columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
from msgspec.structs import replace

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.sample.schema import F32, encode_points
from fuelrail.sharding.sources.adapter.boxes import boxes_by_key
from fuelrail.sharding.sources.adapter.frame import (
    NO_BOXES,
    BoxRows,
    Calibration,
    Clip,
    Frame,
    Image,
    ImageBoxRows,
    Sensors,
    Sweep,
)
from fuelrail.sharding.sources.adapter.members import POINTS
from fuelrail.sharding.sources.shared.arrow import (
    check_unique,
    names_in,
    open_parquet,
    read_parquet,
    stacked,
    unique_pairs,
)
from fuelrail.sharding.sources.waymo.frame_heads import (
    CAMERAS,
    box_rows,
    camera_calibration,
    image_of,
    image_rows,
    label_type,
)
from fuelrail.sharding.sources.waymo.parquet_lidar import bytes_by_time, sweeps
from fuelrail.sharding.sources.waymo.source import (
    LIDAR,
    SPLITS,
    WaymoSettings,
    WaymoSource,
    channel,
    weather_columns,
)

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.arrays import Buffer

_F64: Final = pa.float64()
_TRANSFORM: Final = pa.list_(_F64, 16)
_TIME = "key.frame_timestamp_micros"
_NAME = "key.camera_name"
_TRACK = "key.laser_object_id"
_IMAGE: Final = "[CameraImageComponent]."
_LENS: Final = "[CameraCalibrationComponent]."
_POSE: Final = "[VehiclePoseComponent].world_from_vehicle.transform"
_LIDAR_BOX = "[LiDARBoxComponent]."
_SYNCED_BOX = "[LiDARCameraSyncedBoxComponent]."
_SHUTTER: Final = tuple(
    f"{_IMAGE}rolling_shutter_params.{name}"
    for name in ("shutter", "camera_trigger_time", "camera_readout_done_time")
)
_INTRINSIC: Final = tuple(
    f"{_LENS}intrinsic.{name}"
    for name in ("f_u", "f_v", "c_u", "c_v", "k1", "k2", "p1", "p2", "k3")
)
_BOX: Final = (
    "center.x",
    "center.y",
    "center.z",
    "size.y",
    "size.x",
    "size.z",
    "heading",
)
"""The columns of a box in the order of version 1: width before length."""
_CAMERA_BOX: Final = "[CameraBoxComponent]."
_SIDES: Final = tuple(
    f"{_CAMERA_BOX}box.{name}" for name in ("center.x", "center.y", "size.x", "size.y")
)
_REQUIRED: Final = ("camera_image", "camera_calibration", "vehicle_pose")
_OPTIONAL: Final = (
    "lidar_box",
    "lidar_camera_synced_box",
    "camera_box",
    "stats",
)
_LIDAR: Final = ("lidar", "lidar_calibration", "lidar_pose")
_ROWS_AT_ONCE: Final = 16

_NONE: Final = image_rows(np.empty((0, 4)), [], [])


class WaymoParquet(WaymoSource[WaymoSettings]):
    """Waymo Open Dataset, perception, version 2: Parquet files with five cameras at 10 Hz.

    PATH holds `training`, `validation` and `testing`, or components' folders. Each file of
    `vehicle_pose` is a clip and needs `camera_image` and `camera_calibration`; `lidar_box`,
    `lidar_camera_synced_box`, `camera_box` (`boxes2d`) and `stats` are optional. `lidar` needs
    `lidar_calibration` and `lidar_pose`. Images are staged in OUT, as those of video are. Columns
    are taken by name, and cast if no value changes; other types are refused. All else is as in
    `waymo`.
    """

    kind = "waymo_v2"
    settings_type = WaymoSettings
    reads = "clip"

    def sensors(self) -> Sensors:
        """Return the five cameras in the order of their numbers, and the five lidars, where they
        exist, as one.
        """
        names = self.files.listed()
        folders = [folder for folder in SPLITS if folder in names] or [""]
        has_lidar = any(names_in(self.files, folder, "lidar") for folder in folders)
        sensors = super().sensors()
        if has_lidar:
            return sensors
        return sensors._replace(lidars=())

    def clips(self) -> Iterator[Clip]:
        """Yield a clip for each segment with a file of poses, in the folders of splits, or in
        the root.
        """
        names = self.files.listed()
        for folder, split in [
            (split_folder, SPLITS[split_folder]) for split_folder in SPLITS if split_folder in names
        ] + [("", "")]:
            prefix = f"{folder}/" if folder else ""
            for name in names_in(self.files, folder, "vehicle_pose"):
                if name.endswith(".parquet"):
                    more = [
                        part for part in _OPTIONAL if name in names_in(self.files, folder, part)
                    ]
                    if self.settings.points and name in names_in(self.files, folder, _LIDAR[0]):
                        more += _LIDAR
                    files = tuple(f"{prefix}{part}/{name}" for part in (*_REQUIRED, *more))
                    yield Clip(
                        name=name.removesuffix(".parquet"),
                        split=split,
                        files=files,
                    )

    def frames(self, clip: Clip) -> Iterator[Frame]:
        """Yield a frame for each row of poses."""
        files = {name.rpartition("/")[0].rpartition("/")[2]: name for name in clip.files}
        poses = read_parquet(
            self.files,
            files["vehicle_pose"],
            {_TIME: pa.int64(), _POSE: _TRANSFORM},
        )
        order = np.argsort(poses[_TIME], kind="stable")
        images = self._read_images(
            files["camera_image"],
            self._read_calibrations(files["camera_calibration"]),
        )
        boxes = self._read_boxes(files)
        boxes2d = (
            self._read_boxes2d(files["camera_box"])
            if self.settings.boxes2d and "camera_box" in files
            else None
        )
        name = files.get("stats")
        stats: dict[str, str | bool | None] = {}
        if name is not None:
            parts = ("time_of_day", "location", "weather")
            rows = read_parquet(
                self.files,
                name,
                {f"[StatsComponent].{part}": pa.string() for part in parts},
            )
            values = (rows[f"[StatsComponent].{part}"] for part in parts)
            stats = weather_columns(
                {part: texts[0] for part, texts in zip(parts, values, strict=True) if len(texts)}
            )
        sweep_bytes = bytes_by_time(self.files, files["lidar"]) if "lidar" in files else {}
        unknown = images.keys() - set(poses[_TIME].tolist())
        if unknown:
            raise SourceError(
                f"table '{self.files.shown}/{files['vehicle_pose']}' has no pose at "
                f"{min(unknown)} us, where there are images"
            )
        for row in order.tolist():
            time = int(poses[_TIME][row])
            pose = poses[_POSE][row].reshape(4, 4)
            sweep = Sweep(
                ref=f"{files.get('lidar')}@{time}",
                timestamp_ns=time * 1000,
                lidar2ego=np.eye(4),
                ego2global=pose,
                num_bytes=sweep_bytes.get(time, 0),
            )
            yield Frame(
                timestamp_ns=time * 1000,
                ego2global=pose,
                images=images.get(time, {}),
                sweeps={LIDAR: sweep} if time in sweep_bytes else {},
                boxes=None if boxes is None else boxes.get(time, NO_BOXES),
                boxes2d={}
                if boxes2d is None
                else {name: boxes2d.get((time, name), _NONE) for name in images.get(time, {})},
                attributes=stats,
            )

    def make_images(self, refs: Sequence[str]) -> Iterator[tuple[str, Buffer]]:
        """Read each file once, from its first row to its last; a reference is ``NAME@ROW``."""
        rows_by_file: dict[str, set[int]] = {}
        for ref in refs:
            name, _, row = ref.rpartition("@")
            rows_by_file.setdefault(name, set()).add(int(row))
        for name, rows in rows_by_file.items():
            first_row = 0
            with open_parquet(self.files, name, read_whole=True) as file:
                for batch in file.iter_batches(
                    _ROWS_AT_ONCE,
                    columns=[f"{_IMAGE}image"],
                    use_threads=False,
                ):
                    column = batch.column(0)
                    for number in range(first_row, first_row + len(column)):
                        if number in rows:
                            yield (
                                f"{name}@{number}",
                                column[number - first_row].as_buffer(),
                            )
                    first_row += len(column)

    def points(self, ref: str) -> F32:
        """Read the first returns (P, 5) of all lidars, and the file up to these."""
        name, _, time = ref.rpartition("@")
        found_sweeps = sweeps(self.files, name, [int(time)])
        return next(points for _, points in found_sweeps)

    def read_clip(self, refs: Sequence[str]) -> Iterator[tuple[str, Buffer]]:
        """Yield pictures, then sweeps: each file is read once, from its first row to its last."""
        times_by_file: dict[str, list[int]] = {}
        for ref in refs:
            if ref.startswith(POINTS):
                name, _, time = ref.removeprefix(POINTS).rpartition("@")
                times_by_file.setdefault(name, []).append(int(time))
        image_refs = [ref for ref in refs if not ref.startswith(POINTS)]
        yield from super().read_clip(image_refs)
        for name, times in times_by_file.items():
            for frame_time, points in sweeps(self.files, name, times):
                yield f"{POINTS}{name}@{frame_time}", encode_points(points)

    def _read_calibrations(self, name: str) -> dict[int, Calibration]:
        """Return the calibrations by number of the camera."""
        integer_types = dict.fromkeys(
            (
                f"{_LENS}width",
                f"{_LENS}height",
                f"{_LENS}rolling_shutter_direction",
            ),
            pa.int64(),
        )
        types = {
            _NAME: pa.int64(),
            **dict.fromkeys(_INTRINSIC, _F64),
            f"{_LENS}extrinsic.transform": _TRANSFORM,
        }
        rows = read_parquet(self.files, name, {**types, **integer_types})
        check_unique(
            rows[_NAME].tolist(),
            f"table '{self.files.shown}/{name}'",
            "the camera",
        )
        lenses = stacked(rows, _INTRINSIC)
        mounts = rows[f"{_LENS}extrinsic.transform"].reshape(-1, 4, 4)
        width, height, shutter = (rows[column].tolist() for column in integer_types)
        return {
            number: camera_calibration(
                lenses[row].tolist(),
                mounts[row],
                (width[row], height[row]),
                shutter[row],
            )
            for row, number in enumerate(rows[_NAME].tolist())
        }

    def _read_images(
        self,
        name: str,
        calibrations: Mapping[int, Calibration],
    ) -> dict[int, dict[str, Image]]:
        """Return the images by time of the frame [us], then by channel."""
        times = dict.fromkeys((f"{_IMAGE}pose_timestamp", *_SHUTTER), _F64)
        rows = read_parquet(
            self.files,
            name,
            {
                _TIME: pa.int64(),
                _NAME: pa.int64(),
                f"{_IMAGE}pose.transform": _TRANSFORM,
                **times,
            },
        )
        where = f"table '{self.files.shown}/{name}'"
        pairs = unique_pairs(rows, (_TIME, _NAME), where, "time and camera")
        poses = rows[f"{_IMAGE}pose.transform"].reshape(-1, 4, 4)
        stamps = rows[f"{_IMAGE}pose_timestamp"].tolist()
        shutters = stacked(rows, _SHUTTER).tolist()
        with open_parquet(self.files, name) as file:  # the mean, by metadata alone
            metadata = file.metadata
            total = 0
            for group in range(metadata.num_row_groups):
                for column in range(metadata.num_columns):
                    chunk = metadata.row_group(group).column(column)
                    if chunk.path_in_schema == f"{_IMAGE}image":
                        total += chunk.total_uncompressed_size
        num_bytes = max(total // max(metadata.num_rows, 1), 1)
        images: dict[int, dict[str, Image]] = {}
        for row, (time, camera) in enumerate(pairs):
            if camera not in CAMERAS:
                continue
            calibration = calibrations.get(camera)
            if calibration is None:
                raise SourceError(
                    f"{where} has images of camera {camera} "
                    f"({CAMERAS[camera]}), which has no calibration"
                )
            if not stamps[row] > 0:
                raise SourceError(f"{where}: row {row} has the pose_timestamp {stamps[row]}")
            image = image_of(
                calibration,
                ref=f"{name}@{row}",
                pose=poses[row],
                pose_timestamp=stamps[row],
                shutter_times=shutters[row],
            )
            images.setdefault(time, {})[channel(CAMERAS[camera])] = replace(
                image,
                num_bytes=num_bytes,
                made=True,
            )
        return images

    def _read_boxes(self, files: Mapping[str, str]) -> dict[int, BoxRows] | None:
        """Return boxes by time of the frame [us]; None where the segment is not labelled."""
        if "lidar_box" not in files:
            return None
        box_columns = [f"{_LIDAR_BOX}box.{name}" for name in _BOX]
        kind = f"{_LIDAR_BOX}type"
        points = f"{_LIDAR_BOX}num_lidar_points_in_box"
        keys = {_TIME: pa.int64(), _TRACK: pa.string()}
        rows = read_parquet(
            self.files,
            files["lidar_box"],
            {
                **keys,
                kind: pa.int64(),
                points: pa.int64(),
                **dict.fromkeys(box_columns, _F64),
            },
        )
        where = f"table '{self.files.shown}/{files['lidar_box']}'"
        pairs = unique_pairs(rows, (_TIME, _TRACK), where, "time and object")
        kinds_and_points = zip(rows[kind].tolist(), rows[points].tolist(), strict=True)
        facts = dict(zip(pairs, kinds_and_points, strict=True))
        boxes = stacked(rows, box_columns)
        if self.settings.boxes == "camera_synced":
            if "lidar_camera_synced_box" not in files:
                raise SourceError(
                    "the component lidar_camera_synced_box is not there, "
                    "boxes=camera_synced needs it"
                )
            synced = [f"{_SYNCED_BOX}camera_synced_box.{name}" for name in _BOX]
            rows = read_parquet(
                self.files,
                files["lidar_camera_synced_box"],
                {**keys, **dict.fromkeys(synced, _F64)},
            )
            pairs = list(zip(rows[_TIME].tolist(), rows[_TRACK].tolist(), strict=True))
            boxes = stacked(rows, synced)
            alone = [pair for pair in pairs if pair not in facts]
            if alone:
                where = f"table '{self.files.shown}/{files['lidar_camera_synced_box']}'"
                raise SourceError(
                    f"{where} has object {alone[0][1]} at {alone[0][0]} us, lidar_box does not"
                )
        kinds, num_points = (
            zip(*[facts[pair] for pair in pairs], strict=True) if pairs else ((), ())
        )
        category = list(map(label_type, kinds))
        track = [name for _, name in pairs]
        return boxes_by_key(
            box_rows(
                boxes,
                category=category,
                track=track,
                num_points=np.array(num_points, np.int64),
            ),
            rows[_TIME],
        )

    def _read_boxes2d(self, name: str) -> dict[tuple[int, str], ImageBoxRows]:
        """Return boxes in images by time of the frame [us] and channel."""
        kind = f"{_CAMERA_BOX}type"
        track = "key.camera_object_id"
        keys = {
            _TIME: pa.int64(),
            _NAME: pa.int64(),
            kind: pa.int64(),
            track: pa.string(),
        }
        rows = read_parquet(self.files, name, {**keys, **dict.fromkeys(_SIDES, _F64)})
        by_image: dict[tuple[int, str], list[int]] = {}
        for row, (time, camera) in enumerate(
            zip(rows[_TIME].tolist(), rows[_NAME].tolist(), strict=True)
        ):
            if camera in CAMERAS:
                image = (time, channel(CAMERAS[camera]))
                by_image.setdefault(image, []).append(row)
        sides = stacked(rows, _SIDES)
        tracks = rows[track].tolist()
        names = list(map(label_type, rows[kind].tolist()))
        return {
            image: image_rows(
                sides[label_rows],
                [names[row] for row in label_rows],
                [tracks[row] for row in label_rows],
            )
            for image, label_rows in by_image.items()
        }
