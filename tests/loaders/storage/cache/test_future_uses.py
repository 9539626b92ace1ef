"""Future uses: next uses against a plain search, and evictions against the best that any policy can do."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuelrail.loaders.storage.cache.future_uses import (
    NEVER,
    FarthestFirst,
    FutureUses,
    build_future_uses,
    coming_rows,
)
from fuelrail.pipeline.order.batching import (
    Batching,
    Cursor,
    Walk,
    WorkerShard,
    World,
)
from fuelrail.pipeline.order.spec import OrderSpec, position_map
from support.cache_policies import lru_hits


def future_uses_of(sequence, horizon=None):
    rows = np.array(sequence, np.int64)
    return FutureUses(
        lambda first, count: rows[first : first + count],
        horizon or 2 * len(rows) + 2,
    )


def next_use(sequence, row, after, end):
    return next(
        (t for t in range(after + 1, min(end, len(sequence))) if sequence[t] == row),
        NEVER,
    )


sequences = st.lists(st.integers(0, 6), min_size=1, max_size=30)


@given(sequences)
def test_next_uses_are_those_of_a_plain_search(sequence):
    future_uses = future_uses_of(sequence)
    rows = np.arange(8)
    for now in range(len(sequence)):
        expected = [next_use(sequence, row, now, len(sequence)) for row in rows]
        assert future_uses.next_use(rows, now).tolist() == expected


@given(sequences, st.integers(2, 12))
def test_a_short_horizon_sees_near_uses_and_calls_the_rest_never(sequence, horizon):
    future_uses = future_uses_of(sequence, horizon)
    for now in range(len(sequence)):
        for row, time in enumerate(future_uses.next_use(np.arange(7), now).tolist()):
            exact = next_use(sequence, row, now, len(sequence))
            assert time in (exact, NEVER)
            if exact <= now + horizon // 2 - 1:
                assert time == exact


def simulate(sequence, capacity, horizon=None):
    """Return the misses of a cache that holds a given number of equal samples and evicts by future uses."""
    resident: set[int] = set()
    policy = FarthestFirst(future_uses_of(sequence, horizon), resident.__contains__)
    misses = 0
    for now, row in enumerate(sequence):
        policy.advance(now)
        if policy.wants_stock:
            policy.rebuild(np.array(sorted(resident), np.int64), now)
        if row in resident:
            continue
        misses += 1
        after = policy.next_use(row)
        if len(resident) == capacity:
            victim = policy.pop()
            assert victim is not None
            assert victim[0] in resident
            if victim[1] <= after:
                policy.add(*victim)
                continue
            resident.remove(victim[0])
        resident.add(row)
        policy.add(row, after)
    return misses


def fewest_misses(sequence, capacity):
    """Fewest misses of any policy, by trying everything; not admitting is allowed."""

    @cache
    def best(position, resident):
        if position == len(sequence):
            return 0
        row = sequence[position]
        if row in resident:
            return best(position + 1, resident)
        choices = [resident]
        if len(resident) < capacity:
            choices.append(resident | {row})
        else:
            choices += [resident - {gone} | {row} for gone in resident]
        return 1 + min(best(position + 1, choice) for choice in choices)

    return best(0, frozenset())


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=14).map(tuple), st.integers(1, 3))
def test_no_policy_misses_less(sequence, capacity):
    assert simulate(sequence, capacity) == fewest_misses(sequence, capacity)


def epochs(num_samples, num_epochs, seed=0):
    rng = np.random.default_rng(seed)
    return np.concatenate([rng.permutation(num_samples) for _ in range(num_epochs)]).tolist()


@pytest.mark.costly
def test_shuffled_epochs_hit_as_often_as_the_cache_is_large_and_far_more_than_lru():
    sequence = epochs(400, 8)
    later = len(sequence) - 400
    for capacity in (40, 100, 200):
        ours = simulate(sequence, capacity) - 400
        lru = lru_hits(np.array(sequence), np.ones(400, np.int64), capacity).sum()
        assert (later - ours) * 400 >= later * capacity
        assert later - ours > lru + 0.04 * later
    assert simulate(sequence, 400) == 400


def test_a_horizon_of_two_epochs_is_as_good_as_knowing_everything():
    sequence = epochs(60, 8, seed=3)
    assert simulate(sequence, 20, horizon=120) <= simulate(sequence, 20) * 1.02


@settings(max_examples=60, deadline=None)
@given(
    num_samples=st.integers(6, 40),
    size=st.integers(1, 3),
    batch=st.integers(1, 3),
    drop_last=st.booleans(),
    consumed=st.integers(0, 5),
    data=st.data(),
)
def test_coming_rows_are_those_that_the_ranks_will_take(
    num_samples, size, batch, drop_last, consumed, data
):
    batchings = (
        [
            Batching(
                num_samples,
                batch * size,
                World(rank, size),
                drop_last=drop_last,
            )
            for rank in range(size)
        ]
        if (batch * size <= num_samples or not drop_last)
        else []
    )
    if not batchings:
        return
    ranks = data.draw(st.sampled_from([range(size), range(size - 1, size)]))
    spec = OrderSpec(seed=5)
    start = Cursor(2, consumed)
    frames = data.draw(st.integers(1, 3))

    def rows_of(epoch, positions):
        return (
            position_map(spec, [num_samples], epoch)(positions)[:, None] * 10 + np.arange(frames)
        ).reshape(-1)

    coming, per_step = coming_rows(rows_of, Walk(start, batchings[0]), ranks, frames)
    expected = []
    for cursor in (start, Cursor(3), Cursor(4)):
        order = position_map(spec, [num_samples], cursor.epoch)
        rests = [cursor.rest(batchings[rank]) for rank in ranks]
        for step in range(rests[0].num_steps):
            rows = [row for rest in rests for row in order(rest.positions(step)).tolist()]
            expected += [row * 10 + frame for row in rows for frame in range(frames)]
    assert per_step == len(ranks) * batch * frames
    assert coming(0, len(expected)).tolist() == expected
    first = data.draw(st.integers(0, max(0, len(expected) - 1)))
    assert coming(first, 7).tolist()[: len(expected) - first] == expected[first : first + 7]


@pytest.mark.parametrize(("first", "num_shares"), [(0, 1), (0, 2), (1, 2), (2, 3)])
@pytest.mark.parametrize("consumed", [0, 8, 20])
def test_a_share_of_the_steps_knows_when_its_samples_come(first, num_shares, consumed):
    batching = Batching(26, 4, World(0, 1), drop_last=True)
    start = Cursor(3, consumed)
    order = position_map(OrderSpec(kind="shuffled", seed=1), [26], 0)
    share = WorkerShard(first, num_shares)
    walk = Walk(start, batching, share)
    future_uses, uses = build_future_uses(
        lambda epoch, positions: order(positions) + 100 * epoch, walk
    )
    assert uses == 4
    parts = []  # as `tasks.coming` walks
    for epoch in range(3, 7):
        rest = (start if epoch == 3 else Cursor(epoch)).rest(batching)
        parts += [order(rest.positions(step)) + 100 * epoch for step in share.steps(rest)]
    rows = np.concatenate(parts)
    for k, row in enumerate(rows.tolist()):
        now = future_uses.time_of(k)
        assert future_uses.used(now, now + 1).tolist() == [row]
