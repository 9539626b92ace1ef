"""`fr.order`: the order over data of any kind, exact through stops, other numbers of ranks, and torch's workers."""

from __future__ import annotations

import json
import math
import pickle
import random
import tracemalloc
from fractions import Fraction
from itertools import chain, islice, pairwise

import msgspec
import numpy as np
import pytest
from torch.utils.data import ConcatDataset, DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import fuelrail as fr
from fuelrail.loaders.integrations.sampler import BatchSampler, Sampler
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.order.batching import World
from fuelrail.pipeline.order.compile import compile_mix, compile_order
from fuelrail.pipeline.order.permutation import derive_key
from fuelrail.pipeline.order.spec import OrderSpec, OrderStage, position_map
from fuelrail.pipeline.order.table import Entry
from support.sampler_kills import run_kills
from support.sized_datasets import write_synthetic_index

pytestmark = pytest.mark.process

G = 64
WORLDS = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = (7, 12, 1, 9, 20, 5, 16, 30, 40, 60) * 4
NUM = sum(LENGTHS)
CLIP = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
FRAME = np.concatenate([np.arange(length) for length in LENGTHS])
DRAW = np.random.default_rng(0)
COLUMNS = {
    "key": np.array([f"clip-{c:07d}-{f:06d}" for c, f in zip(CLIP, FRAME, strict=True)]),
    "clip_id": np.array([f"clip-{c:07d}" for c in CLIP]),
    "frame": FRAME,
    "night": CLIP % 3 == 1,
    "num_car": DRAW.integers(0, 4, NUM),
    "score": DRAW.random(NUM),
}
NIGHT = fr.AttributeWeights(attribute="night", values={"true": 3.0})


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "keys.txt"
    file.write_text("\n".join(COLUMNS["key"][::3]), encoding="utf-8")
    return str(file)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The columns as a dataset of ours."""
    root = tmp_path_factory.mktemp("stored") / "data"
    attributes = {name: COLUMNS[name].tolist() for name in ("night", "num_car", "score")}
    write_synthetic_index(root, LENGTHS, samples_per_shard=50, attributes=attributes)
    return open_dataset(root)


STAGES = [  # a ramp of 60 batches, and the mix after it
    fr.order.MixStage(ratios={"a": 3, "b": 1}, until=60 * G, ramp=True),
    fr.order.MixStage(ratios={"a": 1, "b": 3}),
]
SCORE = fr.AttributeWeights(attribute="score")
CURRICULUM = (  # a ramp of 20 batches, from an epoch into the next ones, and two stages after it
    OrderStage(weights=(SCORE,), until=20 * G, ramp=True),
    OrderStage(filter="num_car >= 1", weights=(NIGHT,), until=30 * G + 7),
    OrderStage(filter="night"),
)
KINDS = {
    "shuffled": {"data": 5000, "spec": OrderSpec(seed=3)},
    "padded": {"data": 1000, "spec": OrderSpec(seed=3), "drop_last": False},
    "sequential": {"data": NUM, "spec": OrderSpec(kind="sequential")},
    "windowed": {
        "data": COLUMNS,
        "spec": OrderSpec(kind="windowed", window=3),
        "blocks": 50,
    },
    "lanes": {
        "data": COLUMNS,
        "spec": OrderSpec(kind="lanes", pieces_per_clip=2),
    },
    "filter": {
        "data": COLUMNS,
        "spec": OrderSpec(filter="night or num_car >= 2"),
    },
    "weights": {"data": COLUMNS, "spec": OrderSpec(weights=(NIGHT, SCORE))},
    "balance": {
        "data": COLUMNS,
        "spec": OrderSpec(weights=(fr.ClassBalance(classes=("num_car", "night")),)),
    },
    "subset": {"data": COLUMNS, "spec": OrderSpec(subset="keys")},
    "parts": {
        "data": COLUMNS,
        "spec": OrderSpec(mix=fr.Mix(attribute="night", ratios={"true": 1, "false": 3})),
    },
    "datasets": {
        "data": {"a": COLUMNS, "b": 900},
        "spec": OrderSpec(seed=1),
        "mix": {"a": 3, "b": 1},
    },
    "stages": {
        "data": {"a": COLUMNS, "b": 900},
        "spec": OrderSpec(seed=1),
        "mix": STAGES,
    },
    "curriculum": {
        "data": COLUMNS,
        "spec": OrderSpec(seed=4, stages=CURRICULUM),
    },
    "frames": {
        "data": COLUMNS,
        "spec": OrderSpec(),
        "window": fr.FrameWindow(frames=(-2, 0, 1), pad="drop"),
    },
}


def make(name, keys, world=None, **changes):
    arguments = KINDS[name] | {"global_batch": G, "world": world or World()} | changes
    data = arguments.pop("data")
    spec = arguments.pop("spec")
    if spec.subset:
        spec = fr.OrderSpec(subset=keys)
    return BatchSampler(data, spec, **arguments)


@pytest.mark.parametrize("name", KINDS)
def test_the_order_is_that_of_a_dataset_of_ours(name, keys_file, stored):
    """The product's own compiler on stored attributes, and plain orders where there is only a length."""
    sampler = make(name, keys_file)
    spec = KINDS[name]["spec"]
    window = KINDS[name].get("window")
    if name == "stages":
        shares = [sum(row < NUM for row in sampler[step]) for step in range(70)]
        assert (shares[0], shares[59], set(shares[60:])) == (48, 16, {16})
        assert sum(shares[:60]) == 60 * 32
        assert all(0 <= a - b <= 2 for a, b in pairwise(shares))
        return
    if name == "datasets":
        plain = position_map(OrderSpec(seed=derive_key("order mix part", 1, 1) % 2**63), [900], 0)
        mixed = compile_mix({"a": 1, "b": 1}, spec, {"a": stored, "b": stored}).orders[0].epoch(0)
        rows = np.concatenate([sampler[step] for step in range(10)])
        assert rows[rows < NUM].tolist() == mixed(np.arange(480)).tolist()
        assert (rows[rows >= NUM] - NUM).tolist() == plain(np.arange(160)).tolist()
        assert [sum(row < NUM for row in sampler[step]) for step in range(20)] == [48] * 20
        return
    if isinstance(KINDS[name]["data"], int):
        orders = [position_map(spec, [KINDS[name]["data"]], epoch) for epoch in range(2)]
        length = KINDS[name]["data"]
    else:
        spec = OrderSpec(subset=keys_file) if spec.subset else spec
        order = compile_order(spec, stored, global_batch=G, window=window)
        orders = [order.epoch(epoch) for epoch in range(2)]
        length = order.epoch_length
    steps = -(-length // G) if name == "padded" else length // G
    assert len(sampler) == steps > 1
    expected = [
        permutation(np.arange(step * G, step * G + G) % length).tolist()
        for permutation in orders
        for step in range(steps)
    ]
    assert [sampler[step] for step in range(2 * steps)] == expected
    assert [*sampler, *sampler] == expected


@pytest.mark.parametrize("name", KINDS)
def test_stops_on_any_number_of_ranks_leave_the_batches_as_they_are(name, keys_file):
    """42 stops of each kind, 588 in all: each time another number of ranks continues from the state of one of them."""
    draw = random.Random(name)
    ranks = {
        size: [make(name, keys_file, World(rank, size)) for rank in range(size)] for size in WORLDS
    }
    reference = make(name, keys_file)
    step = 0
    state = None
    for _ in range(42):
        size = draw.choice(WORLDS)
        num_steps = draw.randrange(1, 2 * len(reference) // 3 + 2)
        received = []
        for sampler in ranks[size]:
            loader = sampler.count()
            loader.load_state_dict(state if state is not None else reference.state_dict())
            batches = []
            while len(batches) < num_steps:
                for batch in loader:
                    batches.append(batch)
                    if len(batches) == num_steps:
                        break
            received.append(batches)
        for offset in range(num_steps):
            assert [
                *chain.from_iterable(rank_batches[offset] for rank_batches in received)
            ] == reference[step + offset]
        states = [json.dumps(sampler.state_dict()) for sampler in ranks[size]]
        assert len(set(states)) == 1
        state = json.loads(draw.choice(states))
        step = step + num_steps
    assert step > 3 * len(reference)


def rows_on(size, num_steps, *arguments, **options):
    """The rows of a run's first steps, drawn by this number of ranks and put together as a global batch is."""
    ranks = [
        iter_run(BatchSampler(*arguments, global_batch=G, world=World(rank, size), **options))
        for rank in range(size)
    ]
    rows = []
    for _ in range(num_steps):
        for rank in ranks:
            rows += next(rank)
    return np.array(rows)


def iter_run(sampler):
    while True:
        yield from sampler


@pytest.mark.parametrize("size", [1, 8, 64])
def test_counts_are_the_exact_rational_shares_at_every_block_end(size):
    """Of a mix in blocks of four, of weights in blocks of one position, and of what follows both ramps."""
    ends = np.arange(0, 80 * G + 1, 4)
    rows = rows_on(size, 80, {"a": 800, "b": 900}, OrderSpec(seed=1), mix=STAGES)
    counts = np.concatenate([[0], np.cumsum(rows < 800)])[ends]
    for count, end in zip(counts.tolist(), ends.tolist(), strict=True):
        inside = Fraction(
            min(end, 60 * G), 4
        )  # blocks of the ramp; its share of "a" is a block's 3, going to 1
        exact = 3 * inside - 2 * inside**2 / (2 * 60 * G // 4) + Fraction(max(end - 60 * G, 0), 4)
        assert count == math.ceil(exact), end

    sizes = (
        [1, 2, 1, 4, 8],
        [2, 2, 1, 1, 8, 2],
        [4, 4, 8],
    )  # of each stage, 16 in sum
    columns = {
        "of": np.repeat([0, 1, 2], [5, 6, 3]),
        "w": np.concatenate(sizes),
    }
    stages = [
        OrderStage("of == 0", until=1600),
        OrderStage("of == 1", until=4800, ramp=True),
        OrderStage("of == 2"),
    ]
    spec = OrderSpec(
        weights=(fr.AttributeWeights(attribute="w"),),
        stages=stages,
        epoch_length=1600,
    )
    rows = rows_on(size, 100, columns, spec)
    stage_of_row = columns["of"][rows]
    num_positions = np.arange(1, 6401)
    ramp = np.clip(num_positions - 1600, 0, 3200)
    assert (np.cumsum(stage_of_row == 0) == np.minimum(num_positions, 1600)).all()
    assert (
        np.cumsum(stage_of_row == 2) == ramp**2 // 6400 + np.maximum(num_positions - 4800, 0)
    ).all()
    for stage, expected in enumerate(sizes):
        for epoch in rows[stage_of_row == stage].reshape(-1, 1600):
            assert np.bincount(epoch).tolist()[-len(expected) :] == [
                100 * weight for weight in expected
            ]


def test_a_run_of_a_mix_gets_no_further_stages():
    """Its blocks and the length of its epochs depend on all of them."""

    def make_sampler(*stages):
        return BatchSampler({"a": 40, "b": 30}, global_batch=4, mix=stages, world=World())

    last = fr.order.MixStage(ratios={"a": 1, "b": 1})
    begun = make_sampler(last).count()
    list(islice(iter_run(begun), 1))
    extended = make_sampler(
        msgspec.structs.replace(last, until=400),
        fr.order.MixStage(ratios={"a": 3, "b": 1}),
    )
    with pytest.raises(fr.errors.StateMismatchError, match=r"state has .* loader has"):
        extended.load_state_dict(begun.state_dict())


def test_a_run_gets_further_stages_but_no_other_past():
    stages = KINDS["curriculum"]["spec"].stages
    first = msgspec.structs.replace(stages[1], until=None)
    last = (msgspec.structs.replace(stages[1], until=1400), stages[2])

    def make_sampler(*stages, **options):
        return BatchSampler(
            COLUMNS,
            OrderSpec(stages=stages, **options),
            global_batch=G,
            world=World(),
        )

    begun = make_sampler(first)
    extended = make_sampler(*last)
    received = list(islice(iter_run(begun.count()), 20))
    state = json.loads(json.dumps(begun.state_dict()))
    extended.load_state_dict(state)
    received += list(islice(iter_run(extended.count()), 20))
    assert received == [make_sampler(*last)[step] for step in range(40)], (
        "a run with all stages from its beginning is the same"
    )
    late = extended.state_dict()
    for sampler, sampler_state in (
        (make_sampler(*CURRICULUM), state),
        (make_sampler(first, seed=5), state),
        (begun, late),
        (make_sampler(last[0], OrderStage()), late),
        (
            make_sampler(msgspec.structs.replace(last[0], until=1300), stages[2]),
            state,
        ),
    ):
        with pytest.raises(fr.errors.StateMismatchError, match=r"state has .* loader has"):
            sampler.load_state_dict(sampler_state)
    beginning = make_sampler(*CURRICULUM).state_dict()
    make_sampler(
        *CURRICULUM[:1], msgspec.structs.replace(CURRICULUM[1], until=None)
    ).load_state_dict(beginning)
    with pytest.raises(
        fr.errors.StateMismatchError,
        match=r"'num_car >= 1'.* loader has .*'night'",
    ):  # the ramp leads there
        make_sampler(CURRICULUM[0], OrderStage(filter="night")).load_state_dict(beginning)


def test_another_global_batch_gets_the_rest_of_the_epoch_once():
    first = make("shuffled", None)
    loader = first.count()
    first_batches = list(islice(loader, 10))
    rest = make("shuffled", None, global_batch=40)
    rest.load_state_dict(first.state_dict())
    rows = [*chain(*first_batches, *rest)]
    assert len(rows) == len(set(rows)) == 5000 // 40 * 40


class Rows(Dataset):
    def __init__(self, num_rows):
        self.num_rows = num_rows

    def __len__(self):
        return self.num_rows

    def __getitem__(self, row):
        return row


@pytest.mark.parametrize("kind", [BatchSampler, Sampler])
@pytest.mark.parametrize(
    "workers",
    [{}, {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True}],
)
def test_a_loader_with_workers_stops_at_what_was_received(kind, workers):
    def make_loader(world):
        sampler = kind(500, OrderSpec(seed=2), global_batch=12, world=world)
        how = (
            {"batch_sampler": sampler}
            if kind is BatchSampler
            else {"sampler": sampler, "batch_size": 12 // world.size}
        )
        return sampler.count(DataLoader(Rows(500), **how, **workers))

    reference = BatchSampler(500, OrderSpec(seed=2), global_batch=12, world=World())
    draw = random.Random(1)
    state = None
    step = 0
    for world in (World(), World(1, 2), World(2, 3), World(0, 12)):
        loader = make_loader(world)
        if state is not None:
            loader.load_state_dict(state)
        for _ in range(2):  # the second iteration of one loader continues where the first was left
            stop = draw.randrange(1, 30)
            for number, batch in enumerate(loader, 1):
                part = 12 // world.size
                assert (
                    batch.tolist() == reference[step][world.rank * part : (world.rank + 1) * part]
                )
                step += 1
                state = loader.state_dict()
                assert state["epoch"] * 41 + state["samples_consumed"] // 12 == step
                if number == stop:
                    break


def test_a_mix_numbers_the_rows_of_a_concat_dataset():
    parts = {
        "a": [f"a{i}" for i in range(100)],
        "b": [f"b{i}" for i in range(50)],
    }
    sampler = BatchSampler(
        {name: len(part) for name, part in parts.items()},
        mix={"a": 2, "b": 1},
        global_batch=6,
    )
    loader = DataLoader(ConcatDataset(parts.values()), batch_sampler=sampler)
    batches = list(sampler.count(loader))
    assert [sum(name[0] == "a" for name in batch) for batch in batches] == [4] * 25
    assert len({name for batch in batches for name in batch}) == 150


def test_entries_have_lanes_windows_and_validity():
    window = fr.FrameWindow(frames=(-1, 0))
    options = {
        "global_batch": 4,
        "window": window,
        "entries": True,
        "drop_last": False,
    }
    batches = list(
        BatchSampler(
            {"clip_id": [7, 7, 3, 3, 3, 5, 9]},
            OrderSpec(kind="lanes"),
            **options,
        )
    )
    entries_of_lane = {lane: [batch[lane] for batch in batches] for lane in range(4)}
    clips = {0: (0, 1), 1: (2, 3, 4), 2: (5,), 3: (6,)}
    all_rows = []
    for lane, entries in entries_of_lane.items():
        assert all(isinstance(entry, Entry) and entry.lane == lane for entry in entries)
        rows = [entry.row for entry in entries if entry.valid]
        (clip,) = [clip for clip in clips.values() if rows[0] in clip]
        assert rows == list(clip)
        assert [entry.prev_exists for entry in entries[: len(rows)]] == [
            False,
            *[True] * (len(rows) - 1),
        ]
        assert entries[0].frames == (clip[0], clip[0])
        assert entries[0].present == (False, True)
        assert all(entry.frames == (entry.row - 1, entry.row) for entry in entries[1 : len(rows)])
        all_rows += rows
    assert sorted(all_rows) == list(range(7))
    padded = list(BatchSampler(10, global_batch=4, entries=True, drop_last=False))
    assert [entry.valid for entry in padded[-1]] == [True, True, False, False]
    assert [entry.row for entry in padded[-1][2:]] == [entry.row for entry in padded[0][:2]]
    mixed = BatchSampler(
        {"a": {"clip_id": [0] * 5}, "b": {"clip_id": [0] * 5}},
        mix={"a": 1, "b": 1},
        window=window,
        entries=True,
        global_batch=2,
    )
    for a, b in mixed:
        assert {max(entry.row - 1, 0 if entry.row < 5 else 5) for entry in (a, b)} == {
            entry.frames[0] for entry in (a, b)
        }


@pytest.mark.filterwarnings("ignore:'set_vital':UserWarning")  # by torchdata
def test_a_position_that_nobody_counted_is_refused():
    sampler = BatchSampler(100, global_batch=10)
    assert sampler.state_dict()["samples_consumed"] == 0
    loader = DataLoader(Rows(100), batch_sampler=sampler)
    next(iter(loader))
    with pytest.raises(
        fr.errors.OrderError,
        match=r"drew a part of an epoch .* loader = sampler\.count\(loader\)",
    ):
        sampler.state_dict()
    with pytest.raises(fr.errors.OrderError, match="was not counted"):
        next(iter(loader))
    with pytest.raises(fr.errors.OrderError, match="was not counted"):
        next(iter(sampler.count(loader)))
    sampler = BatchSampler(100, global_batch=10)
    assert sum(map(len, sampler)) == 100
    with pytest.raises(fr.errors.OrderError, match="drew a whole epoch"):
        sampler.state_dict()
    assert next(iter(sampler)) == sampler[10]  # without states, epochs follow each other
    stateful = StatefulDataLoader(Rows(100), batch_sampler=BatchSampler(100, global_batch=10))
    with pytest.raises(fr.errors.OrderError, match="StatefulSampler for torchdata's"):
        next(iter(stateful))
        stateful.state_dict()


@pytest.mark.filterwarnings("ignore:'set_vital':UserWarning")  # by torchdata
def test_a_stateful_loader_has_the_state_of_what_was_received():
    def make_loader(world, workers, **options):
        sampler = fr.order.StatefulSampler(500, OrderSpec(seed=2), global_batch=12, world=world)
        return StatefulDataLoader(Rows(500), batch_sampler=sampler, num_workers=workers, **options)

    reference = BatchSampler(500, OrderSpec(seed=2), global_batch=12, world=World())
    draw = random.Random(0)
    for stops, workers, options in (
        (40, 0, {}),
        (3, 2, {"prefetch_factor": 3}),
        (2, 2, {"persistent_workers": True, "snapshot_every_n_steps": 4}),
    ):
        state = None
        step = 0
        for stop in range(stops):
            size = draw.choice([1, 2, 3, 4, 6, 12])
            world = World(draw.randrange(size), size)
            loader = make_loader(world, workers, **options)
            if state is not None:
                loader.load_state_dict(state)
            num_steps = (
                41 - step % 41 if stop % 3 == 1 else draw.randrange(1, 60)
            )  # to an epoch's end
            received = list(loader) if stop % 3 == 1 else list(islice(iter_run(loader), num_steps))
            part = slice(world.rank * (12 // size), (world.rank + 1) * (12 // size))
            assert [batch.tolist() for batch in received] == [
                reference[step + k][part] for k in range(num_steps)
            ]
            state = loader.state_dict()
            step = step + num_steps
    sampler = fr.order.StatefulSampler(100, global_batch=10)
    assert [next(iter(sampler)), next(iter(sampler))] == [
        sampler[0],
        sampler[0],
    ], "the pass that was left comes again"
    assert list(sampler) == [sampler[step] for step in range(10)]
    assert next(iter(sampler)) == sampler[10]


def test_one_sampler_has_one_position():
    sampler = BatchSampler(100, global_batch=10)
    loader = sampler.count(DataLoader(Rows(100), batch_sampler=sampler))
    older = iter(loader)
    newer = iter(loader)
    assert next(older).tolist() == sampler[0]
    assert next(newer).tolist() == sampler[1]  # one was received
    with pytest.raises(fr.errors.OrderError, match="is not the newest"):
        next(older)
    running = iter(loader)
    next(running)
    sampler.load_state_dict(sampler.state_dict())
    with pytest.raises(fr.errors.OrderError, match="is not the newest"):
        next(running)
    with pytest.raises(fr.errors.OrderError, match="draws no batch"):
        next(iter(sampler.count([1, 2, 3])))
    assert next(iter(loader)).tolist() == sampler[3]
    joined = BatchSampler(100, global_batch=10)
    with pytest.raises(
        fr.errors.OrderError,
        match="handed out 5 batches, and the sampler has 10",
    ):
        list(joined.count(Pairs(joined)))


class Pairs:
    """A loader that joins two batches."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        iterator = iter(self.batches)
        return (first + next(iterator) for first in iterator)


@pytest.mark.parametrize(
    ("make_loader", "message"),
    [
        (
            lambda: BatchSampler(9, global_batch=3).count(DataLoader(Rows(9), batch_size=3)),
            "sampler is a BatchSampler",
        ),
        (
            lambda: Sampler(9, global_batch=3).count(DataLoader(Rows(9), batch_size=3)),
            "batch_size=3",
        ),
        (
            lambda: Sampler(9, global_batch=3).count(),
            "sampler=sampler and batch_size=3",
        ),
        (lambda: BatchSampler("data", global_batch=3), "got str"),
        (lambda: BatchSampler({}, global_batch=3), "at least one"),
        (
            lambda: BatchSampler({"a": [1, 2], "b": [1]}, global_batch=1),
            "'a': 2, 'b': 1",
        ),
        (
            lambda: BatchSampler(9, OrderSpec(filter="night"), global_batch=3),
            "no attribute 'night'",
        ),
        (
            lambda: BatchSampler(9, OrderSpec(subset="keys.txt"), global_batch=3),
            "no column 'key'",
        ),
        (
            lambda: BatchSampler(9, OrderSpec(kind="lanes"), global_batch=3),
            "need a column 'clip_id'",
        ),
        (
            lambda: BatchSampler(9, OrderSpec(kind="windowed", window=2), global_batch=3),
            "blocks=None",
        ),
        (
            lambda: BatchSampler(9, blocks=3, global_batch=3),
            "'windowed' needs them",
        ),
        (
            lambda: BatchSampler(
                9,
                OrderSpec(kind="windowed", window=2),
                blocks=0,
                global_batch=3,
            ),
            "got 0",
        ),
        (
            lambda: BatchSampler(
                9,
                OrderSpec(kind="windowed", window=2),
                blocks=[4, 4],
                global_batch=3,
            ),
            "the sum 8",
        ),
        (
            lambda: BatchSampler(9, mix={"a": 1}, global_batch=3),
            "a mapping of names to data, got int",
        ),
        (
            lambda: BatchSampler({"a": 9}, mix={"b": 1}, global_batch=3),
            "the datasets are 'a'",
        ),
        (
            lambda: BatchSampler(
                {"clip_id": [1]},
                window=fr.FrameWindow(frames=(0,)),
                global_batch=1,
            ),
            "needs entries",
        ),
        (
            lambda: BatchSampler(9, global_batch=3, world=World(0, 4)),
            "no row for some of 4 ranks",
        ),
        (lambda: BatchSampler(9, global_batch=3)[-1], "counted from 0"),
    ],
)
def test_what_does_not_fit_is_refused(make_loader, message):
    with pytest.raises((fr.errors.OrderError, fr.errors.WorldError, IndexError), match=message):
        make_loader()


@pytest.mark.parametrize(
    "sampler",
    [
        BatchSampler(101, global_batch=10),
        BatchSampler(100, OrderSpec(seed=1), global_batch=10),
        BatchSampler(100, global_batch=10, drop_last=False),
        BatchSampler(100, OrderSpec(kind="windowed", window=1), blocks=5, global_batch=10),
        BatchSampler(
            {"clip_id": np.arange(100)},
            OrderSpec(kind="lanes"),
            global_batch=10,
        ),
    ],
)
def test_a_state_of_another_order_is_refused(sampler):
    with pytest.raises(fr.errors.StateMismatchError, match="state has"):
        BatchSampler(100, global_batch=10).load_state_dict(sampler.state_dict())


def test_states_depend_on_blocks_and_clips():
    def state(kind, **options):
        window = 1 if kind == "windowed" else None
        return BatchSampler(
            options.pop("data", 100),
            OrderSpec(kind=kind, window=window),
            global_batch=10,
            **options,
        ).state_dict()

    assert state("windowed", blocks=5) != state("windowed", blocks=10)
    clips = [{"clip_id": np.arange(100) // size} for size in (4, 5)]
    assert state("lanes", data=clips[0]) != state("lanes", data=clips[1])


def test_the_rank_is_that_of_the_launcher(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    sampler = BatchSampler(100, global_batch=20)
    assert sampler.world == World(3, 4)
    assert sampler[0] == BatchSampler(100, global_batch=20, world=World())[0][15:]


def test_a_copy_in_another_process_gives_the_same_batches():
    for name in ("shuffled", "weights", "datasets", "lanes"):
        sampler = make(name, None)
        assert pickle.loads(pickle.dumps(sampler))[7] == sampler[7]


def test_a_billion_rows_take_no_memory():
    tracemalloc.start()
    try:
        sampler = BatchSampler(10**9, global_batch=64, world=World(1, 2))
        rows = list(islice(sampler.count(), 1000))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(set(np.concatenate(rows).tolist())) == 32_000
    assert peak < 20e6


def test_killed_loaders_with_workers_continue_exactly(tmp_path):
    assert run_kills(tmp_path, 3, seed=0) > 100


def test_a_sampler_tells_a_trainer_that_would_deal_its_batches_out_again():
    alone = BatchSampler(100, global_batch=12, world=World())
    alone.set_epoch(3)
    assert alone.drop_last
    assert next(iter(alone.count())) == alone[0], "set_epoch moves nothing"
    ranked = BatchSampler(100, global_batch=12, world=World(1, 2))
    for ask in (lambda: ranked.set_epoch(0), lambda: ranked.drop_last):
        with pytest.raises(fr.errors.OrderError, match=r"rank 1 of 2.*deal them out"):
            ask()
    ranked.count()
    ranked.set_epoch(0)
    assert ranked.drop_last


def test_steps_left_are_those_after_the_batches_received():
    sampler = BatchSampler(100, global_batch=12, world=World())
    left = [sampler.steps_left for _ in sampler.count()]
    assert left == [7, 6, 5, 4, 3, 2, 1, 0]
