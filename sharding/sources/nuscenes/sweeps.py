"""The sweeps between nuScenes' keyframes: which files come before each keyframe's own, and where the sensor was.

nuScenes' lidar turns at 20 Hz and keyframes come at 2 Hz, so nine earlier sweeps for each keyframe are every sweep
once; of its radars, which measure at 13 Hz, six are. The table of sensor files is read a second time for them, only if
the options ask for sweeps or radars.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.sample.schema import SWEEPS_FIELD, Sweeps, encode_arrays
from fuelrail.sharding.sources.adapter.frame import FileMember
from fuelrail.sharding.sources.nuscenes.geometry import Calibrations, Poses
from fuelrail.sharding.sources.nuscenes.tables import SampleData
from fuelrail.sharding.sources.shared.joins import Tokens

if TYPE_CHECKING:
    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.pipeline.storage.columns import Texts
    from fuelrail.sharding.sources.nuscenes.geometry import SceneRows
    from fuelrail.sharding.sources.nuscenes.tables import Tables
    from fuelrail.sharding.sources.shared.joins import Database


class LinkedRow(SampleData, frozen=True, gc=False):
    """A row of ``sample_data`` with the link to the one before it."""

    prev: str = ""


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
        """Take the numbers of the keyframes' rows (``key_rows``), their tokens and samples."""
        self._calibrations, self._modality = Calibrations(tables, database), modality
        is_wanted = self._calibrations.of_kind(modality)
        self.tokens, self._prev = Tokens("sample_data", database), database.texts()
        self._files, pose_tokens = database.texts(), database.texts()
        timestamp_us, calibrated_of = database.column(np.int64), database.column(np.int32)
        key_rows, self.key_tokens, self.key_samples = database.column(np.int64), database.texts(), database.texts()
        is_valid = database.column(np.bool_)
        for piece in tables.read("sample_data", LinkedRow):
            linked = self._calibrations.tokens.find([record.calibrated_sensor_token for record in piece])
            at = np.flatnonzero((linked >= 0) & is_wanted[linked])
            rows = [piece[number] for number in at.tolist()]
            keys = [number for number, record in enumerate(rows) if record.is_key_frame]
            key_rows.append([len(self.tokens) + number for number in keys])
            self.key_tokens.append([rows[number].token for number in keys])
            self.key_samples.append([rows[number].sample_token for number in keys])
            self.tokens.append([record.token for record in rows])
            self._prev.append([record.prev for record in rows])
            self._files.append([record.filename for record in rows])
            pose_tokens.append([record.ego_pose_token for record in rows])
            timestamp_us.append([record.timestamp for record in rows])
            calibrated_of.append(linked[at])
            is_valid.append([record.is_valid for record in rows])
        self.tokens.check_unique()
        self._prev_row = self.tokens.rows_of(self._prev)
        self.key_rows: NDArray[np.int64] = key_rows.values
        self._timestamp_us: NDArray[np.int64] = timestamp_us.values
        self._calibrated_of: NDArray[np.int32] = calibrated_of.values
        self._is_valid: NDArray[np.bool_] = is_valid.values
        self._poses = Poses(tables, database, pose_tokens, self.tokens)

    def channel(self, row: int) -> str:
        """Return the channel of a row's sensor."""
        sensor = int(self._calibrations.sensor_of[self._calibrated_of[row]])
        return self._calibrations.sensors[sensor].channel

    def rows_before(self, row: int, num_sweeps: int) -> NDArray[np.int64]:
        """Return numbers of the ``num_sweeps`` valid rows before a row, the latest first; raise SourceError."""
        found: list[int] = []
        while len(found) < num_sweeps and (prev := self._prev[row]):
            before = int(self._prev_row[row])
            if before < 0 or self._timestamp_us[before] >= self._timestamp_us[row]:
                what = f"is not a {self._modality}'s row" if before < 0 else "is not earlier than it"
                raise SourceError(f"table 'sample_data': row '{self.tokens[row]}' has the prev '{prev}', which {what}")
            row = before
            if self._is_valid[row]:
                found.append(row)
        return np.array(found, np.int64)

    def is_valid(self, row: int) -> bool:
        """Return whether the tables allow the row's file."""
        return bool(self._is_valid[row])

    def files(self, rows: NDArray[np.int64]) -> list[str]:
        """Return names of the rows' files."""
        return [self._files[row] for row in rows.tolist()]

    def timestamp_ns(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return times of rows (N,)."""
        return np.asarray(self._timestamp_us[rows] * 1000)

    def sensor2global(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the sensor at the time of each row to global, rigid (N, 4, 4)."""
        sensor2ego = self._calibrations.sensor2ego[self._calibrated_of[rows]]
        found: NDArray[np.float64] = self._poses.ego2global(self._poses.of_row[rows]) @ sensor2ego
        return found


class LidarSweeps(SensorSweeps):
    """The sweeps of all lidars, found by a keyframe's row."""

    channels: tuple[Channel, ...] = ()

    def __init__(self, tables: Tables, database: Database, keyframes: Texts, num_sweeps: int) -> None:
        """Take the tokens of the keyframes' rows (``keyframes``)."""
        super().__init__(tables, database, "lidar")
        self._row_of, self._num_sweeps = self.tokens.rows_of(keyframes), num_sweeps

    def members(self, rows: SceneRows, at: int) -> Iterator[FileMember]:
        """Yield the earlier sweeps of each lidar, fewer where its links end; raises SourceError."""
        lidars = rows.keyframes.lidars
        for lidar, row in zip(lidars, rows.sensors[at][-len(lidars) :], strict=True):
            if row is None or not row.is_valid:
                continue
            before = self.rows_before(int(self._row_of[row.row]), self._num_sweeps)
            if len(before):
                poses = self.sensor2global(before)[:, :3].reshape(-1, 12).tolist()
                found = SweepList(self.files(before), self.timestamp_ns(before).tolist(), poses)
                hint = "the option sweeps=0 leaves earlier sweeps out"
                name = f"{lidar.lower()}{SWEEPS_FIELD}"
                yield FileMember(name, found.encode(), found.files, hint, is_estimate=False)
