"""Temporal windows against a plain search through the clips, for every padding policy and any stored order."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fuelrail.pipeline.format.attributes import ClipTable
from fuelrail.pipeline.order.windows import FrameWindow, WindowLookup
from fuelrail.pipeline.settings import convert

PADS = ("repeat_edge", "repeat_current", "mask", "drop")


@st.composite
def stored_clips(draw):
    """(clip, frame) of each stored sample, in any order; clips may have holes."""
    frames = draw(st.lists(st.sets(st.integers(0, 12), min_size=1), min_size=1, max_size=6))
    pairs = [(clip, frame) for clip, numbers in enumerate(frames) for frame in sorted(numbers)]
    return draw(st.permutations(pairs))


@st.composite
def frame_windows(draw, pads=PADS):
    frames = draw(st.lists(st.integers(-6, 6).filter(bool), max_size=4, unique=True))
    frames.insert(draw(st.integers(0, len(frames))), 0)
    return FrameWindow(frames=tuple(frames), stride=draw(st.integers(1, 3)), pad=draw(st.sampled_from(pads)))


def table(pairs):
    clips, frames = zip(*pairs, strict=True)
    return ClipTable.build(np.array(clips), np.array(frames))


def plain(pairs, window, sample):
    """The window of one sample, found by looking."""
    place = {pair: at for at, pair in enumerate(pairs)}
    clip, frame = pairs[sample]
    inside = sorted(f for c, f in pairs if c == clip)
    found = []
    for offset in window.frames:
        wanted = frame + offset * window.stride
        present = wanted in inside
        if not present:
            beyond = [f for f in inside if f > wanted] if offset < 0 else [f for f in inside[::-1] if f < wanted]
            wanted = beyond[0] if window.pad == "repeat_edge" else frame
        found.append((place[clip, wanted], present))
    return found


@given(stored_clips(), frame_windows())
def test_windows_are_those_found_by_looking(pairs, window):
    lookup = WindowLookup(table(pairs), window)
    samples = np.arange(len(pairs))
    rows, present = lookup(samples)
    assert rows.shape == present.shape == (len(pairs), len(window.frames))
    assert rows.dtype == np.int64
    for sample in samples.tolist():
        found = list(zip(rows[sample].tolist(), present[sample].tolist(), strict=True))
        assert found == plain(pairs, window, sample)
    assert np.array_equal(lookup.complete(), present.all(axis=1))


def test_a_split_of_more_clips_than_a_chunk_is_complete_everywhere_but_at_starts():
    lengths = [30] * 3000
    clips = np.repeat(np.arange(3000), lengths)
    frames = np.tile(np.arange(30), 3000)
    shuffled = np.random.default_rng(0).permutation(len(clips))
    complete = WindowLookup(
        ClipTable.build(clips[shuffled], frames[shuffled]), FrameWindow(frames=(-1, 0), stride=2, pad="drop")
    ).complete()
    assert np.array_equal(complete, frames[shuffled] >= 2)


def test_clips_sorted_and_shuffled_give_one_table():
    pairs = [(0, 3), (1, 0), (0, 1), (1, 2)]
    clips = table(pairs)
    assert clips.samples.tolist() == [2, 0, 1, 3]
    assert clips.ranks.tolist() == [1, 2, 0, 3]
    assert clips.clip_numbers().tolist() == [0, 0, 1, 1]
    assert len(clips) == 4


def test_a_window_comes_from_settings():
    assert convert({"frames": [-2, -1, 0], "stride": 2, "pad": "mask"}, FrameWindow, "w") == FrameWindow(
        frames=(-2, -1, 0), stride=2, pad="mask"
    )
