"""Boxes of a manifest: a list of structs in the column ``boxes``, or the rows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.settings import did_you_mean
from fuelrail.sharding.sources.adapter.boxes import rows_by_key
from fuelrail.sharding.sources.adapter.frame import NO_BOXES, BoxRows
from fuelrail.sharding.sources.shared.arrow import is_list
from fuelrail.sharding.sources.tables.values import TIME_COLUMNS, Rows

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.schema import F64, I64

_ROTATIONS: Final = ("q_wxyz", "q_xyzw", "qw", "qx", "qy", "qz")
_COUNTS: Final = ("num_lidar_pts", "num_radar_pts", "visibility")
BOX_TYPES: Final = {
    **dict.fromkeys(("category", "track"), pa.string()),
    **dict.fromkeys(("x", "y", "z", "length", "width", "height", "yaw"), pa.float64()),
    **dict.fromkeys(("qw", "qx", "qy", "qz", "vx", "vy", "vz"), pa.float64()),
    **dict.fromkeys(_COUNTS, pa.int64()),
    **dict.fromkeys(
        ("centre", "size_lwh", "q_wxyz", "q_xyzw", "velocity"),
        pa.list_(pa.float64()),
    ),
}
BOX_COLUMNS: Final = tuple(BOX_TYPES)


def check_box_columns(table: str, names: Sequence[str]) -> None:
    """Raise SourceError for a column that is not known."""
    allowed = (*BOX_COLUMNS, "clip_id", *TIME_COLUMNS)
    for name in names:
        if name not in allowed:
            raise SourceError(
                f"table '{table}': boxes have no column {name}; allowed are "
                f"{', '.join(BOX_COLUMNS)}{did_you_mean(name, allowed)}"
            )


def listed_boxes(rows: Rows, *, in_global: bool) -> list[BoxRows | None]:
    """Return the boxes of each row, from its list of structs; None for null: not labelled."""
    column = rows.column("boxes")
    if pa.types.is_null(column.type):
        return [None] * len(rows)
    has_lists = is_list(column.type)
    is_typed = has_lists and pa.types.is_struct(column.type.value_type)
    if not is_typed and not (has_lists and not len(column.flatten())):
        raise SourceError(
            f"table '{rows.table}', column boxes is {column.type}, expected a list of structs"
        )
    labelled = column.is_valid().to_pylist()
    if not is_typed:  # lists of JSON lines, of which none has a box
        return [NO_BOXES if is_labelled else None for is_labelled in labelled]
    lengths = pc.fill_null(pc.list_value_length(column), 0)
    ends = np.cumsum(lengths.to_numpy(zero_copy_only=False)).tolist()
    flat = column.flatten()
    names = [field.name for field in flat.type]
    check_box_columns(rows.table, names)
    inner = Rows(
        f"{rows.table}, boxes",
        0,
        pa.RecordBatch.from_arrays(flat.flatten(), names=names),
    )
    values = _collect_columns(inner)
    boxes: list[BoxRows | None] = []
    starts = [0, *ends[:-1]]
    for start, end, is_labelled in zip(starts, ends, labelled, strict=True):
        boxes.append(
            _make_box_rows(values, slice(start, end), in_global=in_global) if is_labelled else None
        )
    return boxes


def boxes_of_frames(
    rows: Rows | None,
    box_table: Rows | None,
    times: I64,
    order: NDArray[np.intp],
    *,
    in_global: bool,
    is_unix: bool,
) -> Sequence[BoxRows | None]:
    """Return the boxes of a clip's frames in ``order``: of the column of ``rows``, else of
    ``box_table``.

    Of a table they are the rows with exactly the times (F,) [ns] of the frames: a frame without
    rows is not labelled, and a row without a category says that it is labelled. Raises SourceError
    for a row whose time is that of no frame.
    """
    if rows is not None and "boxes" in rows:
        listed = listed_boxes(rows, in_global=in_global)
        return [listed[index] for index in order.tolist()]
    boxes: list[BoxRows | None] = [None] * len(order)
    if box_table is None:
        return boxes
    own_times = box_table.times(is_unix=is_unix)
    frame_times = times[order]
    if own_times is None:
        raise SourceError(
            f"table '{box_table.table}' has no column of time, one of {', '.join(TIME_COLUMNS)}"
        )
    last = len(frame_times) - 1
    index = np.minimum(np.searchsorted(frame_times, own_times), last)
    astray = frame_times[index] != own_times
    if astray.any():
        row = int(np.argmax(astray))
        box_table.fail(
            row,
            "timestamp",
            f"{own_times[row]} ns is the time of no frame of the clip",
        )
    values = _collect_columns(box_table)
    is_box = np.array([bool(name) for name in values["category"]])
    for frame, part in rows_by_key(index).items():
        part_of_boxes = part[is_box[part]]
        boxes[frame] = _make_box_rows(values, part_of_boxes, in_global=in_global)
    return boxes


def _collect_columns(rows: Rows) -> dict[str, Any]:
    """Return all columns of boxes as arrays, missing ones as None."""

    def vector(name: str, parts: Sequence[str]) -> F64 | None:
        present = [part for part in parts if part in rows]
        if present and name not in rows and len(present) < len(parts):
            missing = ", ".join(part for part in parts if part not in present)
            cure = "; write 0 where it is not measured" if name == "velocity" else ""
            raise SourceError(
                f"table '{rows.table}' has {', '.join(present)} of {name}, but no {missing}{cure}"
            )
        if present or name in rows:
            return rows.vector(name, parts)
        return None

    def required(name: str, parts: Sequence[str]) -> F64:
        value = vector(name, parts)
        if value is None:
            raise SourceError(f"table '{rows.table}' has no {name}, nor {', '.join(parts)}")
        return value

    has_quaternions = any(name in rows for name in _ROTATIONS)
    if not has_quaternions and "yaw" not in rows:
        raise SourceError(f"table '{rows.table}' has neither yaw nor {', '.join(_ROTATIONS)}")
    return {
        "centre": required("centre", ("x", "y", "z")),
        "size_lwh": required("size_lwh", ("length", "width", "height")),
        "rotation_wxyz": rows.rotation() if has_quaternions else None,
        "yaw": rows.numbers("yaw") if "yaw" in rows else None,
        "velocity": vector("velocity", ("vx", "vy", "vz")),
        "category": [name or "" for name in rows.texts("category")],
        "track": [name or "" for name in rows.texts("track")] if "track" in rows else None,
        **{name: rows.integers(name, unknown=-1) if name in rows else None for name in _COUNTS},
    }


def _make_box_rows(
    values: dict[str, Any],
    part: slice | NDArray[np.intp],
    *,
    in_global: bool,
) -> BoxRows:
    chosen: dict[str, Any] = {}
    for name, column in values.items():
        if isinstance(column, list):
            chosen[name] = (
                column[part] if isinstance(part, slice) else [column[row] for row in part.tolist()]
            )
        else:
            chosen[name] = None if column is None else column[part]
    return BoxRows(**chosen, in_global=in_global)
