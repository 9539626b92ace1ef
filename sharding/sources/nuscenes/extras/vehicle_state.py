"""Table ``vehicle_state`` of T4 datasets: pedals, steering, indicators and speed of the ego
vehicle, as signals.

Layout: https://github.com/tier4/tier4_perception_dataset/blob/main/docs/t4_format_3d_detailed.md
(vehicle_state.json)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from fuelrail.sharding.sources.adapter.channels import signals_channel
from fuelrail.sharding.sources.nuscenes.geometry import NS_PER_US
from fuelrail.sharding.sources.nuscenes.tables import Record, check_time

if TYPE_CHECKING:
    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.pipeline.sample.schema import F64, I64

TABLE: Final = "vehicle_state"
_UNITS: Final = {
    "accel_pedal": "%",
    "brake_pedal": "%",
    "steer_pedal": "%",
    "steering_tire_angle": "rad",
    "steering_wheel_angle": "rad",
    "indicator_left": "",
    "indicator_right": "",
    "indicator_hazard": "",
    "speed": "km/h",
}
_LIGHT: Final = {"on": 1.0, "off": 0.0}


class _Indicators(msgspec.Struct, frozen=True, gc=False):
    left: str | None = None
    right: str | None = None
    hazard: str | None = None


class _More(msgspec.Struct, frozen=True, gc=False):
    speed: float | None = None


class VehicleState(Record, frozen=True, gc=False):
    """A row of the table; what is null is not known, and NaN in the channel.

    The state of the gears is not a number.
    """

    timestamp: int
    accel_pedal: float | None = None
    brake_pedal: float | None = None
    steer_pedal: float | None = None
    steering_tire_angle: float | None = None
    steering_wheel_angle: float | None = None
    indicators: _Indicators | None = None
    additional_info: _More | None = None

    @property
    def numbers(self) -> list[float | None]:
        """The numbers in the order of the columns; an indicator is 1 for on, and 0 for off."""
        lights = msgspec.structs.astuple(self.indicators or _Indicators())
        return [
            self.accel_pedal,
            self.brake_pedal,
            self.steer_pedal,
            self.steering_tire_angle,
            self.steering_wheel_angle,
            *(_LIGHT.get(light or "") for light in lights),
            (self.additional_info or _More()).speed,
        ]


def state_channel(*, series: bool) -> Channel:
    """Return the entry of the table; with ``series`` as a series."""
    return signals_channel(
        f"can_{TABLE}",
        units=_UNITS,
        source_name=TABLE,
        has_unknown=True,
        series=series,
    )


def state_signals(
    rows: Sequence[VehicleState],
) -> tuple[I64, F64]:
    """Return times [ns] (N,), ascending, and numbers (N, C); raise SourceError for a time not in
    microseconds.
    """
    rows = sorted(rows, key=lambda row: row.timestamp)
    for row in rows:
        check_time(row.timestamp, row.token)
    stamps = np.array([row.timestamp for row in rows], np.int64) * NS_PER_US
    numbers = np.array([row.numbers for row in rows], np.float64)
    return stamps, numbers.reshape(-1, len(_UNITS))
