"""Values of columns as arrays, each checked; an error names table, row and column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.adapter.poses import (
    FARTHEST_M,
    are_poses,
    nearest_rigid,
    pose,
)
from fuelrail.sharding.sources.shared.arrow import is_list

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.schema import F64, I64

_TIMES: Final = {
    "timestamp_ns": 1,
    "timestamp_us": 1_000,
    "timestamp_s": 1_000_000_000,
}
_PER_UNIT: Final = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}
_XYZW: Final = [3, 0, 1, 2]
TIME_COLUMNS: Final = (*_TIMES, "timestamp")
POSE_PARTS: Final = (
    "t",
    "q_wxyz",
    "q_xyzw",
    "tx",
    "ty",
    "tz",
    "qw",
    "qx",
    "qy",
    "qz",
)
"""What a pose ``P`` may be given by, as ``P.t`` and so on, instead of ``P`` itself, a 4x4
matrix.
"""


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a table, the first of which has the number ``first``."""

    table: str
    first: int
    batch: pa.RecordBatch

    def __len__(self) -> int:
        return int(self.batch.num_rows)

    def __contains__(self, column: str) -> bool:
        return bool(self.batch.schema.get_field_index(column) >= 0)

    def fail(self, row: int, column: str, text: str) -> NoReturn:
        """Raise SourceError for one value."""
        raise SourceError(f"table '{self.table}', row {self.first + row}, column {column}: {text}")

    def column(self, name: str) -> pa.Array:
        """Return a column as it is; raise SourceError where there is none."""
        if name not in self:
            raise SourceError(
                f"table '{self.table}' has no column {name}; it has "
                f"{', '.join(self.batch.schema.names)}"
            )
        return self.batch.column(name)

    def texts(self, name: str, column: pa.Array | None = None) -> list[str | None]:
        """Return texts, None for null; convert whole numbers to texts."""
        column = self.column(name) if column is None else column
        if pa.types.is_integer(column.type):
            column = column.cast(pa.string())
        if not (
            pa.types.is_string(column.type)
            or pa.types.is_large_string(column.type)
            or pa.types.is_null(column.type)
        ):
            raise SourceError(
                f"table '{self.table}', column {name} is {column.type}, wanted are texts"
            )
        texts: list[str | None] = column.to_pylist()
        if len(texts) == len(self) and any(text and "\0" in text for text in texts):
            bad_row = next(row for row, text in enumerate(texts) if text and "\0" in text)
            self.fail(
                bad_row,
                name,
                f"{texts[bad_row]!r} has a NUL character, which no file or clip has in its "
                "name; remove it",
            )
        return texts

    def integers(self, name: str, unknown: int | None = None) -> I64:
        """Return whole numbers (R,), ``unknown`` for null; without it null is an error."""
        column = self.column(name)
        is_number = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
        if not (is_number or pa.types.is_null(column.type)):
            raise SourceError(
                f"table '{self.table}', column {name} is {column.type}, wanted are whole numbers"
            )
        if column.null_count:
            if unknown is None:
                self.fail(
                    int(np.argmax(column.is_null().to_numpy(zero_copy_only=False))),
                    name,
                    "it is empty",
                )
            if pa.types.is_null(column.type):
                column = column.cast(pa.int64())
            column = pc.fill_null(column, unknown)
        values = column.to_numpy(zero_copy_only=False)
        if values.dtype.kind == "f":
            is_whole = np.isfinite(values) & (values == np.rint(values))
            bad = ~(is_whole & (np.abs(values) < 2**53))
            if bad.any():
                self.fail(
                    int(np.argmax(bad)),
                    name,
                    f"{values[bad][0]} is not a whole number",
                )
        elif values.dtype.kind == "u" and (values > np.iinfo(np.int64).max).any():
            self.fail(
                int(np.argmax(values)),
                name,
                f"{values.max()} is over the range of int64",
            )
        return np.asarray(values, np.int64)

    def numbers(self, name: str) -> F64:
        """Return numbers (R,) as float64, NaN for null."""
        column = self.column(name)
        try:
            return np.asarray(
                column.cast(pa.float64()).to_numpy(zero_copy_only=False),
                np.float64,
            )
        except (
            pa.ArrowInvalid,
            pa.ArrowNotImplementedError,
            TypeError,
        ) as error:
            raise SourceError(
                f"table '{self.table}', column {name} is {column.type}, wanted are numbers"
            ) from error

    def vectors(self, name: str, width: int) -> F64:
        """Return lists of ``width`` numbers (R, width), also nested ones such as rows of a
        matrix; NaN for null.
        """
        column = values = self.column(name)
        empty = column.is_null().to_numpy(zero_copy_only=False)
        table = np.full((len(self), width), np.nan)
        counts = np.ones(len(self), np.int64)
        while is_list(values.type):
            lengths = np.asarray(
                pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False),
                np.int64,
            )
            sums = np.concatenate([[0], np.cumsum(lengths)])
            ends = np.cumsum(counts)
            counts = sums[ends] - sums[ends - counts]
            values = values.flatten()
        if values is column and not pa.types.is_null(column.type):
            raise SourceError(
                f"table '{self.table}', column {name} is {column.type}, wanted are lists of "
                f"{width} numbers"
            )
        bad = (counts != width) & ~empty
        if bad.any():
            bad_row = int(np.argmax(bad))
            self.fail(
                bad_row,
                name,
                f"it has {counts[bad_row]} numbers, wanted are {width}",
            )
        if not empty.all():
            try:
                flat = values.cast(pa.float64()).to_numpy(zero_copy_only=False)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise SourceError(
                    f"table '{self.table}', column {name} has {values.type}, wanted are numbers"
                ) from error
            table[~empty] = flat.reshape(-1, width)
        return table

    def times(self, prefix: str = "", *, is_unix: bool) -> I64 | None:
        """Return times (R,) [ns] by the one column of time under ``prefix``, -1 for null; None
        without such a column.

        ``is_unix``: they must be between 2000 and 2100, which a wrong unit is not.
        """
        names_present = [column for column in TIME_COLUMNS if prefix + column in self]
        if not names_present:
            return None
        if len(names_present) > 1:
            raise SourceError(
                f"table '{self.table}' has "
                f"{' and '.join(prefix + name for name in names_present)}: leave one"
            )
        name = prefix + names_present[0]
        column = self.column(name)
        if pa.types.is_timestamp(column.type):
            factor = _PER_UNIT[column.type.unit]
            column = column.cast(pa.int64())
            times = pc.fill_null(column, -1)
            values = np.asarray(times.to_numpy(zero_copy_only=False))
        elif names_present[0] == "timestamp":
            names = ", ".join(_TIMES)
            raise SourceError(
                f"table '{self.table}', column {name} is {column.type}: name its unit, one "
                f"of {names}"
            )
        elif names_present[0] == "timestamp_s" and not pa.types.is_integer(column.type):
            seconds = self.numbers(name)
            # float64 has 0.24 us at today's times: microseconds are what it can say.
            times_us = np.rint(seconds * 1e6)
            values = np.where(np.isnan(seconds), -1, times_us)
            factor = 1_000
        elif pa.types.is_floating(column.type) and names_present[0] == "timestamp_ns":
            raise SourceError(
                f"table '{self.table}', column {name} is {column.type}, which cannot hold "
                "nanoseconds: make it int64"
            )
        else:
            values = self.integers(name, unknown=-1)
            factor = _TIMES[names_present[0]]
        is_known = values != -1
        first, last = (946_684_800, 4_102_444_800) if is_unix else (0, 9_000_000_000)
        bad = is_known & (
            (values < first * (1_000_000_000 // factor))
            | (values > last * (1_000_000_000 // factor))
        )
        if bad.any():
            bad_row = int(np.argmax(bad))
            hint = (
                "is not between the years 2000 and 2100: check the unit, or give time_base=relative"
            )
            self.fail(
                bad_row,
                name,
                f"{values[bad_row]} "
                f"{hint if is_unix else f'is out of range; allowed are 0 to {last} s'}",
            )
        times_ns = np.asarray(values, np.int64) * factor
        return np.where(is_known, times_ns, -1)

    def poses(self, prefix: str) -> F64 | None:
        """Return transforms (R, 4, 4), NaN for null, by columns of the pose ``prefix``; None
        without such columns.
        """
        if f"{prefix}.q" in self or f"{prefix}.rotation" in self:
            raise SourceError(
                f"table '{self.table}': the order of a quaternion must be in its name: "
                f"{prefix}.q_wxyz or {prefix}.q_xyzw"
            )
        if prefix in self:
            flat = self.vectors(prefix, 16).reshape(-1, 4, 4)
            is_unknown = np.isnan(flat).all((1, 2))
            known_rows = np.flatnonzero(~is_unknown)
            fitted, sound = nearest_rigid(flat[known_rows])
            if not sound.all():
                bad_row = int(known_rows[np.argmin(sound)])
                text = (
                    "not a rotation and a translation with the last row 0 0 0 1, in row-major order"
                )
                self.fail(bad_row, prefix, f"{text}: {flat[bad_row].tolist()}")
            flat[known_rows] = fitted
            return flat
        if not any(f"{prefix}.{part}" in self for part in POSE_PARTS):
            return None
        q = self.rotation(f"{prefix}.")
        t_parts = [f"{prefix}.{part}" for part in ("tx", "ty", "tz")]
        t = self.vector(f"{prefix}.t", t_parts)
        matrices = np.full((len(self), 4, 4), np.nan)
        is_unknown = np.isnan(q).all(1) & np.isnan(t).all(1)
        is_known = ~is_unknown
        bad = is_known & ~are_poses(q, t)
        if bad.any():
            bad_row = int(np.argmax(bad))
            self.fail(
                bad_row,
                prefix,
                "no unit quaternion w, x, y, z, or a translation that is not finite or "
                f"over {FARTHEST_M:g} m: {q[bad_row].tolist()}, at {t[bad_row].tolist()}",
            )
        if is_known.any():
            matrices[is_known] = pose(q[is_known], t[is_known], prefix)
        return matrices

    def vector(self, name: str, parts: Sequence[str]) -> F64:
        """Return vectors (R, N) by a column of lists, or by a column for each number; NaN for
        null.
        """
        if name in self:
            return self.vectors(name, len(parts))
        columns = [self.numbers(part) for part in parts]
        return np.stack(columns, 1)

    def rotation(self, prefix: str = "") -> F64:
        """Return quaternions w, x, y, z (R, 4) by the columns whose names begin with ``prefix``;
        NaN for null.
        """
        if f"{prefix}q_wxyz" not in self and f"{prefix}q_xyzw" in self:
            return self.vectors(f"{prefix}q_xyzw", 4)[:, _XYZW]
        return self.vector(
            f"{prefix}q_wxyz",
            [f"{prefix}{part}" for part in ("qw", "qx", "qy", "qz")],
        )

    def intrinsics(self, prefix: str) -> F64 | None:
        """Return K (R, 3, 3) by ``intrinsics`` or ``fx``, ``fy``, ``cx``, ``cy``; NaN for null,
        None without them.
        """
        if f"{prefix}intrinsics" in self:
            matrices = self.vectors(f"{prefix}intrinsics", 9).reshape(-1, 3, 3)
        elif f"{prefix}fx" in self:
            fx = self.numbers(f"{prefix}fx")
            fy = self.numbers(f"{prefix}fy")
            cx = self.numbers(f"{prefix}cx")
            cy = self.numbers(f"{prefix}cy")
            matrices = np.zeros((len(self), 3, 3))
            matrices[:, 0, 0] = fx
            matrices[:, 1, 1] = fy
            matrices[:, 0, 2] = cx
            matrices[:, 1, 2] = cy
            matrices[:, 2, 2] = 1
            is_empty = np.isnan(fx) & np.isnan(fy)
            matrices[is_empty] = np.nan
        else:
            return None
        is_known = ~np.isnan(matrices).all((1, 2))
        with np.errstate(invalid="ignore"):
            bad = is_known & ~(
                np.isfinite(matrices).all((1, 2))
                & (matrices[:, 0, 0] > 0)
                & (matrices[:, 1, 1] > 0)
            )
            has_other_row = (matrices[:, 2] != (0, 0, 1)).any(1)
            has_other_row |= matrices[:, 1, 0] != 0
            bad |= is_known & has_other_row
        if bad.any():
            bad_row = int(np.argmax(bad))
            self.fail(
                bad_row,
                f"{prefix}intrinsics",
                f"{matrices[bad_row].tolist()}: expected fx s cx, 0 fy cy, 0 0 1, fx and fy over 0",
            )
        return matrices
