"""A nuScenes dataroot's keyframes: the tables joined into columns, and the rows of a scene from them.

* ``timestamp_ns`` is the sample's timestamp, which is that of its LIDAR_TOP row; ``ego2global`` is that row's ego
  pose. Without a LIDAR_TOP row it is the ego pose of the sample's sensor row nearest in time.
* Annotations are valid at that time (the devkit hands them out so); boxes go to ego with that pose.
* nuScenes' images are rectified: ``dist`` is NaN and ``dist_model`` "none". T4 states ``camera_distortion``: 4 or 5
  values are ``opencv_radtan``, 8, 12 or 14 ``opencv_rational``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.rigid import rigid
from fuelrail.pipeline.sample.schema import NUM_DIST
from fuelrail.pipeline.storage.columns import ROWS_AT_ONCE
from fuelrail.pipeline.transforms.lens import MODELS, UNBENT
from fuelrail.sharding.sources.nuscenes.boxes import Annotations
from fuelrail.sharding.sources.nuscenes.tables import (
    CalibratedSensor,
    EgoPose,
    Log,
    Record,
    SampleData,
    SampleRecord,
    Scene,
    Sensor,
    check_finite,
    of_rig,
    vectors,
)
from fuelrail.sharding.sources.shared.joins import Cut, Tokens

if TYPE_CHECKING:
    from fuelrail.pipeline.storage.columns import Texts
    from fuelrail.sharding.sources.adapter.frame import StoredBoxes
    from fuelrail.sharding.sources.nuscenes.tables import Tables
    from fuelrail.sharding.sources.shared.joins import Database, Owners

RIG: Final = ("CAM_FRONT", "CAM_FRONT_RIGHT", "CAM_FRONT_LEFT", "CAM_BACK", "CAM_BACK_LEFT", "CAM_BACK_RIGHT")
"""Camera order of mmdetection3d and BEVFormer; cameras of other names follow by name."""

NS_PER_US: Final = 1000
_CHANNEL: Final = re.compile(r"[a-z0-9_]{1,64}\Z")


class Keyframes:
    """The tables of a dataroot as columns on disk, joined, keyframes only."""

    def __init__(self, tables: Tables, database: Database, cut: Cut, keep: Sequence[str]) -> None:
        """Take the cameras to ``keep``, in lower case; none: all."""
        self._database, self._cut = database, cut
        self.log = tables.all("log", Log)
        self.scene = tables.all("scene", Scene)
        tables.all("map", Record)
        scene_tokens = Tokens("scene", database, [record.token for record in self.scene])
        self.scene_log = Tokens("log", database, [record.token for record in self.log]).resolve(
            [record.log_token for record in self.scene], may_be_empty=False, table="scene", column="log_token",
            owners=scene_tokens,
        )  # fmt: skip
        self._read_samples(tables, scene_tokens)
        self._read_sensors(tables, keep)
        self.annotations = Annotations(tables, database, self.sample_tokens, self.timestamp_us, cut)

    def scenes(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield scene row and its samples in time order, scenes in table order; those without samples left out.

        Raises SourceError where the order in time is not the order of the ``next`` links, or the count is not the
        scene's ``nbr_samples``.
        """
        order = np.lexsort((self.timestamp_us, self.sample_scene))
        starts = np.searchsorted(self.sample_scene, np.arange(len(self.scene) + 1), sorter=order)
        for row, scene in enumerate(self.scene):
            samples = order[starts[row] : starts[row + 1]]
            if len(samples) != scene.nbr_samples and not self._cut.is_on:
                raise SourceError(
                    f"table 'scene': '{scene.name}' has nbr_samples {scene.nbr_samples}, "
                    f"table 'sample' has {len(samples)} of it"
                )
            expected = np.append(samples[1:], -1)
            may_end = self._cut.is_on & (self.next[samples] < 0)
            wrong = np.flatnonzero((self.next[samples] != expected) & ~may_end) if len(samples) else samples
            if wrong.size:
                token = self.sample_tokens[int(samples[wrong[0]])]
                raise SourceError(
                    f"table 'sample': row '{token}' of scene '{scene.name}': its next is not the scene's following "
                    "sample in time"
                )
            if len(samples):
                yield row, samples

    def _read_samples(self, tables: Tables, scenes: Tokens) -> None:
        self.sample_tokens = Tokens("sample", self._database)
        links = {name: self._database.texts() for name in ("prev", "next")}
        timestamp_us, scene = self._database.column(np.int64), self._database.column(np.int32)
        for whole in tables.read("sample", SampleRecord):
            piece = self._cut.kept(whole, "sample", scene_token=scenes)
            own = [record.token for record in piece]
            self.sample_tokens.append(own)
            timestamp_us.append([record.timestamp for record in piece])
            linked = [record.scene_token for record in piece]
            scene.append(scenes.resolve(linked, may_be_empty=False, table="sample", column="scene_token", owners=own))
            links["prev"].append([record.prev for record in piece])
            links["next"].append([record.next for record in piece])
        if not len(self.sample_tokens):
            raise SourceError(f"table '{tables.path('sample')}' has no rows: nothing to shard")
        self.sample_tokens.check_unique()
        self.timestamp_us: NDArray[np.int64] = timestamp_us.values
        self.sample_scene: NDArray[np.int32] = scene.values
        resolved = {
            name: self.sample_tokens.resolve_all(
                column, table="sample", column=name, owners=self.sample_tokens, cut=self._cut
            )
            for name, column in links.items()
        }
        self.prev, self.next = resolved["prev"], resolved["next"]

    def _read_sensors(self, tables: Tables, cameras: Sequence[str]) -> None:
        """Read keyframe rows of sample_data with calibration and pose: a row number for each (sample, channel)."""
        self._calibrations = Calibrations(tables, self._database)
        is_wanted = of_rig(self._calibrations.sensors, cameras, str(tables.folder))[self._calibrations.sensor_of]
        self.data_tokens, self.filenames = self._database.texts(), self._database.texts()
        pose_tokens, sample_links = self._database.texts(), self._database.texts()
        timestamp_us, image_wh = self._database.column(np.int64), self._database.column(np.int32, (2,))
        calibrated_of, is_valid = self._database.column(np.int32), self._database.column(np.bool_)
        used: set[int] = set()
        # Of 2.6 million rows stay the keyframes of cameras and lidars.
        for piece in tables.read("sample_data", SampleData):
            records = self._cut.kept(
                [record for record in piece if record.is_key_frame], "sample_data",
                calibrated_sensor_token=self._calibrations.tokens, sample_token=self.sample_tokens,
            )  # fmt: skip
            linked = self._calibrations.tokens.resolve(
                [record.calibrated_sensor_token for record in records],
                may_be_empty=False,
                table="sample_data",
                column="calibrated_sensor_token",
                owners=[record.token for record in records],
            )
            at = np.flatnonzero(is_wanted[linked])
            rows, calibrated = [records[number] for number in at.tolist()], linked[at]
            self.data_tokens.append([record.token for record in rows])
            calibrated_of.append(calibrated)
            used.update(self._calibrations.sensor_of[calibrated].tolist())
            sample_links.append([record.sample_token for record in rows])
            pose_tokens.append([record.ego_pose_token for record in rows])
            self.filenames.append([record.filename for record in rows])
            timestamp_us.append([record.timestamp for record in rows])
            image_wh.append([(record.width or 0, record.height or 0) for record in rows])
            is_valid.append([record.is_valid for record in rows])
        self.data_timestamp_us: NDArray[np.int64] = timestamp_us.values
        self.image_wh: NDArray[np.int32] = image_wh.values
        self._is_valid: NDArray[np.bool_] = is_valid.values
        self._calibrated_of: NDArray[np.int32] = calibrated_of.values
        sensors = self._calibrations.sensors
        by_kind = {
            kind: {sensors[i].channel: i for i in used if sensors[i].modality == kind} for kind in ("camera", "lidar")
        }
        self.cameras = in_rig_order(by_kind["camera"])
        self.lidars = sorted(by_kind["lidar"], key=lambda name: (name != "LIDAR_TOP", name))
        if not self.cameras:
            raise SourceError(f"table '{tables.path('sample_data')}' has no keyframes of cameras")
        _check_channels([*self.cameras, *self.lidars])
        placed = [*(by_kind["camera"][n] for n in self.cameras), *(by_kind["lidar"][n] for n in self.lidars)]
        column_of = np.full(len(sensors), -1, np.int64)
        column_of[placed] = np.arange(len(placed))
        sample_of = self.sample_tokens.resolve_all(
            sample_links, may_be_empty=False, table="sample_data", column="sample_token", owners=self.data_tokens
        )
        self._place(sample_of, column_of, len(placed))
        self._calibrations.check_cameras(by_kind["camera"].values())
        self._poses = Poses(tables, self._database, pose_tokens, self.data_tokens)

    def _place(self, sample_of: NDArray[np.int64], column_of: NDArray[np.int64], num_columns: int) -> None:
        """Set ``sensor_rows`` to each sample's row of each column (-1: none); two rows in one place: SourceError."""
        self.sensor_rows = self._database.filled(-1, len(self.sample_tokens), np.int64, (num_columns,))
        flat = self.sensor_rows.reshape(-1)
        for first in range(0, len(sample_of), ROWS_AT_ONCE):
            sample = sample_of[first : first + ROWS_AT_ONCE]
            rows = np.arange(first, first + len(sample))
            column = column_of[self._calibrations.sensor_of[self._calibrated_of[rows]]]
            place = sample * num_columns + column
            is_again = flat[place] >= 0
            is_again[np.setdiff1d(np.arange(len(place)), np.unique(place, return_index=True)[1])] = True
            for at in np.flatnonzero(is_again).tolist():
                name = (*self.cameras, *self.lidars)[column[at]]
                raise SourceError(
                    f"table 'sample_data': row '{self.data_tokens[first + at]}' is a second keyframe of {name} "
                    f"for sample '{self.sample_tokens[int(sample[at])]}'"
                )
            flat[place] = rows
            self._database.used(len(sample))

    def _reference_poses(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the pose row of each sample: LIDAR_TOP's, else that of its sensor row nearest in time."""
        lidar = np.full(len(samples), -1, np.int64)
        if "LIDAR_TOP" in self.lidars:
            lidar = self.sensor_rows[samples, len(self.cameras) + self.lidars.index("LIDAR_TOP")]
        found = np.where(lidar >= 0, self._poses.of_row[lidar], -1)
        for at in np.flatnonzero(lidar < 0).tolist():
            sample = samples[at]
            rows = self.sensor_rows[sample]
            rows = rows[rows >= 0]
            if not rows.size:
                raise SourceError(f"table 'sample': row '{self.sample_tokens[int(sample)]}' has no sensor data at all")
            nearest = rows[np.argmin(np.abs(self.data_timestamp_us[rows] - self.timestamp_us[sample]))]
            found[at] = self._poses.of_row[nearest]
        return found

    def ego2global(self, samples: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return poses of samples (S, 4, 4)."""
        return self._poses.ego2global(self._reference_poses(samples))

    def scene_rows(self, scene: int, samples: NDArray[np.int64]) -> SceneRows:
        """Return the joined rows of some samples of a scene."""
        rows = self.sensor_rows[samples]
        has = rows >= 0
        there = rows[has]
        calibrated, ego2global = self._calibrated_of[there], self._poses.ego2global(self._poses.of_row[there])
        reference = self._reference_poses(samples)
        boxes: list[StoredBoxes | None] = [None] * len(samples)
        if len(self.annotations):  # a test split has none
            boxes = self.annotations.of_samples(samples, self._poses.wxyz[reference], self._poses.xyz[reference])
        known = {number: self._calibrations.of_row(number) for number in np.unique(calibrated).tolist()}
        self._database.used(rows.size)
        columns = zip(
            self.data_tokens.take(there),
            self.filenames.take(there),
            (self.data_timestamp_us[there] * NS_PER_US).tolist(),
            *self.image_wh[there].T.tolist(),
            self._is_valid[there].tolist(),
            map(known.__getitem__, calibrated.tolist()),
            ego2global,
            there.tolist(),
            strict=True,
        )
        found = map(SensorRow._make, columns)
        sensors = [[next(found) if is_there else None for is_there in row] for row in has.tolist()]
        return SceneRows(
            self,
            scene,
            samples,
            self.sample_tokens.take(samples),
            self.timestamp_us[samples].tolist(),
            self._poses.ego2global(reference),
            sensors,
            boxes,
        )


class Calibration(NamedTuple):
    """A row of table ``calibrated_sensor``: sensor to ego (4, 4), K (3, 3), lens coefficients, and the lens model."""

    sensor2ego: NDArray[np.float64]
    intrinsics: NDArray[np.float64]
    dist: tuple[float, ...]
    dist_model: str


class SensorRow(NamedTuple):
    """A keyframe of one sensor, a row of ``sample_data``; size [px] of an image, 0 for others.

    ``is_valid`` false: the source says to ignore the file. ``ego2global`` is (4, 4) at the row's time. ``row`` is the
    number of the row among the keyframes.
    """

    token: str
    filename: str
    timestamp_ns: int
    width: int
    height: int
    is_valid: bool
    calibration: Calibration
    ego2global: NDArray[np.float64]
    row: int


class SceneRows(NamedTuple):
    """Some samples of one scene, in time order: rows of the tables, joined.

    Attributes:
        keyframes: the tables.
        scene: row in table ``scene``.
        samples: rows (S,) in table ``sample``.
        tokens: of the samples.
        timestamp_us: of the samples.
        ego2global: (S, 4, 4) at the samples' times.
        sensors: of each sample the rows of the cameras and then of the lidars, None for one that has none.
        boxes: of each sample; None where the tables have no annotations.

    """

    keyframes: Keyframes
    scene: int
    samples: NDArray[np.int64]
    tokens: list[str]
    timestamp_us: list[int]
    ego2global: NDArray[np.float64]
    sensors: list[list[SensorRow | None]]
    boxes: list[StoredBoxes | None]


def in_rig_order(cameras: Iterable[str]) -> list[str]:
    """Return the names of cameras in the order of `RIG`."""
    return sorted(cameras, key=lambda name: (RIG.index(name) if name in RIG else len(RIG), name))


def _check_channels(names: Sequence[str]) -> None:
    """Check that channels differ in lower case, in which they are part of members' names."""
    seen: dict[str, str] = {}
    for name in names:
        check_name(name)
        if seen.setdefault(name.lower(), name) != name:
            raise SourceError(f"table 'sensor': channels '{seen[name.lower()]}' and '{name}' differ in case alone")


def check_name(channel: str) -> None:
    """Raise SourceError for a channel of table ``sensor`` that is no part of a member's name."""
    if not _CHANNEL.match(channel.lower()):
        raise SourceError(f"table 'sensor': channel '{channel}' has other characters than letters, digits and _")


LENS_OF_LENGTH: Final = {
    0: UNBENT,
    **{length: model for model in ("opencv_radtan", "opencv_rational") for length in MODELS[model][1]},
}
"""Number of values in ``camera_distortion`` to the lens model that they are of, in OpenCV's order."""


class Calibrations:
    """Tables ``sensor`` and ``calibrated_sensor``.

    ``sensor_of``, ``sensor2ego`` (4, 4), ``intrinsics`` (3, 3; NaN for what is no camera), ``dist`` (14; NaN-padded)
    and ``num_dist`` (number of lens coefficients, 0 for none) have a row for each of ``calibrated_sensor``.
    """

    def __init__(self, tables: Tables, database: Database) -> None:
        self.sensors = tables.all("sensor", Sensor)
        sensors = Tokens("sensor", database, [record.token for record in self.sensors])
        self.tokens = Tokens("calibrated_sensor", database)
        sensor_of, sensor2ego = database.column(np.int32), database.column(np.float64, (4, 4))
        intrinsics = database.column(np.float64, (3, 3))
        dist, num_dist = database.column(np.float64, (NUM_DIST,)), database.column(np.int32)
        none = np.full((3, 3), np.nan)
        for piece in tables.read("calibrated_sensor", CalibratedSensor):
            own = [record.token for record in piece]
            self.tokens.append(own)
            linked = [record.sensor_token for record in piece]
            where = {"table": "calibrated_sensor", "column": "sensor_token", "owners": own}
            sensor_of.append(sensors.resolve(linked, may_be_empty=False, **where))
            translation = vectors([record.translation for record in piece], 3)
            rotation = vectors([record.rotation for record in piece], 4)
            _check_pose(translation, rotation, own, "calibrated_sensor")
            sensor2ego.append(rigid(rotation, translation))
            intrinsics.append(
                [record.camera_intrinsic if len(record.camera_intrinsic) == 3 else none for record in piece]
            )
            lenses = [coefficients(record) for record in piece]
            dist.append([(*lens, *[np.nan] * NUM_DIST)[:NUM_DIST] for lens in lenses])
            num_dist.append([len(lens) for lens in lenses])
        self.tokens.check_unique()
        self.sensor_of: NDArray[np.int32] = sensor_of.values
        self.sensor2ego: NDArray[np.float64] = sensor2ego.values
        self.intrinsics: NDArray[np.float64] = intrinsics.values
        self.dist: NDArray[np.float64] = dist.values
        self.num_dist: NDArray[np.int32] = num_dist.values

    def of_row(self, row: int) -> Calibration:
        """Return one row."""
        num_dist = int(self.num_dist[row])
        dist = tuple(self.dist[row, :num_dist].tolist())
        return Calibration(self.sensor2ego[row], self.intrinsics[row], dist, LENS_OF_LENGTH.get(num_dist, UNBENT))

    def of_kind(self, *modalities: str) -> NDArray[np.bool_]:
        """Return whether each row's sensor is of one of these kinds."""
        wanted = np.array([sensor.modality in modalities for sensor in self.sensors], np.bool_)
        return np.asarray(wanted[self.sensor_of], np.bool_)

    def check_cameras(self, cameras: Collection[int]) -> None:
        """Raise SourceError where a row of one of these sensors has no intrinsics, or a lens of no known model."""
        of_camera = np.isin(self.sensor_of, list(cameras))
        for row in np.flatnonzero(of_camera & np.isnan(self.intrinsics[:, 0, 0])).tolist():
            raise SourceError(f"table 'calibrated_sensor': camera row '{self.tokens[row]}' has no 3 x 3 intrinsics")
        for row in np.flatnonzero(of_camera & ~np.isin(self.num_dist, list(LENS_OF_LENGTH))).tolist():
            allowed = ", ".join(f"{length} ({model})" for length, model in LENS_OF_LENGTH.items())
            raise SourceError(
                f"table 'calibrated_sensor': camera row '{self.tokens[row]}' has {self.num_dist[row]} values in "
                f"camera_distortion; allowed are {allowed}, in OpenCV's order k1, k2, p1, p2, k3, ...; for an image "
                "that is rectified, state an empty list"
            )


class Poses:
    """The ego poses that some rows of ``sample_data`` name: nuScenes has one for each of its 2.6 million sensor rows.

    ``of_row`` has the pose of each of those rows, ``xyz`` and ``wxyz`` those poses.
    """

    def __init__(self, tables: Tables, database: Database, links: Texts, owners: Owners) -> None:
        """Take the tokens that the rows name (``links``) and the rows' own (``owners``)."""
        tokens = Tokens("ego_pose", database)
        xyz, wxyz = database.column(np.float64, (3,)), database.column(np.float64, (4,))
        for piece in tables.read("ego_pose", EgoPose):
            tokens.append([record.token for record in piece])
            xyz.append(vectors([record.translation for record in piece], 3))
            wxyz.append(vectors([record.rotation for record in piece], 4))
        self.xyz: NDArray[np.float64] = xyz.values
        self.wxyz: NDArray[np.float64] = wxyz.values
        self.of_row = tokens.resolve_all(
            links, may_be_empty=False, table="sample_data", column="ego_pose_token", owners=owners
        )
        for first in range(0, len(links), ROWS_AT_ONCE):
            rows = self.of_row[first : first + ROWS_AT_ONCE]
            _check_pose(self.xyz[rows], self.wxyz[rows], tokens.take(rows), "ego_pose")
            database.used(len(rows))

    def ego2global(self, poses: NDArray[np.int64]) -> NDArray[Any]:
        """Return matrices (..., 4, 4) of poses (...)."""
        flat = poses.ravel()
        return rigid(self.wxyz[flat], self.xyz[flat]).reshape(*poses.shape, 4, 4)


def coefficients(record: CalibratedSensor) -> tuple[float, ...]:
    """Return the lens coefficients of a row; none where all are 0."""
    stated = record.camera_distortion or ()
    return stated if any(stated) else ()


def _check_pose(translation: NDArray[np.float64], rotation: NDArray[np.float64], owners: Owners, table: str) -> None:
    for name, values in (("translation", translation), ("rotation", rotation)):
        check_finite(values, owners, table=table, column=name)
