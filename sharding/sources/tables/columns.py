"""The columns of a manifest: names, types, and which of them are attributes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import pyarrow as pa

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.settings import did_you_mean
from fuelrail.sharding.sources.adapter.rows import (
    RESERVED_COLUMNS,
    fitting_type,
    may_be_attribute,
)
from fuelrail.sharding.sources.tables.calibration import CALIBRATION
from fuelrail.sharding.sources.tables.tables import CLIP
from fuelrail.sharding.sources.tables.values import POSE_PARTS, TIME_COLUMNS

SENSOR: Final = re.compile(r"(cam|lidar)\.([A-Za-z0-9_]+)\.(.+)")
MASK_COLUMN: Final = re.compile(r"mask\.([A-Za-z0-9_]+)\.(?:([a-z0-9_]+)\.)?path")
"""The masks of a camera: its name, and the name of what the numbers are, "mask" where there is
none.
"""
_ODD_SENSOR: Final = re.compile(r"(?:cam|lidar)\.(.+?)\.[a-z]")
_FILE: Final = (
    "path",
    "byte_offset",
    "byte_length",
    *TIME_COLUMNS,
    "ego2global",
)
OF_CAMERA: Final = (*_FILE, "num_bytes", "cam2ego", *CALIBRATION)
_OF_LIDAR: Final = (*_FILE, "lidar2ego")
OF_CLIP: Final = ("split", "log_id", "vehicle")
_OF_FRAME: Final = (CLIP, *TIME_COLUMNS, "ego2global", "boxes", *OF_CLIP)
_TYPES: Final = {
    **dict.fromkeys((CLIP, "sensor", "path", "dist_model", *OF_CLIP), pa.string()),
    **dict.fromkeys(("timestamp_ns", "timestamp_us", "width", "height"), pa.int64()),
    **dict.fromkeys(("num_bytes", "byte_offset", "byte_length"), pa.int64()),
    **dict.fromkeys(("intrinsics", "dist", "t", "q_wxyz", "q_xyzw"), pa.list_(pa.float64())),
    **dict.fromkeys(
        ("ego2global", "cam2ego", "lidar2ego", "sensor2ego"),
        pa.list_(pa.float64()),
    ),
    **dict.fromkeys(("timestamp_s", "fx", "fy", "cx", "cy", *POSE_PARTS[3:]), pa.float64()),
}
"""The last part of a column's name to its type."""
VALUE: Final = "value."
"""Begins the columns of values, which become channels."""


def check_column(table: str, match: re.Match[str]) -> None:
    """Raise SourceError for a column of a sensor, as :data:`SENSOR` matches it, that is not
    known.
    """
    allowed = OF_CAMERA if match[1] == "cam" else _OF_LIDAR
    rest, _, part = match[3].partition(".")
    is_pose = rest in ("ego2global", "cam2ego", "lidar2ego") and part in (
        *POSE_PARTS,
        "q",
        "rotation",
    )
    if rest not in allowed or (part and not is_pose):
        raise SourceError(
            f"table '{table}': the column {match[0]} is not known; after "
            f"{match[1]}.{match[2]}. may follow {', '.join(allowed)}{did_you_mean(rest, allowed)}"
        )


def type_of(name: str) -> pa.DataType | None:
    """Return the type of a column that is known by name."""
    if name.startswith(VALUE):
        return None
    return _TYPES.get(name.rpartition(".")[2])


def is_known(name: str) -> bool:
    """Return whether a column of ``frames`` is not an attribute."""
    return (
        name.startswith(VALUE)
        or MASK_COLUMN.fullmatch(name) is not None
        or SENSOR.match(name) is not None
        or name.partition(".")[0] in _OF_FRAME
    )


def is_path(column: str) -> bool:
    """Return whether a column names files."""
    return column.rpartition(".")[2] == "path"


def attribute_type(where: str, field: pa.Field) -> type:
    """Return the type of a free column; raises SourceError for one that can be no attribute."""
    kind = field.type
    odd = _ODD_SENSOR.match(field.name)
    if odd is not None:
        raise SourceError(
            f"{where}: the column {field.name} names the sensor '{odd[1]}'; names of sensors have "
            "letters, digits and _, as "
            f"{field.name.replace(odd[1], re.sub('[^A-Za-z0-9_]+', '_', odd[1]))}"
        )
    if pa.types.is_null(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind):
        python_type: Callable[..., Any] | None = str
    elif pa.types.is_boolean(kind):
        python_type = bool
    elif pa.types.is_integer(kind):
        python_type = int
    else:
        python_type = float if pa.types.is_floating(kind) else None
    if field.name in RESERVED_COLUMNS:
        advice = {
            "clip": f"name it {CLIP}",
            "frame": "name it frame_number, say",
        }
        raise SourceError(
            f"{where}: every dataset has a column {field.name} of its own samples; "
            f"{advice.get(field.name, f'rename it, as source_{field.name}')}"
        )
    if python_type is None or not may_be_attribute(field.name):
        problem = (
            f"is {kind}" if python_type is None else "has letters that are not A-Z, a-z, 0-9 and _"
        )
        raise SourceError(
            f"{where}: the column {field.name} is not known, so it is an attribute, but it "
            f"{problem}; attributes are numbers, texts, true or false, and a column "
            f"{VALUE}NAME becomes a channel{did_you_mean(field.name, _OF_FRAME)}"
        )
    fitting = fitting_type(field.name, python_type)  # type: ignore[arg-type]
    if fitting is None:
        raise SourceError(
            f"{where}: the column {field.name} is {kind}; all datasets have it, as numbers: "
            "rename it, or cast it"
        )
    return fitting
