"""Orders of an epoch: pinned values, exact cover, windows, purity, memory, and what is refused."""

from __future__ import annotations

import pickle
import tracemalloc
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fuelrail.pipeline.order.spec as order_module
from fuelrail.pipeline.errors import ConfigError, OrderError
from fuelrail.pipeline.order.batching import Batching, Cursor, Walk, World
from fuelrail.pipeline.order.mix import Mix
from fuelrail.pipeline.order.permutation import MAX_LENGTH
from fuelrail.pipeline.order.spec import ORDER_VERSION, Layout, Order, OrderSpec
from fuelrail.pipeline.order.weights import AttributeWeights
from fuelrail.pipeline.settings import convert

SEEDS = st.integers(0, 2**63 - 1)
EPOCHS = st.integers(0, 2**40)
SHARDS = st.lists(st.integers(1, 60), min_size=1, max_size=30).map(tuple)


def specs(seeds=SEEDS):
    return st.one_of(
        st.builds(OrderSpec, kind=st.sampled_from(["shuffled", "sequential"]), seed=seeds),
        st.builds(OrderSpec, kind=st.just("windowed"), seed=seeds, window=st.integers(1, 40)),
    )


SMALL = Layout((3, 1, 4, 2, 5))
LARGE = Layout((10**6,) * 1000)

# Everybody who has saved a training state relies on these; see the same note in test_permutation.py. A change of
# them needs another ORDER_VERSION, which makes older states refused.
GOLDEN = [
    ({"kind": "shuffled", "seed": 7}, 0, [7, 8, 9, 12, 6, 1, 4, 13, 10, 0, 14, 2, 3, 11, 5]),
    ({"kind": "shuffled", "seed": 7}, 1, [13, 12, 7, 1, 9, 11, 0, 2, 6, 4, 5, 8, 10, 14, 3]),
    ({"kind": "windowed", "seed": 7, "window": 2}, 0, [2, 0, 1, 8, 9, 5, 7, 4, 6, 12, 11, 14, 13, 3, 10]),
    ({"kind": "windowed", "seed": 7, "window": 2}, 1, [2, 0, 1, 5, 6, 9, 7, 8, 4, 11, 12, 3, 14, 13, 10]),
    ({"kind": "sequential", "seed": 7}, 1, list(range(15))),
]


@pytest.mark.parametrize(("spec", "epoch", "samples"), GOLDEN)
def test_orders_are_those_of_every_release(spec, epoch, samples):
    assert Order(OrderSpec(**spec), SMALL, epoch)(np.arange(15)).tolist() == samples
    assert ORDER_VERSION == 1


