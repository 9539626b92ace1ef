"""Orders over a dataset: filter, subset, weights, lanes and windows composed; what is selected, exact and resumable."""

from __future__ import annotations

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import csv
from pyarrow import parquet as pq

from fuelrail.pipeline.errors import ConfigError, IndexFileError, OrderError
from fuelrail.pipeline.format.attributes import Attributes
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.format.index.attributes_file import ATTRIBUTES_FILE
from fuelrail.pipeline.order.balance import Balance
from fuelrail.pipeline.order.batching import Batching, Cursor, Walk, World
from fuelrail.pipeline.order.compile import (
    compile_inputs,
    compile_order,
    compile_table,
)
from fuelrail.pipeline.order.inputs import read_inputs
from fuelrail.pipeline.order.keys import read_keys
from fuelrail.pipeline.order.mix import Mix
from fuelrail.pipeline.order.spec import OrderSpec, OrderStage
from fuelrail.pipeline.order.table import Table
from fuelrail.pipeline.order.weights import (
    AttributeWeights,
    ClassBalance,
    FileWeights,
)
from fuelrail.pipeline.order.windows import FrameWindow
from support.sized_datasets import write_synthetic_index

LENGTHS = (7, 12, 1, 9, 20, 5, 16, 30)
NUM = sum(LENGTHS)
NIGHT = AttributeWeights(attribute="night", values={"true": 3.0})


def write(root, shuffle_seed):
    rng = np.random.default_rng(0)
    clip = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    attributes = {
        "night": (clip % 3 == 1).tolist(),
        "num_car": rng.integers(0, 4, NUM).tolist(),
        "num_bus": (rng.random(NUM) < 0.1).astype(int).tolist(),
    }
    write_synthetic_index(
        root,
        LENGTHS,
        samples_per_shard=8,
        shuffle_seed=shuffle_seed,
        attributes=attributes,
    )
    return open_dataset(root)


@pytest.fixture(scope="module")
def by_clip(tmp_path_factory):
    return write(tmp_path_factory.mktemp("orders") / "by_clip", None)


@pytest.fixture(scope="module")
def by_frame(tmp_path_factory):
    return write(tmp_path_factory.mktemp("orders") / "by_frame", 4)


@pytest.fixture(params=["by_clip", "by_frame"])
def dataset(request):
    return request.getfixturevalue(request.param)


def attribute(dataset, name):
    return np.array(Attributes(dataset, "train").read((name,))[name].to_pylist())


def read_epoch(order, epoch=0):
    return order.epoch(epoch)(np.arange(order.epoch_length))


def test_a_plain_order_is_the_order_itself(dataset):
    order = compile_order(OrderSpec(seed=3), dataset)
    assert order.epoch_length == order.num_selected == NUM
    assert np.array_equal(np.sort(read_epoch(order)), np.arange(NUM))
    assert order.identity == {"version": 1, "kind": "shuffled", "seed": 3}


class RecordingTable(Table):
    """Columns in memory, and the names of those that were read, a list a call."""

    def read(self, names):
        self.__dict__.setdefault("reads", []).append(list(names))
        return super().read(names)


@pytest.mark.parametrize("has_stages", [False, True])
def test_an_orders_inputs_are_read_once_and_its_files_before_it_is_computed(tmp_path, has_stages):
    columns = {
        "key": [f"k{number}" for number in range(6)],
        "night": [True, True, True, True, False, True],
        "cost": [1, 2, 3, 4, 5, 6],
    }
    (tmp_path / "subset.txt").write_text("k0\nk1\nk2\nk3\nk4\n")
    (tmp_path / "without.txt").write_text("k1\n")
    (tmp_path / "weights.csv").write_text("key,weight\nk3,0\n")
    weights = (FileWeights(file=str(tmp_path / "weights.csv")),)
    spec = OrderSpec(
        filter="night",
        subset=str(tmp_path / "subset.txt"),
        without=(str(tmp_path / "without.txt"),),
        balance=Balance(cost="cost"),
        weights=() if has_stages else weights,
        stages=(OrderStage(filter="cost < 6", weights=weights),) if has_stages else (),
    )
    table = RecordingTable(columns, spec, None, None)
    inputs = read_inputs(spec, table, table.lengths)
    for path in tmp_path.iterdir():
        path.unlink()
    order = compile_inputs(spec, inputs)
    assert sorted(set(read_epoch(order).tolist())) == [0, 2]
    assert [sorted(names) for names in table.reads] == [["cost", "key", "night"]]


