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

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.schema import NUM_DIST, Geometry, rigid
from fuelrail.sharding.sources.nuscenes_boxes import Annotations
from fuelrail.sharding.sources.nuscenes_tables import (
    CalibratedSensor,
    EgoPose,
    Log,
    Record,
    SampleData,
    SampleRecord,
    Scene,
    Sensor,
    Tokens,
    check_finite,
    read_all,
    read_table,
    strings,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pyarrow as pa
    from numpy.typing import NDArray

    from fuelrail.pipeline.schema import Boxes

RIG: Final = ("CAM_FRONT", "CAM_FRONT_RIGHT", "CAM_FRONT_LEFT", "CAM_BACK", "CAM_BACK_LEFT", "CAM_BACK_RIGHT")
"""Camera order of mmdetection3d and BEVFormer; cameras of other names follow by name."""

NS_PER_US: Final = 1000
_CHANNEL: Final = re.compile(r"[a-z0-9_]{1,64}\Z")


class Keyframes:
    """The tables of a dataroot as columns, joined, keyframes only."""

    def __init__(self, folder: Path) -> None:
        self.log = read_all(folder, "log", Log)
        self.scene = read_all(folder, "scene", Scene)
        read_all(folder, "map", Record)
        samples = read_all(folder, "sample", SampleRecord)
        if not samples:
            raise SourceError(f"table '{folder / 'sample.json'}' has no rows: nothing to shard")
        self.sample_tokens = Tokens.of("sample", samples)
        self.timestamp_us = np.array([record.timestamp for record in samples], np.int64)
        scene_tokens = Tokens.of("scene", self.scene)
        self.scene_log = Tokens.of("log", self.log).need(
            strings(record.log_token for record in self.scene),
            table="scene",
            column="log_token",
            owners=scene_tokens.array,
        )
        self._sample_scene = scene_tokens.need(
            strings(record.scene_token for record in samples),
            table="sample",
            column="scene_token",
            owners=self.sample_tokens.array,
        )
        self._next = self._links(samples)
        self._read_sensors(folder)
        self.annotations = Annotations(folder, self.sample_tokens, self.timestamp_us)

    def _links(self, samples: list[SampleRecord]) -> NDArray[np.int64]:
        tokens = self.sample_tokens
        linked = {
            name: tokens.resolve(
                strings(getattr(record, name) for record in samples), table="sample", column=name, owners=tokens.array
            )
            for name in ("prev", "next")
        }
        return linked["next"]

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
        rows = [
            record
            for piece in read_table(folder, "sample_data", SampleData)
            for record in piece
            if record.is_key_frame and record.calibrated_sensor_token not in others
        ]
        own = strings(record.token for record in rows)
        calibrated_of = calibrated_tokens.need(
            strings(record.calibrated_sensor_token for record in rows),
            table="sample_data",
            column="calibrated_sensor_token",
            owners=own,
        )
        sample_of = self.sample_tokens.need(
            strings(record.sample_token for record in rows), table="sample_data", column="sample_token", owners=own
        )
        used = set(sensor_of[calibrated_of].tolist())
        by_kind = {
            kind: {sensors[i].channel: i for i in used if sensors[i].modality == kind} for kind in ("camera", "lidar")
        }
        self.cameras = sorted(by_kind["camera"], key=lambda name: (RIG.index(name) if name in RIG else len(RIG), name))
        self.lidars = sorted(by_kind["lidar"], key=lambda name: (name != "LIDAR_TOP", name))
        if not self.cameras:
            raise SourceError(f"table '{folder / 'sample_data.json'}' has no keyframes of cameras")
        _check_channels([*self.cameras, *self.lidars])
        columns = {
            sensor: column
            for column, sensor in enumerate(
                [*(by_kind["camera"][n] for n in self.cameras), *(by_kind["lidar"][n] for n in self.lidars)]
            )
        }
        self.sensor_rows = np.full((len(self.sample_tokens), len(columns)), -1, np.int64)
        for row, (sample, sensor) in enumerate(zip(sample_of, sensor_of[calibrated_of], strict=True)):
            if (column := columns.get(int(sensor))) is None:
                continue
            if self.sensor_rows[sample, column] >= 0:
                raise SourceError(
                    f"table 'sample_data': row '{own[row]}' is a second keyframe of {sensors[sensor].channel} "
                    f"for sample '{self.sample_tokens.array[int(sample)]}'"
                )
            self.sensor_rows[sample, column] = row
        self.data_tokens = own
        self.filenames = strings(record.filename for record in rows)
        self.data_timestamp_us = np.array([record.timestamp for record in rows], np.int64)
        self.image_wh = np.array([(record.width or 0, record.height or 0) for record in rows], np.int32).reshape(-1, 2)
        self._calibrated_of = calibrated_of
        self._calibrate(calibrated, calibrated_tokens, set(by_kind["camera"].values()), sensor_of)
        self._read_poses(folder, rows, own)

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

    def _read_poses(self, folder: Path, rows: list[SampleData], own: pa.Array) -> None:
        """Ego poses of the keyframe rows only: nuScenes has one pose for each of its 2.6 million sensor rows."""
        wanted_tokens = strings(record.ego_pose_token for record in rows)
        wanted = Tokens("ego_pose", wanted_tokens.unique())
        kept: list[EgoPose] = []
        for piece in read_table(folder, "ego_pose", EgoPose):
            found = wanted.find(strings(record.token for record in piece))
            kept += [piece[int(at)] for at in np.flatnonzero(found >= 0)]
        poses = Tokens.of("ego_pose", kept)
        self._pose_of = poses.need(wanted_tokens, table="sample_data", column="ego_pose_token", owners=own)
        self._ego_xyz = np.array([record.translation for record in kept]).reshape(-1, 3)
        self._ego_wxyz = np.array([record.rotation for record in kept]).reshape(-1, 4)
        for name, values in (("translation", self._ego_xyz), ("rotation", self._ego_wxyz)):
            check_finite(values, poses.array, table="ego_pose", column=name)
        self._ego2global = rigid(self._ego_wxyz, self._ego_xyz)

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

    def geometry(self, sample: int, present: set[str]) -> Geometry:
        """The sample's geometry; sensors without a row are NaN, -1 and invalid."""
        rows = self.sensor_rows[sample]
        has = rows >= 0
        calibrated, poses = self._calibrated_of[rows], self._pose_of[rows]
        split = len(self.cameras)
        timestamp_ns = np.where(has, self.data_timestamp_us[rows] * NS_PER_US, -1)
        sensor2ego = np.where(has[:, None, None], self._sensor2ego[calibrated], np.nan)
        ego2global = np.where(has[:, None, None], self._ego2global[poses], np.nan)
        cameras = slice(0, split)
        return Geometry(
            cam_valid=np.array([name.lower() in present for name in self.cameras], np.uint8),
            cam_timestamp_ns=timestamp_ns[cameras],
            img_wh=np.where(has[cameras, None], self.image_wh[rows[cameras]], -1).astype(np.int32),
            intrinsics=np.where(has[cameras, None, None], self._intrinsics[calibrated[cameras]], np.nan),
            dist=np.full((split, NUM_DIST), np.nan),
            cam2ego=sensor2ego[cameras],
            cam_ego2global=ego2global[cameras],
            ego2global=self._ego2global[self._reference_pose(sample)],
            lidar2ego=sensor2ego[split:],
            lidar_ego2global=ego2global[split:],
            lidar_timestamp_ns=timestamp_ns[split:],
            ego_velocity=np.full(3, np.nan),
            ego_accel=np.full(3, np.nan),
            ego_rates=np.full(3, np.nan),
        )

    def boxes(self, sample: int) -> Boxes | None:
        """The sample's boxes; None where the whole dataroot has no annotations (a test split)."""
        if not len(self.annotations):
            return None
        pose = self._reference_pose(sample)
        return self.annotations.of_sample(sample, self._ego_wxyz[pose], self._ego_xyz[pose])


def _check_channels(names: Sequence[str]) -> None:
    """Channels are stored in lower case, as part of members' names."""
    seen: dict[str, str] = {}
    for name in names:
        if not _CHANNEL.match(name.lower()):
            raise SourceError(f"table 'sensor': channel '{name}' has other characters than letters, digits and _")
        if seen.setdefault(name.lower(), name) != name:
            raise SourceError(f"table 'sensor': channels '{seen[name.lower()]}' and '{name}' differ in case alone")
