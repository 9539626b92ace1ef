"""Logs that py123d wrote: pinhole cameras, poses and boxes of nuPlan, KITTI-360, PandaSet and
others in one form.

``SPLIT/LOG/`` has an Arrow file for each modality, and ``sync.arrow``, whose row is a moment: for
each modality the number of its row. The form is that of py123d 0.7
(https://github.com/autonomousvision/py123d).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

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

    def _names(self) -> list[str]:
        """Return the logs, SPLIT/LOG."""
        folders = (
            (split, log) for split in self._logs.folders() for log in self._logs.folders(split)
        )
        return [
            f"{split}/{log}"
            for split, log in folders
            if f"{SYNC}.arrow" in self._logs.listed(f"{split}/{log}")
        ]

    def _cameras(self, log: str) -> list[str]:
        files = self._logs.listed(log)
        return [
            name.removesuffix(".arrow")
            for name in files
            if name.startswith(CAMERA) and name.endswith(".arrow")
        ]

    def _read(self, log: str, modality: str) -> tuple[pa.Table, dict[str, Any], pa.Buffer]:
        """Return the table of a modality, what its metadata states, and the mapped file."""
        name = f"{log}/{modality}.arrow"
        path = self._logs.path(name)
        if path is None or self._logs.facts(name) is None:
            raise SourceError(f"'{self._logs.shown}/{name}' is not a file on this machine")
        where = f"table '{self._logs.shown}/{name}'"
        with parsing(where), pa.memory_map(path) as file:
            mapped = file.read_buffer()
            reader = open_mapped(mapped, where, read_whole=True)
            if odd := [field for field in reader.schema if not is_plain(field.type)]:
                raise ValueError(f"column '{odd[0].name}' of {odd[0].type} is not read")
            table = reader.read_all()
            table.validate(full=True)
            check_expanded(table, where)
            stated = msgspec.msgpack.decode(
                (table.schema.metadata or {})[b"metadata"], type=dict[str, Any]
            )
        return table, stated, mapped

    def sensors(self) -> Sensors:
        names = dict.fromkeys(name for log in self._names() for name in self._cameras(log))
        return Sensors.from_names([name.removeprefix(CAMERA) for name in names])

    def clips(self) -> Iterator[Clip]:
        for log in self._names():
            split = _SPLIT.search(log.partition("/")[0])
            files = tuple(f"{log}/{name}.arrow" for name in (SYNC, *self._cameras(log)))
            own = files if self._logs is self.files else ()
            yield Clip(name=log, log_id=log, split=split[1] if split else "", files=own)

    def poses(self, clip: Clip) -> Trajectory:
        table, _, _ = self._read(clip.name, EGO)
        with parsing(f"log '{clip.name}': {EGO}"):
            return Trajectory(
                _times(table, EGO), _poses(table, f"{EGO}.imu_se3", clip.name), clip.name
            )

    def frames(self, clip: Clip) -> Iterator[Frame]:
        sync, stated, _ = self._read(clip.name, SYNC)
        with parsing(f"log '{clip.name}'"):
            rows = sync.to_pydict()
            images = {
                name.removeprefix(CAMERA).lower(): (rows[name], self._images(clip.name, name))
                for name in self._cameras(clip.name)
                if name in rows
            }
            boxes = (
                self._boxes(clip.name) if f"{BOXES}.arrow" in self._logs.listed(clip.name) else None
            )
            facts = {name: stated.get(name) or "" for name in ("location", "dataset")}
            for at, time_us in enumerate(rows["sync.timestamp_us"]):
                of_camera = {
                    camera: found[index[at]]
                    for camera, (index, found) in images.items()
                    if index[at] is not None
                }
                number = rows[BOXES][at] if boxes is not None else None
                yield Frame(
                    timestamp_ns=time_us * 1000,
                    images=of_camera,
                    attributes=facts,
                    boxes=None if boxes is None or number is None else boxes[number],
                )

    def _images(self, log: str, modality: str) -> list[Image | Absent]:
        """Return the images of a camera by row."""
        table, stated, mapped = self._read(log, modality)
        name = modality.removeprefix(CAMERA)
        if stated.get("camera_model") != "pinhole" or stated.get("intrinsics") is None:
            self.noted[f"{name} left out, its model is {stated.get('camera_model')}"] += 1
            return [Absent("not a pinhole")] * len(table)
        if pa.types.is_integer(table.column(f"{modality}.data").type):
            self.noted[f"{name} left out, its images are in a video"] += 1
            return [Absent("in a video")] * len(table)
        fx, fy, cx, cy, skew = stated["intrinsics"]
        cam2ego = _matrices(np.array([stated["camera_to_imu_se3"]]), log)[0]
        cam2global = _poses(table, f"{modality}.camera_to_global_se3", log)
        lens = () if stated.get("is_undistorted") else tuple(stated.get("distortion") or ())
        calibration = Calibration(
            intrinsics=np.array([[fx, skew, cx], [0, fy, cy], [0, 0, 1]]),
            sensor2ego=cam2ego,
            width=stated["width"],
            height=stated["height"],
            dist=lens,
            dist_model="opencv_radtan" if lens else "none",
        )
        found: list[Image | Absent] = []
        for row, (ref, time_ns) in enumerate(
            zip(_refs(table, log, modality, mapped), _times(table, modality), strict=True)
        ):
            known = not np.isnan(cam2global[row]).any()
            own = cam2global[row] @ invert_rigid(cam2ego) if known else None
            image = Image(
                ref=ref or "",
                timestamp_ns=int(time_ns),
                calibration=calibration,
                ego2global=own,
            )
            found.append(image if ref else Absent("no image"))
        return found

    def _boxes(self, log: str) -> list[BoxRows]:
        """Return the boxes by row; a class is named by the number of its label, whose name the
        log does not have.
        """
        rows = self._read(log, BOXES)[0].to_pydict()
        found = []
        for box, label, track, velocity, count in zip(
            *(
                rows[f"{BOXES}.{name}"]
                for name in (
                    "bounding_box_se3",
                    "label",
                    "track_token",
                    "velocity_3d",
                    "num_lidar_points",
                )
            ),
            strict=True,
        ):
            numbers = np.array(box, np.float64).reshape(-1, 10)
            speeds = np.array([one or [np.nan] * 3 for one in velocity or []], np.float64).reshape(
                -1, 3
            )
            found.append(
                BoxRows(
                    centre=numbers[:, :3],
                    rotation_wxyz=numbers[:, 3:7],
                    size_lwh=numbers[:, 7:],
                    in_global=True,
                    category=[f"label_{one}" for one in label],
                    track=list(track),
                    velocity=None if np.isnan(speeds).any() else speeds,
                    num_lidar_pts=[-1 if one is None else one for one in count],
                )
            )
        return found


def _times(table: pa.Table, modality: str) -> np.ndarray:
    return table.column(f"{modality}.timestamp_us").to_numpy().astype(np.int64) * 1000


def _poses(table: pa.Table, name: str, where: str) -> np.ndarray:
    """Return the poses of a column (R, 4, 4), NaN for null."""
    rows = np.array(
        [one or [np.nan] * 7 for one in table.column(name).to_pylist()], np.float64
    ).reshape(-1, 7)
    found = np.full((len(rows), 4, 4), np.nan)
    known = ~np.isnan(rows).any(1)
    found[known] = _matrices(rows[known], where)
    return found


def _matrices(rows: np.ndarray, where: str) -> np.ndarray:
    """Return poses (R, 4, 4) of x, y, z, qw, qx, qy, qz."""
    return pose(rows[:, 3:], rows[:, :3], where) if len(rows) else np.empty((0, 4, 4))


def _refs(table: pa.Table, log: str, modality: str, mapped: pa.Buffer) -> list[str | None]:
    """Return where each image is: a path, or a range of the file."""
    found: list[str | None] = []
    for chunk in table.column(f"{modality}.data").chunks:
        if pa.types.is_string(chunk.type):
            found += chunk.to_pylist()
            continue
        ranges = byte_ranges(chunk, mapped, "write them with ipc_compression=None")
        found += [f"{log}/{modality}.arrow#{at}+{size}" if size else None for at, size in ranges]
    return found
