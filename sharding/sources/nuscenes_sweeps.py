"""The lidar sweeps between nuScenes' keyframes: which files come before each keyframe's own, and where the lidar was.

nuScenes' lidar turns at 20 Hz and keyframes come at 2 Hz, so nine earlier sweeps for each keyframe are every sweep
once. The table of sensor files is read a second time for them, by whoever asks for sweeps only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.schema import Sweeps, encode_arrays, rigid
from fuelrail.sharding.sources.nuscenes_tables import (
    CalibratedSensor,
    EgoPose,
    SampleData,
    Sensor,
    Tokens,
    check_finite,
    read_all,
    read_table,
    strings,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray


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
    """The rows of ``sample_data`` of all lidars, linked backwards in time."""

    def __init__(self, folder: Path) -> None:
        lidars = {record.token for record in read_all(folder, "sensor", Sensor) if record.modality == "lidar"}
        calibrated = [r for r in read_all(folder, "calibrated_sensor", CalibratedSensor) if r.sensor_token in lidars]
        calibrated_tokens = Tokens.of("calibrated_sensor", calibrated)
        of_lidars = {record.token for record in calibrated}
        self._rows: dict[str, _Linked] = {
            record.token: record
            for piece in read_table(folder, "sample_data", _Linked)
            for record in piece
            if record.calibrated_sensor_token in of_lidars
        }
        rows = list(self._rows.values())
        wanted = strings(record.ego_pose_token for record in rows)
        kept: list[EgoPose] = []
        unique = Tokens("ego_pose", wanted.unique())
        for piece in read_table(folder, "ego_pose", EgoPose):
            found = unique.find(strings(record.token for record in piece))
            kept += [piece[int(at)] for at in np.flatnonzero(found >= 0)]
        own = strings(record.token for record in rows)
        poses = Tokens.of("ego_pose", kept)
        pose_of = poses.need(wanted, table="sample_data", column="ego_pose_token", owners=own)
        calibrated_of = calibrated_tokens.find(strings(record.calibrated_sensor_token for record in rows))
        ego2global = _rigid(kept, poses, "ego_pose")[pose_of]
        lidar2ego = _rigid(calibrated, calibrated_tokens, "calibrated_sensor")[calibrated_of]
        self._lidar2global = ego2global @ lidar2ego
        self._place = {record.token: place for place, record in enumerate(rows)}

    def before(self, token: str, num_sweeps: int) -> SweepList:
        """The ``num_sweeps`` sweeps before the row ``token``, fewer where its links end; raises SourceError."""
        files, times, poses = [], [], []
        row = self._rows[token]
        for _ in range(num_sweeps):
            if not row.prev:
                break
            before = self._rows.get(row.prev)
            if before is None or before.timestamp >= row.timestamp:
                what = "is not a lidar's row" if before is None else "is not earlier than it"
                raise SourceError(f"table 'sample_data': row '{row.token}' has the prev '{row.prev}', which {what}")
            row = before
            files.append(row.filename)
            times.append(row.timestamp * 1000)
            poses.append(self._lidar2global[self._place[row.token], :3].ravel().tolist())
        return SweepList(files, times, poses)


def _rigid(records: list[EgoPose] | list[CalibratedSensor], tokens: Tokens, table: str) -> NDArray[np.float64]:
    translation = np.array([record.translation for record in records]).reshape(-1, 3)
    rotation = np.array([record.rotation for record in records]).reshape(-1, 4)
    for name, values in (("translation", translation), ("rotation", rotation)):
        check_finite(values, tokens.array, table=table, column=name)
    return rigid(rotation, translation)
