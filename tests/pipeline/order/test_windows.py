"""Temporal windows against a plain search through the clips, for every padding policy and any stored order."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuelrail.pipeline.errors import FuelrailError, OrderError
from fuelrail.pipeline.format.attributes import ClipTable
from fuelrail.pipeline.order.compile import plain as plain_settings
from fuelrail.pipeline.order.windows import (
    ChannelWindow,
    FrameWindow,
    TimeWindow,
    WindowLookup,
    as_window,
    window_lookup,
)
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
    return FrameWindow(
        frames=tuple(frames),
        stride=draw(st.integers(1, 3)),
        pad=draw(st.sampled_from(pads)),
    )


def table(pairs):
    clips, frames = zip(*pairs, strict=True)
    return ClipTable.build(np.array(clips), np.array(frames))


def find_window(pairs, window, sample):
    """The window of one sample, found by looking."""
    place = {pair: row for row, pair in enumerate(pairs)}
    clip, frame = pairs[sample]
    inside = sorted(f for c, f in pairs if c == clip)
    frames_found = []
    for offset in window.frames:
        sought = frame + offset * window.stride
        present = sought in inside
        if not present:
            beyond = (
                [f for f in inside if f > sought]
                if offset < 0
                else [f for f in inside[::-1] if f < sought]
            )
            sought = beyond[0] if window.pad == "repeat_edge" else frame
        frames_found.append((place[clip, sought], present))
    return frames_found


@given(stored_clips(), frame_windows())
def test_windows_are_those_found_by_looking(pairs, window):
    lookup = WindowLookup(table(pairs), window)
    samples = np.arange(len(pairs))
    rows, present = lookup(samples)
    assert rows.shape == present.shape == (len(pairs), len(window.frames))
    assert rows.dtype == np.int64
    for sample in samples.tolist():
        frames = list(zip(rows[sample].tolist(), present[sample].tolist(), strict=True))
        assert frames == find_window(pairs, window, sample)
    assert np.array_equal(lookup.complete(), present.all(axis=1))


def test_a_split_of_more_clips_than_a_chunk_is_complete_everywhere_but_at_starts():
    lengths = [30] * 3000
    clips = np.repeat(np.arange(3000), lengths)
    frames = np.tile(np.arange(30), 3000)
    shuffled = np.random.default_rng(0).permutation(len(clips))
    complete = WindowLookup(
        ClipTable.build(clips[shuffled], frames[shuffled]),
        FrameWindow(frames=(-1, 0), stride=2, pad="drop"),
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
    assert convert(
        {"frames": [-2, -1, 0], "stride": 2, "pad": "mask"}, FrameWindow, "w"
    ) == FrameWindow(frames=(-2, -1, 0), stride=2, pad="mask")


@st.composite
def timed_clips(draw):
    """(clip, time in ms) of each stored sample, in any order, at any rates, and the number of each in its clip."""
    times = draw(
        st.lists(
            st.sets(st.integers(0, 400), min_size=1, max_size=12),
            min_size=1,
            max_size=5,
        )
    )
    rows = [
        (clip, number, ms * 1_000_000)
        for clip, clip_times in enumerate(times)
        for number, ms in enumerate(sorted(clip_times))
    ]
    return draw(st.permutations(rows))


@st.composite
def time_windows(draw):
    offsets = draw(st.lists(st.integers(-300, 300).filter(bool), max_size=3, unique=True))
    offsets.insert(draw(st.integers(0, len(offsets))), 0)
    images = ChannelWindow(
        seconds=tuple(ms / 1e3 for ms in offsets),
        interpolation=draw(st.sampled_from([None, "nearest", "hold"])),
        max_staleness_s=draw(st.sampled_from([None, 0.0, 0.02, 0.1])),
        pad=draw(st.sampled_from(PADS)),
    )
    speed_offsets = draw(st.lists(st.integers(-300, 300), max_size=3, unique=True))
    speed = (
        {"speed": ChannelWindow(seconds=tuple(ms / 1e3 for ms in speed_offsets))}
        if speed_offsets
        else {}
    )
    return TimeWindow({"img": images, **speed})


def find_time_window(rows, window, sample):
    """The frames of a sample by looking at all times of its clip, one after the other."""
    clip, _, now = rows[sample]
    clip_rows = sorted(
        (time, row) for row, (row_clip, _, time) in enumerate(rows) if row_clip == clip
    )
    images = window.channels["img"]
    frames = []
    for offset in images.offsets_ns:
        sought = now + offset
        if images.interpolation == "hold":
            before = [clip_row for clip_row in clip_rows if clip_row[0] <= sought]
            time, row = before[-1] if before else clip_rows[0]
            is_present = bool(before) and (
                sought <= clip_rows[-1][0] or images.max_staleness_s is not None
            )
        else:
            time, row = min(
                clip_rows,
                key=lambda clip_row: (abs(clip_row[0] - sought), clip_row[0]),
            )
            steps = [b[0] - a[0] for a, b in pairwise(clip_rows)] or [0]
            is_present = (
                clip_rows[0][0] - steps[0] // 2 <= sought <= clip_rows[-1][0] + steps[-1] // 2
            )
            is_present = is_present or images.max_staleness_s is not None
        if images.max_staleness_s is not None:
            is_present = is_present and abs(time - sought) <= images.max_staleness_s * 1e9
        frames.append(
            (
                row if is_present or images.pad == "repeat_edge" else sample,
                is_present,
            )
        )
    return frames


@given(timed_clips(), time_windows())
def test_windows_in_seconds_are_those_read_by_timestamps(rows, window):
    clips, numbers, times = zip(*rows, strict=True)
    lookup = window_lookup(
        ClipTable.build(np.array(clips), np.array(numbers)).at_times(times),
        window,
    )
    samples, present = lookup(np.arange(len(rows)))
    num_frames = len(window.frames)
    assert samples.shape == present.shape == (len(rows), lookup.num_rows)
    for sample in range(len(rows)):
        frames = list(
            zip(
                samples[sample, :num_frames].tolist(),
                present[sample, :num_frames].tolist(),
                strict=True,
            )
        )
        assert frames == find_time_window(rows, window, sample)
        # What channels of other times need: the samples of the clip before and after each of these times.
        neighbours = samples[sample, num_frames:].tolist()
        assert present[sample, num_frames:].all()
        row_by_time = {times[row]: row for row, clip in enumerate(clips) if clip == clips[sample]}
        assert set(neighbours) <= set(row_by_time.values())
        for offset in window.own_offsets:
            sought = times[sample] + offset
            for near in (
                max(
                    (time for time in row_by_time if time <= sought),
                    default=None,
                ),
                min(
                    (time for time in row_by_time if time >= sought),
                    default=None,
                ),
            ):
                assert near is None or row_by_time[near] in neighbours


@given(
    st.integers(1, 50),
    st.integers(1, 30),
    st.lists(st.integers(-8, 8).filter(bool), max_size=3, unique=True),
    st.integers(1, 3),
    st.sampled_from(PADS),
)
def test_seconds_and_steps_agree_at_a_constant_rate(hz, length, frames, stride, pad):
    frames = (*frames, 0)
    seconds = tuple(frame * stride / hz for frame in frames)
    clips = np.repeat([0, 1], length)
    numbers = np.tile(np.arange(length), 2)
    table = ClipTable.build(clips, numbers).at_times(
        np.round(numbers / hz * 1e9).astype(np.int64) + clips * 10**15
    )
    in_steps = window_lookup(table, FrameWindow(frames=frames, stride=stride, pad=pad))
    for interpolation in ("nearest", "hold"):
        images = ChannelWindow(seconds=seconds, interpolation=interpolation, pad=pad)
        in_seconds = window_lookup(table, TimeWindow({"img": images}))(np.arange(2 * length))
        expected = in_steps(np.arange(2 * length))
        assert np.array_equal(in_seconds.present, expected.present)
        assert np.array_equal(in_seconds.samples, expected.samples)


def test_times_that_do_not_ascend_are_refused_with_the_samples():
    table = ClipTable.build([0, 0, 0], [0, 1, 2]).at_times([10, 30, 20])
    with pytest.raises(OrderError, match="those of samples 1 and 2 of the split"):
        window_lookup(table, TimeWindow({"img": ChannelWindow(seconds=(0.0,))}))


def test_a_window_of_seconds_comes_from_a_dict_by_name():
    window = as_window(
        {
            "img": [-0.5, 0],
            "speed": {"from": -0.2, "to": 0, "hz": 10, "interpolation": "hold"},
        }
    )
    assert window.frames == (-500_000_000, 0)
    assert window.own_offsets == (-200_000_000, -100_000_000, 0)
    assert as_window(plain_settings(window)) == window == as_window(window)
    assert as_window({"frames": [-1, 0]}) == FrameWindow(frames=(-1, 0))
    assert as_window({"speed": [0.0]}).frames == (0,)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"img": [-0.5]}, "needs the offset 0"),
        (
            {"img": {"seconds": [0], "interpolation": "linear"}},
            "is 'nearest' or 'hold'",
        ),
        ({"img": [0, 0]}, "each once"),
        ({"img": []}, "has seconds="),
        ({"speed": {"from": -1, "to": 0}}, "all of from, to and hz"),
        ({"speed": {"from": 0, "to": -1, "hz": 10}}, "a whole number"),
        ({"speed": {"from": 0, "to": 1, "hz": 0.3}}, "a whole number"),
        ({"speed": {"seconds": [0], "pad": "mask"}}, "pad is of 'img' only"),
        ({"speed": {"seconds": [0], "max_staleness_s": -1}}, "max_staleness_s"),
        ({"speed": {"seconds": [1e9]}}, "may reach"),
        ({"speed": {"seconds": [0], "hz": 10}}, "all of from, to and hz"),
        ({"speed": {"second": [0]}}, "second"),
        ({"speed": 3}, "window.speed=3"),
        ({}, "window"),
    ],
)
def test_windows_that_are_none_are_refused(value, words):
    with pytest.raises(FuelrailError, match=re.escape(words)):
        as_window(value)
