"""Packs and balance: ORDER.md by its letter, each sample once, the same packs on any ranks, and what is refused."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuelrail.bench.studies.runs.history import RunHistory
from fuelrail.loaders.integrations.sampler import BatchSampler, Sampler
from fuelrail.pipeline.errors import OrderError, StateMismatchError, WorldError
from fuelrail.pipeline.order import batching
from fuelrail.pipeline.order.balance import Balance, deal
from fuelrail.pipeline.order.batching import World
from fuelrail.pipeline.order.cost import Cost, compute_costs
from fuelrail.pipeline.order.mix import Mix, MixStage
from fuelrail.pipeline.order.pack import Pack, pack_window
from fuelrail.pipeline.order.permutation import KeyedPermutation, derive_key
from fuelrail.pipeline.order.spec import OrderSpec, OrderStage, position_map
from fuelrail.pipeline.order.weights import AttributeWeights

RNG = np.random.default_rng(7)
NUM = 900
TOKENS = np.clip(RNG.lognormal(5, 1, NUM), 16, 1024).astype(int)
DATA = {
    "tokens": TOKENS,
    "night": np.arange(NUM) % 3 == 0,
    "key": [f"s{n}" for n in range(NUM)],
}
PACK = Pack(budget=1024, cost="tokens", window=100)
VECTORS = json.loads(Path(__file__).with_name("vectors.json").read_text(encoding="utf-8"))


def pack_plainly(costs, budget, max_samples=None):
    """Section 10 of ORDER.md, in plain lists."""
    max_samples = len(costs) if max_samples is None else max_samples
    packs = [[] for _ in range(max(-(-sum(costs) // budget), -(-len(costs) // max_samples)))]
    for row in sorted(range(len(costs)), key=lambda row: (-costs[row], row)):
        open_packs = [pack for pack in packs if len(pack) < max_samples]
        emptiest = min(
            open_packs,
            key=lambda pack: sum(costs[i] for i in pack),
            default=None,
        )
        if emptiest is None or sum(costs[i] for i in emptiest) + costs[row] > budget:
            emptiest = []
            packs.append(emptiest)
        emptiest.append(row)
    return [sorted(pack) for pack in packs]


def dealt_by_the_letter(costs, num_groups):
    groups = [[] for _ in range(num_groups)]
    for row in sorted(range(len(costs)), key=lambda row: (-costs[row], row)):
        not_full = [group for group in groups if len(group) < len(costs) // num_groups]
        min(not_full, key=lambda group: sum(costs[i] for i in group)).append(row)
    return [row for group in groups for row in sorted(group)]


@settings(deadline=None)
@given(st.data())
def test_a_window_is_packed_by_the_letter(data):
    budget = data.draw(st.integers(1, 60))
    costs = data.draw(st.lists(st.integers(1, budget), min_size=1, max_size=40))
    max_samples = data.draw(st.none() | st.integers(1, 6))
    packs, num = pack_window(np.array(costs), budget, max_samples)
    expected = pack_plainly(costs, budget, max_samples)
    assert [np.flatnonzero(packs == pack).tolist() for pack in range(num)] == expected
    assert all(0 < sum(costs[row] for row in pack) <= budget for pack in expected)


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=12),
    st.sampled_from([1, 2, 3, 4]),
    st.integers(1, 4),
)
def test_a_batch_is_dealt_by_the_letter(costs, num_groups, repeats):
    costs = (costs * num_groups * repeats)[: len(costs) * num_groups]
    assert deal(np.array(costs), num_groups).tolist() == dealt_by_the_letter(costs, num_groups)


def split_by_rank(sampler, ranks):
    """The sampler of each rank of a world, all with one compiled order."""
    samplers = [copy.copy(sampler) for _ in range(ranks)]
    for rank, rank_sampler in enumerate(samplers):
        rank_sampler._batching = replace(sampler._batching, world=World(rank, ranks))
    return samplers


def read_packs(sampler, steps):
    """The packs of a rank's batches, as lists of entries."""
    packs_by_step = []
    for step in steps:
        batch = sampler[step]
        packs = {}
        for entry in batch:
            packs.setdefault(entry.pack, []).append(entry)
        packs_by_step.append([packs[number] for number in sorted(packs)])
    return packs_by_step


