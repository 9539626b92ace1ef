"""Temporal windows: the frames of its clip that belong to a sample, and what replaces missing ones.

A window is a list of offsets in frames, for example ``frames=[-2, -1, 0]`` with ``stride=2`` for
frames f - 4, f - 2 and f; or offsets in seconds for the images and for single channels
(`TimeWindow`). Windows never cross a clip. They look at all frames that the split stores, whichever
of them a filter selects.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from fuelrail.pipeline.errors import ConfigError, OrderError
from fuelrail.pipeline.order.epoch import Occurrences
from fuelrail.pipeline.settings import (
    AtLeast0,
    Positive,
    Settings,
    as_settings,
    check_types,
)

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from fuelrail.pipeline.dtypes import I64, Mask
    from fuelrail.pipeline.format.attributes import ClipTable

_MAX_REACH: Final = 2**30
_CHUNK: Final = 1 << 16
_MAX_OFFSETS: Final = 512
_MAX_REACH_NS: Final = 10**15

IMAGES: Final = "img"
"""The entry of a `TimeWindow` for the images, and for all else that belongs to a frame."""
SAME_NS: Final = 1_000
"""Times that differ by this much or less [ns] are the same: rates such as 30 Hz are no whole
numbers of nanoseconds.
"""

Padding = Literal["repeat_edge", "repeat_current", "mask", "drop"]
Interpolation = Literal["nearest", "hold", "linear"]


class FrameWindow(Settings, frozen=True):
    """Frames that make one sample: T offsets times ``stride``, in the order of the T axis.

    What replaces a frame that the clip does not have (``pad``):

    * ``repeat_edge``: the clip's frame nearest to it on its side of the sample: at a clip's start
      its first one;
    * ``repeat_current``: the sample itself, as BEVDet4D does;
    * ``mask``: nothing; its place is marked absent;
    * ``drop``: samples without all of their frames are not in the epoch.
    """

    frames: tuple[int, ...]
    """Offsets from the sample's own frame; each once, 0 among them."""
    stride: Positive = 1
    """Frames between neighbouring offsets."""
    pad: Padding = "repeat_edge"

    def __post_init__(self) -> None:
        check_types(self, OrderError)
        if 0 not in self.frames or len(set(self.frames)) != len(self.frames):
            raise OrderError(
                "a window's frames must be different offsets with 0 among them, got "
                f"{list(self.frames)}"
            )
        if max(1, *map(abs, self.frames)) * self.stride >= _MAX_REACH:
            raise OrderError(
                f"a window may reach less than 2**30 frames, got {list(self.frames)} x "
                f"{self.stride}"
            )

    @property
    def current(self) -> int:
        """Index of the sample itself on the T axis."""
        return self.frames.index(0)

    @property
    def offsets(self) -> I64:
        """Offsets in frames, stride included: int64 (T,)."""
        return np.array(self.frames, dtype=np.int64) * self.stride


