"""Where nuScenes' sensors are: on the vehicle (``calibrated_sensor``), and the vehicle in the world (``ego_pose``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.rigid import rigid
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


class Calibrations:
    """Tables ``sensor`` and ``calibrated_sensor``.

    ``sensor_of``, ``sensor2ego`` (4, 4) and ``intrinsics`` (3, 3; NaN for what is no camera) have a row for each of
    ``calibrated_sensor``.
    """

    def __init__(self, folder: Path, spill: Spill) -> None:
        self.sensors = read_all(folder, "sensor", Sensor)
        sensors = Tokens("sensor", spill, [record.token for record in self.sensors])
        self.tokens = Tokens("calibrated_sensor", spill)
        sensor_of, sensor2ego = spill.column(np.int32), spill.column(np.float64, (4, 4))
        intrinsics = spill.column(np.float64, (3, 3))
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
        self.tokens.check_unique()
        self.sensor_of: NDArray[np.int32] = sensor_of.values
        self.sensor2ego: NDArray[np.float64] = sensor2ego.values
        self.intrinsics: NDArray[np.float64] = intrinsics.values

    def of_kind(self, *modalities: str) -> NDArray[np.bool_]:
        """For each row whether its sensor is of one of these."""
        wanted = np.array([sensor.modality in modalities for sensor in self.sensors], np.bool_)
        return np.asarray(wanted[self.sensor_of], np.bool_)

    def check_intrinsics(self, cameras: Collection[int]) -> None:
        """Raise SourceError where a row of one of these sensors has no intrinsics."""
        lacking = np.isin(self.sensor_of, list(cameras)) & np.isnan(self.intrinsics[:, 0, 0])
        for row in np.flatnonzero(lacking).tolist():
            raise SourceError(f"table 'calibrated_sensor': camera row '{self.tokens[row]}' has no 3 x 3 intrinsics")


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


def _pose(
    records: list[CalibratedSensor] | list[EgoPose], owners: Owners, table: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    translation = vectors([record.translation for record in records], 3)
    rotation = vectors([record.rotation for record in records], 4)
    for name, values in (("translation", translation), ("rotation", rotation)):
        check_finite(values, owners, table=table, column=name)
    return translation, rotation
