"""Orders through the DataLoader: filtered, weighted, mixed, in lanes; states of other orders are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fuelrail import AttributeWeights, DataLoader, Mix, OrderSpec, World
from fuelrail.pipeline.errors import ConfigError, OrderError, StateMismatchError
from fuelrail.pipeline.format.dataset import open_dataset
from support.batches import TINY, batches, load
from support.datasets import build_dataset
from support.storage_suite import spoil

# clips of four frames, the last of two
FIRST = 5
NUM = 26
LENGTHS = {"val": (FIRST,), "train": (9, 10, NUM - 19)}
LANES = OrderSpec(kind="lanes", seed=1)
LANES_OF_PIECES = OrderSpec(kind="lanes", seed=1, pieces_per_clip=2)
MIXED = OrderSpec(mix=Mix(attribute="frame", ratios={"0": 1, "3": 2}))


@pytest.fixture(scope="module")
def root(build_once):
    return build_once(LENGTHS)[0]


def run(root, batch_size, **options):
    return batches(root, batch_size, image=TINY, **options)


def column(batches, name):
    """The entries of all batches (steps, batch)."""
    return np.array(
        [batch[name].tolist() if torch.is_tensor(batch[name]) else batch[name] for batch in batches]
    )


def test_a_filter_leaves_exactly_what_it_selects(root):
    batches = run(
        root,
        4,
        order=OrderSpec(filter="frame >= 2 and clip_id != 'clip-0002'", seed=3),
        drop_last=False,
    )
    every = np.arange(FIRST, FIRST + NUM)
    selected = every[(every % 4 >= 2) & (every // 4 != 2)]
    assert len(batches) == -(-len(selected) // 4)
    assert np.array_equal(
        np.sort(column(batches, "global_index")[column(batches, "valid")]),
        selected,
    )


def in_order(root, **options):
    """The rows of an epoch, by a loader of exactly these options."""
    with DataLoader(root, 5, world=World(), transforms={"image": TINY}, **options) as loader:
        batches = list(loader)
    return column(batches, "global_index")[column(batches, "valid")].tolist()


@pytest.mark.parametrize("form", [OrderSpec, dict], ids=["a spec", "a dict"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"filter": "frame < 2"},
        {"weights": [{"by": "attribute", "attribute": "frame"}]},
    ],
    ids=["whole", "filter", "weights"],
)
def test_an_order_without_a_kind_follows_shuffle(root, form, fields):
    fields = dict(fields)
    if form is OrderSpec and "weights" in fields:
        fields["weights"] = (AttributeWeights(attribute="frame"),)
    by_kind = {
        kind: in_order(root, order=form(**fields, kind=kind)) for kind in ("sequential", "shuffled")
    }
    assert by_kind["sequential"] == sorted(by_kind["sequential"]) != by_kind["shuffled"]
    assert in_order(root, shuffle=False, order=form(**fields)) == by_kind["sequential"]
    assert in_order(root, shuffle=True, order=form(**fields)) == by_kind["shuffled"]
    assert in_order(root, order=form(**fields)) == by_kind["shuffled"]


@pytest.mark.parametrize(
    ("shuffle", "fields"),
    [
        (False, {"kind": "shuffled"}),
        (False, {"kind": "windowed", "window": 2}),
        (False, {"kind": "lanes"}),
        (True, {"kind": "sequential"}),
    ],
)
def test_a_shuffle_that_contradicts_the_order_is_refused(root, shuffle, fields):
    with pytest.raises(
        ConfigError,
        match=rf"shuffle={shuffle} and order kind '{fields['kind']}'",
    ):
        in_order(root, shuffle=shuffle, order=OrderSpec(**fields))
    assert len(in_order(root, order=OrderSpec(**fields))) >= NUM
    assert len(in_order(root, shuffle=not shuffle, order=OrderSpec(**fields))) >= NUM


def test_weights_repeat_samples_in_one_epoch(root):
    batches = run(
        root,
        4,
        order=OrderSpec(weights=(AttributeWeights(attribute="frame"),), epoch_length=40),
    )
    assert len(batches) == 10
    counts = np.bincount(column(batches, "frame").ravel(), minlength=4)
    assert counts[0] == 0
    assert counts[3] > counts[2] > counts[1] > 0


def test_a_mix_holds_in_every_global_batch(root):
    ranks = [run(root, 3, rank=rank, size=2, order=MIXED) for rank in range(2)]
    for parts in zip(*ranks, strict=True):
        assert sorted(np.concatenate(column(parts, "frame"))) == [
            0,
            0,
            3,
            3,
            3,
            3,
        ]


def test_lanes_follow_clips_and_say_when_to_forget(root):
    batches = run(root, 4, order=LANES)
    rows, exists, valid, clips = (
        column(batches, name) for name in ("global_index", "prev_exists", "valid", "clip_id")
    )
    assert (column(batches, "lane") == np.arange(4)).all()
    assert np.array_equal(np.sort(rows[valid]), np.arange(FIRST, FIRST + NUM))
    assert not exists[0].any()
    assert (rows[1:][exists[1:]] == rows[:-1][exists[1:]] + 1).all()
    assert (clips[1:][exists[1:]] == clips[:-1][exists[1:]]).all()
    assert (clips[1:][~exists[1:] & valid[1:]] != clips[:-1][~exists[1:] & valid[1:]]).all()
    assert {"lane", "prev_exists"}.isdisjoint(run(root, 4)[0]), (
        "batches of other orders have no lanes"
    )


def test_a_bad_frame_is_replaced_by_the_lanes_next(root, tmp_path):
    build_dataset(tmp_path / "OUT", LENGTHS)
    expected = column(run(root, 4, order=LANES), "global_index")
    spoil(tmp_path / "OUT", open_dataset(root).index.row(int(expected[1, 2])))
    actual = column(
        run(tmp_path / "OUT", 4, order=LANES, on_error="substitute", file=None),
        "global_index",
    )
    assert actual[1, 2] == expected[2, 2]
    actual[1, 2] = expected[1, 2]
    assert np.array_equal(actual, expected)


ORDERS = [
    OrderSpec(),
    MIXED,
    OrderSpec(filter="frame > 0"),
    OrderSpec(filter="frame > 1"),
    OrderSpec(weights=(AttributeWeights(attribute="frame"),)),
    LANES,
    LANES_OF_PIECES,
]


def test_states_of_other_orders_are_refused(root):
    loaders = [load(root, 2, order=order) for order in ORDERS]
    states = [loader.state_dict() for loader in loaders]
    for loader, own_state in zip(loaders, states, strict=True):
        loader.load_state_dict(own_state)
        for state in states:
            if state is not own_state:
                with pytest.raises(StateMismatchError, match=r"order: state has .* loader has"):
                    loader.load_state_dict(state)
    with pytest.raises(
        StateMismatchError, match=r"'lanes': 4.*'lanes': 2"
    ):  # of another global batch
        load(root, 2, order=LANES).load_state_dict(load(root, 4, order=LANES).state_dict())


def test_orders_that_cannot_be_are_refused_at_once(root):
    with pytest.raises(OrderError, match="selects no sample"):
        load(root, 2, order=OrderSpec(filter="frame > 9"))
    with pytest.raises(OrderError, match="7 pieces of clips for 8 lanes"):
        load(root, 8, order=LANES)