class ChannelWindow(Settings, frozen=True, kw_only=True):
    """Times relative to the sample's, at which one channel is read, and how: ``seconds``, or
    ``from``, ``to``, ``hz``.

    In a dict ``start`` and ``end`` are called ``from`` and ``to``; a list stands for ``{"seconds":
    [...]}``. Raises OrderError for values that are not allowed.

    Attributes:
        seconds: offsets from the sample's time [s].
        start, end, hz: offsets from ``start`` to ``end`` [s], both included, at a rate [1/s].
        interpolation: ``nearest``: the measurement nearest in time, of two equally near ones the
            earlier. ``hold``: the last one at or before the time. ``linear``: between the one
            before and the one after. None: by the channel's kind.
        max_staleness_s: greatest distance in time [s] of a measurement that is used; None: any, but
            none is used before the clip's first measurement or after its last one.
        pad: of ``img`` only: what replaces a frame that the clip does not have, as of
            `FrameWindow`.
    """

    seconds: tuple[float, ...] = ()
    start: float | None = msgspec.field(default=None, name="from")
    end: float | None = msgspec.field(default=None, name="to")
    hz: float | None = None
    interpolation: Interpolation | None = None
    max_staleness_s: AtLeast0 | None = None
    pad: Padding = "repeat_edge"

    def __post_init__(self) -> None:
        check_types(self, OrderError)
        num_bounds = 3 - (self.start, self.end, self.hz).count(None)
        num_needed = 0 if self.seconds else 3
        if num_bounds != num_needed:
            raise OrderError("a channel's window has seconds=[...], or all of from, to and hz")
        offsets = self.offsets_ns
        if len(offsets) > _MAX_OFFSETS or len(set(offsets)) != len(offsets):
            raise OrderError(
                f"a channel's window has at most {_MAX_OFFSETS} offsets, each once, got "
                f"{len(offsets)}"
            )
        if max(map(abs, offsets)) > _MAX_REACH_NS:
            raise OrderError(f"a window may reach {_MAX_REACH_NS * 1e-9:g} s, got {self}")

    @property
    def offsets_ns(self) -> tuple[int, ...]:
        """The offsets from the sample's time [ns]."""
        if self.start is None or self.end is None or self.hz is None:
            return tuple(round(offset_s * 1e9) for offset_s in self.seconds)
        steps = (self.end - self.start) * self.hz
        is_in_range = self.hz > 0 and 0 <= steps < _MAX_OFFSETS
        if not is_in_range or abs(steps - round(steps)) >= 1e-6:
            raise OrderError(
                f"from {self.start} to {self.end} s at {self.hz} Hz is {steps:g} steps; a "
                f"whole number in 0 .. {_MAX_OFFSETS - 1} is needed"
            )
        offsets_ns = []
        for number in range(round(steps) + 1):
            offset_s = self.start + number / self.hz
            offsets_ns.append(round(offset_s * 1e9))
        return tuple(offsets_ns)

    @property
    def reach_ns(self) -> int | None:
        """The greatest distance [ns] of a measurement that is used; None: any within the clip."""
        if self.max_staleness_s is None:
            return None
        return round(self.max_staleness_s * 1e9) + SAME_NS


class TimeWindow(Settings, frozen=True):
    """Offsets in seconds for the images (``img``, with all that belongs to a frame) and for
    channels of their own.

    Frames are found by the samples' times. An entry of the name of a channel or attribute has an
    axis of its own times. Raises OrderError for offsets of ``img`` without 0, and for an
    interpolation or padding that it cannot have.
    """

    channels: dict[str, ChannelWindow]

    def __post_init__(self) -> None:
        check_types(self, OrderError)
        for name, window in self.channels.items():
            if name != IMAGES and window.pad != "repeat_edge":
                raise OrderError(
                    f"window of '{name}': pad is of '{IMAGES}' only; missing values are marked"
                )
        if 0 not in self.frames or self.images.interpolation == "linear":
            raise OrderError(
                f"the window of '{IMAGES}' needs the offset 0, and is 'nearest' or 'hold', "
                f"got {self}"
            )
        if len(self.own_offsets) > _MAX_OFFSETS:
            raise OrderError(
                f"windows of channels have {len(self.own_offsets)} times, at most {_MAX_OFFSETS}"
            )

    @property
    def images(self) -> ChannelWindow:
        """The window of the frames; without ``img`` the sample alone."""
        return self.channels.get(IMAGES, ChannelWindow(seconds=(0.0,)))

    @property
    def own_offsets(self) -> tuple[int, ...]:
        """The offsets [ns] of all channels with times of their own, each once, ascending."""
        offsets_ns: set[int] = set()
        for name, window in self.channels.items():
            if name != IMAGES:
                offsets_ns.update(window.offsets_ns)
        return tuple(sorted(offsets_ns))

    @property
    def frames(self) -> tuple[int, ...]:
        """The offsets of the frames [ns]."""
        return self.images.offsets_ns

    @property
    def offsets(self) -> I64:
        """The offsets of the frames [ns]: int64 (T,)."""
        return np.array(self.frames, dtype=np.int64)

    @property
    def current(self) -> int:
        """Index of the sample itself on the T axis."""
        return self.frames.index(0)

    @property
    def pad(self) -> Padding:
        """What replaces a frame that the clip does not have."""
        return self.images.pad


Window: TypeAlias = FrameWindow | TimeWindow


def has_frames(window: Window | None) -> bool:
    """Return whether an axis of frames follows B in a batch."""
    if isinstance(window, FrameWindow):
        return True
    return window is not None and IMAGES in window.channels


