"""Point clouds of any layout as columns: of lidars x, y, z, intensity, ring, time; of radars
those that they have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.channels.table import Channel, Law
from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.rigid import move_points
from fuelrail.sharding.sources.adapter.poses import pose

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.schema import F32
    from fuelrail.sharding.sources.logs.messages.records import Cloud

COLUMNS: Final = ("x", "y", "z", "intensity", "ring", "time")
_NAMES: Final = {
    "x": ("x",),
    "y": ("y",),
    "z": ("z",),
    "intensity": (
        "intensity",
        "intensities",
        "i",
        "reflectivity",
        "reflectance",
    ),
    "ring": ("ring", "channel", "laser_id", "laser_number", "line"),
    "time": (
        "time",
        "t",
        "time_stamp",
        "timestamp",
        "time_offset",
        "offset_time",
        "timeOffset",
    ),
}

_AXES: Final = ("x", "y", "z")
_VECTORS: Final = (
    ("vx", "vy", "vz"),
    ("vx", "vy"),
    ("vx_comp", "vy_comp"),
    ("velocity_x", "velocity_y"),
)
"""Columns that turn with the points; of those with the same first one, the first that is there
counts.
"""


def radar_channel(name: str, cloud: Cloud, topic: str) -> Channel:
    """Return the entry of the table for a radar whose clouds have these columns, without their
    times, and ``dt_s``.
    """
    times = {column.lower() for column in _NAMES["time"]}
    more = [
        column.name
        for column in cloud.fields
        if column.name not in _AXES and column.name.lower() not in times
    ]
    columns = (*_AXES, *more, "dt_s")
    vectors = {group[0]: group for group in reversed(_VECTORS) if set(group) <= set(more)}
    return Channel(
        name=name,
        kind="points",
        field=f"{name}.npy",
        law=Law(
            "ego_points",
            roles={"positions": (_AXES,), "vectors": tuple(vectors.values())},
        ),
        dtype="float32",
        axes=("point", "column"),
        shape=(None, len(columns)),
        columns=columns,
        units=("m", "m", "m", *("" for _ in more), "s"),
        frame="ego",
        sensor="radar",
        allows_nan=True,
        allows_inf=True,
        optional=True,
        source_name=topic,
        description=(
            "in ego at the sample's time, as are vectors; other columns are as measured; dt_s "
            "since measured"
        ),
    )


class RadarSweep(msgspec.Struct, frozen=True):
    """What a radar's member needs beyond its cloud: ``sensor2ego`` are 16 numbers, of ego at the
    sample's time.
    """

    columns: tuple[str, ...]
    vectors: tuple[tuple[str, ...], ...]
    dt_s: float
    sensor2ego: list[float]


def radar_points(cloud: Cloud, sweep: RadarSweep, where: str) -> F32:
    """Return points (P, C) of a :func:`radar_channel`; NaN for a column that the cloud lacks;
    raise SourceError.
    """
    rows = _rows(cloud, where)
    sensor2ego = np.array(sweep.sensor2ego).reshape(4, 4)
    points = np.full((len(rows), len(sweep.columns)), np.nan)
    for number, column in enumerate(sweep.columns):
        if column in (rows.dtype.names or ()):
            points[:, number] = rows[column]
    is_point = np.isfinite(points[:, :3]).all(1)
    points = points[is_point]
    if cloud.pose is not None:
        sensor2ego = sensor2ego @ pose(cloud.pose.wxyz, cloud.pose.xyz, where)
    points[:, :3] = move_points(points[:, :3], sensor2ego)
    for group in sweep.vectors:
        group_columns = [sweep.columns.index(name) for name in group]
        size = len(group)
        turn = sensor2ego[:size, :size]
        points[:, group_columns] = points[:, group_columns] @ turn.T
    points[:, -1] = sweep.dt_s
    return np.asarray(points, np.float32)


def points_of(cloud: Cloud, where: str) -> F32:
    """Return points (P, 6) in the cloud's frame, without those that lack a position; NaN for a
    missing column.

    Time is seconds after the stamp: integers are nanoseconds (over 1e15: since 1970), floats
    seconds (over 1e9: since 1970).
    Raises SourceError, naming ``where``, for a layout that contradicts itself.
    """
    rows = _rows(cloud, where)
    points = np.full((len(rows), len(COLUMNS)), np.nan, np.float32)
    for number, column in enumerate(COLUMNS):
        name = next(
            (name for name in _NAMES[column] if name in (rows.dtype.names or ())),
            None,
        )
        if name is None:
            continue
        values = rows[name]
        if column == "time" and values.dtype.kind in "iu":
            since_stamp_ns = values.astype(np.int64)
            if len(values) and since_stamp_ns.max() > 1e15:
                since_stamp_ns -= cloud.stamp_ns
            values = since_stamp_ns * 1e-9
        elif column == "time":
            values = values.astype(np.float64)
            if len(values) and np.nanmax(values) > 1e9:
                values -= cloud.stamp_ns * 1e-9
        points[:, number] = values
    is_point = np.isfinite(points[:, :3]).all(1)
    points = points[is_point]
    if cloud.pose is not None:
        moved = pose(cloud.pose.wxyz, cloud.pose.xyz, where)
        points[:, :3] = move_points(points[:, :3], moved)
    return points


def _rows(cloud: Cloud, where: str) -> NDArray[np.void]:
    """Return the points as records (P,); raise SourceError for a layout that contradicts itself."""
    fields = {field.name: field for field in cloud.fields}
    order = ">" if cloud.big_endian else "<"
    inside = all(
        field.offset + np.dtype(field.kind).itemsize <= cloud.step for field in cloud.fields
    )
    row_bytes = cloud.width * cloud.step
    row_step = cloud.row_step or row_bytes
    num_bytes = max(cloud.height - 1, 0) * row_step + row_bytes
    has_all = len(memoryview(cloud.data)) >= num_bytes
    if not inside or row_step < row_bytes or not has_all:
        raise SourceError(
            f"{where}: a cloud of {cloud.height} x {cloud.width} points of {cloud.step} "
            f"bytes with the fields {', '.join(fields)} does not fit into its "
            f"{len(memoryview(cloud.data))} bytes and rows of {row_step}"
        )
    if not {"x", "y", "z"} <= fields.keys():
        raise SourceError(
            f"{where}: the cloud has the fields {', '.join(fields)}; x, y and z are needed"
        )
    dtype = np.dtype(
        {
            "names": list(fields),
            "formats": [order + field.kind for field in fields.values()],
            "offsets": [field.offset for field in fields.values()],
            "itemsize": cloud.step,
        }
    )
    return np.ndarray(
        (cloud.height, cloud.width),
        dtype,
        cloud.data,
        strides=(row_step, cloud.step),
    ).reshape(-1)
