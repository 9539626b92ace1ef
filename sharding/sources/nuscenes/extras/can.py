"""nuScenes' CAN bus as channels: the messages between a keyframe and the one before it, as they
were measured.

Fields, units and frames are those of the README of the CAN bus expansion:
https://github.com/nutonomy/nuscenes-devkit/blob/master/python-sdk/nuscenes/can_bus/README.md
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import numpy as np
from msgspec import Meta

from fuelrail.pipeline.channels.kinds import KINDS
from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.adapter.channels import (
    signal_series,
    signals_channel,
)
from fuelrail.sharding.sources.adapter.frame import FileMember
from fuelrail.sharding.sources.adapter.members import check_inside
from fuelrail.sharding.sources.nuscenes.geometry import NS_PER_US
from fuelrail.sharding.sources.shared.foreign import read_json

if TYPE_CHECKING:
    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.pipeline.sample.schema import F64, I64
    from fuelrail.sharding.sources.nuscenes.geometry import SceneRows
    from fuelrail.sharding.sources.shared.files import SourceFiles

FOLDER: Final = "can_bus"
MESSAGES: Final[dict[str, dict[str, tuple[int, str]]]] = {
    "ms_imu": {
        "linear_accel": (3, "m/s^2"),
        "q": (4, ""),
        "rotation_rate": (3, "rad/s"),
    },
    "pose": {
        "accel": (3, "m/s^2"),
        "orientation": (4, ""),
        "pos": (3, "m"),
        "rotation_rate": (3, "rad/s"),
        "vel": (3, "m/s"),
    },
    "steeranglefeedback": {"value": (1, "rad")},
    "vehicle_monitor": {
        "available_distance": (1, "km"),
        "battery_level": (1, "%"),
        "brake": (1, "bar"),
        "brake_switch": (1, ""),
        "gear_position": (1, ""),
        "left_signal": (1, ""),
        "rear_left_rpm": (1, "1/min"),
        "rear_right_rpm": (1, "1/min"),
        "right_signal": (1, ""),
        "steering": (1, "deg"),
        "steering_speed": (1, "deg/s"),
        "throttle": (1, ""),
        "vehicle_speed": (1, "km/h"),
        "yaw_rate": (1, "deg/s"),
    },
    "zoesensors": {
        "brake_sensor": (1, ""),
        "steering_sensor": (1, ""),
        "throttle_sensor": (1, ""),
    },
    "zoe_veh_info": {
        "FL_wheel_speed": (1, "1/min"),
        "FR_wheel_speed": (1, "1/min"),
        "RL_wheel_speed": (1, "1/min"),
        "RR_wheel_speed": (1, "1/min"),
        "left_solar": (1, ""),
        "longitudinal_accel": (1, "m/s^2"),
        "meanEffTorque": (1, "N m"),
        "odom": (1, "cm"),
        "odom_speed": (1, "km/h"),
        "pedal_cc": (1, ""),
        "regen": (1, ""),
        "requestedTorqueAfterProc": (1, "N m"),
        "right_solar": (1, ""),
        "steer_corrected": (1, "deg"),
        "steer_offset_can": (1, "deg"),
        "steer_raw": (1, "deg"),
        "transversal_accel": (1, "g"),
    },
}
"""Message to fields in the order of the columns: number of values and unit."""
_FIRST_S: Final = 0.5
_AXES: Final = {3: "xyz", 4: "wxyz"}


def can_channel(message: str, *, series: bool = False) -> Channel:
    """Return the entry of the table for one kind of message; with ``series`` as a series."""
    units: dict[str, str] = {}
    for field, (length, unit) in MESSAGES[message].items():
        names = [field] if length == 1 else [f"{field}_{axis}" for axis in _AXES[length]]
        units |= dict.fromkeys(names, unit)
    return signals_channel(
        f"can_{message}",
        units=units,
        source_name=message,
        series=series,
    )


class CanMessages(msgspec.Struct, frozen=True):
    """What a worker needs to build the member: messages of ``after_us < utime <= until_us``,
    relative to the latter.
    """

    message: str
    file: str
    after_us: int
    until_us: int

    def member(self, read: Callable[[str], bytes]) -> bytes:
        """Return the member's bytes; raise SourceError."""
        times, values = _parse_file(read, self.message, self.file)
        mask = (times > self.after_us) & (times <= self.until_us)
        ages_s = (self.until_us - times[mask, None]) * 1e-6
        rows = np.concatenate([ages_s, values[mask]], 1)
        channel = can_channel(self.message)
        return KINDS[channel.kind].encode(rows, channel)