def as_window(value: Any) -> Window | None:
    """Return a window: itself, of the fields of a `FrameWindow`, or of offsets in seconds by name.

    Raises ConfigError and OrderError for what is none.
    """
    if value is None or isinstance(value, FrameWindow | TimeWindow):
        return value
    if isinstance(value, str | os.PathLike):
        return as_settings(value, FrameWindow, "window")
    if not isinstance(value, Mapping) or not value:
        raise ConfigError(
            f"window={value!r:.200} must be a FrameWindow or a TimeWindow, a dict of the "
            "fields of one, the path of a YAML file, or None"
        )
    if value.keys() & {*FrameWindow.__struct_fields__}:
        return as_settings(value, FrameWindow, "window")
    windows = value
    if value.keys() == {"channels"} and isinstance(value["channels"], Mapping):
        windows = value["channels"]
    channels = {}
    for name, fields in windows.items():
        if isinstance(fields, list | tuple):
            fields = {"seconds": fields}
        channels[name] = as_settings(fields, ChannelWindow, f"window.{name}")
    return TimeWindow(channels)


class WindowSamples(NamedTuple):
    """The samples of some windows: numbers int64 (B, T), and which of them are the requested
    frames: bool (B, T).

    Where ``present`` is False the number is that of the stand-in; with ``pad="mask"`` the sample's
    own, to be left out.
    """

    samples: I64
    present: Mask


class WindowLookup:
    """Maps sample numbers to the samples of their windows.

    Pure; safe to call from any number of threads.
    """

    def __init__(self, clips: ClipTable, window: Window) -> None:
        self.window = window
        self._clips = clips
        self._offsets = window.offsets
        self.num_rows = len(self._offsets)
        """Samples that are read for one: its frames, and then those that only channels of other
        times need.
        """

    def __call__(self, samples: ArrayLike) -> WindowSamples:
        """Return the windows of ``samples`` (integers (B,), numbers within the split)."""
        current = np.asarray(samples, dtype=np.int64)
        clips = self._clips
        current_keys = clips.keys[clips.ranks[current]]
        keys = current_keys[:, None] + self._offsets
        # A key that has run over its clip's ends lands between the clips: frames take half of the
        # frame bits.
        places = np.searchsorted(clips.keys, keys)
        last = len(clips) - 1
        present = clips.keys[np.minimum(places, last)] == keys
        if self.window.pad == "repeat_edge":
            # The first frame behind a missing past one, and the last before a missing future one;
            # both of this clip, as the current frame is on that side.
            places -= ~present & (self._offsets > 0)
            frames = clips.samples[places].astype(np.int64)
        else:
            frames = clips.samples[np.where(present, places, 0)].astype(np.int64)
            frames = np.where(present, frames, current[:, None])
        return WindowSamples(frames, present)

    def without(self, samples: I64) -> WindowLookup:
        """Return the lookup of clips without these samples; with ``pad="drop"`` nobody asks for
        what shows one.
        """
        if self.window.pad == "drop" or not len(samples):
            return self
        clips = self._clips.without(samples)
        return window_lookup(clips, self.window)

    def find(self, samples: ArrayLike) -> Occurrences:
        """Return the samples whose windows show ``samples`` (n,), stand-ins included: by sample,
        then ascending.
        """
        clips = self._clips
        numbers = np.asarray(samples, dtype=np.int64)
        clip_by_rank = clips.clip_numbers()
        clip_of_sample = clip_by_rank[clips.ranks[numbers]]
        indices = [np.zeros(0, np.int64)]
        window_samples = [np.zeros(0, np.int64)]
        for index, clip in enumerate(clip_of_sample.tolist()):
            first, end = np.searchsorted(clip_by_rank, (clip, clip + 1))
            clip_samples = clips.samples[first:end].astype(np.int64)
            is_shown = self(clip_samples).samples == numbers[index]
            centres = np.sort(clip_samples[is_shown.any(axis=1)])
            indices.append(np.full(len(centres), index))
            window_samples.append(centres)
        return Occurrences(
            np.concatenate(indices),
            np.concatenate(window_samples),
        )

    def complete(self) -> Mask:
        """Return which samples of the split have all their frames: bool (n,)."""
        num_samples = len(self._clips)
        parts: list[Mask] = [np.empty(0, dtype=bool)]
        for start in range(0, num_samples, _CHUNK):
            end = min(start + _CHUNK, num_samples)
            present = self(np.arange(start, end)).present
            parts.append(np.all(present, axis=1))
        return np.concatenate(parts)