def test_a_billion_samples_are_ordered_as_in_every_release():
    at = [0, 1, 2, 10**9 // 2, 10**9 - 1]
    shuffled = Order(OrderSpec(seed=7), LARGE, 3)
    windowed = Order(OrderSpec(kind="windowed", seed=7, window=2), LARGE, 3)
    assert shuffled(at).tolist() == [473407553, 887283042, 622802318, 979023553, 357266510]
    assert windowed(at).tolist() == [555671733, 396774567, 396904436, 57589754, 305200159]


@given(specs(), SHARDS, EPOCHS)
def test_every_sample_comes_once(spec, shards, epoch):
    layout = Layout(shards)
    order = Order(spec, layout, epoch)
    samples = order(np.arange(len(order)))
    assert samples.dtype == np.int64
    assert np.array_equal(np.sort(samples), np.arange(layout.num_samples))


@given(specs(), SHARDS, EPOCHS, st.data())
def test_an_order_is_a_pure_function(spec, shards, epoch, data):
    layout = Layout(shards)
    order = Order(spec, layout, epoch)
    whole = order(np.arange(len(order)))
    some = np.array(data.draw(st.lists(st.integers(0, len(order) - 1), max_size=30)), dtype=np.int64)
    assert np.array_equal(order(some), whole[some])
    assert np.array_equal(order(some.reshape(1, -1)), whole[some].reshape(1, -1))
    assert np.array_equal(pickle.loads(pickle.dumps(order))(some), whole[some])
    assert np.array_equal(Order(spec, layout, epoch)(some[::-1]), whole[some[::-1]])


@given(SEEDS, SHARDS, EPOCHS, st.integers(1, 40))
def test_windows_hold_whole_shards_one_window_after_the_other(seed, shards, epoch, window):
    layout = Layout(shards)
    samples = Order(OrderSpec(kind="windowed", seed=seed, window=window), layout, epoch)(np.arange(sum(shards)))
    shard_of = np.repeat(np.arange(len(shards)), shards)[samples]
    order_of_shards = list(dict.fromkeys(shard_of.tolist()))
    assert sorted(order_of_shards) == list(range(len(shards)))
    num_windows = -(-len(shards) // window)
    bounds = [number * len(shards) // num_windows for number in range(num_windows + 1)]
    sizes = np.diff(bounds)
    assert sizes.max() <= window
    assert sizes.max() - sizes.min() <= 1
    seen = 0
    for first, end in pairwise(bounds):
        # The shards come in windows, in whatever order within one: all of a window are read before the next one's.
        size = sum(shards[shard] for shard in order_of_shards[first:end])
        inside = set(shard_of[seen : seen + size].tolist())
        assert inside == set(order_of_shards[first:end])
        seen += size
    assert seen == len(samples)


def test_one_window_of_all_shards_reaches_every_position():
    layout = Layout((500,) * 4)
    samples = Order(OrderSpec(kind="windowed", seed=1, window=4), layout, 0)(np.arange(2000))
    first_shards = samples[:500] // 500
    assert np.bincount(first_shards, minlength=4).min() > 80  # 125 expected of each


@given(st.lists(st.sampled_from([1, 2, 3, 900, 5000]), min_size=1, max_size=12), st.integers(1, 5), st.integers(0, 9))
def test_shards_that_are_very_short_beside_others_change_nothing_but_the_time(shards, window, seed):
    spec, layout = OrderSpec(kind="windowed", seed=seed, window=window), Layout(tuple(shards))
    positions = np.random.default_rng(seed).permutation(layout.num_samples)
    samples = Order(spec, layout, 0)(positions)
    assert np.array_equal(np.sort(samples), np.arange(layout.num_samples))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order_module, "_MAX_RUNS", 0)  # bisection everywhere
        assert np.array_equal(Order(spec, layout, 0)(positions), samples)
        patch.setattr(order_module, "_MAX_RUNS", 2**40)  # the table everywhere
        assert np.array_equal(Order(spec, layout, 0)(positions), samples)


def test_seeds_and_epochs_change_the_order():
    layout = Layout((50,) * 10)
    for spec in ({"kind": "shuffled"}, {"kind": "windowed", "window": 3}):
        orders = {
            tuple(Order(OrderSpec(**spec, seed=seed), layout, epoch)(np.arange(500)).tolist())
            for seed in range(4)
            for epoch in range(4)
        }
        assert len(orders) == 16


@given(
    specs(),
    st.integers(1, 10**9),
    st.integers(1, 64),
    st.integers(1, 64),
    st.integers(1, 64),
    st.booleans(),
    st.data(),
)
def test_the_global_sequence_is_the_same_for_every_world_and_resumed_anywhere(
    spec, n, size, other_size, factor, drop_last, data
):
    """The matrix of elasticity: no position list is made, whatever n."""
    global_batch = size * other_size * factor
    if drop_last:
        n = max(n, global_batch)
    window = 2 if spec.kind == "windowed" else None
    spec = msgspec.structs.replace(spec, window=window)
    layout = Layout((n // 3, n - n // 3)) if n > 3 else Layout((n,))
    one = Batching(n, global_batch, World(0, 1), drop_last=drop_last)
    step = data.draw(st.integers(0, one.num_steps))
    cursor = Walk(Cursor(3), one).after(step).rolled(one)

    def batch_at(cursor, size):
        """The next global batch of a run that stands at ``cursor``, put together from all ranks."""
        order = Order(spec, layout, cursor.epoch)
        rests = [cursor.rest(Batching(n, global_batch, World(r, size), drop_last=drop_last)) for r in range(size)]
        assert len({rest.num_steps for rest in rests}) == 1
        samples = np.concatenate([order(rest.positions(0)) for rest in rests])
        return samples, np.concatenate([rest.valid(0) for rest in rests])

    samples, valid = batch_at(cursor, 1)
    for other in {size, other_size}:
        again, again_valid = batch_at(cursor, other)
        assert np.array_equal(samples, again)
        assert np.array_equal(valid, again_valid)
    assert len(set(samples[valid].tolist())) == valid.sum()
    assert drop_last <= bool(valid.all())


def test_memory_does_not_grow_with_the_number_of_samples():
    def peak_bytes(layout):
        spec = OrderSpec(kind="shuffled", seed=1)
        at = np.linspace(0, layout.num_samples - 1, 1024).astype(np.int64)
        tracemalloc.start()
        try:
            Order(spec, layout, 0)(at)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak_bytes(SMALL)  # imports and caches
    assert peak_bytes(Layout((10**9,))) < peak_bytes(Layout((1025,))) + 10_000


def test_a_spec_comes_from_settings_and_goes_to_plain_types():
    spec = convert({"kind": "windowed", "seed": 3, "window": 8}, OrderSpec, "order.yaml")
    assert spec == OrderSpec(kind="windowed", seed=3, window=8)
    assert convert(msgspec.to_builtins(spec), OrderSpec, "state") == spec
    with pytest.raises(ConfigError, match="allowed here: kind, seed, window"):
        convert({"king": "shuffled"}, OrderSpec, "order.yaml")


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({"kind": "random"}, "shuffled, windowed, sequential, lanes, got 'random'"),
        ({"seed": -1}, "seed must be an integer in 0"),
        ({"seed": 2**63}, "seed must be an integer in 0"),
        ({"seed": 1.5}, "got 1.5"),
        ({"kind": "windowed"}, "needs window >= 1"),
        ({"kind": "windowed", "window": 0}, "got 0"),
        ({"window": 4}, "window=4 requires order kind 'windowed', got 'shuffled'"),
        ({"kind": "lanes", "weights": (AttributeWeights(attribute="a"),)}, "take no weights"),
        ({"kind": "lanes", "mix": Mix(attribute="a", ratios={"b": 1})}, "no mix"),
        ({"pieces_per_clip": 2}, "pieces_per_clip=2 requires order kind 'lanes', got 'shuffled'"),
        ({"kind": "lanes", "pieces_per_clip": 0}, "pieces_per_clip must be 1 or more, got 0"),
        ({"epoch_length": 0}, "epoch_length must be 1 or more, got 0"),
        ({"seed": True}, "OrderSpec: seed=True is not allowed: Expected `int`, got `bool`"),
        ({"kind": "windowed", "window": "4"}, "window='4' is not allowed"),
        ({"filter": 3}, "filter=3 is not allowed"),
        ({"subset": 3}, "subset=3 is not allowed"),
        ({"weights": 3}, "weights=3 is not allowed"),
        ({"weights": ("cbgs",)}, "weights=.* is not allowed"),
        ({"mix": 3}, "mix=3 must be a Mix, a dict of its fields"),
        ({"epoch_length": "9"}, "epoch_length='9' is not allowed"),
        ({"kind": "lanes", "pieces_per_clip": "2"}, "pieces_per_clip='2' is not allowed"),
    ],
)
def test_bad_specs_are_refused(spec, text):
    with pytest.raises(OrderError, match=text):
        OrderSpec(**spec)


@pytest.mark.parametrize(
    ("shards", "text"),
    [((), "at least one shard"), ((3, 0), "shard 1 holds 0"), ((-1,), "holds -1"), ((MAX_LENGTH, 1), "at most")],
)
def test_bad_layouts_are_refused(shards, text):
    with pytest.raises(OrderError, match=text):
        Layout(shards)


def test_an_epoch_length_without_weights_or_a_mix_is_refused():
    with pytest.raises(OrderError, match="epoch_length=5 requires weights or a mix"):
        Order(OrderSpec(epoch_length=5), Layout((10,)), 0)


NEED_A_DATASET = [
    {"kind": "lanes"},
    {"filter": "night"},
    {"subset": "f"},
    {"weights": (AttributeWeights(attribute="a"),)},
    {"mix": Mix(attribute="a", ratios={"b": 1})},
]


@pytest.mark.parametrize("spec", NEED_A_DATASET)
def test_what_needs_a_dataset_is_not_ignored(spec):
    with pytest.raises(OrderError, match="need a dataset"):
        Order(OrderSpec(**spec), SMALL, 0)


@pytest.mark.parametrize("epoch", [-1, 2**63])
def test_bad_epochs_are_refused(epoch):
    with pytest.raises(OrderError, match=f"got {epoch}"):
        Order(OrderSpec(), SMALL, epoch)


@pytest.mark.parametrize("kind", [{"kind": "shuffled"}, {"kind": "windowed", "window": 2}, {"kind": "sequential"}])
def test_positions_outside_the_epoch_are_refused(kind):
    order = Order(OrderSpec(**kind), SMALL, 0)
    for position in (-1, 15):
        with pytest.raises(OrderError, match=rf"position {position} is outside 0 .. 14"):
            order([3, position])


def test_sequential_gives_a_copy():
    positions = np.arange(5)
    Order(OrderSpec(kind="sequential"), SMALL, 0)(positions)[0] = 9
    assert positions[0] == 0
