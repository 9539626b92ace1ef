"""nuScenes' radars as channels: all points with the 18 fields of the files, in ego at the sample's
time.

Earlier sweeps are ego-motion compensated as ``RadarPointCloud.from_file_multisweep`` of
nuscenes-devkit does it; unlike there, no point is filtered out and velocities turn with the points.
Layout of the files:
https://github.com/nutonomy/nuscenes-devkit/blob/master/python-sdk/nuscenes/utils/data_classes.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from fuelrail.pipeline.channels.table import Channel, Law
from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.rigid import invert_rigid, move_points
from fuelrail.sharding.sources.adapter.frame import FileMember
from fuelrail.sharding.sources.adapter.members import POINTS
from fuelrail.sharding.sources.nuscenes.geometry import NS_PER_US
from fuelrail.sharding.sources.nuscenes.sweeps import SensorSweeps
from fuelrail.sharding.sources.shared.points import read_pcd

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.schema import F32, F64
    from fuelrail.pipeline.storage.columns import Disk
    from fuelrail.sharding.sources.nuscenes.geometry import Keyframes, SceneRows
    from fuelrail.sharding.sources.nuscenes.tables import Tables

FIELDS: Final = {
    "x": "m",
    "y": "m",
    "z": "m",
    "dyn_prop": "",
    "id": "",
    "rcs": "dBsm",
    "vx": "m/s",
    "vy": "m/s",
    "vx_comp": "m/s",
    "vy_comp": "m/s",
    "is_quality_valid": "",
    "ambig_state": "",
    "x_rms": "",
    "y_rms": "",
    "invalid_state": "",
    "pdh0": "",
    "vx_rms": "",
    "vy_rms": "",
}
"""The fields of a file in its order, with their units."""
_DT: Final = "dt_s"
_VELOCITIES: Final = (("vx", "vy"), ("vx_comp", "vy_comp"))


def radar_channel(source_name: str) -> Channel:
    """Return the entry of the table for one radar."""
    name = source_name.lower()
    return Channel(
        name=name,
        kind="points",
        field=f"{name}.npy",
        law=Law(
            "ego_points",
            roles={"positions": (("x", "y", "z"),), "vectors": _VELOCITIES},
        ),
        dtype="float32",
        axes=("point", "column"),
        shape=(None, len(FIELDS) + 1),
        columns=(*FIELDS, _DT),
        units=(*FIELDS.values(), "s"),
        frame="ego",
        sensor="radar",
        optional=True,
        source_name=source_name,
        description=(
            "unfiltered, in ego at the sample's time; vx_comp and vy_comp are over ground; dt_s "
            "since measured"
        ),
    )


class RadarFiles(msgspec.Struct, frozen=True, tag="radar"):
    """What a worker needs to build the member: age [s] and sensor to ego (3 x 4) of each file,
    the latest first.
    """

    channel: str
    files: list[str]
    dt_s: list[float]
    sensor2ego: list[list[float]]

    def points(self, read: Callable[[str], bytes]) -> F32:
        """Return (P, 19): the fields and the age of each point; raise SourceError."""
        parts = []
        for file, dt_s, flat in zip(self.files, self.dt_s, self.sensor2ego, strict=True):
            points = parse_pcd(read(file), file)
            matrix = np.array(flat).reshape(3, 4)
            if not np.isfinite(points).all():
                raise SourceError(f"radar file '{file}' has points that are not finite")
            columns = list(FIELDS)
            points[:, :3] = move_points(points[:, :3], matrix)
            for pair in _VELOCITIES:
                indices = [columns.index(name) for name in pair]
                turn = matrix[:2, :2]
                points[:, indices] = points[:, indices] @ turn.T
            ages = np.full((len(points), 1), dt_s)
            parts.append(np.concatenate([points, ages], 1))
        return np.concatenate(parts).astype(np.float32)


class Radars:
    """All radars that have keyframes, by name."""

    def __init__(
        self,
        tables: Tables,
        disk: Disk,
        keyframes: Keyframes,
        num_sweeps: int,
    ) -> None:
        """Take the number of earlier sweeps of each radar that come with a keyframe's own
        (``num_sweeps``).
        """
        self._sweeps = SensorSweeps(
            tables=tables,
            disk=disk,
            modality="radar",
            keyframes=keyframes,
            num_sweeps=num_sweeps,
        )
        self.channels = tuple(map(radar_channel, keyframes.radars))

    def members(self, rows: SceneRows, number: int) -> Iterator[FileMember]:
        """Yield the members of one sample; radars without a valid row are left out.

        Raises SourceError.
        """
        global2ego = invert_rigid(rows.ego2global[number])
        for channel, sweep in rows.radars[number].items():
            if sweep.absent:
                continue
            files, timestamp_ns, sensor2global = self._sweeps.files(
                self._sweeps.rows_up_to(rows.row_of(number, channel))
            )
            dt_s = (rows.timestamp_us[number] * NS_PER_US - timestamp_ns) * 1e-9
            sensor2ego = global2ego @ sensor2global
            sensor2ego = sensor2ego[:, :3].reshape(-1, 12)
            radar_files = RadarFiles(
                channel=channel,
                files=files,
                dt_s=dt_s.tolist(),
                sensor2ego=sensor2ego.tolist(),
            )
            hint = "leave out 'radar' in the option channels, or earlier sweeps by radar_sweeps=0"
            yield FileMember(
                radar_channel(channel).field,
                POINTS + msgspec.json.encode(radar_files).decode(),
                files,
                hint,
            )


def parse_pcd(data: bytes, name: str) -> F64:
    """Return the points (P, 18) of a radar file of nuScenes, in the order of `FIELDS`; raise
    SourceError.

    A point in the file whose first row has NaN stands for no point at all, as nuscenes-devkit has
    it.
    """
    fields = read_pcd(data, f"radar file '{name}'")
    if list(fields) != list(FIELDS):
        raise SourceError(
            f"radar file '{name}' has the fields {' '.join(fields):.200}; wanted are "
            f"nuScenes' 18 fields, {' '.join(FIELDS)}"
        )
    columns = [column.astype(np.float64) for column in fields.values()]
    points = np.stack(columns, 1)
    if len(points) and np.isnan(points[0]).any():
        return points[:0]
    return points