def window_lookup(clips: ClipTable, window: Window) -> WindowLookup:
    """Return the map of samples to their windows; raise OrderError as `TimeLookup`."""
    if isinstance(window, TimeWindow):
        return TimeLookup(clips, window)
    return WindowLookup(clips, window)


class TimeLookup(WindowLookup):
    """Maps sample numbers to the samples of windows in seconds: the frames, then those about each
    other time.

    Behind the T frames come, for each of the K offsets of channels, the samples before and after
    it: 2 K, all present. Raises OrderError where times do not ascend with the frames of a clip.
    """

    def __init__(self, clips: ClipTable, window: TimeWindow) -> None:
        super().__init__(clips, window)
        self._holds = window.images.interpolation == "hold"
        self._reach_ns = window.images.reach_ns
        self._own = np.array(window.own_offsets, dtype=np.int64)
        self.num_rows += 2 * len(self._own)
        assert clips.times_ns is not None, "windows in seconds need the times of the clips"
        self._times = clips.times_ns
        clip = clips.clip_numbers()
        is_falling = np.diff(self._times) <= 0
        falls = np.flatnonzero(is_falling & (clip[1:] == clip[:-1]))
        if falls.size:
            rank = falls[0]
            first, second = clips.samples[rank : rank + 2].tolist()
            raise OrderError(
                "windows in seconds need times that ascend in each clip; those of samples "
                f"{first} and {second} of the split, neighbours in a clip, do not: use a "
                "window in frames"
            )

    def __call__(self, samples: ArrayLike) -> WindowSamples:
        """Return the windows of ``samples`` (integers (B,), numbers within the split): (B, T + 2
        K).
        """
        clips = self._clips
        times = self._times
        numbers = np.asarray(samples, dtype=np.int64)
        ranks = clips.ranks[numbers].astype(np.int64)[:, None]
        first, end = clips.bounds(ranks)
        last = end - 1
        frame_ns = times[ranks] + self._offsets
        before = self._last_before(frame_ns, first, end)
        low = np.maximum(before, first)
        high = np.minimum(before + 1, last)
        nearest = low
        if not self._holds:
            low_distance = np.abs(frame_ns - times[low])
            high_distance = np.abs(times[high] - frame_ns)
            nearest = np.where(high_distance < low_distance, high, low)
        distance = np.abs(times[nearest] - frame_ns)
        if self._reach_ns is not None:
            present = distance <= self._reach_ns
        else:
            first_ns = times[first]
            present = frame_ns >= first_ns - SAME_NS
            present &= frame_ns <= times[last] + SAME_NS
            if not self._holds:
                # The first and the last frame stand for half an interval beyond them, as all
                # others do.
                last_interval = np.maximum(end - 2, first)
                edge = np.where(frame_ns < first_ns, first, last_interval)
                behind_edge = np.minimum(edge + 1, last)
                half_interval = (times[behind_edge] - times[edge]) // 2
                present |= distance <= half_interval
        if self._holds:
            present &= before >= first
        if self.window.pad != "repeat_edge":
            nearest = np.where(present, nearest, ranks)
        channel_ns = times[ranks] + self._own
        before = self._last_before(channel_ns, first, end)
        low = np.maximum(before, first)
        is_exact = (before < first) | (channel_ns - times[low] <= SAME_NS)
        high = np.where(is_exact, low, np.minimum(low + 1, last))
        neighbours = np.stack([low, high], axis=-1).reshape(len(ranks), -1)
        num_neighbours = neighbours.shape[1]
        present = np.pad(
            present,
            ((0, 0), (0, num_neighbours)),
            constant_values=True,
        )
        window_ranks = np.hstack([nearest, neighbours])
        return WindowSamples(
            clips.samples[window_ranks].astype(np.int64),
            present,
        )

    def _last_before(self, times_ns: I64, first: I64, end: I64) -> I64:
        """Return the rank of the last sample at or before each time, ``first`` - 1 where there
        is none: bisection.
        """
        limits_ns = times_ns + SAME_NS
        low = np.broadcast_to(first - 1, times_ns.shape)
        high = np.broadcast_to(end, times_ns.shape)
        while (is_open := high - low > 1).any():
            middle = (low + high) // 2
            is_before = self._times[middle] <= limits_ns
            low = np.where(is_open & is_before, middle, low)
            high = np.where(is_open & ~is_before, middle, high)
        return low
