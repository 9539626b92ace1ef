"""Keyframes of joined tables: which rows a sample has of each sensor, and where sensors and ego
vehicle were.

* A sample's ``ego2global`` is the ego pose of its row of a leading sensor, in nuScenes LIDAR_TOP,
  whose time is the sample's. Without such a row it is that of the sensor row nearest in time.
* Annotations are valid at that time (the devkit hands them out so); boxes go to ego with that pose.
* nuScenes' images are rectified: ``dist`` is NaN and ``dist_model`` "none". T4 states
  ``camera_distortion``: 4 or 5 values are ``opencv_radtan``, 8, 12 or 14 ``opencv_rational``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.rigid import rigid
from fuelrail.pipeline.storage.columns import ROWS_AT_ONCE
from fuelrail.pipeline.transforms.lens import MODELS, UNBENT
from fuelrail.sharding.sources.adapter.frame import Calibration, Image, Sweep
from fuelrail.sharding.sources.nuscenes.tables import check_finite

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.schema import F64, I64
    from fuelrail.pipeline.storage.columns import Disk
    from fuelrail.sharding.sources.nuscenes.joined import Joined
    from fuelrail.sharding.sources.nuscenes.tables import Log, Scene, Sensor

RIG: Final = (
    "CAM_FRONT",
    "CAM_FRONT_RIGHT",
    "CAM_FRONT_LEFT",
    "CAM_BACK",
    "CAM_BACK_LEFT",
    "CAM_BACK_RIGHT",
)
"""Camera order of mmdetection3d and BEVFormer; cameras of other names follow by name."""
NS_PER_US: Final = 1000
NOT_VALID: Final = "marked as not valid"
"""Why there is no image or sweep where the tables say so."""
LENS_OF_LENGTH: Final = {
    0: UNBENT,
    **{
        length: model
        for model in ("opencv_radtan", "opencv_rational")
        for length in MODELS[model][1]
    },
}
"""Number of values in ``camera_distortion`` to the lens model that they are of, in OpenCV's
order.
"""
_CHANNEL: Final = re.compile(r"[a-z0-9_]{1,64}\Z")
_FAR_US: Final = 2**62


class SceneRows(NamedTuple):
    """Some samples of one scene, in time order: rows of the tables, joined.

    Attributes:
        keyframes: those of all scenes.
        scene: its record.
        log: its log's record.
        samples: rows (S,) in table ``sample``.
        tokens: of the samples.
        timestamp_us: of the samples.
        ego2global: (S, 4, 4) at the samples' times, NaN where there is none.
        images: of each sample the images that it has, by channel of the camera.
        lidars: of each sample the sweeps that it has, by the lidar's name in the tables.
        radars: likewise.

    """

    keyframes: Keyframes
    scene: Scene
    log: Log
    samples: I64
    tokens: list[str]
    timestamp_us: list[int]
    ego2global: F64
    images: list[dict[str, Image]]
    lidars: list[dict[str, Sweep]]
    radars: list[dict[str, Sweep]]

    def row_of(self, number: int, channel: str) -> int:
        """Return the row of ``sample_data`` that a sample has of a sensor, -1 for none."""
        column = self.keyframes.channels.index(channel)
        return int(self.keyframes.sensor_rows[self.samples[number], column])


class SensorPoses:
    """Where sensors are on the ego vehicle, and where it was, by rows of joined tables."""

    def __init__(self, joined: Joined) -> None:
        """Check the ego poses that rows of ``sample_data`` name; raises SourceError."""
        self._calibrated = joined["calibrated_sensor"]
        self._poses = joined["ego_pose"]
        self.sensors: list[Sensor] = joined["sensor"].records
        links = joined["sample_data"].links
        self.calibrated_of = links["calibrated_sensor_token"]
        self.pose_of = links["ego_pose_token"]
        columns = self._poses.columns
        for first in range(0, len(self.pose_of), ROWS_AT_ONCE):
            rows = self.pose_of[first : first + ROWS_AT_ONCE]
            owners = self._poses.tokens.take(rows)
            for name in ("translation", "rotation"):
                check_finite(
                    columns[name][rows],
                    owners=owners,
                    table="ego_pose",
                    column=name,
                )

    def sensor_of(self, rows: I64) -> I64:
        """Return numbers of the sensors of rows of ``sample_data``."""
        sensors = self._calibrated.links["sensor_token"]
        numbers: I64 = sensors[self.calibrated_of[rows]]
        return numbers

    def sensor2ego(self, calibrated: I64) -> F64:
        """Return matrices (..., 4, 4) of rows of ``calibrated_sensor`` (...)."""
        columns = self._calibrated.columns
        return np.asarray(
            rigid(
                columns["rotation"][calibrated],
                columns["translation"][calibrated],
            )
        )

    def ego2global(self, poses: I64) -> F64:
        """Return matrices (..., 4, 4) of rows of ``ego_pose`` (...)."""
        columns = self._poses.columns
        rotation = columns["rotation"][poses]
        return np.asarray(rigid(rotation, columns["translation"][poses]))

    def calibrations(self, rows: I64) -> dict[int, Calibration]:
        """Return the calibrations of rows of ``calibrated_sensor``, by row."""
        columns = self._calibrated.columns
        rows = np.unique(rows)
        calibration_of = {}
        for row, sensor2ego in zip(rows.tolist(), self.sensor2ego(rows), strict=True):
            num_dist, *dist = columns["camera_distortion"][row].tolist()
            calibration_of[row] = Calibration(
                intrinsics=columns["camera_intrinsic"][row],
                sensor2ego=sensor2ego,
                dist=tuple(dist[: int(num_dist)]),
                dist_model=LENS_OF_LENGTH.get(num_dist, UNBENT),
            )
        return calibration_of

    def check_cameras(self, cameras: Collection[int]) -> None:
        """Raise SourceError where a row of one of these sensors has no intrinsics, or a lens of
        no known model.
        """
        table = self._calibrated
        columns = self._calibrated.columns
        is_camera = np.isin(table.links["sensor_token"], list(cameras))
        lengths = columns["camera_distortion"][:, 0].astype(np.int64)
        for row in np.flatnonzero(
            is_camera & np.isnan(columns["camera_intrinsic"][:, 0, 0])
        ).tolist():
            raise SourceError(
                f"table 'calibrated_sensor': camera row '{table.tokens[row]}' has no 3 x 3 "
                "intrinsics"
            )
        has_lens = np.isin(lengths, list(LENS_OF_LENGTH))
        for row in np.flatnonzero(is_camera & ~has_lens).tolist():
            allowed = ", ".join(f"{length} ({model})" for length, model in LENS_OF_LENGTH.items())
            raise SourceError(
                f"table 'calibrated_sensor': camera row '{table.tokens[row]}' has "
                f"{lengths[row]} values in camera_distortion; allowed are {allowed}, in "
                "OpenCV's order k1, k2, p1, p2, k3, ...; for an image that is rectified, "
                "state an empty list"
            )


class Keyframes:
    """Samples with the rows that they have of each sensor.

    ``channels`` are those of sensors with keyframes: ``cameras`` in the order of the rig,
    ``lidars``, ``radars``. ``sensor_rows`` (samples, sensors) are rows of ``sample_data`` of these,
    in that order, -1 for none.
    """

    def __init__(
        self,
        joined: Joined,
        disk: Disk,
        leading: Sequence[str] | None,
        folder: str = "",
        *,
        stay: bool,
    ) -> None:
        """Take the channels whose pose is the sample's, None for all lidars, and the folder of
        files.

        ``stay`` is `Image.stays`. Raises SourceError.
        """
        self.joined = joined
        self.disk = disk
        self._folder = folder
        self._stay = stay
        self.sensor_poses = SensorPoses(joined)
        self.timestamp_us: I64 = joined["sample"].columns["timestamp"]
        sensors = self.sensor_poses.sensors
        used = np.flatnonzero(np.bincount(self.sensor_poses.calibrated_of))
        by_kind: dict[str, dict[str, int]] = {
            "camera": {},
            "lidar": {},
            "radar": {},
        }
        sensors_used = joined["calibrated_sensor"].links["sensor_token"][used]
        for number in np.unique(sensors_used).tolist():
            by_kind[sensors[number].modality][sensors[number].channel] = number
        self.cameras = in_rig_order(by_kind["camera"])
        self.lidars = sorted(by_kind["lidar"], key=lambda name: (name != "LIDAR_TOP", name))
        self.radars = sorted(by_kind["radar"])
        self.channels = [*self.cameras, *self.lidars, *self.radars]
        names_seen: dict[str, str] = {}
        for name in self.channels:
            if not _CHANNEL.match(name.lower()):
                raise SourceError(
                    f"table 'sensor': channel '{name}' has other characters than letters, "
                    "digits and _"
                )
            if names_seen.setdefault(name.lower(), name) != name:
                raise SourceError(
                    f"table 'sensor': channels '{names_seen[name.lower()]}' and '{name}' differ "
                    "in case alone"
                )
        self.sensor_poses.check_cameras(by_kind["camera"].values())
        self._is_leading = np.isin(self.channels, self.lidars if leading is None else leading)
        self._may_place = np.isin(
            self.channels,
            self.channels if leading is None else [*self.cameras, *self.lidars],
        )
        # The rows of sample_data by sample and channel, of which each has one place.
        samples = self.joined["sample"].tokens
        sample_of = self.joined["sample_data"].links["sample_token"]
        number_of = {channel: number for number, channel in enumerate(self.channels)}
        column_of = np.array(
            [number_of.get(sensor.channel, -1) for sensor in self.sensor_poses.sensors],
            np.int64,
        )
        self.sensor_rows = self.disk.filled(
            -1,
            num_rows=len(samples),
            dtype=np.int64,
            shape=(len(self.channels),),
        )
        flat = self.sensor_rows.reshape(-1)
        for first in range(0, len(sample_of), ROWS_AT_ONCE):
            sample = sample_of[first : first + ROWS_AT_ONCE]
            rows = np.arange(first, first + len(sample))
            column = column_of[self.sensor_poses.sensor_of(rows)]
            place = sample * len(self.channels) + column
            is_again = flat[place] >= 0
            flat[place[::-1]] = rows[::-1]  # the first stays
            is_again |= flat[place] != rows
            if is_again.any():
                index = int(is_again.argmax())
                raise SourceError(
                    "table 'sample_data': row "
                    f"'{self.joined['sample_data'].tokens[first + index]}' is a second keyframe of "
                    f"{self.channels[column[index]]} for sample '{samples[int(sample[index])]}'"
                )
            self.disk.used(len(sample))

    def ego2global(self, samples: I64) -> F64:
        """Return poses of samples (S, 4, 4), NaN for none."""
        rows = self.sensor_rows[samples]
        if not rows.size or not len(self.joined["sample_data"]):
            poses = np.full(len(samples), -1)
        else:
            times_us = self.joined["sample_data"].columns["timestamp"]
            away_us = np.where(
                (rows < 0) | ~self._may_place,
                _FAR_US,
                np.abs(times_us[rows] - self.timestamp_us[samples][:, None]),
            )
            leading_us = np.where(self._is_leading, away_us, _FAR_US)
            column = np.where(
                leading_us.min(1) < _FAR_US,
                leading_us.argmin(1),
                away_us.argmin(1),
            )
            row_index = np.arange(len(rows))
            is_known = away_us[row_index, column] < _FAR_US
            data_rows = rows[row_index, column]
            poses = np.where(is_known, self.sensor_poses.pose_of[data_rows], -1)
        has_pose = poses >= 0
        matrices = np.full((len(samples), 4, 4), np.nan)
        matrices[has_pose] = self.sensor_poses.ego2global(poses[has_pose])
        return matrices

    def scenes(self) -> Iterator[tuple[int, I64]]:
        """Yield each row of table ``scene`` with its samples in time order, which may be none."""
        scene_of = self.joined["sample"].links["scene_token"]
        order = np.lexsort((self.timestamp_us, scene_of))
        scenes = np.arange(len(self.joined["scene"]) + 1)
        starts = np.searchsorted(scene_of, scenes, sorter=order).tolist()
        for row, (first, end) in enumerate(pairwise(starts)):
            yield row, order[first:end]

    def scene_rows(self, samples: I64) -> SceneRows:
        """Return the joined rows of some samples of a scene (S,)."""
        rows = self.sensor_rows[samples]
        has = rows >= 0
        data_rows = rows[has]
        data = self.joined["sample_data"]
        scenes = self.joined["sample"].links["scene_token"]
        scene = int(scenes[samples[0]])
        calibrated = self.sensor_poses.calibrated_of[data_rows]
        self.disk.used(rows.size)
        calibrations = self.sensor_poses.calibrations(calibrated)
        columns = zip(
            *np.nonzero(has),
            data.tokens.take(data_rows),
            data.columns["filename"].take(data_rows),
            (data.columns["timestamp"][data_rows] * NS_PER_US).tolist(),
            data.columns["width"][data_rows].tolist(),
            data.columns["height"][data_rows].tolist(),
            data.columns["is_valid"][data_rows].tolist(),
            map(calibrations.__getitem__, calibrated.tolist()),
            self.sensor_poses.ego2global(self.sensor_poses.pose_of[data_rows]),
            strict=True,
        )
        images: list[dict[str, Image]] = [{} for _ in samples]
        lidars: list[dict[str, Sweep]] = [{} for _ in samples]
        radars: list[dict[str, Sweep]] = [{} for _ in samples]
        for (
            sample_number,
            number,
            token,
            file,
            time_ns,
            width,
            height,
            is_valid,
            calibration,
            ego2global,
        ) in columns:
            facts: Any = {
                "ref": f"{self._folder}{file}",
                "timestamp_ns": time_ns,
                "ego2global": ego2global,
            }
            facts["absent"] = "" if is_valid else NOT_VALID
            channel = self.channels[number]
            if number < len(self.cameras):
                image = Image(
                    **facts,
                    calibration=calibration,
                    width=width,
                    height=height,
                    token=token,
                    stays=self._stay,
                )
                images[sample_number][channel.lower()] = image
            else:
                sweeps = lidars if channel in self.lidars else radars
                sweeps[sample_number][channel] = Sweep(**facts, lidar2ego=calibration.sensor2ego)
        return SceneRows(
            keyframes=self,
            scene=self.joined["scene"].records[scene],
            log=self.joined["log"].records[self.joined["scene"].links["log_token"][scene]],
            samples=samples,
            tokens=self.joined["sample"].tokens.take(samples),
            timestamp_us=self.timestamp_us[samples].tolist(),
            ego2global=self.ego2global(samples),
            images=images,
            lidars=lidars,
            radars=radars,
        )


def in_rig_order(cameras: Iterable[str]) -> list[str]:
    """Return the names of cameras in the order of `RIG`."""
    return sorted(
        cameras,
        key=lambda name: (RIG.index(name) if name in RIG else len(RIG), name),
    )