class CanBus:
    """The messages of all scenes; nuScenes lacks several scenes and messages.

    ``has_series``: they are series.
    """

    def __init__(self, *, has_series: bool) -> None:
        self.has_series = has_series
        self.channels = tuple(can_channel(message, series=has_series) for message in MESSAGES)

    def series(
        self,
        files: SourceFiles,
        scene: str,
        times_ns: Sequence[int],
    ) -> tuple[
        tuple[str, ...],
        dict[str, tuple[I64, F64]],
    ]:
        """Return the files of a scene with samples at these times, and their series; raise
        SourceError.
        """
        files_found = []
        series = {}
        if self.has_series:
            for message in MESSAGES:
                file = f"{FOLDER}/{scene}_{message}.json"
                check_inside(file, f"scene '{scene}'")
                if files.facts(file) is not None:
                    times_us, values = parse_can(files.read(file), message, file)
                    series[f"can_{message}"] = signal_series(times_us * NS_PER_US, values, times_ns)
                    files_found.append(file)
        return tuple(files_found), series

    def members(self, rows: SceneRows, number: int) -> Iterator[FileMember]:
        """Yield the members of one sample, as far as their files are there; none of series."""
        if self.has_series:
            return
        keyframes = rows.keyframes
        sample = rows.samples[number]
        until_us = rows.timestamp_us[number]
        before = int(keyframes.joined["sample"].links["prev"][sample])
        after_us = until_us - round(_FIRST_S * 1e6)
        if before >= 0:
            after_us = int(keyframes.timestamp_us[before])
        for channel in self.channels:
            file = f"{FOLDER}/{rows.scene.name}_{channel.source_name}.json"
            messages = CanMessages(
                message=str(channel.source_name),
                file=file,
                after_us=after_us,
                until_us=until_us,
            )
            ref = msgspec.json.encode(messages).decode()
            yield FileMember(channel.field, ref, (file,))


@lru_cache(maxsize=8)
def _parse_file(
    read: Callable[[str], bytes],
    message: str,
    file: str,
) -> tuple[I64, F64]:
    """Return times [us] (N,) and values (N, C) of a file; kept for the samples of its scene that
    follow.
    """
    return parse_can(read(file), message, file)


def parse_can(data: bytes, message: str, file: str) -> tuple[I64, F64]:
    """Return times [us] (N,), ascending, and values (N, C) of a file of the CAN bus; raise
    SourceError.
    """
    fields = MESSAGES[message]
    records = read_json(
        data,
        f"CAN file '{file}'",
        _RECORDS[message],
        f"is not a list of messages '{message}'",
    )
    times = np.array([record.utime for record in records], np.int64)
    is_backward = np.diff(times) < 0
    if is_backward.any():
        row = int(np.argmax(is_backward)) + 1
        raise SourceError(
            f"CAN file '{file}': message {row} of {times[row]} us is earlier than the one before it"
        )
    columns = [
        np.array([getattr(record, field) for record in records], np.float64).reshape(
            len(records), length
        )
        for field, (length, _) in fields.items()
    ]
    return times, np.concatenate(columns, 1)


_TYPES: Final[dict[int, Any]] = {
    1: float,
    3: tuple[float, float, float],
    4: tuple[float, float, float, float],
}


def _make_list_type(message: str) -> Any:
    fields = [(field, _TYPES[length]) for field, (length, _) in MESSAGES[message].items()]
    time: Any = ("utime", Annotated[int, Meta(ge=0, lt=2**53)])
    record: Any = msgspec.defstruct(message, [time, *fields], frozen=True)
    return list[record]


_RECORDS: Final[dict[str, Any]] = {message: _make_list_type(message) for message in MESSAGES}
