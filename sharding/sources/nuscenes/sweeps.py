"""The sweeps between nuScenes' keyframes: which files come before each keyframe's own, and where the sensor was.

nuScenes' lidar turns at 20 Hz and keyframes come at 2 Hz, so nine earlier sweeps for each keyframe are every sweep
once; of its radars, which measure at 13 Hz, six are. The table of sensor files is read a second time for them, only if
the options ask for sweeps or radars.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.sample.schema import SWEEPS_FIELD, Sweeps, encode_arrays
from fuelrail.sharding.sources.adapter.frame import FileMember
from fuelrail.sharding.sources.nuscenes.geometry import NS_PER_US, SensorPoses
from fuelrail.sharding.sources.nuscenes.joined import SWEEPS, Joined
from fuelrail.sharding.sources.shared.joins import Cut

if TYPE_CHECKING:
    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.pipeline.storage.columns import Texts
    from fuelrail.sharding.sources.nuscenes.geometry import SceneRows
    from fuelrail.sharding.sources.nuscenes.tables import Sensor, Tables
    from fuelrail.sharding.sources.shared.joins import Database


class SweepList(msgspec.Struct, frozen=True, array_like=True):
    """What a worker needs to build the member: of each earlier sweep file, time and pose (3 x 4), the latest first."""

    files: list[str]
    timestamp_ns: list[int]
    lidar2global: list[list[float]]

    def encode(self) -> str:
        """Return the list as a reference of the scan table."""
        return msgspec.json.encode(self).decode()

    @staticmethod
    def decode(ref: str) -> SweepList:
        """Make the list from its text in the scan table."""
        return msgspec.json.decode(ref, type=SweepList)

    def member(self, read: Callable[[str], NDArray[np.float32]]) -> bytes:
        """Return the member's bytes; ``read`` gives a file's points (P, C)."""
        sweeps = [read(file) for file in self.files]
        poses = np.tile(np.eye(4), (len(self.files), 1, 1))
        poses[:, :3] = np.array(self.lidar2global).reshape(-1, 3, 4)
        return encode_arrays(
            Sweeps(
                num_points=np.array([len(points) for points in sweeps], np.int64),
                timestamp_ns=np.array(self.timestamp_ns, np.int64),
                lidar2global=poses,
                points=np.concatenate(sweeps),
            )
        )


class SensorSweeps:
    """The rows of ``sample_data`` of all sensors of one modality, as columns on disk, linked backwards in time."""

    def __init__(self, tables: Tables, database: Database, modality: str) -> None:
        """Read the table of sensor files again; raises SourceError."""

        def of_modality(sensors: Sequence[Sensor]) -> NDArray[np.bool_]:
            return np.array([sensor.modality == modality for sensor in sensors], np.bool_)

        joined = Joined(tables, database, SWEEPS, of_modality, Cut(is_on=False))
        self.data, self._modality, self._sensor_poses = joined["sample_data"], modality, SensorPoses(joined)

    def channels_of(self, rows: NDArray[np.int64]) -> list[str]:
        """Return the channels of rows' sensors."""
        return [self._sensor_poses.sensors[sensor].channel for sensor in self._sensor_poses.sensor_of(rows).tolist()]

    def rows_before(self, row: int, num_sweeps: int) -> NDArray[np.int64]:
        """Return numbers of the ``num_sweeps`` valid rows before a row, the latest first; raise SourceError."""
        found: list[int] = []
        timestamp_us = self.data.columns["timestamp"]
        while len(found) < num_sweeps and (prev := self.data.link_texts["prev"][row]):
            before = int(self.data.links["prev"][row])
            if before < 0 or timestamp_us[before] >= timestamp_us[row]:
                what = f"is not a {self._modality}'s row" if before < 0 else "is not earlier than it"
                own = self.data.tokens[row]
                raise SourceError(f"table 'sample_data': row '{own}' has the prev '{prev}', which {what}")
            row = before
            if self.is_valid(row):
                found.append(row)
        return np.array(found, np.int64)

    def is_valid(self, row: int) -> bool:
        """Return whether the tables allow the row's file."""
        return bool(self.data.columns["is_valid"][row])

    def files(self, rows: NDArray[np.int64]) -> tuple[list[str], NDArray[np.int64], NDArray[np.float64]]:
        """Return the files of rows (N,), their times [ns], and their sensors then to global, rigid (N, 4, 4)."""
        columns, poses = self.data.columns, self._sensor_poses
        sensor2global = poses.ego2global(poses.pose_of[rows]) @ poses.sensor2ego(poses.calibrated_of[rows])
        return columns["filename"].take(rows), columns["timestamp"][rows] * NS_PER_US, sensor2global


class LidarSweeps(SensorSweeps):
    """The sweeps of all lidars, found by a keyframe's row."""

    channels: tuple[Channel, ...] = ()

    def __init__(self, tables: Tables, database: Database, keyframes: Texts, num_sweeps: int) -> None:
        """Take the tokens of the keyframes' rows (``keyframes``)."""
        super().__init__(tables, database, "lidar")
        (self._row_of,), self._num_sweeps = self.data.tokens.rows_of(keyframes), num_sweeps

    def members(self, rows: SceneRows, at: int) -> Iterator[FileMember]:
        """Yield the earlier sweeps of each lidar, fewer where its links end; raises SourceError."""
        for lidar, row in rows.of_sample(at, rows.keyframes.lidars):
            if not row.is_valid:
                continue
            before = self.rows_before(int(self._row_of[row.row]), self._num_sweeps)
            if len(before):
                files, timestamp_ns, lidar2global = self.files(before)
                found = SweepList(files, timestamp_ns.tolist(), lidar2global[:, :3].reshape(-1, 12).tolist())
                hint = "the option sweeps=0 leaves earlier sweeps out"
                name = f"{lidar.lower()}{SWEEPS_FIELD}"
                yield FileMember(name, found.encode(), found.files, hint, is_estimate=False)
