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
FLU = np.array(
    [[0.0, -1, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
)  # ego to lidar, whose y is backwards


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

    def _read(self, name: str) -> Any:
        return read_json(self.files.read(name), f"file '{self.files.shown}/{name}'")

    def _poses(self, folder: str) -> tuple[np.ndarray, np.ndarray]:
        rows = self._read(f"{folder}/poses.json")
        numbers = [[list(row[part].values()) for row in rows] for part in ("heading", "position")]
        times = (
            np.round(np.array(self._read(f"{folder}/timestamps.json")) * 1e6).astype(np.int64)
            * 1000
        )
        return times, pose(*numbers, f"{folder}/poses.json")

    def poses(self, clip: Clip) -> Trajectory:
        with parsing(f"poses in '{self.files.shown}/{clip.name}/lidar'"):
            times, lidar2global = self._poses(f"{clip.name}/lidar")
            return Trajectory(times, lidar2global @ FLU, clip.name)

    def frames(self, clip: Clip) -> Iterator[Frame]:
        with parsing(f"sequence '{self.files.shown}/{clip.name}'"):
            yield from self._frames(clip)

    def _frames(self, clip: Clip) -> Iterator[Frame]:
        times, _ = self._poses(f"{clip.name}/lidar")
        ego = self.poses(clip)
        images = [{} for _ in times]
        for camera in CAMERAS:
            folder = f"{clip.name}/camera/{camera}"
            k = self._read(f"{folder}/intrinsics.json")
            (stamps, cam2global) = self._poses(folder)
            cam2ego = (
                invert_rigid(ego.at(stamps)) @ cam2global
            )  # both poses at the camera's own time
            intrinsics = np.array([[k["fx"], 0, k["cx"]], [0, k["fy"], k["cy"]], [0, 0, 1]])
            for number in sorted(
                int(name[:-4]) for name in self.files.listed(folder) if name.endswith(".jpg")
            ):
                images[number][camera] = Image(
                    ref=f"{folder}/{number:02d}.jpg",
                    timestamp_ns=int(stamps[number]),
                    calibration=Calibration(intrinsics=intrinsics, sensor2ego=cam2ego[number]),
                )
        yield from (
            Frame(timestamp_ns=int(t), images=found)
            for t, found in zip(times, images, strict=True)
            if found
        )
