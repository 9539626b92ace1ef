"""PandaSet (https://pandaset.org): six cameras at 10 Hz and poses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fuelrail.pipeline.rigid import invert_rigid
from fuelrail.sharding.sources.adapter.frame import Calibration, Clip, Frame, Image, Sensors
from fuelrail.sharding.sources.adapter.poses import Trajectory, pose
from fuelrail.sharding.sources.adapter.source import FrameSettings, FrameSource
from fuelrail.sharding.sources.shared.foreign import parsing, read_json

if TYPE_CHECKING:
    from collections.abc import Iterator

CAMERAS = (
    "front_camera",
    "front_right_camera",
    "front_left_camera",
    "back_camera",
    "left_camera",
    "right_camera",
)
# The lidar's y is backwards.
EGO2LIDAR = np.array(
    [
        [0.0, -1, 0, 0],
        [1, 0, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 0, 1],
    ]
)


class PandaSet(FrameSource[FrameSettings]):
    """PandaSet sequences: six cameras with poses.

    Lidar and boxes are pickles, which are not read.
    """

    kind = "pandaset"
    ego_origin = "lidar"

    def sensors(self) -> Sensors:
        return Sensors.from_names(CAMERAS)

    def clips(self) -> Iterator[Clip]:
        for name in self.files.listed():
            if name.isdecimal():
                yield Clip(name=name, files=(f"{name}/lidar/poses.json",))

    def poses(self, clip: Clip) -> Trajectory:
        with parsing(f"poses in '{self.files.shown}/{clip.name}/lidar'"):
            times, lidar2global = self._read_poses(f"{clip.name}/lidar")
            return Trajectory(times, lidar2global @ EGO2LIDAR, clip.name)

    def frames(self, clip: Clip) -> Iterator[Frame]:
        with parsing(f"sequence '{self.files.shown}/{clip.name}'"):
            times, _ = self._read_poses(f"{clip.name}/lidar")
            trajectory = self.poses(clip)
            images: list[dict[str, Image]] = [{} for _ in times]
            for camera in CAMERAS:
                folder = f"{clip.name}/camera/{camera}"
                k = self._read_json(f"{folder}/intrinsics.json")
                stamps, cam2global = self._read_poses(folder)
                # Both poses are at the camera's own time.
                cam2ego = invert_rigid(trajectory.at(stamps)) @ cam2global
                intrinsics = np.array([[k["fx"], 0, k["cx"]], [0, k["fy"], k["cy"]], [0, 0, 1]])
                names = [name for name in self.files.listed(folder) if name.endswith(".jpg")]
                for number in sorted(int(name.removesuffix(".jpg")) for name in names):
                    calibration = Calibration(intrinsics=intrinsics, sensor2ego=cam2ego[number])
                    images[number][camera] = Image(
                        ref=f"{folder}/{number:02d}.jpg",
                        timestamp_ns=int(stamps[number]),
                        calibration=calibration,
                    )
            for time, images_of_frame in zip(times.tolist(), images, strict=True):
                if images_of_frame:
                    yield Frame(timestamp_ns=time, images=images_of_frame)

    def _read_poses(self, folder: str) -> tuple[np.ndarray, np.ndarray]:
        """Return times (P,) [ns], and sensor to global at each (P, 4, 4)."""
        name = f"{folder}/poses.json"
        rows = self._read_json(name)
        headings = [list(row["heading"].values()) for row in rows]
        positions = [list(row["position"].values()) for row in rows]
        times_s = np.array(self._read_json(f"{folder}/timestamps.json"))
        times_us = np.round(times_s * 1e6).astype(np.int64)
        return times_us * 1000, pose(headings, positions, name)

    def _read_json(self, name: str) -> Any:
        return read_json(self.files.read(name), f"file '{self.files.shown}/{name}'")
