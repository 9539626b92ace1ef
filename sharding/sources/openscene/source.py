"""OpenScene v1.1 and NAVSIM: nuPlan's logs at 2 Hz, one pickle a log, eight cameras and a merged
lidar.

The files are described at https://github.com/OpenDriveLab/OpenScene (``docs/dataset_stats.md``).
``lidar2ego`` of the merged lidar is the identity in nuPlan; boxes are in ego, their velocities in
the lidar's axes, as the program that wrote the logs has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

import numpy as np
from msgspec import Meta

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.rigid import invert_rigid
from fuelrail.pipeline.text import shortened
from fuelrail.sharding.sources.adapter.channels import value_channel
from fuelrail.sharding.sources.adapter.frame import (
    BoxRows,
    Calibration,
    Clip,
    Frame,
    Image,
    Sensors,
    Sweep,
)
from fuelrail.sharding.sources.adapter.poses import pose
from fuelrail.sharding.sources.adapter.source import FrameSettings, FrameSource
from fuelrail.sharding.sources.adapter.trajectories import (
    EGO,
    PAST,
    STEPS,
    ego_trajectory,
)
from fuelrail.sharding.sources.openscene.pickles import read_pickle
from fuelrail.sharding.sources.shared.foreign import parsing
from fuelrail.sharding.sources.shared.points import parse_points
from fuelrail.sharding.sources.shared.times import nearest

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.schema import F32, F64
    from fuelrail.sharding.sources.shared.scan_table import Reference

_LOGS: Final = ("navsim_logs", "meta_datas")
_BLOBS: Final = "sensor_blobs"
_SPLITS: Final = {"trainval": "train"}
_CAMERAS: Final = tuple(f"CAM_{name}" for name in ("F0", "L0", "R0", "L1", "R1", "L2", "R2", "B0"))
_LIDAR: Final = "lidar_merged"
_POINTS: Final = ("x", "y", "z", "intensity", "ring", "lidar_info")
_COMMANDS: Final = ("left", "forward", "right", "unknown")
_STEP_NS: Final = 500_000_000
_NEAR_NS: Final = 100_000_000
"""How far a frame may be from the time of a step of the trajectory."""


class OpenSceneSettings(FrameSettings, frozen=True, kw_only=True):
    """Options of the source."""

    part: Annotated[
        str,
        Meta(description="mini, trainval or test; empty: all that are there"),
    ] = ""


class OpenScene(FrameSource[OpenSceneSettings]):
    """OpenScene and NAVSIM: eight cameras, lidar, boxes, ego status, commands and trajectories of
    nuPlan at 2 Hz.

    PATH has logs in `navsim_logs` or `meta_datas`, files in `sensor_blobs`, each by part: `mini`,
    `trainval` (split `train`), `test`: `-o part=trainval`. For partial downloads use `cameras`,
    `missing_camera`, `points`. Pickles may hold only numbers, texts, lists, dicts and arrays.

    - A log is a clip, with distorted cameras (`opencv_radtan`), the lidar `lidar_merged`, boxes
      with tracks, and ego status. The logs have no times of images: each has the time of its frame.
    - Channels: `ego_trajectory` as in nuScenes, by time; `driving_command` (one of left, forward,
      right, unknown is 1); `roadblock_ids`; `traffic_lights`, rows of a lane connector and whether
      it is red.
    - NAVSIM's splits are lists of the attribute `token`. Write the keys of their samples into a
      file, and give it to an order, as `fr.OrderSpec(subset="navtrain.txt")`:

          tokens = set(yaml.safe_load(Path("navtrain.yaml").read_text())["tokens"])
          rows = fr.open("OUT").table.select(["key", "token"]).to_pylist()
          keys = [row["key"] for row in rows if row["token"] in tokens]
          Path("navtrain.txt").write_text("\\n".join(keys))
    """

    kind = "openscene"
    settings_type = OpenSceneSettings
    ego_origin = "rear_axle"
    license = "CC BY-NC-SA 4.0"
    columns: Mapping[str, type] = {
        "token": str,
        "location": str,
        "command": str,
        "has_route": bool,
    }
    channels = (
        EGO,
        value_channel(
            "driving_command",
            "uint8",
            (4,),
            "1 for one of left, forward, right, unknown",
        ),
        value_channel(
            "roadblock_ids",
            "int64",
            (None,),
            "nuPlan's ids of the route's roadblocks, in order",
        ),
        value_channel(
            "traffic_lights",
            "int64",
            (None, 2),
            "nuPlan's id of a lane connector; 1: red, 0: not red",
        ),
    )

    def sensors(self) -> Sensors:
        """Return nuPlan's cameras and its merged lidar."""
        return Sensors.from_names(_CAMERAS, {_LIDAR: _POINTS})

    def category_names(self) -> tuple[str, ...]:
        """Return nuPlan's classes."""
        return (
            "vehicle",
            "bicycle",
            "pedestrian",
            "traffic_cone",
            "barrier",
            "czone_sign",
            "generic_object",
        )

    def clips(self) -> Iterator[Clip]:
        """Yield the logs of the parts."""
        names = self.files.listed()
        folder = next((name for name in _LOGS if name in names), "")
        parts = self.files.folders(folder) if folder else []
        if self.settings.part:
            if self.settings.part not in parts:
                raise SourceError(
                    f"'{self.files.shown}' has no logs of part "
                    f"'{shortened(self.settings.part)}'; it has: "
                    f"{', '.join(map(shortened, parts)) or 'none'} (folders in "
                    f"{' or '.join(_LOGS)})"
                )
            parts = [self.settings.part]
        for part in parts:
            for name in self.files.listed(f"{folder}/{part}"):
                if name.endswith(".pkl"):
                    file = f"{folder}/{part}/{name}"
                    stem = name.removesuffix(".pkl")
                    yield Clip(
                        name=stem,
                        token=file,
                        log_id=stem,
                        split=_SPLITS.get(part, part),
                        files=(file,),
                    )

    def frames(self, clip: Clip) -> Iterator[Frame]:
        """Yield the frames of a log."""
        where = f"log '{self.files.shown}/{clip.token}'"
        rows = read_pickle(self.files.read(clip.token), where)
        blobs = f"{_BLOBS}/{clip.token.split('/')[1]}"
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise SourceError(f"{where} is not a list of frames")
        with parsing(where, "is not as OpenScene's logs are"):
            rotations, translations = (
                np.array([np.asarray(row[f"ego2global_{name}"], np.float64) for row in rows])
                for name in ("rotation", "translation")
            )
            times_us = np.array([row["timestamp"] for row in rows], np.int64)
            poses = pose(rotations, translations, where)
            times_ns = times_us * 1000
            # The frame of each step of the trajectory, -1 for none.
            step_ns = (np.arange(STEPS) - PAST) * _STEP_NS
            step_times = times_ns[:, None] + step_ns
            rows_near = nearest(times_ns, step_times)
            is_near = abs(times_ns[rows_near] - step_times) <= _NEAR_NS
            steps = np.where(is_near, rows_near, -1)
            for number, row in enumerate(rows):
                exists = steps[number] >= 0
                frames_of_steps = steps[number][exists]
                later_s = (times_ns[frames_of_steps] - times_ns[number]) * 1e-9
                trajectory = ego_trajectory(
                    invert_rigid(poses[number]),
                    poses[steps[number][exists]],
                    later_s,
                    exists,
                )
                yield self._make_frame(
                    row,
                    blobs=blobs,
                    ego2global=poses[number],
                    time_ns=int(times_ns[number]),
                    trajectory=trajectory,
                    where=f"{where}, frame {number}",
                )

    def _make_frame(
        self,
        row: Mapping[str, Any],
        blobs: str,
        ego2global: F64,
        time_ns: int,
        trajectory: Reference,
        where: str,
    ) -> Frame:
        lidar2ego = pose(
            _read_numbers(row["lidar2ego_rotation"], 4),
            _read_numbers(row["lidar2ego_translation"], 3),
            where,
        )
        images = {}
        for name, camera in row["cams"].items():
            to_lidar = np.eye(4)
            rotation = camera["sensor2lidar_rotation"]
            translation = camera["sensor2lidar_translation"]
            to_lidar[:3, :3] = _read_numbers(rotation, 3, 3)
            to_lidar[:3, 3] = _read_numbers(translation, 3)
            images[name.lower()] = Image(
                ref=f"{blobs}/{camera['data_path']}",
                timestamp_ns=time_ns,
                calibration=Calibration(
                    intrinsics=_read_numbers(camera["cam_intrinsic"], 3, 3),
                    sensor2ego=lidar2ego @ to_lidar,
                    dist=tuple(_read_numbers(camera["distortion"], 5).tolist()),
                    dist_model="opencv_radtan",
                ),
                ego2global=ego2global,
            )
        boxes = None
        if "anns" in row:
            labels = row["anns"]
            numbers = np.asarray(labels["gt_boxes"], np.float64).reshape(-1, 7)
            velocity = np.asarray(labels["gt_velocity_3d"], np.float64).reshape(-1, 3)
            names = np.asarray(labels["gt_names"]).tolist()
            tokens = np.asarray(labels["track_tokens"]).tolist()
            boxes = BoxRows(
                centre=numbers[:, :3],
                size_lwh=numbers[:, 3:6],
                yaw=numbers[:, 6],
                category=[str(name) for name in names],
                track=[str(token) for token in tokens],
                velocity=velocity @ lidar2ego[:3, :3].T,
            )
        state = _read_numbers(row["ego_dynamic_state"], 4)
        command = _read_numbers(row["driving_command"], len(_COMMANDS))
        lights = [(int(lane), int(is_red)) for lane, is_red in row["traffic_lights"]]
        route = [int(name) for name in row["roadblock_ids"]]
        return Frame(
            timestamp_ns=time_ns,
            token=str(row["token"]),
            ego2global=ego2global,
            images=images,
            sweeps={
                _LIDAR: Sweep(
                    ref=f"{blobs}/{row['lidar_path']}",
                    timestamp_ns=time_ns,
                    lidar2ego=lidar2ego,
                    ego2global=ego2global,
                )
            },
            boxes=boxes,
            members=(trajectory,),
            values={
                "driving_command": command.astype(np.uint8),
                "roadblock_ids": np.array(route, np.int64),
                "traffic_lights": np.array(lights, np.int64).reshape(-1, 2),
            },
            attributes={
                "token": str(row["token"]),
                "location": str(row["map_location"]),
                "command": _COMMANDS[int(command.argmax())],
                "has_route": bool(route),
            },
            ego_velocity=(*state[:2], np.nan),
            ego_accel=(*state[2:], np.nan),
        )

    def points(self, ref: str) -> F32:
        """Read points (P, 6) in the merged lidar's frame."""
        return parse_points(self.files.read(ref), _POINTS, f"file '{self.files.shown}/{ref}'")


def _read_numbers(value: Any, *shape: int) -> F64:
    """Return an array of this shape."""
    array: F64 = np.asarray(value, np.float64)
    if array.shape != shape:
        raise ValueError(f"numbers {list(array.shape)} where {list(shape)} are expected")
    return array