KINDS = [
    {"kind": "shuffled"},
    {"kind": "windowed", "window": 3},
    {"kind": "sequential"},
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_filter_selects_exactly_and_each_comes_once(dataset, kind):
    order = compile_order(OrderSpec(**kind, filter="night and num_car >= 1"), dataset)
    expected = np.flatnonzero(attribute(dataset, "night") & (attribute(dataset, "num_car") >= 1))
    assert order.num_selected == order.epoch_length == len(expected)
    assert np.array_equal(np.sort(read_epoch(order, 5)), expected)
    if kind["kind"] == "sequential":
        assert np.array_equal(read_epoch(order), expected)


@pytest.mark.parametrize("text", ["True", "1 < 2", "not False", "night or True", "2 in (1, 2)"])
def test_a_filter_that_always_holds_selects_all(dataset, text):
    """Also one that names no attribute, for data of any kind, and in a stage."""
    columns = {"night": [True, False, False]}
    rows = columns if "night" in text else 3
    assert compile_order(OrderSpec(filter=text), dataset).num_selected == NUM
    stages = (
        OrderStage(filter=text, until=NUM),
        OrderStage(filter="num_car >= 1"),
    )
    assert compile_order(OrderSpec(stages=stages), dataset).epoch_length == NUM
    spec = OrderSpec(kind="sequential", filter=text)
    table = Table(rows, spec, None, None)
    assert read_epoch(compile_table(spec, table, table.lengths)).tolist() == [
        0,
        1,
        2,
    ]
    with pytest.raises(OrderError, match="selects no sample"):
        compile_order(OrderSpec(filter=f"not ({text})"), dataset)


def test_the_index_is_among_the_attributes(dataset):
    frames = dataset.index.column("frame")
    order = compile_order(
        OrderSpec(
            kind="sequential",
            filter="frame % 5 == 0 and clip_id != 'clip-0000007'",
        ),
        dataset,
    )
    clips = np.array(dataset.index.texts("clip_id").to_pylist())
    assert np.array_equal(
        read_epoch(order),
        np.flatnonzero((frames % 5 == 0) & (clips != "clip-0000007")),
    )


@pytest.mark.parametrize("name", ["keys.txt", "keys.csv"])
def test_a_subset_is_the_keys_of_a_file(dataset, tmp_path, name):
    index_keys = dataset.index.texts("key").to_pylist()
    keys = [index_keys[i] for i in (50, 3, 3, 77, 20)]
    if name == "keys.csv":
        csv.write_csv(pa.table({"key": keys, "note": keys}), tmp_path / name)
    else:
        (tmp_path / name).write_text("# hand-picked\n\n" + "\n".join(f"  {key} " for key in keys))
    order = compile_order(OrderSpec(kind="sequential", subset=str(tmp_path / name)), dataset)
    assert read_epoch(order).tolist() == [3, 20, 50, 77]
    assert str(tmp_path) not in str(order.identity)


def test_class_balance_has_its_own_epoch_length(dataset):
    order = compile_order(
        OrderSpec(weights=(ClassBalance(classes=("num_car", "num_bus")),)),
        dataset,
    )
    held = (attribute(dataset, "num_car") > 0).sum() + (attribute(dataset, "num_bus") > 0).sum()
    assert order.epoch_length == held // 2 * 2
    buses = attribute(dataset, "num_bus") > 0
    assert buses[read_epoch(order)].sum() >= order.epoch_length // 2 - 1


def test_equal_weights_change_nothing_but_the_epoch_length(dataset):
    order = compile_order(
        OrderSpec(weights=(AttributeWeights(attribute="night", values={}),)),
        dataset,
    )
    assert np.array_equal(read_epoch(order), read_epoch(compile_order(OrderSpec(), dataset)))
    twice = compile_order(
        OrderSpec(weights=(AttributeWeights(attribute="night"),), epoch_length=2 * NUM),
        dataset,
    )
    assert set(read_epoch(twice).tolist()) == set(
        np.flatnonzero(attribute(dataset, "night")).tolist()
    )


MIX = Mix(attribute="night", ratios={"true": 3, "false": 1})


@pytest.mark.parametrize("kind", KINDS)
def test_a_mix_has_exact_shares_in_every_block(dataset, kind):
    order = compile_order(OrderSpec(**kind, seed=5, filter="num_car > 0", mix=MIX), dataset)
    chosen = attribute(dataset, "num_car") > 0
    night = attribute(dataset, "night")
    for epoch in range(3):
        samples = read_epoch(order, epoch)
        assert (night[samples.reshape(-1, 4)].sum(axis=1) == 3).all()
        assert set(samples.tolist()) == set(np.flatnonzero(chosen).tolist())
    assert np.array_equal(order.selected(), np.flatnonzero(chosen))
    totals = sum(np.bincount(read_epoch(order, epoch), minlength=NUM) for epoch in range(40))
    of_value = np.bincount(night[chosen], minlength=2)
    shares = order.epoch_length * np.array([1, 3]) / 4 / of_value
    assert np.abs(totals[chosen] / 40 - shares[night[chosen].astype(int)]).max() < 0.2


def test_a_mix_of_one_value_and_weights_within_the_parts(dataset):
    only_night = compile_order(OrderSpec(mix=Mix(attribute="night", ratios={"true": 5})), dataset)
    nights = np.flatnonzero(attribute(dataset, "night"))
    assert np.array_equal(only_night.selected(), nights)
    heavy = AttributeWeights(attribute="num_car")
    order = compile_order(OrderSpec(mix=MIX, weights=(heavy,), epoch_length=400), dataset)
    assert order.epoch_length == 400
    cars = attribute(dataset, "num_car")
    assert (cars[read_epoch(order)] > 0).all()
    totals = sum(np.bincount(read_epoch(order, epoch), minlength=NUM) for epoch in range(40))
    assert np.abs(totals[nights] / 40 - 300 * cars[nights] / cars[nights].sum()).max() < 0.3


def test_compositions_are_those_of_every_release(by_clip):
    # Saved training states rely on these, as on the values in test_permutation.py.
    mixed = compile_order(OrderSpec(seed=7, filter="num_car > 0", mix=MIX), by_clip)
    assert read_epoch(mixed, 1)[:12].tolist() == [
        57,
        35,
        94,
        14,
        88,
        81,
        84,
        3,
        9,
        47,
        58,
        10,
    ]
    spec = OrderSpec(
        kind="windowed",
        window=2,
        seed=7,
        filter="num_car > 0",
        weights=(NIGHT,),
    )
    assert read_epoch(compile_order(spec, by_clip), 1)[:12].tolist() == [
        71,
        64,
        70,
        70,
        67,
        55,
        49,
        48,
        62,
        51,
        58,
        60,
    ]


def test_windows_that_drop_leave_out_clip_starts(dataset):
    window = FrameWindow(frames=(-2, -1, 0), stride=2, pad="drop")
    order = compile_order(OrderSpec(kind="sequential"), dataset, window=window)
    assert np.array_equal(read_epoch(order), np.flatnonzero(dataset.index.column("frame") >= 4))
    masked = FrameWindow(frames=(-2, -1, 0), stride=2, pad="mask")
    assert compile_order(OrderSpec(), dataset, window=masked).epoch_length == NUM


def test_lanes_follow_clips_of_the_selection(dataset):
    spec = OrderSpec(kind="lanes", filter="night", pieces_per_clip=2)
    order = compile_order(spec, dataset, global_batch=4)
    entries = order.epoch(1).entries(np.arange(order.epoch_length))
    assert np.array_equal(
        np.sort(entries.samples[entries.valid]),
        np.flatnonzero(attribute(dataset, "night")),
    )
    frames = dataset.index.column("frame")
    clips = dataset.index.clip_numbers()
    samples = entries.samples.reshape(-1, 4)
    exists = entries.flags["prev_exists"].reshape(-1, 4)
    assert (frames[samples[1:]] == frames[samples[:-1]] + 1)[exists[1:]].all()
    assert (clips[samples[1:]] == clips[samples[:-1]])[exists[1:]].all()


def test_datasets_stored_by_clip_and_by_frame_give_the_same_lanes(by_clip, by_frame):
    # Clips are numbered by first appearance, so only the set of (clip, frame) sequences is the same.
    def sequences(dataset):
        order = compile_order(OrderSpec(kind="lanes"), dataset, global_batch=1)
        keys = dataset.index.texts("key").to_pylist()
        entries = order.epoch(0).entries(np.arange(order.epoch_length))
        starts = np.flatnonzero(~entries.flags["prev_exists"])
        return {tuple(keys[s] for s in piece) for piece in np.split(entries.samples, starts[1:])}

    assert sequences(by_clip) == sequences(by_frame)


SPECS = [
    OrderSpec(seed=1),
    OrderSpec(kind="windowed", window=3, filter="num_car > 0"),
    OrderSpec(weights=(NIGHT,), epoch_length=150),
    OrderSpec(
        kind="windowed",
        window=2,
        filter="num_car > 0",
        weights=(NIGHT,),
        epoch_length=97,
    ),
    OrderSpec(kind="windowed", window=2, filter="num_car > 0", mix=MIX),
]


@given(
    st.sampled_from(SPECS),
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(1, 3),
    st.integers(0, 60),
)
def test_any_composition_resumes_anywhere_in_any_world(
    by_frame, spec, size, second_size, factor, num_steps
):
    order = compile_order(spec, by_frame)
    global_batch = size * second_size * factor
    plan = Batching(order.epoch_length, global_batch, World(), drop_last=False)
    number, step = Walk(Cursor(), plan).place(num_steps)
    cursor = Cursor(number, plan.consumed(step))

    def batch(size):
        epoch = order.epoch(cursor.epoch)
        ranks = [
            Batching(
                order.epoch_length,
                global_batch,
                World(r, size),
                drop_last=False,
            )
            for r in range(size)
        ]
        return np.concatenate([epoch(cursor.rest(rank).positions(0)) for rank in ranks]).tolist()

    expected = read_epoch(order, cursor.epoch)[cursor.rest(plan).positions(0)].tolist()
    assert batch(1) == batch(size) == batch(second_size) == expected


def test_identities_tell_orders_apart_and_hold_no_paths(dataset, tmp_path):
    keys = dataset.index.texts("key").to_pylist()
    for name, chosen in (
        ("a.txt", keys[:9]),
        ("b.txt", keys[:8]),
        ("c.txt", keys[:9]),
    ):
        (tmp_path / name).write_text("\n".join(chosen))
    for name, weight in (("a.csv", 2), ("b.csv", 3), ("c.csv", 2)):
        (tmp_path / name).write_text(f"key,weight\n{keys[0]},{weight}\n")

    def identity(global_batch=None, **fields):
        order = compile_order(OrderSpec(**fields), dataset, global_batch=global_batch)
        encoded = msgspec.json.encode(order.identity)
        assert msgspec.json.decode(encoded) == order.identity
        return encoded

    subsets = [{"subset": str(tmp_path / name)} for name in ("a.txt", "b.txt")]
    by_file = [
        {"weights": (FileWeights(file=str(tmp_path / name)),)} for name in ("a.csv", "b.csv")
    ]
    fewer = Mix(attribute="night", ratios={"true": 3, "false": 2})
    different = [
        identity(**fields)
        for fields in (
            {},
            {"seed": 1},
            {"kind": "sequential"},
            {"filter": "night"},
            {"filter": "num_car > 0"},
            *subsets,
            {"weights": (NIGHT,)},
            {"weights": (NIGHT,), "epoch_length": 7},
            *by_file,
            {"mix": MIX},
            {"mix": fewer},
            {"mix": MIX, "epoch_length": 8},
            *({"mix": MIX, **weights} for weights in by_file),
            {"kind": "lanes", "global_batch": 2},
            {"kind": "lanes", "global_batch": 4},
            {"kind": "lanes", "global_batch": 4, "pieces_per_clip": 2},
        )
    ]
    assert len(set(different)) == len(different)
    assert identity(subset=str(tmp_path / "a.txt")) == identity(subset=str(tmp_path / "c.txt"))
    same = [
        identity(weights=(FileWeights(file=str(tmp_path / name)),)) for name in ("a.csv", "c.csv")
    ]
    assert same[0] == same[1]
    assert not any(str(tmp_path).encode() in identity_bytes for identity_bytes in different)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"filter": "num_car > 99"}, "filter 'num_car > 99' selects no sample"),
        (
            {"filter": "num_cars > 9"},
            "no attribute 'num_cars'; did you mean num_car",
        ),
        ({"filter": "num_car > 'a'"}, "does not fit the attributes"),
        ({"kind": "lanes"}, "needs the global batch"),
        (
            {
                "weights": (AttributeWeights(attribute="num_bus"),),
                "filter": "num_bus == 0",
            },
            "weights are 0",
        ),
        (
            {"weights": (AttributeWeights(attribute="speed"),)},
            "no attribute 'speed'",
        ),
        (
            {"mix": Mix(attribute="night", ratios={"maybe": 1})},
            "no selected sample has 'night' 'maybe'; there are: F",
        ),
        (
            {"mix": Mix(attribute="nite", ratios={"true": 1})},
            "no attribute 'nite'; did you mean night",
        ),
        ({"mix": Mix(attribute="night", ratios={"true": 0})}, "integers >= 1"),
        (
            {"mix": Mix(attribute="night", ratios={})},
            "ratios must be integers >= 1, at most 1024 in sum, got",
        ),
        ({"subset": "gone.txt"}, "keys file 'gone.txt' cannot be read"),
    ],
)
def test_orders_that_cannot_be_are_refused(by_clip, fields, text):
    with pytest.raises(OrderError, match=text):
        compile_order(OrderSpec(**fields), by_clip)


