"""Long tables: which file of each sensor belongs to which frame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.settings import did_you_mean
from fuelrail.sharding.sources.adapter.frame import Absent
from fuelrail.sharding.sources.shared.times import nearest

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.schema import I64
    from fuelrail.sharding.sources.adapter.frame import Image, Sweep
    from fuelrail.sharding.sources.tables.calibration import CalibrationTable
    from fuelrail.sharding.sources.tables.members import RowFiles
    from fuelrail.sharding.sources.tables.values import Rows


def match_times(frame_ns: I64, sensor_ns: I64, tolerance_ns: int) -> NDArray[np.intp]:
    """Match measurements to frames: (F,) their numbers, -1 for none.

    Both times ascend. A measurement and a frame belong together where each is the other's nearest,
    and no more than ``tolerance_ns`` apart: no measurement is in two frames. Of two that are as
    near, the earlier one is taken.
    """
    if not len(sensor_ns) or not len(frame_ns):
        return np.full(len(frame_ns), -1)
    nearest_numbers = nearest(sensor_ns, frame_ns)
    numbers = np.arange(len(frame_ns))
    nearest_frames = nearest(frame_ns, sensor_ns)
    is_mutual = nearest_frames[nearest_numbers] == numbers
    is_near = np.abs(sensor_ns[nearest_numbers] - frame_ns) <= tolerance_ns
    return np.where(is_mutual & is_near, nearest_numbers, -1)


def ascending(rows: Rows, times: I64, chosen: NDArray[np.intp]) -> NDArray[np.intp]:
    """Put rows into the order of time; raises SourceError where two have the same time."""
    order = chosen[np.argsort(times[chosen], kind="stable")]
    same = np.flatnonzero(np.diff(times[order]) == 0)
    if len(same):
        first = order[same[0]]
        second = order[same[0] + 1]
        rows.fail(
            int(second),
            "timestamp",
            f"{times[second]} ns is also the time of row {rows.first + int(first)}",
        )
    return order


class SensorRows:
    """The rows of ``sensor_data`` of one clip, by sensor and time."""

    def __init__(
        self,
        clip: str,
        files: RowFiles,
        calibrations: CalibrationTable,
    ) -> None:
        """Sort the rows; raises SourceError for two rows of a sensor with one time."""
        self._clip = clip
        self._files = files
        self._calibrations = calibrations
        numbers: dict[str, list[int]] = {}
        for row, name in enumerate(files.rows.texts("sensor")):
            if not name:
                files.rows.fail(row, "sensor", "it is empty")
            numbers.setdefault(name, []).append(row)
        self._by_time = {
            name: ascending(files.rows, files.times, np.array(sensor_rows))
            for name, sensor_rows in numbers.items()
        }

    def reference_times(self, reference: str) -> I64:
        """Return the times of a sensor, ascending; without a name, of the first lidar, else the
        first camera.
        """
        sensors = self._calibrations.sensors
        unmounted = [name for name in sensors if not sensors[name]]
        default = unmounted or list(sensors)
        name = reference or default[0]
        if name not in sensors:
            listed = ", ".join(sensors)
            raise SourceError(
                f"reference={name}: there is no such sensor, but "
                f"{listed}{did_you_mean(name, sensors)}"
            )
        if name not in self._by_time:
            raise SourceError(
                f"clip '{self._clip}' has no row of sensor '{name}', whose times are those "
                "of frames"
            )
        return self._files.times[self._by_time[name]]

    def add(
        self,
        frame_ns: I64,
        tolerance_ms: float,
        into: Sequence[tuple[dict[str, Image | Absent], dict[str, Sweep]]],
    ) -> None:
        """Add to the images and sweeps of frames at ascending times those of all sensors."""
        absent = Absent(f"no image within {tolerance_ms:g} ms")
        for name, rows in self._by_time.items():
            calibration = self._calibrations.find(self._clip, name)
            if calibration is None:
                raise SourceError(
                    f"clip '{self._clip}': sensor '{name}' has no row in "
                    f"'{self._calibrations.table.name}'"
                )
            tolerance_ns = round(tolerance_ms * 1e6)
            chosen = match_times(frame_ns, self._files.times[rows], tolerance_ns)
            is_camera = self._calibrations.sensors[name]
            for (images, sweeps), number in zip(into, chosen.tolist(), strict=True):
                if number < 0:
                    if is_camera:
                        images[name.lower()] = absent
                    continue
                row = int(rows[number])
                if is_camera:
                    images[name.lower()] = self._files.image(row, calibration)
                    continue
                sweep = self._files.sweep(row, calibration)
                if sweep is not None:
                    sweeps[name.lower()] = sweep
