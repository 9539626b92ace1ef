"""The sweeps between nuScenes' keyframes: which files come before each keyframe's own, and where
the sensor was.

nuScenes' lidar turns at 20 Hz and keyframes come at 2 Hz, so nine earlier sweeps for each keyframe
are every sweep once; of its radars, which measure at 13 Hz, six are. The table of sensor files is
read a second time for them, only if the options ask for sweeps or radars.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.sample.schema import F32, F64, I64, SWEEPS_FIELD, Mask, Sweeps, encode_arrays
from fuelrail.sharding.sources.adapter.frame import FileMember
from fuelrail.sharding.sources.nuscenes.geometry import NS_PER_US, SensorPoses
from fuelrail.sharding.sources.nuscenes.joined import SWEEPS, Joined

if TYPE_CHECKING:
    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.pipeline.storage.columns import Disk
    from fuelrail.sharding.sources.nuscenes.geometry import Keyframes, SceneRows
    from fuelrail.sharding.sources.nuscenes.tables import Sensor, Tables


class SweepList(msgspec.Struct, frozen=True, array_like=True):
    """What a worker needs to build the member: of each earlier sweep file, time and pose (3 x
    4), the latest first.
    """

    files: list[str]
    timestamp_ns: list[int]
    lidar2global: list[list[float]]

    def member(self, read: Callable[[str], F32]) -> bytes:
        """Return the member's bytes; ``read`` gives a file's points (P, C)."""
        sweeps = [read(file) for file in self.files]
        poses = np.tile(np.eye(4), (len(self.files), 1, 1))
        flat_poses = np.array(self.lidar2global)
        poses[:, :3] = flat_poses.reshape(-1, 3, 4)
        return encode_arrays(
            Sweeps(
                num_points=np.array([len(points) for points in sweeps], np.int64),
                timestamp_ns=np.array(self.timestamp_ns, np.int64),
                lidar2global=poses,
                points=np.concatenate(sweeps),
            )
        )


class SensorSweeps:
    """The rows of ``sample_data`` of all sensors of one modality, as columns on disk, linked
    backwards in time.
    """

    def __init__(
        self,
        tables: Tables,
        disk: Disk,
        modality: str,
        keyframes: Keyframes,
        num_sweeps: int,
    ) -> None:
        """Read the table of sensor files again, for the ``num_sweeps`` before each keyframe;
        raises SourceError.
        """

        def has_modality(sensors: Sequence[Sensor]) -> Mask:
            is_of_modality = [sensor.modality == modality for sensor in sensors]
            return np.array(is_of_modality, np.bool_)

        joined = Joined(tables, disk, SWEEPS, has_modality)
        self._data = joined["sample_data"]
        self._modality = modality
        self._sensor_poses = SensorPoses(joined)
        sample_data = keyframes.joined["sample_data"]
        (self._row_of,) = self._data.tokens.rows_of(sample_data.tokens)
        self._num_sweeps = num_sweeps

    def rows_up_to(self, key: int) -> list[int]:
        """Return the number of a keyframe's row among these, and of valid rows before it, latest
        first; SourceError.
        """
        row = int(self._row_of[key])
        rows = [row]
        timestamp_us = self._data.columns["timestamp"]
        while len(rows) <= self._num_sweeps and (prev := self._data.link_texts["prev"][row]):
            before = int(self._data.links["prev"][row])
            if before < 0 or timestamp_us[before] >= timestamp_us[row]:
                problem = (
                    f"is not a {self._modality}'s row" if before < 0 else "is not earlier than it"
                )
                token = self._data.tokens[row]
                raise SourceError(
                    f"table 'sample_data': row '{token}' has the prev '{prev}', which {problem}"
                )
            row = before
            if self._data.columns["is_valid"][row]:
                rows.append(row)
        return rows

    def files(self, numbers: Sequence[int]) -> tuple[list[str], I64, F64]:
        """Return the files of rows, their times [ns], and their sensors then to global, rigid
        (N, 4, 4).
        """
        rows = np.array(numbers, np.int64)
        columns = self._data.columns
        poses = self._sensor_poses
        sensor2global = poses.ego2global(poses.pose_of[rows]) @ poses.sensor2ego(
            poses.calibrated_of[rows]
        )
        return (
            columns["filename"].take(rows),
            columns["timestamp"][rows] * NS_PER_US,
            sensor2global,
        )


class LidarSweeps(SensorSweeps):
    """The sweeps of all lidars, found by a keyframe's row."""

    channels: tuple[Channel, ...] = ()

    def members(self, rows: SceneRows, number: int) -> Iterator[FileMember]:
        """Yield the earlier sweeps of each lidar, fewer where its links end; raises SourceError."""
        for lidar, sweep in rows.lidars[number].items():
            before: Sequence[int] = ()
            if not sweep.absent:
                before = self.rows_up_to(rows.row_of(number, lidar))[1:]
            if before:
                files, timestamp_ns, lidar2global = self.files(before)
                sweep_list = SweepList(
                    files,
                    timestamp_ns.tolist(),
                    lidar2global[:, :3].reshape(-1, 12).tolist(),
                )
                hint = "the option sweeps=0 leaves earlier sweeps out"
                name = f"{lidar.lower()}{SWEEPS_FIELD}"
                yield FileMember(
                    name,
                    msgspec.json.encode(sweep_list).decode(),
                    sweep_list.files,
                    hint,
                    is_estimate=False,
                )
