"""Logs that py123d wrote: pinhole cameras, poses and boxes of nuPlan, KITTI-360, PandaSet and
others in one form.

``SPLIT/LOG/`` has an Arrow file for each modality, and ``sync.arrow``, whose row is a moment: for
each modality the number of its row. The form is that of py123d 0.7
(https://github.com/autonomousvision/py123d).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.rigid import invert_rigid
from fuelrail.sharding.sources.adapter.frame import (
    Absent,
    BoxRows,
    Calibration,
    Clip,
    Frame,
    Image,
    Sensors,
)
from fuelrail.sharding.sources.adapter.poses import Trajectory, pose
from fuelrail.sharding.sources.adapter.source import FrameSettings, FrameSource
from fuelrail.sharding.sources.shared.arrow import (
    byte_ranges,
    check_expanded,
    is_plain,
    open_mapped,
)
from fuelrail.sharding.sources.shared.files import source_files
from fuelrail.sharding.sources.shared.foreign import parsing

if TYPE_CHECKING:
    from collections.abc import Iterator

SYNC = "sync"
EGO = "ego_state_se3"
BOXES = "box_detections_se3"
CAMERA = "camera."
_SPLIT = re.compile(r"(train|val|test)\Z")


class Py123dSettings(FrameSettings, frozen=True, kw_only=True):
    """Options of the adapter."""

    root: Annotated[
        str, msgspec.Meta(description="folder of the data set that paths of images are below")
    ] = ""


class _Modality(NamedTuple):
    """The table of a modality, what its metadata states, and the file as it is mapped."""

    table: pa.Table
    metadata: dict[str, Any]
    mapped: pa.Buffer


class Py123d(FrameSource[Py123dSettings]):
    """Logs of py123d (SPLIT/LOG/sync.arrow): pinhole cameras, poses, boxes with the numbers of
    their labels.

    PATH holds logs of py123d 0.7, of nuPlan, KITTI-360, PandaSet and others; py123d is not needed.
    Frames are the rows of `sync`; give `-o missing_camera=mask`.

    - Images are JPEG or PNG in the files, or paths below `root`. IPC compression is refused.
    - Ego is the log's IMU. An image has the log's pose for it, else the trajectory's at its time.
      `-o classes=FILE` names box classes, which logs number (`label_N`).
    - Left out: f-theta and MEI cameras, images in videos. Not read: lidar, radar, traffic lights,
      maps.
    """

    kind = "py123d"
    settings_type = Py123dSettings
    ego_origin = "imu"
    columns: ClassVar = {"location": str, "dataset": str}

    def __init__(self, location: str, options: dict[str, Any]) -> None:
        super().__init__(location, options)
        self._logs = self.files
        if self.settings.root:
            self.files = source_files(self.settings.root)

    @property
    def options(self) -> dict[str, Any]:
        return {name: value for name, value in super().options.items() if name != "root"}

    def sensors(self) -> Sensors:
        names: dict[str, None] = {}
        for log in self._list_logs():
            for modality in self._list_cameras(log):
                names[modality.removeprefix(CAMERA)] = None
        return Sensors.from_names(names)

    def clips(self) -> Iterator[Clip]:
        for log in self._list_logs():
            folder, _, _ = log.partition("/")
            split = _SPLIT.search(folder)
            files: list[str] = []
            if self._logs is self.files:
                files = [f"{log}/{name}.arrow" for name in (SYNC, *self._list_cameras(log))]
            yield Clip(
                name=log,
                log_id=log,
                split=split[1] if split else "",
                files=tuple(files),
            )

    def _list_logs(self) -> list[str]:
        """Return the logs, SPLIT/LOG."""
        logs: list[str] = []
        for split in self._logs.folders():
            logs += [f"{split}/{name}" for name in self._logs.folders(split)]
        return [log for log in logs if f"{SYNC}.arrow" in self._logs.listed(log)]

    def _list_cameras(self, log: str) -> list[str]:
        """Return the modalities of a log that are cameras."""
        names = [name for name in self._logs.listed(log) if name.startswith(CAMERA)]
        return [name.removesuffix(".arrow") for name in names if name.endswith(".arrow")]

    def poses(self, clip: Clip) -> Trajectory:
        table = self._read_modality(clip.name, EGO).table
        with parsing(f"log '{clip.name}': {EGO}"):
            times = _read_times(table, EGO)
            ego2global = _read_poses(table, f"{EGO}.imu_se3", clip.name)
            return Trajectory(times, ego2global, clip.name)

    def frames(self, clip: Clip) -> Iterator[Frame]:
        sync = self._read_modality(clip.name, SYNC)
        with parsing(f"log '{clip.name}'"):
            columns = sync.table.to_pydict()
            images: dict[str, list[Image | Absent]] = {}
            image_rows: dict[str, list[int | None]] = {}
            for modality in self._list_cameras(clip.name):
                if modality in columns:
                    camera = modality.removeprefix(CAMERA).lower()
                    images[camera] = self._read_images(clip.name, modality)
                    image_rows[camera] = columns[modality]
            boxes: list[BoxRows] = []
            box_rows: list[int | None] = [None] * len(sync.table)
            if f"{BOXES}.arrow" in self._logs.listed(clip.name):
                boxes = self._read_boxes(clip.name)
                box_rows = columns[BOXES]
            attributes = {name: sync.metadata.get(name) or "" for name in ("location", "dataset")}
            for moment, time_us in enumerate(columns["sync.timestamp_us"]):
                images_of_frame = {}
                for camera, rows in image_rows.items():
                    row = rows[moment]
                    if row is not None:
                        images_of_frame[camera] = images[camera][row]
                box_row = box_rows[moment]
                yield Frame(
                    timestamp_ns=time_us * 1000,
                    images=images_of_frame,
                    attributes=attributes,
                    boxes=None if box_row is None else boxes[box_row],
                )

    def _read_modality(self, log: str, name: str) -> _Modality:
        """Read the file of a modality of a log."""
        file_name = f"{log}/{name}.arrow"
        path = self._logs.path(file_name)
        if path is None or self._logs.facts(file_name) is None:
            raise SourceError(f"'{self._logs.shown}/{file_name}' is not a file on this machine")
        where = f"table '{self._logs.shown}/{file_name}'"
        with parsing(where), pa.memory_map(path) as file:
            mapped = file.read_buffer()
            reader = open_mapped(mapped, where, read_whole=True)
            for field in reader.schema:
                if not is_plain(field.type):
                    raise ValueError(f"column '{field.name}' of {field.type} is not read")
            table = reader.read_all()
            table.validate(full=True)
            check_expanded(table, where)
            packed = (table.schema.metadata or {})[b"metadata"]
            metadata = msgspec.msgpack.decode(packed, type=dict[str, Any])
        return _Modality(table, metadata, mapped)

    def _read_images(self, log: str, modality: str) -> list[Image | Absent]:
        """Return the images of a camera by row."""
        table, metadata, mapped = self._read_modality(log, modality)
        name = modality.removeprefix(CAMERA)
        model = metadata.get("camera_model")
        if model != "pinhole" or metadata.get("intrinsics") is None:
            self.noted[f"{name} left out, its model is {model}"] += 1
            return [Absent("not a pinhole")] * len(table)
        if pa.types.is_integer(table.column(f"{modality}.data").type):
            self.noted[f"{name} left out, its images are in a video"] += 1
            return [Absent("in a video")] * len(table)
        fx, fy, cx, cy, skew = metadata["intrinsics"]
        cam2ego = _make_transforms(np.array([metadata["camera_to_imu_se3"]]), log)[0]
        cam2global = _read_poses(table, f"{modality}.camera_to_global_se3", log)
        coefficients: tuple[float, ...] = ()
        if not metadata.get("is_undistorted"):
            coefficients = tuple(metadata.get("distortion") or ())
        intrinsics = np.array(
            [
                [fx, skew, cx],
                [0, fy, cy],
                [0, 0, 1],
            ]
        )
        calibration = Calibration(
            intrinsics=intrinsics,
            sensor2ego=cam2ego,
            width=metadata["width"],
            height=metadata["height"],
            dist=coefficients,
            dist_model="opencv_radtan" if coefficients else "none",
        )
        ego2cam = invert_rigid(cam2ego)
        refs = _list_refs(table, log, modality, mapped)
        times = _read_times(table, modality).tolist()
        images: list[Image | Absent] = []
        for row, ref in enumerate(refs):
            if not ref:
                images.append(Absent("no image"))
                continue
            has_pose = not np.isnan(cam2global[row]).any()
            image = Image(
                ref=ref,
                timestamp_ns=times[row],
                calibration=calibration,
                ego2global=cam2global[row] @ ego2cam if has_pose else None,
            )
            images.append(image)
        return images

    def _read_boxes(self, log: str) -> list[BoxRows]:
        """Return the boxes by row; a class is named by the number of its label, whose name the
        log does not have.
        """
        columns = self._read_modality(log, BOXES).table.to_pydict()
        lists = (
            columns[f"{BOXES}.bounding_box_se3"],
            columns[f"{BOXES}.label"],
            columns[f"{BOXES}.track_token"],
            columns[f"{BOXES}.velocity_3d"],
            columns[f"{BOXES}.num_lidar_points"],
        )
        boxes = []
        for poses, labels, tracks, velocities, counts in zip(*lists, strict=True):
            numbers = np.array(poses, np.float64).reshape(-1, 10)
            speeds = [speed or [np.nan] * 3 for speed in velocities or []]
            velocity = np.array(speeds, np.float64).reshape(-1, 3)
            rows = BoxRows(
                centre=numbers[:, :3],
                rotation_wxyz=numbers[:, 3:7],
                size_lwh=numbers[:, 7:],
                in_global=True,
                category=[f"label_{label}" for label in labels],
                track=list(tracks),
                velocity=None if np.isnan(velocity).any() else velocity,
                num_lidar_pts=[-1 if count is None else count for count in counts],
            )
            boxes.append(rows)
        return boxes


def _read_times(table: pa.Table, modality: str) -> np.ndarray:
    """Return the times (R,) [ns] of the rows."""
    times_us = table.column(f"{modality}.timestamp_us").to_numpy()
    return times_us.astype(np.int64) * 1000


def _read_poses(table: pa.Table, column: str, where: str) -> np.ndarray:
    """Return the poses of a column (R, 4, 4), NaN for null."""
    rows = [row or [np.nan] * 7 for row in table.column(column).to_pylist()]
    numbers = np.array(rows, np.float64).reshape(-1, 7)
    is_complete = ~np.isnan(numbers).any(1)
    poses = np.full((len(numbers), 4, 4), np.nan)
    poses[is_complete] = _make_transforms(numbers[is_complete], where)
    return poses


def _make_transforms(rows: np.ndarray, where: str) -> np.ndarray:
    """Return transforms (R, 4, 4) of rows of x, y, z, qw, qx, qy, qz."""
    if not len(rows):
        return np.empty((0, 4, 4))
    return pose(rows[:, 3:], rows[:, :3], where)


def _list_refs(
    table: pa.Table,
    log: str,
    modality: str,
    mapped: pa.Buffer,
) -> list[str | None]:
    """Return where each image is: a path, or a range of the file; None for no image."""
    refs: list[str | None] = []
    for chunk in table.column(f"{modality}.data").chunks:
        if pa.types.is_string(chunk.type):
            refs += chunk.to_pylist()
            continue
        ranges = byte_ranges(chunk, mapped, "write them with ipc_compression=None")
        for offset, size in ranges:
            refs.append(f"{log}/{modality}.arrow#{offset}+{size}" if size else None)
    return refs
