"""Channels at times of their own (`TimeWindow`): values read from a clip by time, between
measurements where they can.

The samples about each time are read besides those of the frames, of them the channels' members
alone. A channel that is stored for each sample was measured at the sample's time; a series
(:mod:`fuelrail.pipeline.channels.series`) at times of its own. What is not there at a time is None:
a batch has zeros, and ``{name}_valid`` False.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fuelrail.pipeline.channels.laws import LAWS, Motion
from fuelrail.pipeline.channels.series import TIMES, VALUES, one_of_series
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.order.windows import IMAGES, SAME_NS, TimeWindow
from fuelrail.pipeline.transforms.ego import IDENTITY

if TYPE_CHECKING:
    from fuelrail.loaders.records import Source
    from fuelrail.pipeline.channels.kinds import Value
    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.pipeline.dtypes import I64
    from fuelrail.pipeline.order.windows import Interpolation, Window
    from fuelrail.pipeline.transforms.ego import BevMap

    TimedValues = Mapping[str, Sequence[Value | None]]
    """The values of channels at their times, by name."""

_NEAREST: Final = frozenset({"image", "points", "ragged"})


class TimedChannel(NamedTuple):
    """A channel at K times of its own; ``channel`` is the entry of the value at one of them."""

    channel: Channel
    is_series: bool
    offsets_ns: I64
    interpolation: Interpolation
    reach_ns: int | None

    def read(
        self,
        time_ns: int,
        timed_samples: Sequence[tuple[int, Mapping[str, Value | None]]],
    ) -> list[Value | None]:
        """Return the values at the K times about a sample's time, None for those that are not
        there.

        ``timed_samples`` are samples at ascending times [ns], with their values.
        """
        name = self.channel.name
        times = np.array([time for time, _ in timed_samples], np.int64)
        values: Any = [of_sample[name] for _, of_sample in timed_samples]
        if self.is_series:
            parts = [part for part in values if part is not None]
            stamps = [times[:0]]
            stamps += [part[TIMES] for part in parts]
            times, order = np.unique(np.concatenate(stamps), return_index=True)
            if parts:
                values = np.concatenate([part[VALUES] for part in parts])[order]
        if not len(times):
            return [None] * len(self.offsets_ns)
        return resampled(
            times,
            values=values,
            sample_times=time_ns + self.offsets_ns,
            interpolation=self.interpolation,
            reach_ns=self.reach_ns,
        )


def resampled(
    times: I64,
    values: Sequence[Value | None],
    sample_times: I64,
    interpolation: Interpolation,
    reach_ns: int | None,
) -> list[Value | None]:
    """Return the values at ``sample_times`` (K,) from those at ``times`` (M,), which ascend.

    All times are in ns.

    `ChannelWindow` says what each interpolation takes, and what is not there: None.
    """
    before_index = np.searchsorted(times, sample_times + SAME_NS, side="right") - 1
    low = np.maximum(before_index, 0)
    high = np.minimum(before_index + 1, len(times) - 1)
    before = np.abs(sample_times - times[low])
    after = np.abs(times[high] - sample_times)
    is_there = sample_times >= times[0] - SAME_NS
    is_there &= sample_times <= times[-1] + SAME_NS
    # The share of the later one of the two measurements about each time.
    if interpolation == "linear":
        distance = np.maximum(times[high] - times[low], 1)
        share = np.where(before <= SAME_NS, 0.0, before / distance)
    elif interpolation == "nearest":
        share = np.where(after < before, 1.0, 0.0)
        if reach_ns is not None:
            is_there[:] = True
    else:
        share = np.zeros(len(sample_times))
        if reach_ns is not None:
            is_there |= before_index >= 0
    if reach_ns is not None:
        is_there &= (share == 1) | (before <= reach_ns)
        is_there &= (share == 0) | (after <= reach_ns)
    sampled: list[Value | None] = []
    for low_index, high_index, weight, exists in zip(
        low.tolist(),
        high.tolist(),
        share.tolist(),
        is_there.tolist(),
        strict=True,
    ):
        earlier: Any = values[low_index]
        later: Any = values[high_index]
        if not exists:
            sampled.append(None)
        elif weight == 0:
            sampled.append(earlier)
        elif weight == 1:
            sampled.append(later)
        elif earlier is None or later is None:
            sampled.append(None)
        else:
            first = np.asarray(earlier, np.float64) * (1 - weight)
            second = np.asarray(later, np.float64) * weight
            dtype = np.asarray(earlier).dtype
            sampled.append(np.asarray(first + second, dtype))
    return sampled


class TimedChannels(NamedTuple):
    """All channels at times of their own, by name; of what is read for a sample, ``num_frames``
    are its frames.
    """

    num_frames: int = 1
    by_name: Mapping[str, TimedChannel] = {}

    def set_up(self, sources: Sequence[Source]) -> None:
        """Have the readers read no more than these channels of samples that are no frames."""
        for source in sources:
            reader = source.reader
            reader.num_frames = self.num_frames if self.by_name else None
            reader.timed = tuple(
                channel for channel in reader.channels if channel.name in self.by_name
            )

    def read(
        self,
        time_ns: int,
        timed_samples: Collection[tuple[int, Mapping[str, Value | None]]],
    ) -> TimedValues:
        """Return the values of each channel about a sample's time, from those of samples at
        their times.
        """
        ordered = sorted(timed_samples, key=lambda channel: channel[0])
        return {name: channel.read(time_ns, ordered) for name, channel in self.by_name.items()}

    def moved(self, values: TimedValues, bev: BevMap) -> TimedValues:
        """Return the values moved with the augmented ego frame, by the law of each channel."""
        if bev is IDENTITY:
            return values
        motion = Motion({}, bev, {})
        moved = {}
        for name, channel_values in values.items():
            channel = self.by_name[name].channel
            move = LAWS[channel.law.name].move
            moved[name] = [
                None if value is None else move(value, channel, motion) for value in channel_values
            ]
        return moved


def timed_channels(window: Window | None, channels: Sequence[Channel]) -> TimedChannels:
    """Choose how each channel of a window in seconds is read; ``channels`` are the selected ones
    and attributes.

    Raises ConfigError for a name that is not among them, and for a channel that has no value at a
    time of its own.
    """
    num_frames = 1 if window is None else len(window.frames)
    if not isinstance(window, TimeWindow):
        return TimedChannels(num_frames)
    by_name = {channel.name: channel for channel in channels}
    timed = {}
    for name, settings in window.channels.items():
        if name == IMAGES:
            continue
        if name not in by_name:
            raise ConfigError(
                f"window: '{name}' is not a selected channel or attribute; there are: "
                f"{', '.join(by_name) or 'none'}; select it (Transforms.select), or give "
                f"'{IMAGES}' for the frames"
            )
        stored = by_name[name]
        channel = one_of_series(stored) or stored
        law = LAWS[channel.law.name]
        if law.moves and not (
            channel.law.name.startswith("ego_") and channel.frame in (None, "ego")
        ):
            raise ConfigError(
                f"window: '{name}' (law {channel.law.name}, frame {channel.frame}) moves "
                "with the images or a sensor, so it has the times of the frames: leave it "
                f"out, '{IMAGES}' is its window too"
            )
        if channel.kind == "tokens" and channel.shape == (None,):
            raise ConfigError(
                f"window: '{name}' are tokens of varying number, which have no times of their own"
            )
        is_linear = channel.kind == "array" and channel.numpy_dtype.kind == "f" and not law.moves
        if settings.interpolation == "linear" and not is_linear:
            raise ConfigError(
                f"window: '{name}' (kind {channel.kind}, {channel.dtype or 'no numbers'}, "
                f"law {channel.law.name}) has nothing between two values: use 'nearest' or 'hold'"
            )
        usual: Interpolation = "hold"
        if is_linear:
            usual = "linear"
        elif law.moves or channel.kind in _NEAREST:
            usual = "nearest"
        timed[name] = TimedChannel(
            channel=channel,
            is_series=channel is not stored,
            offsets_ns=np.array(settings.offsets_ns, np.int64),
            interpolation=settings.interpolation or usual,
            reach_ns=settings.reach_ns,
        )
    return TimedChannels(num_frames, timed)
