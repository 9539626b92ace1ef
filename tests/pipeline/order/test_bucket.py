"""Buckets: ORDER.md by its letter, each sample once, the same batches on any ranks, and what is refused."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuelrail.loaders.integrations.sampler import BatchSampler
from fuelrail.pipeline.errors import OrderError, StateMismatchError
from fuelrail.pipeline.order.balance import Balance
from fuelrail.pipeline.order.batching import World
from fuelrail.pipeline.order.bucket import Bucket
from fuelrail.pipeline.order.cost import Cost
from fuelrail.pipeline.order.mix import Mix, MixStage
from fuelrail.pipeline.order.pack import Pack
from fuelrail.pipeline.order.permutation import KeyedPermutation, derive_key
from fuelrail.pipeline.order.spec import OrderSpec, OrderStage, position_map
from fuelrail.pipeline.order.weights import AttributeWeights

NUM = 700
TOKENS = np.clip(np.random.default_rng(3).lognormal(4, 1, NUM), 1, 400).astype(int)
BOUNDS = (20, 60, 61, 150, 400)
DATA = {
    "tokens": TOKENS,
    "night": np.arange(NUM) % 3 == 0,
    "rig": [("car", "truck", "bus")[n % 3] if n % 100 else "drone" for n in range(NUM)],
}
CASES = json.loads(Path(__file__).with_name("vectors.json").read_text(encoding="utf-8"))["buckets"]
BUCKET = Bucket(by="tokens", bounds=BOUNDS, window=64)


def bucket_plainly(samples, values, bounds, window, size, seed, epoch):
    """Section 10 of ORDER.md, in plain lists: batches of (sample, valid)."""
    batches_shown = []
    waiting = {bound: [] for bound in bounds}
    full_batches = {bound: [] for bound in bounds}
    num_windows = -(-len(samples) // window)
    for number in range(num_windows):
        for sample in samples[number * window : (number + 1) * window]:
            bound = min(bound for bound in bounds if values[sample] <= bound)
            waiting[bound].append((sample, True))
            if len(waiting[bound]) == size:
                full_batches[bound].append(waiting[bound])
                waiting[bound] = []
        if number == num_windows - 1:
            for bound, rest in waiting.items():
                if rest:
                    padding = [(sample, False) for sample, _ in rest * size]
                    full_batches[bound].append((rest + padding)[:size])
        batches = [batch for bound in bounds for batch in full_batches[bound]]
        full_batches = {bound: [] for bound in bounds}
        places = np.arange(len(batches))
        if len(batches):
            shuffled = KeyedPermutation(
                len(batches), derive_key("order buckets", seed, epoch, number)
            )(places)
            batches_shown += [batches[place] for place in shuffled.tolist()]
    return batches_shown


@settings(deadline=None, max_examples=60)
@given(
    values=st.lists(st.integers(0, 9), min_size=1, max_size=80),
    window=st.integers(1, 30),
    size=st.sampled_from([1, 2, 4, 6, 12]),
    has_bounds=st.booleans(),
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 3),
)
def test_an_epoch_in_buckets_is_that_of_the_letter(values, window, size, has_bounds, seed, epoch):
    bounds = (0, 2, 3, 7, 9) if has_bounds else tuple(sorted(set(values)))
    spec = OrderSpec(
        seed=seed,
        bucket=Bucket(by="v", bounds=bounds if has_bounds else (), window=window),
    )
    order = BatchSampler({"v": values}, spec, global_batch=size)._rows.order
    samples = position_map(OrderSpec(seed=seed), [len(values)], epoch)(
        np.arange(len(values))
    ).tolist()
    expected = bucket_plainly(
        samples,
        values=values,
        bounds=bounds,
        window=window,
        size=size,
        seed=seed,
        epoch=epoch,
    )
    batches = order.epoch(epoch)
    entries = batches.entries(np.arange(len(batches)))
    pairs = list(zip(entries.samples.tolist(), entries.valid.tolist(), strict=True))
    assert pairs == [pair for batch in expected for pair in batch]
    for bucket, (sample, _) in zip(entries.flags["bucket"].tolist(), pairs, strict=True):
        assert bucket == min(
            number for number, bound in enumerate(bounds) if values[sample] <= bound
        )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_the_buckets_of_the_vectors(case):
    bucket = Bucket(by="v", bounds=tuple(case["bounds"]), window=case["window"])
    spec = OrderSpec(seed=case["seed"], bucket=bucket)
    size = case["global_batch"]
    epoch = BatchSampler({"v": case["values"]}, spec, global_batch=size)._rows.order.epoch(
        case["epoch"]
    )
    entries = epoch.entries(np.arange(len(epoch)).reshape(-1, size))
    assert entries.samples.tolist() == case["batches"]
    assert entries.valid.sum(1).tolist() == case["num_valid"]


ORDERS = {
    "plain": OrderSpec(seed=1, bucket=BUCKET),
    "rigs": OrderSpec(seed=1, bucket=Bucket(by="rig", window=100)),
    "model": OrderSpec(
        seed=1,
        bucket=Bucket(by=Cost(quadratic={"tokens": 1}), bounds=(400, 10_000, 400**2)),
    ),
    "filter": OrderSpec(seed=1, bucket=BUCKET, filter="night"),
    "weights": OrderSpec(
        seed=1,
        bucket=BUCKET,
        weights=(AttributeWeights(attribute="night", values={"true": 2.0}),),
        epoch_length=900,
    ),
    "parts": OrderSpec(
        seed=1,
        bucket=BUCKET,
        mix=Mix(attribute="night", ratios={"true": 1, "false": 3}),
    ),
    "balanced": OrderSpec(seed=1, bucket=BUCKET, balance=Balance(cost="tokens", micro_batches=2)),
}
"""What buckets go with."""


def make_ranks(spec, size, batch=24, **options):
    return [
        BatchSampler(
            DATA,
            spec,
            global_batch=batch,
            world=World(rank, size),
            entries=True,
            **options,
        )
        for rank in range(size)
    ]


@pytest.mark.parametrize("name", ORDERS)
def test_the_same_batches_of_one_bucket_come_on_any_ranks(name):
    values = DATA["rig"] if name == "rigs" else np.searchsorted(BOUNDS, TOKENS)
    if name == "model":
        values = np.searchsorted((400, 10_000, 400**2), TOKENS**2)
    for epoch in range(2):
        alone = make_ranks(ORDERS[name], 1)[0]
        batches = [alone[step] for step in range(epoch * len(alone), (epoch + 1) * len(alone))]
        for size in (2, 12):
            worlds = make_ranks(ORDERS[name], size)
            for step, batch in enumerate(batches, epoch * len(alone)):
                parts = [sampler[step] for sampler in worlds]
                assert {len(part) for part in parts} == {24 // size}
                entries = [entry for part in parts for entry in part]
                expected = list(batch)
                if name == "balanced":
                    entries = sorted(entries)
                    expected = sorted(expected)
                assert entries == expected
        for batch in batches:
            assert (
                len({values[entry.row] for entry in batch})
                == len({entry.bucket for entry in batch})
                == 1
            )
    if name not in ("weights", "parts"):
        expected = np.flatnonzero(DATA["night"]) if name == "filter" else np.arange(NUM)
        assert (
            sorted(entry.row for batch in alone for entry in batch if entry.valid)
            == expected.tolist()
        )


def test_weighted_epochs_in_buckets_differ_in_length_and_are_whole():
    spec = OrderSpec(
        seed=1,
        bucket=BUCKET,
        weights=(AttributeWeights(attribute="tokens"),),
        epoch_length=500,
    )
    (sampler,) = make_ranks(spec, 1)
    lengths = []
    for _ in range(5):
        expected = len(sampler)
        batches = list(sampler)
        assert len(batches) == expected
        assert sum(entry.valid for batch in batches for entry in batch) == 500
        lengths.append(expected)
    assert len(set(lengths)) > 1, "epochs of one length would not show that the others work"


def test_datasets_of_a_mix_share_their_buckets():
    data = {
        "a": DATA,
        "b": {
            "tokens": TOKENS[:100] // 2 + 1,
            "rig": ["car"] * 90 + ["ship"] * 10,
        },
    }
    for by, num in (("tokens", len(BOUNDS)), ("rig", 5)):
        spec = OrderSpec(
            seed=2,
            bucket=Bucket(by=by, bounds=BOUNDS if by == "tokens" else ()),
        )
        sampler = BatchSampler(data, spec, global_batch=8, mix={"a": 7, "b": 1}, entries=True)
        values = [*DATA["rig"], *data["b"]["rig"]]
        if by == "tokens":
            values = np.searchsorted(BOUNDS, [*TOKENS, *data["b"]["tokens"]])
        batches = list(sampler)
        assert {len({values[entry.row] for entry in batch}) for batch in batches} == {1}
        assert {entry.bucket for batch in batches for entry in batch} == set(range(num))
        rows = [entry.row for batch in batches for entry in batch if entry.valid]
        assert sorted(rows) == list(range(NUM + 100))


def stops_and_changes(spec, num_stops, seed):
    """Train with stops at random steps, each time on other ranks; compare with no stop."""
    draw = random.Random(seed)
    rows = []
    state = None
    epochs = 0
    for _ in range(num_stops):
        worlds = [
            sampler.count() for sampler in make_ranks(spec, draw.choice([1, 2, 3, 4, 6, 8, 12, 24]))
        ]
        if state is not None:
            for rank_sampler in worlds:
                rank_sampler.load_state_dict(json.loads(state))
        for number, batches in enumerate(zip(*worlds, strict=True), 1):
            for rank_batch in batches:
                rows += [entry.row for entry in rank_batch if entry.valid]
            states = {json.dumps(rank_sampler.state_dict()) for rank_sampler in worlds}
            assert len(states) == 1
            if number >= draw.randint(1, 12):
                break
        (state,) = states
        epochs = json.loads(state)["epoch"]
    (undivided,) = make_ranks(spec, 1)
    expected = []
    for _ in range(epochs + 1):
        for batch in undivided:
            expected += [entry.row for entry in batch if entry.valid]
    assert rows == expected[: len(rows)]
    assert all(
        sorted(rows[NUM * epoch : NUM * (epoch + 1)]) == list(range(NUM)) for epoch in range(epochs)
    )
    assert epochs >= 1


@pytest.mark.parametrize("num_stops", [10, pytest.param(300, marks=pytest.mark.long)])
def test_stops_and_changes_of_the_ranks_lose_and_repeat_nothing(num_stops):
    stops_and_changes(ORDERS["plain"], num_stops, seed=3)


def test_a_copy_of_the_sampler_and_its_state():
    (sampler,) = make_ranks(ORDERS["plain"], 1)
    assert pickle.loads(pickle.dumps(sampler))[3] == sampler[3]
    for another_sampler in (
        make_ranks(ORDERS["plain"], 1, batch=12)[0],
        make_ranks(ORDERS["rigs"], 1)[0],
    ):
        with pytest.raises(StateMismatchError, match=r"global_batch|bucket"):
            another_sampler.load_state_dict(sampler.state_dict())


def test_the_next_epoch_is_counted_while_this_one_is_read():
    order = make_ranks(ORDERS["plain"], 1)[0]._rows.order
    epoch = order.epoch(0)
    epoch.entries(np.arange(len(epoch) // 2))
    assert 1 < len(order._counts[1].sums) <= order.num_windows
    epoch.entries(np.arange(len(epoch)))
    assert len(order._counts[1].sums) == order.num_windows + 1


def mixed_in_stages():
    stages = [MixStage(ratios={"a": 1}, until=8), MixStage(ratios={"a": 1})]
    return BatchSampler({"a": DATA}, OrderSpec(bucket=BUCKET), global_batch=1, mix=stages)


def over(values, *bounds):
    return BatchSampler(
        {"v": values, "key": [f"s{n}" for n in range(len(values))]},
        by_v(*bounds),
        global_batch=1,
    )


def by_v(*bounds):
    return OrderSpec(bucket=Bucket(by="v", bounds=bounds))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Bucket(by="v", bounds=(4, 4)), "bounds ascend"),
        (lambda: Bucket(by="v", bounds=(-1, 4)), "bounds ascend"),
        (
            lambda: Bucket(by="v", window=0),
            "window=0 must be a whole number from 1",
        ),
        (lambda: OrderSpec(kind="lanes", bucket=BUCKET), "no bucket"),
        (
            lambda: OrderSpec(stages=(OrderStage(),), bucket=BUCKET),
            "no buckets",
        ),
        (
            lambda: OrderSpec(pack=Pack(budget=9, cost="v"), bucket=BUCKET),
            "pack or bucket, not both",
        ),
        (mixed_in_stages, "stages of a mix count"),
        (
            lambda: over([1, 9, 12], 4, 9),
            "sample 's2' .* costs 12, above the last bound of 9; so do 0 others of 3",
        ),
        (
            lambda: over(list(range(1025))),
            "has 1025 values, and 1024 buckets are allowed",
        ),
        (lambda: over([1, None]), "is unknown"),
        (lambda: over(["a", None]), "is unknown"),
        (lambda: over(["a", "b"], 4), "needs whole numbers"),
        (lambda: over([0.5]), "needs whole numbers"),
    ],
)
def test_what_is_refused(make, words):
    with pytest.raises(OrderError, match=words):
        make()
