"""Where sensors are and how cameras project: columns of a frame's row, or rows of the table
``calibration``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from msgspec.structs import replace

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.adapter.frame import Calibration
from fuelrail.sharding.sources.adapter.poses import OPTICAL2FLU

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.schema import F64
    from fuelrail.sharding.sources.tables.tables import Table
    from fuelrail.sharding.sources.tables.values import Rows


CALIBRATION: Final = (
    "width",
    "height",
    "dist_model",
    "dist",
    "intrinsics",
    "fx",
    "fy",
    "cx",
    "cy",
)
"""What else a camera has, besides its pose."""


def read_calibration(
    rows: Rows,
    prefix: str,
    pose: str,
    *,
    is_corner: bool,
    is_flu: bool,
) -> list[Calibration]:
    """Read the columns under ``prefix``; ``pose`` is the name of the transform from the sensor to
    ego.

    ``is_corner``: pixel (0, 0) is the corner of the top-left one, and principal points move by half
    a pixel. ``is_flu``: the camera's axes are forward, left, up.
    """
    intrinsics = rows.intrinsics(prefix)
    sensor2ego = rows.poses(prefix + pose)
    if intrinsics is not None and is_corner:
        intrinsics[:, :2, 2] -= 0.5
    if sensor2ego is not None and is_flu:
        sensor2ego = sensor2ego @ OPTICAL2FLU
    count = len(rows)

    def integers(name: str) -> list[int]:
        values = [0] * count
        if prefix + name in rows:
            values = rows.integers(prefix + name, unknown=0).tolist()
        return values

    models = rows.texts(f"{prefix}dist_model") if f"{prefix}dist_model" in rows else []
    dist: list[tuple[float, ...]] = [()] * count
    if f"{prefix}dist" in rows:
        dist = [
            tuple(map(float, value or ())) for value in rows.column(f"{prefix}dist").to_pylist()
        ]
    lenses = [model or "none" for model in models] or ["none"] * count
    columns = zip(
        shared(intrinsics, count),
        shared(sensor2ego, count),
        integers("width"),
        integers("height"),
        lenses,
        dist,
        strict=True,
    )
    return [
        Calibration(
            intrinsics=intrinsics_of_row,
            sensor2ego=pose_of_row,
            width=width,
            height=height,
            dist=coefficients,
            dist_model=dist_model,
        )
        for intrinsics_of_row, pose_of_row, width, height, dist_model, coefficients in columns
    ]


def shared(matrices: F64 | None, count: int) -> list[F64 | None]:
    """Return matrices (R, N, N) as a list in which equal ones are the same object; None for NaN."""
    if matrices is None or not count:
        return [None] * count
    is_unknown = np.isnan(matrices).all((1, 2))
    is_known: list[bool] = np.asarray(~is_unknown).tolist()
    if is_known[0] and (matrices == matrices[0]).all():
        return [matrices[0]] * count
    matrix_of: dict[bytes, Any] = {}
    return [
        matrix_of.setdefault(matrix.tobytes(), matrix) if has_value else None
        for matrix, has_value in zip(matrices, is_known, strict=True)
    ]


class CalibrationTable:
    """The table ``calibration``: rows of all clips (no clip), and rows of one clip, which come
    first.
    """

    def __init__(
        self,
        table: Table,
        axes: Mapping[str, str],
        *,
        is_corner: bool,
    ) -> None:
        """Take the table; ``axes`` of sensors by name, under "" of all others."""
        self.table = table
        self._axes = axes
        self._is_corner = is_corner
        self._clip: tuple[str, dict[str, Calibration]] = ("", {})
        rows = table.rows("")
        self._common = {} if rows is None else self._read(rows)

    def find(self, clip: str, sensor: str) -> Calibration | None:
        """Return the calibration of a sensor in a clip; None where there is none."""
        if self._clip[0] != clip:
            rows = self.table.rows(clip)
            calibrations = {} if rows is None else self._read(rows)
            self._clip = (clip, calibrations)
        _, calibrations = self._clip
        return calibrations.get(sensor) or self._common.get(sensor)

    @cached_property
    def sensors(self) -> dict[str, bool]:
        """All sensors in order, and whether each is a camera: it has intrinsics."""
        is_camera_by_name: dict[str, bool] = {}
        for rows in self.table.parts():
            intrinsics = rows.intrinsics("")
            is_camera = [
                has_intrinsics is not None for has_intrinsics in shared(intrinsics, len(rows))
            ]
            for name, has_intrinsics in zip(rows.texts("sensor"), is_camera, strict=True):
                if name:
                    is_camera_by_name[name] = is_camera_by_name.get(name, False) or has_intrinsics
        return is_camera_by_name

    def _read(self, rows: Rows) -> dict[str, Calibration]:
        calibrations: dict[str, Calibration] = {}
        plain = read_calibration(
            rows,
            prefix="",
            pose="sensor2ego",
            is_corner=self._is_corner,
            is_flu=False,
        )
        for row, name in enumerate(rows.texts("sensor")):
            if not name:
                rows.fail(row, "sensor", "it is empty")
            if name in calibrations:
                raise SourceError(
                    f"table '{rows.table}', row {rows.first + row}: sensor '{name}' is there twice"
                )
            calibration = plain[row]
            pose = calibration.sensor2ego
            is_flu = self._axes.get(name, self._axes[""]) == "flu"
            if pose is not None and calibration.intrinsics is not None and is_flu:
                calibration = replace(calibration, sensor2ego=pose @ OPTICAL2FLU)
            calibrations[name] = calibration
        return calibrations
