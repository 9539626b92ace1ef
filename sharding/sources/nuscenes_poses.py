"""Where nuScenes' sensors are: on the vehicle (``calibrated_sensor``), and the vehicle in the world (``ego_pose``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.lens import MODELS, UNBENT
from fuelrail.pipeline.rigid import rigid
from fuelrail.pipeline.schema import NUM_DIST
from fuelrail.sharding.sources.nuscenes_tables import (
    CalibratedSensor,
    EgoPose,
    Sensor,
    check_finite,
    read_all,
    read_table,
    vectors,
)
from fuelrail.sharding.sources.tokens import Sieve, Tokens

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from numpy.typing import NDArray

    from fuelrail.pipeline.spill import Spill
    from fuelrail.sharding.sources.tokens import Owners


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

    def __init__(self, folder: Path, spill: Spill) -> None:
        self.sensors = read_all(folder, "sensor", Sensor)
        sensors = Tokens("sensor", spill, [record.token for record in self.sensors])
        self.tokens = Tokens("calibrated_sensor", spill)
        sensor_of, sensor2ego = spill.column(np.int32), spill.column(np.float64, (4, 4))
        intrinsics = spill.column(np.float64, (3, 3))
        dist, num_dist = spill.column(np.float64, (NUM_DIST,)), spill.column(np.int32)
        none = np.full((3, 3), np.nan)
        for piece in read_table(folder, "calibrated_sensor", CalibratedSensor):
            own = [record.token for record in piece]
            self.tokens.extend(own)
            linked = [record.sensor_token for record in piece]
            sensor_of.append(sensors.need(linked, table="calibrated_sensor", column="sensor_token", owners=own))
            translation, rotation = _pose(piece, own, "calibrated_sensor")
            sensor2ego.append(rigid(rotation, translation))
            intrinsics.append(
                [record.camera_intrinsic if len(record.camera_intrinsic) == 3 else none for record in piece]
            )
            lenses = [_coefficients(record) for record in piece]
            dist.append([(*lens, *[np.nan] * NUM_DIST)[:NUM_DIST] for lens in lenses])
            num_dist.append([len(lens) for lens in lenses])
        self.tokens.check_unique()
        self.sensor_of: NDArray[np.int32] = sensor_of.values
        self.sensor2ego: NDArray[np.float64] = sensor2ego.values
        self.intrinsics: NDArray[np.float64] = intrinsics.values
        self.dist: NDArray[np.float64] = dist.values
        self.num_dist: NDArray[np.int32] = num_dist.values

    def of_kind(self, *modalities: str) -> NDArray[np.bool_]:
        """For each row whether its sensor is of one of these."""
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

    def __init__(self, folder: Path, spill: Spill, wanted: Tokens, owners: Owners) -> None:
        """``wanted`` are the tokens that the rows name, ``owners`` the rows' own."""
        tokens = Tokens("ego_pose", spill)
        xyz, wxyz = spill.column(np.float64, (3,)), spill.column(np.float64, (4,))
        sieve = Sieve(wanted)
        for piece in read_table(folder, "ego_pose", EgoPose):
            likely = [piece[at] for at in sieve.likely([record.token for record in piece]).tolist()]
            found = wanted.find([record.token for record in likely])
            kept = [likely[at] for at in np.flatnonzero(found >= 0).tolist()]
            own = [record.token for record in kept]
            tokens.extend(own)
            translation, rotation = _pose(kept, own, "ego_pose")
            xyz.append(translation)
            wxyz.append(rotation)
        tokens.check_unique()
        self.of_row = tokens.resolve_all(
            wanted, table="sample_data", column="ego_pose_token", owners=owners, may_be_empty=False
        )
        self.xyz: NDArray[np.float64] = xyz.values
        self.wxyz: NDArray[np.float64] = wxyz.values

    def ego2global(self, poses: NDArray[np.int64]) -> NDArray[Any]:
        """Matrices (..., 4, 4) of poses (...)."""
        flat = poses.ravel()
        return rigid(self.wxyz[flat], self.xyz[flat]).reshape(*poses.shape, 4, 4)


def _coefficients(record: CalibratedSensor) -> tuple[float, ...]:
    """The lens coefficients of a row; none where all are 0."""
    stated = record.camera_distortion or ()
    return stated if any(stated) else ()


def _pose(
    records: list[CalibratedSensor] | list[EgoPose], owners: Owners, table: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    translation = vectors([record.translation for record in records], 3)
    rotation = vectors([record.rotation for record in records], 4)
    for name, values in (("translation", translation), ("rotation", rotation)):
        check_finite(values, owners, table=table, column=name)
    return translation, rotation
