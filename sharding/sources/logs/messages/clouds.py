"""Point clouds of any layout as columns x, y, z, intensity, ring, time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.frames.poses import pose

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fuelrail.sharding.sources.logs.messages.records import Cloud

COLUMNS: Final = ("x", "y", "z", "intensity", "ring", "time")
_NAMES: Final = {
    "x": ("x",),
    "y": ("y",),
    "z": ("z",),
    "intensity": ("intensity", "intensities", "i", "reflectivity", "reflectance"),
    "ring": ("ring", "channel", "laser_id", "laser_number", "line"),
    "time": ("time", "t", "time_stamp", "timestamp", "time_offset", "offset_time", "timeOffset"),
}


def points_of(cloud: Cloud, where: str) -> NDArray[np.float32]:
    """Points (P, 6) in the cloud's frame; NaN for a column that it lacks. Points without a position are left out.

    Time is seconds after the stamp: integers are nanoseconds (over 1e15: since 1970), floats seconds (over 1e9: since
    1970).
    Raises SourceError, naming ``where``, for a layout that contradicts itself.
    """
    fields = {field.name: field for field in cloud.fields}
    order = ">" if cloud.big_endian else "<"
    inside = all(field.offset + np.dtype(field.kind).itemsize <= cloud.step for field in cloud.fields)
    row_step = cloud.row_step or cloud.width * cloud.step
    needed = max(cloud.height - 1, 0) * row_step + cloud.width * cloud.step
    if not inside or row_step < cloud.width * cloud.step or len(memoryview(cloud.data)) < needed:
        raise SourceError(
            f"{where}: a cloud of {cloud.height} x {cloud.width} points of {cloud.step} bytes with the fields "
            f"{', '.join(fields)} does not fit into its {len(memoryview(cloud.data))} bytes and rows of {row_step}"
        )
    if not {"x", "y", "z"} <= fields.keys():
        raise SourceError(f"{where}: the cloud has the fields {', '.join(fields)}; x, y and z are needed")
    dtype = np.dtype(
        {
            "names": list(fields),
            "formats": [order + field.kind for field in fields.values()],
            "offsets": [field.offset for field in fields.values()],
            "itemsize": cloud.step,
        }
    )
    rows = np.ndarray((cloud.height, cloud.width), dtype, cloud.data, strides=(row_step, cloud.step)).reshape(-1)
    found = np.full((len(rows), len(COLUMNS)), np.nan, np.float32)
    for at, column in enumerate(COLUMNS):
        name = next((name for name in _NAMES[column] if name in fields), None)
        if name is not None:
            found[:, at] = _seconds(rows[name], cloud.stamp_ns) if column == "time" else rows[name]
    found = found[np.isfinite(found[:, :3]).all(1)]
    if cloud.pose is not None:
        moved = pose(cloud.pose.wxyz, cloud.pose.xyz, where)
        found[:, :3] = found[:, :3] @ moved[:3, :3].T + moved[:3, 3]
    return found


def _seconds(values: NDArray[np.generic], stamp_ns: int) -> NDArray[np.float64]:
    """Seconds after the stamp."""
    if values.dtype.kind in "iu":
        whole = values.astype(np.int64)
        return np.asarray((whole - stamp_ns if len(whole) and whole.max() > 1e15 else whole) * 1e-9)
    seconds = values.astype(np.float64)
    return np.asarray(seconds - stamp_ns * 1e-9 if len(seconds) and np.nanmax(seconds) > 1e9 else seconds)
