"""Temporal windows: the frames of its clip that belong to a sample, and what replaces missing ones.

A window is a list of offsets in frames, for example ``frames=[-2, -1, 0]`` with ``stride=2`` for frames f - 4, f - 2
and f. Windows never cross a clip. They look at all frames that the split stores, whichever of them a filter selects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import numpy as np

from fuelrail.pipeline.errors import OrderError
from fuelrail.pipeline.order.epoch import Shown
from fuelrail.pipeline.settings import Settings, check_types

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from fuelrail.pipeline.format.attributes import ClipTable

_MAX_REACH: Final = 2**30
_CHUNK: Final = 1 << 16

Padding = Literal["repeat_edge", "repeat_current", "mask", "drop"]


class FrameWindow(Settings, frozen=True):
    """Frames that make one sample: T offsets times ``stride``, in the order of the T axis.

    What replaces a frame that the clip does not have (``pad``):

    * ``repeat_edge``: the clip's frame nearest to it on its side of the sample: at a clip's start its first one;
    * ``repeat_current``: the sample itself, as BEVDet4D does;
    * ``mask``: nothing; its place is marked absent;
    * ``drop``: samples without all of their frames are not in the epoch.
    """

    frames: tuple[int, ...]
    """Offsets from the sample's own frame; each once, 0 among them."""
    stride: int = 1
    """Frames between neighbouring offsets, 1 or more."""
    pad: Padding = "repeat_edge"

    def __post_init__(self) -> None:
        check_types(self, OrderError)
        if self.stride < 1:
            raise OrderError(f"a window's stride must be 1 or more, got {self.stride}")
        if 0 not in self.frames or len(set(self.frames)) != len(self.frames):
            raise OrderError(f"a window's frames must be different offsets with 0 among them, got {list(self.frames)}")
        if max(1, *map(abs, self.frames)) * self.stride >= _MAX_REACH:
            raise OrderError(f"a window may reach less than 2**30 frames, got {list(self.frames)} x {self.stride}")

    @property
    def current(self) -> int:
        """Index of the sample itself on the T axis."""
        return self.frames.index(0)

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Offsets in frames, stride included: int64 (T,)."""
        return np.array(self.frames, dtype=np.int64) * self.stride


class WindowSamples(NamedTuple):
    """The samples of some windows: numbers int64 (B, T), and which of them are the requested frames: bool (B, T).

    Where ``present`` is False the number is that of the stand-in; with ``pad="mask"`` the sample's own, to be left out.
    """

    samples: NDArray[np.int64]
    present: NDArray[np.bool_]


class WindowLookup:
    """Maps sample numbers to the samples of their windows. Pure; safe to call from any number of threads."""

    def __init__(self, clips: ClipTable, window: FrameWindow) -> None:
        self.window = window
        self._clips, self._offsets = clips, window.offsets

    def __call__(self, samples: ArrayLike) -> WindowSamples:
        """Return the windows of ``samples`` (integers (B,), numbers within the split)."""
        current = np.asarray(samples, dtype=np.int64)
        clips = self._clips
        wanted = clips.keys[clips.ranks[current]][:, None] + self._offsets
        # A key that has run over its clip's ends lands between the clips: frames take half of the frame bits.
        at = np.searchsorted(clips.keys, wanted)
        present = clips.keys[np.minimum(at, len(clips) - 1)] == wanted
        if self.window.pad == "repeat_edge":
            # The first frame behind a missing past one, and the last before a missing future one; both of this clip,
            # as the current frame is on that side.
            at -= ~present & (self._offsets > 0)
            return WindowSamples(clips.samples[at].astype(np.int64), present)
        found = clips.samples[np.where(present, at, 0)].astype(np.int64)
        return WindowSamples(np.where(present, found, current[:, None]), present)

    def without(self, samples: NDArray[np.int64]) -> WindowLookup:
        """Return the lookup of clips without these samples; with ``pad="drop"`` nobody asks for what shows one."""
        is_whole = self.window.pad == "drop" or not len(samples)
        return self if is_whole else WindowLookup(self._clips.without(samples), self.window)

    def find(self, samples: ArrayLike) -> Shown:
        """Return the samples whose windows show ``samples`` (n,), stand-ins included: by sample, then ascending."""
        clips, asked = self._clips, np.asarray(samples, dtype=np.int64)
        number = clips.clip_numbers()
        which, shown = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for at, clip in enumerate(number[clips.ranks[asked]].tolist()):
            near = clips.samples[slice(*np.searchsorted(number, (clip, clip + 1)))].astype(np.int64)
            centres = np.sort(near[(self(near).samples == asked[at]).any(axis=1)])
            which.append(np.full(len(centres), at))
            shown.append(centres)
        return Shown(np.concatenate(which), np.concatenate(shown))

    def complete(self) -> NDArray[np.bool_]:
        """Return which samples of the split have all their frames: bool (n,)."""
        n = len(self._clips)
        parts = [self(np.arange(low, min(low + _CHUNK, n))).present.all(axis=1) for low in range(0, n, _CHUNK)]
        return np.concatenate(parts) if parts else np.empty(0, dtype=bool)