def test_a_subset_outside_of_the_filter_leaves_nothing(by_clip, tmp_path):
    keys = np.array(by_clip.index.texts("key").to_pylist())[~attribute(by_clip, "night")]
    (tmp_path / "day.txt").write_text(keys[0])
    with pytest.raises(
        OrderError,
        match=r"day.txt' selects no sample out of the .* selected before",
    ):
        compile_order(OrderSpec(filter="night", subset=str(tmp_path / "day.txt")), by_clip)


def test_unknown_keys_are_counted_and_named(tmp_path):
    index_keys = pa.chunked_array([["a", "b"], ["c"]])
    (tmp_path / "keys.txt").write_text("a\nx\ny\n")
    with pytest.raises(
        OrderError,
        match="names 2 of 3 keys that are not in the split, such as 'x'",
    ):
        read_keys(str(tmp_path / "keys.txt"), index_keys)
    (tmp_path / "keys.txt").write_text("# nothing\n")
    assert read_keys(str(tmp_path / "keys.txt"), index_keys).tolist() == []


def test_attributes_that_do_not_fit_the_index_are_refused(tmp_path):
    dataset = write(tmp_path / "cut", None)
    file = dataset.root / ATTRIBUTES_FILE
    table = Attributes(dataset, "train").read(("night",))
    pq.write_table(table.slice(1), file)
    with pytest.raises(IndexFileError, match="has 99 rows for 100 samples"):
        compile_order(OrderSpec(filter="night"), dataset)
    file.write_bytes(b"PAR1 not really")
    with pytest.raises(IndexFileError, match="is damaged"):
        compile_order(OrderSpec(filter="night"), dataset)
    assert compile_order(OrderSpec(), dataset).epoch_length == NUM  # needs no attributes
    file.unlink()
    with pytest.raises(
        IndexFileError,
        match=r"attributes\.parquet' cannot be read: No such file",
    ):
        compile_order(OrderSpec(filter="night"), dataset)


