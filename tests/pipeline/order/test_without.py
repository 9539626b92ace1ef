"""Samples that are left out of an order in their place: against a search through the whole epoch."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fuelrail as fr
from fuelrail import World
from fuelrail.pipeline.errors import OrderError, StateMismatchError
from fuelrail.pipeline.order.balance import Balance
from fuelrail.pipeline.order.mix import Mix, MixStage
from fuelrail.pipeline.order.pack import Pack
from fuelrail.pipeline.order.spec import OrderSpec, OrderStage
from fuelrail.pipeline.order.table import OrderedRows
from fuelrail.pipeline.order.weights import AttributeWeights
from fuelrail.pipeline.order.windows import FrameWindow

NUM = 41
CLIPS = [f"clip {at // 5}" for at in range(NUM)]
COLUMNS = {
    "key": [f"{clip} frame {at}" for at, clip in enumerate(CLIPS)],
    "clip_id": CLIPS,
    "night": np.arange(NUM) % 3 == 0,
    "loss": (np.arange(NUM) * 7 % 11) / 4,
    "tokens": np.arange(NUM) * 5 % 7 + 1,
}
LOSS = (AttributeWeights(attribute="loss"),)
PACK = Pack(budget=9, cost="tokens", window=16)
STAGES = (OrderStage(until=70), OrderStage(filter="night", weights=LOSS))
ORDERS = {
    "shuffled": {},
    "sequential": {"kind": "sequential"},
    "windowed": {"kind": "windowed", "window": 2},
    "lanes": {"kind": "lanes"},
    "pieces": {"kind": "lanes", "pieces_per_clip": 2, "filter": "loss > 0.5"},
    "filter": {"filter": "night or loss > 2"},
    "weights": {"weights": LOSS},
    "weights in windows": {"kind": "windowed", "window": 3, "weights": LOSS, "epoch_length": 67},
    "mix of parts": {"mix": Mix(attribute="night", ratios={"true": 3, "false": 2})},
    "stages": {"stages": STAGES, "epoch_length": NUM},
    "packs": {"pack": PACK},
    "packs of weights": {"pack": PACK, "weights": LOSS},
    "balance": {"balance": Balance(cost="tokens")},
    "balanced packs": {"pack": PACK, "balance": Balance(cost="tokens")},
}
MIXES = {
    "ratios": {"a": 2, "b": 1},
    "stages": [MixStage({"a": 3, "b": 0}, until=60), MixStage({"a": 1, "b": 2})],
}
NAMES = st.lists(
    st.sampled_from([*dict.fromkeys(CLIPS), *COLUMNS["key"]]), min_size=1, max_size=4, unique=True
)


def blocks(fields):
    return 6 if fields.get("kind") == "windowed" else None


def rows_of(names):
    return np.array([at for at in range(NUM) if CLIPS[at] in names or COLUMNS["key"][at] in names])


def order_of(fields, without=(), seed=3, global_batch=4, data=COLUMNS, mix=None):
    spec = OrderSpec(seed=seed, without=without, **fields)
    return OrderedRows(
        data=data,
        spec=spec,
        blocks=blocks(fields),
        mix=mix,
        window=None,
        global_batch=global_batch,
        entries=False,
    ).order


def groups(order, epoch):
    """What the epoch shows: the samples of each pack, of each lane without padding, or of each position."""
    shown = order.epoch(epoch)
    entries = shown.entries(np.arange(len(shown)))
    pairs = list(zip(entries.parts.tolist(), entries.samples.tolist(), strict=True))
    if "lane" in entries.flags:
        lanes = entries.flags["lane"]
        return [
            [pairs[at] for at in np.flatnonzero((lanes == lane) & entries.valid)]
            for lane in range(shown.num_lanes)
        ]
    pack = entries.flags.get("pack", np.arange(len(pairs)))
    return [[pairs[at] for at in np.flatnonzero(pack == one)] for one in range(len(shown))]


def check(order, whole, epoch, hidden):
    """Compare an order with the whole one by a search, and its inverse with one."""
    left = [[one for one in group if one not in hidden] for group in groups(whole, epoch)]
    is_lanes = "lane" in whole.epoch(epoch).entries([0]).flags
    assert groups(order, epoch) == (left if is_lanes else [group for group in left if group])
    shown = order.epoch(epoch)
    assert len(shown) == (max(map(len, left)) * len(left) if is_lanes else sum(map(bool, left)))
    entries = shown.entries(np.arange(len(shown)))
    positions = entries.flags.get("pack", np.arange(len(shown)))
    for part in range(2):
        asked = np.arange(NUM)
        here = [
            np.sort(positions[(entries.parts == part) & (entries.samples == one)]) for one in asked
        ]
        if part and not np.concatenate(here).size:
            continue
        which, found = shown.find(asked, part)
        assert np.array_equal(which, np.repeat(asked, list(map(len, here))))
        assert np.array_equal(found, np.concatenate(here))


@pytest.mark.parametrize("name", ORDERS)
@settings(max_examples=8, deadline=None)
@given(
    names=NAMES,
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 2**20),
    global_batch=st.integers(1, 6),
)
def test_what_is_left_keeps_its_order(name, names, seed, epoch, global_batch):
    fields = ORDERS[name]
    hidden = {(0, row) for row in rows_of(names).tolist()}
    whole = order_of(fields, seed=seed, global_batch=global_batch)
    try:
        order = order_of(fields, (tuple(names),), seed, global_batch)
    except OrderError as error:
        assert "nothing is left" in str(error)
        return
    check(order, whole, epoch, hidden)
    twice = order_of(fields, (tuple(names), ("clip 5", "clip 0")), seed, global_batch)
    check(
        pickle.loads(pickle.dumps(twice)),
        whole,
        epoch,
        hidden | {(0, at) for at in rows_of(["clip 5", "clip 0"])},
    )
    if "pack" not in fields and "balance" not in fields:
        assert set(order.selected()) == set(whole.selected()) - {row for _, row in hidden}
        assert order.num_selected == len(order.selected())


@pytest.mark.parametrize("mix", MIXES)
@settings(max_examples=8, deadline=None)
@given(names=NAMES, others=NAMES, seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 9))
def test_names_may_be_of_any_dataset_of_a_mix(mix, names, others, seed, epoch):
    second = {name: column[5:30] for name, column in COLUMNS.items() if name in ("key", "clip_id")}
    second = {name: [f"b {text}" for text in column] for name, column in second.items()}
    data = {"a": {name: COLUMNS[name] for name in ("key", "clip_id")}, "b": second}
    of_second = {
        at
        for at in range(25)
        if {second["clip_id"][at], second["key"][at]} & {f"b {one}" for one in others}
    }
    if not of_second:
        return
    known = [f"b {one}" for one in others if f"b {one}" in {*second["clip_id"], *second["key"]}]
    order = order_of({}, ((*names, *known),), seed, data=data, mix=MIXES[mix])
    hidden = {(0, row) for row in rows_of(names).tolist()} | {(1, row) for row in of_second}
    whole = order_of({}, (), seed, data=data, mix=MIXES[mix])
    left = [group for group in groups(whole, epoch) if group[0] not in hidden]
    assert groups(order, epoch) == left
    with pytest.raises(
        OrderError,
        match=r"1 names are neither a key nor a clip of the samples there are, such as 'c'",
    ):
        order_of({}, ((*names, "c"),), seed, data=data, mix=MIXES[mix])


def sampler(fields, without=(), rank=0, size=1, global_batch=4, drop_last=True, **options):
    spec = OrderSpec(seed=5, without=without, **fields)
    given_blocks = {} if blocks(fields) is None else {"blocks": blocks(fields)}
    world = World(rank, size)
    return fr.order.BatchSampler(
        COLUMNS,
        spec,
        global_batch=global_batch,
        world=world,
        drop_last=drop_last,
        **given_blocks,
        **options,
    )


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("drop_last", [True, False])
def test_a_run_that_continues_without_them_is_one_that_never_had_them(name, drop_last):
    """From each state of the whole run: it is refused where a sample was shown, else the tail is the same."""
    fields = ORDERS[name]
    names = ("clip 3", COLUMNS["key"][22])
    hidden = set(rows_of(names).tolist())
    whole = sampler(fields, drop_last=drop_last).count()
    never = sampler(fields, (names,), drop_last=drop_last)
    expected = [never[step] for step in range(24)]
    shown = set()
    num_clean = 0
    run = iter(whole)
    for step in range(14):
        state = json.loads(json.dumps(whole.state_dict()))
        tail = sampler(fields, (names,), drop_last=drop_last)
        if shown & hidden:
            with pytest.raises(StateMismatchError, match="showed what `without` names at position"):
                tail.load_state_dict(state)
        else:
            num_clean += 1
            tail.load_state_dict(state)
            found = [batch for _ in range(3) for batch in tail.count()]
            assert found[: 24 - step] == expected[step : step + len(found)]
        batch = next(run, None)
        if batch is None:
            run = iter(whole)
            batch = next(run)
        if not shown & hidden:
            assert set(batch) & hidden or batch == expected[step]
        shown.update(batch)
    assert num_clean
    assert all(not hidden & set(batch) for batch in expected)


@pytest.mark.parametrize("name", ["shuffled", "windowed", "weights", "packs", "balance"])
def test_any_number_of_ranks_continues(name):
    fields = ORDERS[name]
    names = ("clip 2",)
    never = sampler(fields, (names,), global_batch=8)
    if "balance" not in fields:
        expected = [never[step] for step in range(3)]
        for size in (2, 4, 8):
            ranks = [
                sampler(fields, without=(names,), rank=rank, size=size, global_batch=8)
                for rank in range(size)
            ]
            assert [[row for one in ranks for row in one[step]] for step in range(3)] == expected
    state = sampler(fields, global_batch=8).state_dict()
    for size in (1, 2, 8):
        ranks = [
            sampler(fields, without=(names,), rank=rank, size=size, global_batch=8)
            for rank in range(size)
        ]
        for one in ranks:
            one.load_state_dict(state)
        assert [
            sorted(row for batch in batches for row in batch)
            for batches in zip(*ranks, strict=True)
        ] == [sorted(never[step]) for step in range(never.steps_per_epoch)]


def test_64_ranks():
    names = tuple(range(100, 300, 7))
    data = {"key": [str(at) for at in range(4096)]}
    spec = OrderSpec(without=(tuple(map(str, names)),))
    ranks = [
        fr.order.BatchSampler(data, spec, global_batch=128, world=World(rank, 64))
        for rank in range(64)
    ]
    found = [row for batches in zip(*ranks, strict=True) for batch in batches for row in batch]
    whole = fr.order.BatchSampler(data, OrderSpec(), global_batch=1)
    left = [row for (row,) in whole if row not in names]
    assert found == left[: len(left) // 128 * 128]


WINDOWS = {
    pad: FrameWindow(frames=(-1, 0, 1), pad=pad)
    for pad in ("repeat_edge", "repeat_current", "mask", "drop")
}


@pytest.mark.parametrize("pad", WINDOWS)
def test_a_window_lacks_the_frames(pad):
    names = (COLUMNS["key"][12], "clip 5")
    hidden = set(rows_of(names).tolist())
    options = {"window": WINDOWS[pad], "entries": True, "global_batch": 1}
    whole = sampler({}, **options)
    thin = sampler({}, (names,), **options)
    found = [one for (one,) in thin]
    expected = [
        one
        for (one,) in whole
        if one.row not in hidden and not (pad == "drop" and hidden & {*one.frames})
    ]
    assert [one.row for one in found] == [one.row for one in expected]
    for one, before in zip(found, expected, strict=True):
        assert not hidden & set(one.frames)
        same = [at for at, frame in enumerate(before.frames) if frame not in hidden]
        assert [one.frames[at] for at in same if before.present[at]] == [
            before.frames[at] for at in same if before.present[at]
        ]
        assert not any(one.present[at] for at in range(3) if at not in same)
    counted = whole.count()
    dirty = False
    whole.load_state_dict(sampler({}, **options).state_dict())
    for (entry,) in counted:
        state = whole.state_dict()
        dirty |= bool(hidden & {entry.row, *entry.frames})
        if dirty:
            with pytest.raises(StateMismatchError, match="load a state from before it"):
                thin.load_state_dict(state)
            break
        thin.load_state_dict(state)


def test_a_second_deletion_continues_a_run_with_the_first():
    first = ("clip 3",)
    one = sampler({}, (first,)).count()
    second = (COLUMNS["key"][one.sampler[4][2]],)
    both = sampler({}, (first, second))
    for step, batch in enumerate(one):
        assert (batch == both[step]) == (step < 4)
        state = one.state_dict()
        if step < 4:
            both.load_state_dict(state)
            assert list(both.count()) == [both[at] for at in range(step + 1, both.steps_per_epoch)]
        else:
            with pytest.raises(
                StateMismatchError, match="showed what `without` names at position 18 of epoch 0"
            ):
                both.load_state_dict(state)
    for other in ((second,), (), (second, first)):
        with pytest.raises(StateMismatchError, match="another training sequence"):
            sampler({}, other).load_state_dict(state)


def test_names_from_a_file_and_wrong_ones(tmp_path):
    file = tmp_path / "names.txt"
    file.write_text(f"# a comment\nclip 4\n\n{COLUMNS['key'][2]}\n")
    spec = OrderSpec(without=(str(file), ("clip 1",)))
    rows = OrderedRows(
        data=COLUMNS, spec=spec, blocks=None, mix=None, window=None, global_batch=4, entries=False
    ).order
    assert set(rows.selected()) == set(range(NUM)) - set(
        rows_of(["clip 4", "clip 1", COLUMNS["key"][2]])
    )
    with pytest.raises(OrderError, match="nothing is left"):
        order_of({}, (tuple(CLIPS),))
    with pytest.raises(
        OrderError, match=r"2 names are neither a key nor a clip of .*, such as 'nobody'"
    ):
        order_of({}, (("nobody", "nowhere", "clip 1"),))
    with pytest.raises(OrderError, match="cannot be read"):
        order_of({}, (str(tmp_path / "none.txt"),))
    with pytest.raises(OrderError, match="without"):
        OrderSpec(without=(3,))
    with pytest.raises(OrderError, match="without"):
        OrderSpec(without="names.txt")


def test_what_is_left_of_a_million_rows():
    data = {"key": np.arange(10**6).astype(str)}
    order = order_of({}, (tuple(map(str, range(0, 10**6, 10_000))),), data=data)
    whole = order_of({}, data=data).epoch(0)(np.arange(10**6))
    assert np.array_equal(
        order.epoch(0)(np.arange(len(order.epoch(0)))), whole[whole % 10_000 != 0]
    )
