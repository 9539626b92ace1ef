"""A nuScenes dataroot's keyframes: the tables joined into columns, and each sample's geometry and boxes from them.

* ``timestamp_ns`` is the sample's timestamp, which is that of its LIDAR_TOP row; ``ego2global`` is that row's ego
  pose. Without a LIDAR_TOP row it is the ego pose of the sample's sensor row nearest in time.
* Annotations are valid at that time (the devkit hands them out so); boxes go to ego with that pose.
* nuScenes' images are undistorted: ``dist`` is NaN and ``dist_model`` "none".
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.schema import NUM_DIST, Geometry, rigid
from fuelrail.sharding.sources.nuscenes_boxes import Annotations
from fuelrail.sharding.sources.nuscenes_tables import (
    CalibratedSensor,
    Column,
    EgoPose,
    Log,
    Record,
    SampleData,
    SampleRecord,
    Scene,
    Sensor,
    Tokens,
    check_finite,
    join_columns,
    read_all,
    read_columns,
    read_table,
    strings,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from fuelrail.pipeline.schema import Boxes

RIG: Final = ("CAM_FRONT", "CAM_FRONT_RIGHT", "CAM_FRONT_LEFT", "CAM_BACK", "CAM_BACK_LEFT", "CAM_BACK_RIGHT")
"""Camera order of mmdetection3d and BEVFormer; cameras of other names follow by name."""

NS_PER_US: Final = 1000
_POSES_AT_ONCE: Final = 1 << 16
_CHANNEL: Final = re.compile(r"[a-z0-9_]{1,64}\Z")


class Keyframes:
    """The tables of a dataroot as columns, joined, keyframes only."""

    def __init__(self, folder: Path) -> None:
        self.log = read_all(folder, "log", Log)
        self.scene = read_all(folder, "scene", Scene)
        read_all(folder, "map", Record)
        samples = read_columns(folder, "sample", SampleRecord, _sample_columns)
        if not len(samples["token"]):
            raise SourceError(f"table '{folder / 'sample.json'}' has no rows: nothing to shard")
        self.sample_tokens = Tokens("sample", samples["token"])
        self.timestamp_us: NDArray[np.int64] = samples["timestamp_us"]
        scene_tokens = Tokens.of("scene", self.scene)
        self.scene_log = Tokens.of("log", self.log).need(
            strings(record.log_token for record in self.scene),
            table="scene",
            column="log_token",
            owners=scene_tokens.array,
        )
        self._sample_scene = scene_tokens.need(
            samples["scene_token"], table="sample", column="scene_token", owners=self.sample_tokens.array
        )
        linked = {
            name: self.sample_tokens.resolve(
                samples[name], table="sample", column=name, owners=self.sample_tokens.array
            )
            for name in ("prev", "next")
        }
        self._next = linked["next"]
        self._read_sensors(folder)
        self.annotations = Annotations(folder, self.sample_tokens, self.timestamp_us)

    def scenes(self) -> list[tuple[int, NDArray[np.int64]]]:
        """Scene row and its samples in time order, scenes in table order; those without samples left out.

        Raises SourceError where the order in time is not the order of the ``next`` links, or the count is not the
        scene's ``nbr_samples``.
        """
        order = np.lexsort((self.timestamp_us, self._sample_scene))
        starts = np.searchsorted(self._sample_scene[order], np.arange(len(self.scene) + 1))
        found = []
        for row, scene in enumerate(self.scene):
            samples = order[starts[row] : starts[row + 1]]
            if len(samples) != scene.nbr_samples:
                raise SourceError(
                    f"table 'scene': '{scene.name}' has nbr_samples {scene.nbr_samples}, "
                    f"table 'sample' has {len(samples)} of it"
                )
            expected = np.append(samples[1:], -1)
            wrong = np.flatnonzero(self._next[samples] != expected) if len(samples) else samples
            if wrong.size:
                token = self.sample_tokens.array[int(samples[wrong[0]])]
                raise SourceError(
                    f"table 'sample': row '{token}' of scene '{scene.name}': its next is not the scene's following "
                    "sample in time"
                )
            if len(samples):
                found.append((row, samples))
        return found

    def _read_sensors(self, folder: Path) -> None:
        """Keyframe rows of sample_data with their calibration and pose: a row number for each (sample, channel)."""
        sensors = read_all(folder, "sensor", Sensor)
        calibrated = read_all(folder, "calibrated_sensor", CalibratedSensor)
        calibrated_tokens = Tokens.of("calibrated_sensor", calibrated)
        sensor_of = Tokens.of("sensor", sensors).need(
            strings(record.sensor_token for record in calibrated),
            table="calibrated_sensor",
            column="sensor_token",
            owners=calibrated_tokens.array,
        )
        # Of 2.6 million rows stay the keyframes of cameras and lidars (and dangling ones, to be reported below).
        others = {
            record.token
            for record, sensor in zip(calibrated, sensor_of, strict=True)
            if sensors[sensor].modality not in ("camera", "lidar")
        }

        def columns_of(piece: list[SampleData]) -> dict[str, Column]:
            rows = [r for r in piece if r.is_key_frame and r.calibrated_sensor_token not in others]
            own = strings(r.token for r in rows)
            of = {"table": "sample_data", "owners": own}
            calibrated = strings(r.calibrated_sensor_token for r in rows)
            return {
                "token": own,
                "calibrated": calibrated_tokens.need(calibrated, column="calibrated_sensor_token", **of),
                "sample": self.sample_tokens.need(strings(r.sample_token for r in rows), column="sample_token", **of),
                "pose_token": strings(r.ego_pose_token for r in rows),
                "filename": strings(r.filename for r in rows),
                "timestamp_us": np.array([r.timestamp for r in rows], np.int64),
                "image_wh": np.array([(r.width or 0, r.height or 0) for r in rows], np.int32).reshape(-1, 2),
            }

        rows = read_columns(folder, "sample_data", SampleData, columns_of)
        self.data_tokens, self.filenames = rows["token"], rows["filename"]
        self.data_timestamp_us: NDArray[np.int64] = rows["timestamp_us"]
        self.image_wh: NDArray[np.int32] = rows["image_wh"]
        self._calibrated_of: NDArray[np.int64] = rows["calibrated"]
        sensor_of_row = sensor_of[self._calibrated_of]
        used = set(np.unique(sensor_of_row).tolist())
        by_kind = {
            kind: {sensors[i].channel: i for i in used if sensors[i].modality == kind} for kind in ("camera", "lidar")
        }
        self.cameras = sorted(by_kind["camera"], key=lambda name: (RIG.index(name) if name in RIG else len(RIG), name))
        self.lidars = sorted(by_kind["lidar"], key=lambda name: (name != "LIDAR_TOP", name))
        if not self.cameras:
            raise SourceError(f"table '{folder / 'sample_data.json'}' has no keyframes of cameras")
        _check_channels([*self.cameras, *self.lidars])
        placed = [*(by_kind["camera"][n] for n in self.cameras), *(by_kind["lidar"][n] for n in self.lidars)]
        column_of = np.full(len(sensors), -1, np.int64)
        column_of[placed] = np.arange(len(placed))
        self._place(rows["sample"], column_of[sensor_of_row], len(placed))
        self._calibrate(calibrated, calibrated_tokens, set(by_kind["camera"].values()), sensor_of)
        self._read_poses(folder, rows["pose_token"])

    def _place(self, sample: NDArray[np.int64], column: NDArray[np.int64], num_columns: int) -> None:
        """Set ``sensor_rows`` from each row's sample and column (-1: none); two rows in one place are a SourceError."""
        rows = np.flatnonzero(column >= 0)
        place = sample[rows] * num_columns + column[rows]
        taken, first = np.unique(place, return_index=True)
        if len(taken) < len(rows):
            again = int(np.delete(rows, first).min())
            name = (*self.cameras, *self.lidars)[column[again]]
            raise SourceError(
                f"table 'sample_data': row '{self.data_tokens[again]}' is a second keyframe of {name} "
                f"for sample '{self.sample_tokens.array[int(sample[again])]}'"
            )
        self.sensor_rows = np.full((len(self.sample_tokens), num_columns), -1, np.int64)
        self.sensor_rows.flat[place] = rows

    def _calibrate(
        self, records: list[CalibratedSensor], tokens: Tokens, cameras: set[int], sensor_of: NDArray[np.int64]
    ) -> None:
        translation = np.array([record.translation for record in records]).reshape(-1, 3)
        rotation = np.array([record.rotation for record in records]).reshape(-1, 4)
        for name, values in (("translation", translation), ("rotation", rotation)):
            check_finite(values, tokens.array, table="calibrated_sensor", column=name)
        self._sensor2ego = rigid(rotation, translation)
        self._intrinsics = np.full((len(records), 3, 3), np.nan)
        for row, record in enumerate(records):
            if len(record.camera_intrinsic) == 3:
                self._intrinsics[row] = record.camera_intrinsic
            elif int(sensor_of[row]) in cameras:
                raise SourceError(f"table 'calibrated_sensor': camera row '{record.token}' has no 3 x 3 intrinsics")

    def _read_poses(self, folder: Path, wanted_tokens: pa.Array) -> None:
        """Ego poses of the keyframe rows only: nuScenes has one pose for each of its 2.6 million sensor rows."""
        wanted = Tokens("ego_pose", wanted_tokens.unique())
        kept: list[dict[str, Column]] = []
        pending: list[dict[str, Column]] = []

        def keep() -> None:
            poses = join_columns(pending)
            at = np.flatnonzero(wanted.find(poses["token"]) >= 0)
            kept.append(
                {name: values.take(pa.array(at)) if name == "token" else values[at] for name, values in poses.items()}
            )
            pending.clear()

        for piece in read_table(folder, "ego_pose", EgoPose):
            pending.append(_pose_columns(piece))
            # Each look-up begins by hashing all wanted tokens, so it is for many rows.
            if sum(len(columns["token"]) for columns in pending) >= _POSES_AT_ONCE:
                keep()
        if pending or not kept:
            keep()
        found = join_columns(kept)
        poses = Tokens("ego_pose", found["token"])
        self._pose_of = poses.need(wanted_tokens, table="sample_data", column="ego_pose_token", owners=self.data_tokens)
        self._ego_xyz: NDArray[np.float64] = found["translation"]
        self._ego_wxyz: NDArray[np.float64] = found["rotation"]
        for name, values in (("translation", self._ego_xyz), ("rotation", self._ego_wxyz)):
            check_finite(values, poses.array, table="ego_pose", column=name)

    def _reference_pose(self, sample: int) -> int:
        """Pose row that stands for the sample: LIDAR_TOP's, else that of its sensor row nearest in time."""
        rows = self.sensor_rows[sample]
        if "LIDAR_TOP" in self.lidars and (row := rows[len(self.cameras) + self.lidars.index("LIDAR_TOP")]) >= 0:
            return int(self._pose_of[row])
        rows = rows[rows >= 0]
        if not rows.size:
            raise SourceError(f"table 'sample': row '{self.sample_tokens.array[sample]}' has no sensor data at all")
        nearest = rows[np.argmin(np.abs(self.data_timestamp_us[rows] - self.timestamp_us[sample]))]
        return int(self._pose_of[nearest])

    def geometries(self, samples: NDArray[np.int64]) -> Iterator[Geometry]:
        """The geometry of each of some samples, one scene's, all cameras valid that have a row.

        Sensors without a row are NaN, -1 and invalid.
        """
        rows = self.sensor_rows[samples]
        has = rows >= 0
        calibrated, poses = self._calibrated_of[rows], self._pose_of[rows]
        reference = np.array([self._reference_pose(sample) for sample in samples.tolist()])
        split = len(self.cameras)
        timestamp_ns = np.where(has, self.data_timestamp_us[rows] * NS_PER_US, -1)
        sensor2ego = np.where(has[..., None, None], self._sensor2ego[calibrated], np.nan)
        own_pose = rigid(self._ego_wxyz[poses.ravel()], self._ego_xyz[poses.ravel()]).reshape(*poses.shape, 4, 4)
        ego2global = np.where(has[..., None, None], own_pose, np.nan)
        reference_pose = rigid(self._ego_wxyz[reference], self._ego_xyz[reference])
        img_wh = np.where(has[:, :split, None], self.image_wh[rows[:, :split]], -1).astype(np.int32)
        intrinsics = np.where(has[:, :split, None, None], self._intrinsics[calibrated[:, :split]], np.nan)
        dist, unknown = np.full((split, NUM_DIST), np.nan), np.full(3, np.nan)
        for at in range(len(samples)):
            yield Geometry(
                cam_valid=has[at, :split].astype(np.uint8),
                cam_timestamp_ns=timestamp_ns[at, :split],
                img_wh=img_wh[at],
                intrinsics=intrinsics[at],
                dist=dist,
                cam2ego=sensor2ego[at, :split],
                cam_ego2global=ego2global[at, :split],
                ego2global=reference_pose[at],
                lidar2ego=sensor2ego[at, split:],
                lidar_ego2global=ego2global[at, split:],
                lidar_timestamp_ns=timestamp_ns[at, split:],
                ego_velocity=unknown,
                ego_accel=unknown,
                ego_rates=unknown,
            )

    def boxes(self, sample: int) -> Boxes | None:
        """The sample's boxes; None where the whole dataroot has no annotations (a test split)."""
        if not len(self.annotations):
            return None
        pose = self._reference_pose(sample)
        return self.annotations.of_sample(sample, self._ego_wxyz[pose], self._ego_xyz[pose])


def _sample_columns(piece: list[SampleRecord]) -> dict[str, Column]:
    return {
        "token": strings(r.token for r in piece),
        "scene_token": strings(r.scene_token for r in piece),
        "prev": strings(r.prev for r in piece),
        "next": strings(r.next for r in piece),
        "timestamp_us": np.array([r.timestamp for r in piece], np.int64),
    }


def _pose_columns(piece: list[EgoPose]) -> dict[str, Column]:
    return {
        "token": strings(r.token for r in piece),
        "translation": np.array([r.translation for r in piece], np.float64).reshape(-1, 3),
        "rotation": np.array([r.rotation for r in piece], np.float64).reshape(-1, 4),
    }


def _check_channels(names: Sequence[str]) -> None:
    """Channels are stored in lower case, as part of members' names."""
    seen: dict[str, str] = {}
    for name in names:
        if not _CHANNEL.match(name.lower()):
            raise SourceError(f"table 'sensor': channel '{name}' has other characters than letters, digits and _")
        if seen.setdefault(name.lower(), name) != name:
            raise SourceError(f"table 'sensor': channels '{seen[name.lower()]}' and '{name}' differ in case alone")
