"""Lanes: every frame once, in time, never two lanes in one clip, equal steps, few pads, and flags that say so."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fuelrail.pipeline.format.attributes import ClipTable
from fuelrail.pipeline.order.lanes import LaneOrder


def make(lengths, shuffle_seed=None):
    """Table of clips of some lengths, with the clip and frame of each sample."""
    clips = np.repeat(np.arange(len(lengths)), lengths)
    frames = np.concatenate([np.arange(length) for length in lengths])
    if shuffle_seed is not None:
        shuffled = np.random.default_rng(shuffle_seed).permutation(len(clips))
        clips = clips[shuffled]
        frames = frames[shuffled]
    return ClipTable.build(clips, frames), clips, frames


def columns(order):
    """Samples, which are valid, and which follow the frame before, at all positions of an epoch."""
    entries = order.entries(np.arange(len(order)))
    return entries.samples, entries.valid, entries.flags["prev_exists"]


LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=20)


@given(LENGTHS, st.integers(1, 8), st.integers(0, 99))
def test_longest_first_ends_within_a_third_of_the_best(lengths, num_lanes, seed):
    num_lanes = min(num_lanes, len(lengths))
    lanes = LaneOrder(make(lengths)[0], num_lanes, seed=seed)
    best = max(-(-sum(lengths) // num_lanes), max(lengths))
    assert best <= lanes.num_steps <= best * 4 / 3 + max(lengths)
    assert {len(lanes.epoch(epoch)) for epoch in range(3)} == {lanes.num_steps * num_lanes}


@given(LENGTHS, st.data())
def test_a_selection_cuts_clips_where_it_leaves_frames_out(lengths, data):
    table, clips, frames = make(lengths, shuffle_seed=3)
    selected = np.array(sorted(data.draw(st.sets(st.integers(0, len(clips) - 1), min_size=1))))
    lanes = LaneOrder(table, 1, selected=selected)
    samples, valid, prev_exists = columns(lanes.epoch(0))
    assert valid.all()
    assert np.array_equal(np.sort(samples), selected)
    for before, now, exists in zip(samples[:-1], samples[1:], prev_exists[1:], strict=True):
        if exists:
            assert (clips[now], frames[now]) == (
                clips[before],
                frames[before] + 1,
            )
    chosen = set(selected.tolist())
    place = {
        pair: row for row, pair in enumerate(zip(clips.tolist(), frames.tolist(), strict=True))
    }
    has_previous = [place.get((clips[s], frames[s] - 1)) in chosen for s in samples.tolist()]
    assert prev_exists.tolist() == has_previous


def test_nuscenes_sized_training_has_few_pads():
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.normal(40.2, 0.7, 700).round(), 38, 41).astype(int)
    lanes = LaneOrder(make(lengths)[0], 16, pieces_per_clip=2)
    assert lanes.num_selected == lengths.sum()
    assert lanes.epoch_length - lanes.num_selected <= 0.01 * lengths.sum()


def test_epochs_and_seeds_shuffle_clips_companions_and_lanes():
    table = make([10] * 40)[0]
    seeded = [LaneOrder(table, 4, seed=seed) for seed in range(4)]
    orders = {
        tuple(lanes.epoch(epoch)(np.arange(400)).tolist()) for lanes in seeded for epoch in range(4)
    }
    assert len(orders) == 16
    first_clips = np.array([seeded[0].epoch(epoch)(np.arange(4)) // 10 for epoch in range(2000)])
    counts = np.bincount(first_clips.ravel(), minlength=40)
    assert 130 < counts.min() <= counts.max() < 270  # 200 expected of each, standard deviation 14
    assert all(len(set(row)) == 4 for row in first_clips.tolist())


def test_lanes_are_those_of_every_release():
    # Saved training states rely on these, as on the values in test_permutation.py.
    lanes = LaneOrder(make([3, 1, 4, 2, 5, 3])[0], 3, seed=7)
    assert lanes.epoch(0)(np.arange(18)).tolist() == GOLDEN_0
    assert lanes.epoch(1)(np.arange(18)).tolist() == GOLDEN_1


GOLDEN_0 = [8, 10, 0, 9, 11, 1, 4, 12, 2, 5, 13, 15, 6, 14, 16, 7, 3, 17]
GOLDEN_1 = [3, 4, 0, 10, 5, 1, 11, 6, 2, 12, 7, 15, 13, 8, 16, 14, 9, 17]