def test_no_positions_have_no_samples():
    entries = (
        BatchSampler(DATA, OrderSpec(pack=PACK), global_batch=1)._rows.order.epoch(0).entries([])
    )
    assert [entries.samples.tolist(), entries.flags["pack"].tolist()] == [
        [],
        [],
    ]


def test_an_epoch_is_the_windows_of_the_order_packed_and_shuffled():
    sampler = BatchSampler(DATA, OrderSpec(seed=11, pack=PACK), global_batch=1)
    for epoch in range(2):
        expected = []
        for window in range(-(-NUM // 100)):
            positions = np.arange(100 * window, min(100 * (window + 1), NUM))
            samples = position_map(OrderSpec(seed=11), [NUM], epoch)(positions)
            packs = pack_plainly(TOKENS[samples].tolist(), 1024)
            places = KeyedPermutation(len(packs), derive_key("order packs", 11, epoch, window))(
                np.arange(len(packs))
            )
            expected += [samples[packs[pack]].tolist() for pack in places.tolist()]
        drawn_packs = list(sampler)
        assert drawn_packs == expected
        assert sorted(row for pack in drawn_packs for row in pack) == list(range(NUM))


@pytest.mark.parametrize("case", VECTORS["packs"], ids=lambda case: case["name"])
def test_the_packs_of_the_vectors(case):
    pack = Pack(
        budget=case["budget"],
        cost="c",
        window=case["window"],
        max_samples=case["max_samples"],
        truncate=case.get("truncate", False),
    )
    hidden = tuple(map(str, case.get("hidden", ())))
    check_batches(case, pack=pack, without=(hidden,) if hidden else ())


@pytest.mark.parametrize("case", VECTORS["balances"], ids=lambda case: case["name"])
def test_the_balances_of_the_vectors(case):
    check_batches(case)


def check_batches(case, **fields):
    """Compare the rows of each rank, and whether they are padding, with a case of packs or of balance."""
    if case["micro_batches"]:
        fields["balance"] = Balance(cost="c", micro_batches=case["micro_batches"])
    costs = case["costs"]
    data = {"c": costs, "key": [str(row) for row in range(len(costs))]}
    samplers = [
        BatchSampler(
            data,
            OrderSpec(seed=case["seed"], **fields),
            global_batch=case["global_batch"],
            world=World(rank, case["ranks"]),
            drop_last=case.get("drop_last", True),
            entries=True,
        )
        for rank in range(case["ranks"])
    ]
    steps = range(len(case["batches"]))
    batches = [[sampler[step] for sampler in samplers] for step in steps]
    rows = [[[entry.row for entry in batch] for batch in step] for step in batches]
    assert rows == case["batches"]
    if "valid" in case:  # of one whole epoch
        assert samplers[0].steps_per_epoch == len(steps)
        valid = [[[entry.valid for entry in batch] for batch in step] for step in batches]
        assert valid == case["valid"]


ORDERS = {
    "plain": OrderSpec(seed=1, pack=PACK),
    "filter": OrderSpec(seed=1, pack=PACK, filter="not night"),
    "weights": OrderSpec(
        seed=1,
        pack=PACK,
        weights=(AttributeWeights(attribute="night", values={"true": 2.0}),),
        epoch_length=2000,
    ),
    "parts": OrderSpec(
        seed=1,
        pack=PACK,
        mix=Mix(attribute="night", ratios={"true": 1, "false": 3}),
    ),
    "balanced": OrderSpec(seed=1, pack=PACK, balance=Balance(cost=Cost(quadratic={"tokens": 1}))),
    "samples": OrderSpec(seed=1, balance=Balance(cost="tokens")),
}


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("drop_last", [True, False])
def test_the_same_packs_come_on_any_ranks(name, drop_last):
    alone = BatchSampler(DATA, ORDERS[name], global_batch=64, drop_last=drop_last, entries=True)
    for step in (0, len(alone) - 1, len(alone)):
        by_ranks = []
        for ranks in (1, 4, 64):
            packs_by_rank = [
                read_packs(sampler, [step])[0] for sampler in split_by_rank(alone, ranks)
            ]
            assert {len(rank_packs) for rank_packs in packs_by_rank} == (
                {64 // ranks} if name != "samples" else {1}
            )
            all_packs = itertools.chain.from_iterable(packs_by_rank)
            by_ranks.append([[entry.row for entry in pack] for pack in all_packs])
        if name == "samples":
            by_ranks = [sorted(row for rows in packs for row in rows) for packs in by_ranks]
        elif name == "balanced":
            by_ranks = [sorted(packs) for packs in by_ranks]
        assert by_ranks[0] == by_ranks[1] == by_ranks[2]


def test_threads_read_the_same_packs_at_once():
    expected = BatchSampler(DATA, ORDERS["plain"], global_batch=1)._rows.order
    order = BatchSampler(DATA, ORDERS["plain"], global_batch=1)._rows.order
    places = [
        (epoch, position) for epoch in range(3) for position in range(0, expected.length(epoch), 7)
    ] * 2
    random.Random(0).shuffle(places)
    with ThreadPoolExecutor(8) as pool:
        packs = list(pool.map(lambda place: order.epoch(place[0])([place[1]]).tolist(), places))
    assert packs == [expected.epoch(epoch)([position]).tolist() for epoch, position in places]


@pytest.mark.parametrize("spec", [ORDERS["plain"], ORDERS["balanced"]])
def test_each_sample_comes_once_though_epochs_differ_in_length(spec):
    sampler = BatchSampler(DATA, spec, global_batch=8, entries=True, drop_last=False)
    for _ in range(4):
        assert sorted(entry.row for batch in sampler for entry in batch if entry.valid) == list(
            range(NUM)
        )
    order = sampler._rows.order
    lengths = [len(order.epoch(epoch)) for epoch in range(4)]
    assert len(set(lengths)) > 1, "epochs of one length would not show that the others work"


def test_the_packs_of_a_mix_of_datasets():
    spec = OrderSpec(
        seed=2,
        pack=Pack(budget=2048, cost="tokens", window=100),
        balance=Balance(cost="tokens"),
    )
    data = {"a": DATA, "b": {"tokens": TOKENS[:150] + 300}}
    sampler = BatchSampler(
        data,
        spec,
        global_batch=4,
        mix={"a": 2, "b": 1},
        drop_last=False,
        entries=True,
    )
    costs = np.concatenate([TOKENS, TOKENS[:150] + 300])
    rows = []
    for packs in read_packs(sampler, range(len(sampler))):
        assert all(costs[[entry.row for entry in pack]].sum() <= 2048 for pack in packs)
        rows += [entry.row for pack in packs for entry in pack if entry.valid]
    counts = np.bincount(rows, minlength=NUM + 150)
    assert (counts[:NUM] == 1).all()
    assert set(counts[NUM:]) == {3}


def test_fill_and_balance_of_the_lengths_of_a_text_model():
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 1, 16_384), 16, 1024).astype(int)
    for budget in (1024, 8192, 32768):
        order = BatchSampler(
            {"c": lengths},
            OrderSpec(pack=Pack(budget=budget, cost="c")),
            global_batch=1,
        )._rows.order
        assert lengths.sum() / (budget * order.epoch_length) >= 0.97
    packed = OrderSpec(pack=Pack(budget=8192, cost="c"), balance=Balance(cost="c"))
    for spec, batch in (
        (packed, 64),
        (OrderSpec(balance=Balance(cost="c")), 1024),
    ):
        sampler = BatchSampler({"c": lengths}, spec, global_batch=batch)
        loads = [
            [lengths[rank_sampler[step]].sum() for rank_sampler in split_by_rank(sampler, 64)]
            for step in range(4)
        ]
        assert (np.max(loads, 1) / np.mean(loads, 1)).mean() <= 1.05


def test_balance_cannot_help_where_one_sample_fills_a_pack():
    """The figures of docs/packing.md, in small: one pack a rank, and four."""
    lengths = np.clip(np.random.default_rng(0).lognormal(6, 1.2, 12_000), 16, 8192).astype(int)
    attention = Cost(linear={"tokens": 1200}, quadratic={"tokens": 1})
    spec = OrderSpec(
        seed=3,
        pack=Pack(budget=8192, cost="tokens"),
        balance=Balance(cost=attention),
    )
    dearest = {}
    for packs_a_rank in (1, 4):
        sampler = BatchSampler({"tokens": lengths}, spec, global_batch=8 * packs_a_rank)
        ranks = split_by_rank(sampler, 8)
        costs = [
            [sum(1200 * n + n * n for n in lengths[rank[step]].tolist()) for rank in ranks]
            for step in range(len(sampler))
        ]
        dearest[packs_a_rank] = np.mean([max(step) / np.mean(step) for step in costs])
    assert 1.8 < dearest[1] < 2.0
    assert 1.1 < dearest[4] < 1.2


def test_micro_batches_cost_about_the_same():
    spec = OrderSpec(balance=Balance(cost="tokens", micro_batches=4))
    batch = TOKENS[BatchSampler(DATA, spec, global_batch=128)[0]].reshape(4, 32).sum(1)
    assert batch.max() <= 1.02 * batch.mean()
    with pytest.raises(WorldError, match="cannot be cut into 4 micro-batches"):
        BatchSampler(DATA, spec, global_batch=6)


def stops_and_changes(spec, num_stops, seed):
    """Train with stops at random steps, each time on other ranks and a batch that divides; compare with no stop."""
    draw = random.Random(seed)
    rows = []
    state = None
    epochs = 0
    for _ in range(num_stops):
        ranks, batch = draw.choice([(1, 16), (2, 16), (4, 16), (16, 16), (2, 8), (1, 4)])
        counted = []
        for rank in range(ranks):
            sampler = BatchSampler(
                DATA,
                spec,
                global_batch=batch,
                world=World(rank, ranks),
                drop_last=False,
                entries=True,
            )
            counted.append(sampler.count())
            if state is not None:
                counted[-1].load_state_dict(json.loads(state))
        for number, batches in enumerate(zip(*counted, strict=True), 1):
            for rank_batch in batches:
                rows += [entry.row for entry in rank_batch if entry.valid]
            states = [json.dumps(rank_sampler.state_dict()) for rank_sampler in counted]
            assert len(set(states)) == 1
            if number >= draw.randint(1, 8):
                break
        state = states[0]
        epochs = json.loads(state)["epoch"]
    undivided = BatchSampler(DATA, spec, global_batch=1, drop_last=False)
    expected = []
    for _ in range(epochs + 1):
        for batch in undivided:
            expected += batch
    if spec.balance is None:
        assert rows == expected[: len(rows)]
    for epoch in range(epochs):
        assert sorted(rows[NUM * epoch : NUM * (epoch + 1)]) == list(range(NUM))
    assert epochs >= 1


@pytest.mark.parametrize("num_stops", [20, pytest.param(300, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["plain", "balanced"])
def test_stops_and_changes_of_the_ranks_lose_and_repeat_nothing(name, num_stops):
    stops_and_changes(ORDERS[name], num_stops, seed=3)


SHORT_DATA = {"n": np.random.default_rng(0).integers(1, 60, 40)}
SHORT_SPEC = OrderSpec(pack=Pack(60, "n", window=7))
SHORT_LENGTHS = [26, 25, 25, 25, 25, 24, 27, 25, 26, 25, 25, 26]


def test_an_epoch_with_fewer_packs_than_the_batch_is_passed_over():
    undivided = BatchSampler(SHORT_DATA, SHORT_SPEC, global_batch=26)
    order = undivided._rows.order
    assert [order.length(epoch) for epoch in range(12)] == SHORT_LENGTHS
    epochs = [0, 6, 8, 11]
    expected = [
        [row for pack in range(26) for row in order.epoch(epoch)([pack]).tolist()]
        for epoch in epochs
    ]
    iterated = [(len(undivided), list(undivided)) for _ in epochs]
    assert iterated == [(1, [batch]) for batch in expected]
    assert [undivided[step] for step in range(4)] == expected
    for ranks in (1, 2, 13):
        by_rank = split_by_rank(BatchSampler(SHORT_DATA, SHORT_SPEC, global_batch=26), ranks)
        loaders = [sampler.count() for sampler in by_rank]
        for step, batch in enumerate(expected):
            assert [row for loader in loaders for rows in loader for row in rows] == batch
            states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
            assert all(state == states[0] for state in states)
            resumed = BatchSampler(SHORT_DATA, SHORT_SPEC, global_batch=26)
            resumed.load_state_dict(states[0])
            assert step == 3 or list(resumed) == [expected[step + 1]]


def test_a_ledger_counts_the_steps_of_a_run_that_passes_over_epochs(tmp_path):
    path = tmp_path / "run.ledger"
    loader = BatchSampler(SHORT_DATA, SHORT_SPEC, global_batch=26, ledger=path).count()
    for _ in range(3):
        assert len(list(loader)) == 1
    history = RunHistory(path)
    assert history.num_steps == 3
    places = [history.step(step)[1] for step in range(3)]
    assert [place.epoch for place in places] == [0, 6, 8]


def test_a_run_without_any_further_full_batch_ends_with_an_error(monkeypatch):
    monkeypatch.setattr(batching, "MAX_EMPTY_EPOCHS", 4)
    sampler = BatchSampler(SHORT_DATA, SHORT_SPEC, global_batch=26)
    assert len(list(sampler)) == 1
    words = (
        r"none of the epochs [12] \.\. [45] has a full global batch of 26 packs, the last one has"
    )
    with pytest.raises(WorldError, match=words):
        next(iter(sampler))
    with pytest.raises(WorldError, match=words):
        sampler[1]


def test_an_epoch_of_which_nothing_is_left_is_passed_over():
    """With weights an epoch may show only samples that are left out; without drop_last, too."""
    data = {"key": ["a", "b", "c"], "w": [1, 1, 1]}
    spec = OrderSpec(
        weights=(AttributeWeights(attribute="w"),),
        epoch_length=1,
        without=(("a",),),
    )
    sampler = BatchSampler(data, spec, global_batch=1, drop_last=False)
    order = sampler._rows.order
    lengths = [order.length(epoch) for epoch in range(30)]
    assert set(lengths) == {0, 1}
    rows = [order.epoch(epoch)([0]).tolist() for epoch in range(30) if lengths[epoch]]
    assert [sampler[step] for step in range(len(rows))] == rows
    assert [next(iter(list(sampler))) for _ in rows] == rows


def test_a_copy_of_the_sampler_and_its_state():
    sampler = BatchSampler(DATA, ORDERS["plain"], global_batch=4)
    copy = pickle.loads(pickle.dumps(sampler))
    assert copy[3] == sampler[3]
    another_sampler = BatchSampler(
        {**DATA, "tokens": TOKENS[::-1]}, ORDERS["plain"], global_batch=4
    )
    with pytest.raises(StateMismatchError, match="pack_costs"):
        another_sampler.load_state_dict(sampler.state_dict())


def test_the_next_epoch_is_counted_while_this_one_is_read():
    order = BatchSampler(DATA, ORDERS["plain"], global_batch=4)._rows.order
    epoch = order.epoch(0)
    epoch.entries(np.arange(len(epoch) // 2))
    half = len(order._counts[1].sums) - 1
    assert 0 < half < order.num_windows
    epoch.entries(np.arange(len(epoch)))
    assert len(order._counts[1].sums) - 1 == order.num_windows


def test_a_sample_is_found_in_its_pack():
    epoch = BatchSampler(DATA, ORDERS["weights"], global_batch=1)._rows.order.epoch(1)
    indices, positions = epoch.find(np.arange(0, NUM, 7))
    pairs_found = {
        (sample, position)
        for sample, position in zip((indices * 7).tolist(), positions.tolist(), strict=True)
    }
    packs = epoch.entries(np.arange(len(epoch)))
    pairs = zip(packs.samples.tolist(), packs.flags["pack"].tolist(), strict=True)
    assert pairs_found == {(sample, pack) for sample, pack in pairs if sample % 7 == 0}


def test_costs_are_whole_numbers_rounded_up():
    table = pa.table({"t": [0, 3, 10], "b": [True, False, True], "l": [[1], [], [1, 2]]})
    assert compute_costs("b", table).tolist() == [1, 0, 1]
    assert compute_costs("l", table).tolist() == [1, 0, 2]
    model = Cost(linear={"t": 7, "l": 1}, quadratic={"t": 2}, constant=5, divisor=10)
    exact = [(5 + 7 * t + length + 2 * t * t) / 10 for t, length in ((0, 1), (3, 0), (10, 2))]
    assert compute_costs(model, table).tolist() == [int(np.ceil(value)) for value in exact]


def mixed_in_stages():
    stages = [MixStage(ratios={"a": 1}, until=8), MixStage(ratios={"a": 1})]
    return BatchSampler({"a": DATA}, OrderSpec(pack=PACK), global_batch=1, mix=stages)


def over(costs, **spec):
    return BatchSampler({"c": costs}, OrderSpec(**spec), global_batch=1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Pack(budget=0, cost="c"),
            "budget=0 must be a whole number from 1",
        ),
        (
            lambda: Pack(budget=9, cost="c", window=0),
            "window=0 must be a whole number from 1",
        ),
        (
            lambda: Pack(budget=9, cost="c", window=2**20 + 1),
            "window=1048577 must be a whole number from 1 to 1048576",
        ),
        (
            lambda: Pack(budget=2**40 + 1, cost="c", window=2**20),
            "budget=1099511627777 must be a whole number from 1 to 1099511627776",
        ),
        (
            lambda: Pack(budget=9, cost="c", max_samples=0),
            "max_samples=0 must be a whole number >= 1",
        ),
        (
            lambda: Pack(budget=9, cost=Cost(linear={"c": 1}), truncate=True),
            "one attribute",
        ),
        (lambda: Cost(), "needs columns"),
        (
            lambda: Cost(linear={"c": -1}),
            "linear={'c': -1} is not allowed: at 'c': must be a whole number from 0 to 4611686018427387903; got -1",
        ),
        (
            lambda: Balance(cost="c", micro_batches=0),
            "micro_batches=0 must be a whole number >= 1",
        ),
        (lambda: OrderSpec(kind="lanes", pack=PACK), "no pack"),
        (
            lambda: OrderSpec(stages=(OrderStage(),), pack=PACK),
            "stages count positions",
        ),
        (lambda: mixed_in_stages(), "stages of a mix count"),
        (
            lambda: Sampler(DATA, OrderSpec(pack=PACK), global_batch=4),
            "use BatchSampler",
        ),
        (
            lambda: BatchSampler(
                DATA,
                OrderSpec(pack=Pack(budget=1000, cost="tokens")),
                global_batch=1,
            ),
            "sample 's",
        ),
        (
            lambda: over([2, 0], pack=Pack(budget=9, cost="c")),
            "sample 1 costs 0",
        ),
        (lambda: over([2, None], balance=Balance(cost="c")), "is unknown"),
        (
            lambda: over([2, -1], balance=Balance(cost="c")),
            r"is -1 somewhere, and a cost needs numbers of 0 \.\. 2",
        ),
        (
            lambda: compute_costs("c", pa.table({"c": pa.array([2**63], pa.uint64())})),
            "is 9223372036854775808 somewhere",
        ),
        (lambda: Cost(linear={"c": 2**62}), "at 'c': must be"),
        (lambda: over([2.0], balance=Balance(cost="c")), "whole numbers"),
        (lambda: over([2**41], balance=Balance(cost="c")), "at most 2.*40"),
        (
            lambda: compute_costs(Cost(quadratic={"c": 2}), pa.table({"c": [2**31]})),
            "smaller coefficients",
        ),
    ],
)
def test_what_is_refused(make, words):
    with pytest.raises(OrderError, match=words):
        make()


def test_a_sample_above_the_budget_is_truncated_where_that_is_asked():
    spec = OrderSpec(pack=Pack(budget=10, cost="c", truncate=True))
    packs = list(BatchSampler({"c": [25, 4, 6]}, spec, global_batch=1))
    assert sorted(map(sorted, packs)) == [[0], [1, 2]]
