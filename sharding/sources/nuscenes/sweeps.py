"""The lidar sweeps between nuScenes' keyframes: which files come before each keyframe's own, and where the lidar was.

nuScenes' lidar turns at 20 Hz and keyframes come at 2 Hz, so nine earlier sweeps for each keyframe are every sweep
once. The table of sensor files is read a second time for them, only if the options ask for sweeps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.sample.schema import Sweeps, encode_arrays
from fuelrail.sharding.sources.columns.tokens import TokenColumn, Tokens
from fuelrail.sharding.sources.nuscenes.geometry import Calibrations, Poses
from fuelrail.sharding.sources.nuscenes.tables import SampleData, read_table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from fuelrail.pipeline.storage.spill import Spill


class _Linked(SampleData, frozen=True, gc=False):
    """A row of ``sample_data`` with the link to the one before it."""

    prev: str = ""


class SweepList(msgspec.Struct, frozen=True, array_like=True):
    """What a worker needs to build the member: of each earlier sweep file, time and pose (3 x 4), the latest first."""

    files: list[str]
    timestamp_ns: list[int]
    lidar2global: list[list[float]]

    def encode(self) -> str:
        """As a reference of the scan table."""
        return msgspec.json.encode(self).decode()

    @staticmethod
    def decode(ref: str) -> SweepList:
        """Back from the scan table."""
        return msgspec.json.decode(ref, type=SweepList)

    def member(self, read: Callable[[str], NDArray[np.float32]]) -> bytes:
        """The member's bytes; ``read`` gives a file's points (P, C)."""
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


class LidarSweeps:
    """The rows of ``sample_data`` of all lidars, as columns on disk, linked backwards in time."""

    def __init__(self, folder: Path, spill: Spill) -> None:
        self._calibrations = Calibrations(folder, spill)
        is_lidar = self._calibrations.of_kind("lidar")
        self._tokens, self._prev = Tokens("sample_data", spill), TokenColumn(spill)
        self._files, pose_tokens = spill.texts(), Tokens("ego_pose", spill)
        timestamp_us, calibrated_of = spill.column(np.int64), spill.column(np.int32)
        is_valid = spill.column(np.bool_)
        for piece in read_table(folder, "sample_data", _Linked):
            linked = self._calibrations.tokens.find([record.calibrated_sensor_token for record in piece])
            at = np.flatnonzero((linked >= 0) & is_lidar[linked])
            rows = [piece[number] for number in at.tolist()]
            self._tokens.extend([record.token for record in rows])
            self._prev.extend([record.prev for record in rows])
            self._files.append([record.filename.encode() for record in rows])
            pose_tokens.extend([record.ego_pose_token for record in rows])
            timestamp_us.append([record.timestamp for record in rows])
            calibrated_of.append(linked[at])
            is_valid.append([record.is_valid for record in rows])
        self._tokens.check_unique()
        self._timestamp_us: NDArray[np.int64] = timestamp_us.values
        self._calibrated_of: NDArray[np.int32] = calibrated_of.values
        self._is_valid: NDArray[np.bool_] = is_valid.values
        self._poses = Poses(folder, spill, pose_tokens, self._tokens)

    def before(self, token: str, num_sweeps: int) -> SweepList:
        """The ``num_sweeps`` valid sweeps before the row ``token``, fewer where its links end; raises SourceError."""
        row = int(self._tokens.find([token])[0])
        found: list[int] = []
        while len(found) < num_sweeps and (prev := self._prev[row]):
            before = int(self._tokens.find([prev])[0])
            if before < 0 or self._timestamp_us[before] >= self._timestamp_us[row]:
                what = "is not a lidar's row" if before < 0 else "is not earlier than it"
                raise SourceError(f"table 'sample_data': row '{self._tokens[row]}' has the prev '{prev}', which {what}")
            row = before
            if self._is_valid[row]:
                found.append(row)
        rows = np.array(found, np.int64)
        lidar2ego = self._calibrations.sensor2ego[self._calibrated_of[rows]]
        lidar2global = self._poses.ego2global(self._poses.of_row[rows]) @ lidar2ego
        return SweepList(
            [self._files[row] for row in found],
            (self._timestamp_us[rows] * 1000).tolist(),
            lidar2global[:, :3].reshape(-1, 12).tolist(),
        )