def test_unknown_splits_are_refused(by_clip):
    with pytest.raises(ConfigError, match="no split 'test'; it has: train"):
        compile_order(OrderSpec(), by_clip, "test")


@pytest.mark.parametrize("spec", [*SPECS, OrderSpec(kind="lanes", seed=3), OrderSpec(mix=MIX)])
@pytest.mark.parametrize("shape", [(6,), (2, 3)])
def test_all_orders_answer_one_protocol(dataset, spec, shape):
    order = compile_order(spec, dataset, global_batch=4)
    epoch = order.epoch(1)
    positions = np.random.default_rng(shape).integers(0, len(epoch), shape)
    entries = epoch.entries(positions)
    all_entries = epoch.entries(np.arange(len(epoch)))
    for name in all_entries.flags:
        assert np.array_equal(entries.flags[name], all_entries.flags[name][positions])
    for part, whole_part in zip(entries[:3], all_entries[:3], strict=True):
        assert np.array_equal(part, whole_part[positions])
    assert len(epoch) == order.epoch_length
    assert [column.dtype for column in entries[:3]] == [
        np.int64,
        np.int64,
        bool,
    ]
    assert all(column.shape == shape for column in (*entries[:3], *entries.flags.values()))
    assert np.array_equal(entries.samples, epoch(positions))
    assert not entries.parts.any()  # all of one dataset
    if spec.kind == "lanes":
        assert epoch.num_lanes == 4
        assert np.array_equal(entries.flags["lane"], positions % 4)
        assert entries.flags.keys() == {"lane", "prev_exists"}
    else:
        assert epoch.num_lanes == 1
        assert entries.valid.all()
        assert not entries.flags
    assert len(order.selected()) == order.num_selected
