"""Ranks, steps and positions: exact cover, disjoint ranks, padding, re-batching, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuelrail.pipeline.errors import WorldError
from fuelrail.pipeline.order.batching import (
    Batching,
    Cursor,
    Walk,
    WorkerShard,
    World,
)

SIZES = st.integers(1, 64)


def make_rank_batching(batching, rank, size):
    return dataclasses.replace(batching, world=World(rank, size))


def epoch_positions(undivided, size):
    """Positions and validity of all steps of one epoch, in global order: step by step, rank by rank."""
    ranks = [make_rank_batching(undivided, rank, size) for rank in range(size)]
    assert len({batching.num_steps for batching in ranks}) == 1
    steps = range(undivided.num_steps)
    positions = [batching.positions(step) for step in steps for batching in ranks]
    valid = [batching.valid(step) for step in steps for batching in ranks]
    assert all(len(part) == undivided.global_batch // size for part in (*positions, *valid))
    empty = np.empty(0, dtype=np.int64)
    return np.concatenate([empty, *positions]), np.concatenate([empty.astype(bool), *valid])


@given(st.integers(1, 10**9), SIZES, st.integers(1, 512), st.booleans(), st.data())
def test_any_step_of_any_rank_is_arithmetic(n, size, rank_batch, drop_last, data):
    global_batch = size * rank_batch
    n += global_batch * drop_last
    rank = data.draw(st.integers(0, size - 1))
    start = data.draw(st.integers(0, n))
    batching = Batching(n, global_batch, World(rank, size), drop_last=drop_last, start=start)
    rest = n - start
    assert batching.num_steps == (rest // global_batch if drop_last else -(-rest // global_batch))
    if batching.num_steps:
        step = data.draw(st.integers(0, batching.num_steps - 1))
        first = start + step * global_batch + rank * rank_batch
        running = range(first, first + rank_batch)
        assert batching.positions(step).tolist() == [position % n for position in running]
        assert batching.valid(step).tolist() == [position < n for position in running]
        assert batching.positions(step).dtype == np.int64


@given(
    st.integers(1, 600),
    st.lists(
        st.tuples(st.integers(1, 64), st.integers(1, 8), st.integers(0, 5)),
        min_size=1,
        max_size=5,
    ),
    SIZES,
    st.integers(1, 8),
)
def test_re_batched_any_number_of_times_each_sample_comes_once(
    n, phases, last_size, last_rank_batch
):
    """A run that changes ranks and global batch again and again still covers the epoch exactly."""
    cursor = Cursor(2)
    samples = []
    for size, rank_batch, num_steps in phases:
        batching = Batching(n, size * rank_batch, World(0, 1), drop_last=False)
        rest = cursor.rest(batching)
        steps = min(num_steps, rest.num_steps)
        for step in range(steps):
            for rank in range(size):
                part = make_rank_batching(rest, rank, size)
                samples += part.positions(step)[part.valid(step)].tolist()
        cursor = Cursor(2, rest.consumed(steps))
    rest = cursor.rest(Batching(n, last_size * last_rank_batch, World(0, 1), drop_last=False))
    positions, valid = epoch_positions(rest, last_size)
    assert samples + positions[valid].tolist() == list(range(n))


def advance(cursor, batching, num_steps):
    """Where a run is after this number of steps."""
    walk = Walk(cursor, batching)
    epoch, step = walk.place(num_steps)
    return Cursor(epoch, walk.batches(epoch).consumed(step))


@given(
    st.integers(1, 500),
    SIZES,
    st.integers(1, 4),
    st.booleans(),
    st.integers(0, 400),
    st.integers(0, 400),
)
def test_a_cursor_advanced_in_two_parts_stands_where_one_does(
    n, size, rank_batch, drop_last, first, second
):
    global_batch = size * rank_batch
    batching = Batching(
        n + global_batch * drop_last,
        global_batch,
        World(0, size),
        drop_last=drop_last,
    )
    start = Cursor(1)
    assert advance(advance(start, batching, first), batching, second) == advance(
        start, batching, first + second
    )


@given(st.integers(1, 300), st.integers(1, 40), st.booleans(), st.integers(0, 60))
def test_a_cursor_crosses_epoch_ends_as_iterating_does(n, global_batch, drop_last, num_steps):
    batching = Batching(n + global_batch * drop_last, global_batch, World(), drop_last=drop_last)
    epoch = 0
    step = 0
    for _ in range(num_steps):
        step += 1
        if step == batching.num_steps:
            epoch = epoch + 1
            step = 0
    assert advance(Cursor(), batching, num_steps) == Cursor(epoch, batching.consumed(step))


@given(
    st.data(),
    st.integers(1, 60),
    SIZES,
    st.integers(1, 3),
    st.booleans(),
    st.integers(1, 3),
    st.integers(0, 5),
)
def test_a_walk_takes_the_steps_that_iterating_takes(
    data, n, size, rank_batch, drop_last, num_shards, first_taken
):
    """Places, numbers, positions of several ranks, and the cursor, against one epoch after the other."""
    global_batch = size * rank_batch
    n += global_batch * drop_last
    batching = Batching(n, global_batch, World(0, size), drop_last=drop_last)
    start = Cursor(2, data.draw(st.integers(0, n)))
    share = WorkerShard(data.draw(st.integers(0, num_shards - 1)), num_shards)
    walk = Walk(start, batching, share)
    ranks = range(data.draw(st.integers(0, size - 1)), size)
    expected = []
    number = 0
    for epoch in range(2, 9):
        rest = (start if epoch == 2 else Cursor(epoch)).rest(batching)
        assert walk.batches(epoch) == rest
        for step in range(rest.num_steps):
            if step in share.steps(rest):
                rows = [
                    dataclasses.replace(rest, world=World(rank, size)).positions(step)
                    for rank in ranks
                ]
                expected.append((epoch, step, number, np.concatenate(rows).tolist()))
            number += 1
    assert list(itertools.islice(walk, len(expected))) == [
        entry[:2] for entry in expected
    ] or not share.steps(batching)
    assert [walk.number(k) for k in range(len(expected))] == [entry[2] for entry in expected]
    assert walk.num_steps == sum(entry[0] == 2 for entry in expected)
    steps = expected[first_taken : first_taken + 4]
    parts = list(walk.positions(first_taken, len(steps), ranks)) if steps else []
    assert [position for _, positions in parts for position in positions.tolist()] == [
        position for entry in steps for position in entry[3]
    ]
    assert [epoch for epoch, _ in parts] == list(dict.fromkeys(entry[0] for entry in steps))


def test_a_walk_says_where_a_run_is_after_some_of_its_steps():
    batching = Batching(26, 4, World(), drop_last=False)
    walk = Walk(Cursor(3, 8), batching)
    assert [walk.after(k).samples_consumed for k in range(walk.num_steps + 1)] == [
        8,
        12,
        16,
        20,
        24,
        26,
    ]
    turns = Walk(Cursor(3, 8), batching, WorkerShard(1, 2))
    assert [turns.after(k).samples_consumed for k in range(turns.num_steps + 1)] == [8, 16, 24]
    assert walk.following == turns.following == Cursor(4)


def test_a_share_without_steps_makes_an_empty_walk():
    assert list(Walk(Cursor(), Batching(8, 4, World()), WorkerShard(2, 3))) == []


EPOCHS = {"equal": None, "varying": lambda epoch: 8 + epoch % 3}


@pytest.mark.parametrize("name", EPOCHS)
def test_a_share_without_a_step_has_no_place(name) -> None:
    walk = Walk(
        Cursor(),
        Batching(8, 4, World(), lengths=EPOCHS[name]),
        WorkerShard(2, 3),
    )
    assert list(walk) == []
    with pytest.raises(WorldError, match=r"worker 2 of 3 has no step .* has 2; use at most 2"):
        walk.place(0)


def test_a_share_waits_for_an_epoch_that_is_long_enough() -> None:
    batching = Batching(4, 4, World(), lengths=lambda epoch: 8 if epoch % 5 == 4 else 4)
    walk = Walk(Cursor(), batching, WorkerShard(1, 2))
    assert list(itertools.islice(walk, 2)) == [(4, 1), (9, 1)] == [walk.place(0), walk.place(1)]


def test_a_cursor_resumes_with_the_rest_of_its_epoch():
    batching = Batching(100, 8, World(), drop_last=False)
    assert Cursor(4, 36).rest(batching).num_steps == 8
    assert Cursor(4, 36).rest(batching).positions(0)[0] == 36
    assert Cursor(4, 36).rest(batching).valid(7).all()
    assert Cursor(4, 100).rolled(batching) == Cursor(5)
    assert Cursor(4, 96).rolled(batching) == Cursor(4, 96)
    assert Cursor(4, 96).rolled(dataclasses.replace(batching, drop_last=True)) == Cursor(5)


def test_numpy_numbers_are_taken_and_made_plain():
    world = World(np.int64(1), np.int32(2))
    batching = Batching(np.int64(10), np.int64(4), world, start=np.int64(2))
    assert batching == Batching(10, 4, World(1, 2), start=2)
    assert type(batching.start) is type(world.rank) is type(Cursor(np.int64(3)).epoch) is int
