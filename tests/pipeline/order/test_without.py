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
CLIPS = [f"clip {row // 5}" for row in range(NUM)]
COLUMNS = {
    "key": [f"{clip} frame {row}" for row, clip in enumerate(CLIPS)],
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
    "weights in windows": {
        "kind": "windowed",
        "window": 3,
        "weights": LOSS,
        "epoch_length": 67,
    },
    "mix of parts": {"mix": Mix(attribute="night", ratios={"true": 3, "false": 2})},
    "stages": {"stages": STAGES, "epoch_length": NUM},
    "packs": {"pack": PACK},
    "packs of weights": {"pack": PACK, "weights": LOSS},
    "balance": {"balance": Balance(cost="tokens")},
    "balanced packs": {"pack": PACK, "balance": Balance(cost="tokens")},
}
MIXES = {
    "ratios": {"a": 2, "b": 1},
    "stages": [
        MixStage({"a": 3, "b": 0}, until=60),
        MixStage({"a": 1, "b": 2}),
    ],
}
NAMES = st.lists(
    st.sampled_from([*dict.fromkeys(CLIPS), *COLUMNS["key"]]),
    min_size=1,
    max_size=4,
    unique=True,
)


def blocks(fields):
    return 6 if fields.get("kind") == "windowed" else None


def find_rows(names):
    return np.array(
        [row for row in range(NUM) if CLIPS[row] in names or COLUMNS["key"][row] in names]
    )


def make_order(fields, without=(), seed=3, global_batch=4, data=COLUMNS, mix=None):
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
    plan = order.epoch(epoch)
    entries = plan.entries(np.arange(len(plan)))
    pairs = list(zip(entries.parts.tolist(), entries.samples.tolist(), strict=True))
    if "lane" in entries.flags:
        lanes = entries.flags["lane"]
        return [
            [pairs[position] for position in np.flatnonzero((lanes == lane) & entries.valid)]
            for lane in range(plan.num_lanes)
        ]
    pack = entries.flags.get("pack", np.arange(len(pairs)))
    return [
        [pairs[position] for position in np.flatnonzero(pack == number)]
        for number in range(len(plan))
    ]


def check(order, undivided, epoch, hidden):
    """Compare an order with the whole one by a search, and its inverse with one."""
    remaining = [[row for row in group if row not in hidden] for group in groups(undivided, epoch)]
    is_lanes = "lane" in undivided.epoch(epoch).entries([0]).flags
    assert groups(order, epoch) == (
        remaining if is_lanes else [group for group in remaining if group]
    )
    plan = order.epoch(epoch)
    assert len(plan) == (
        max(map(len, remaining)) * len(remaining) if is_lanes else sum(map(bool, remaining))
    )
    entries = plan.entries(np.arange(len(plan)))
    positions = entries.flags.get("pack", np.arange(len(plan)))
    for part in range(2):
        rows = np.arange(NUM)
        positions_by_row = [
            np.sort(positions[(entries.parts == part) & (entries.samples == row)]) for row in rows
        ]
        if part and not np.concatenate(positions_by_row).size:
            continue
        indices, positions_found = plan.find(rows, part)
        assert np.array_equal(indices, np.repeat(rows, list(map(len, positions_by_row))))
        assert np.array_equal(positions_found, np.concatenate(positions_by_row))


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
    hidden = {(0, row) for row in find_rows(names).tolist()}
    undivided = make_order(fields, seed=seed, global_batch=global_batch)
    try:
        order = make_order(fields, (tuple(names),), seed, global_batch)
    except OrderError as error:
        assert "nothing is left" in str(error)
        return
    check(order, undivided, epoch, hidden)
    twice = make_order(fields, (tuple(names), ("clip 5", "clip 0")), seed, global_batch)
    check(
        pickle.loads(pickle.dumps(twice)),
        undivided,
        epoch,
        hidden | {(0, row) for row in find_rows(["clip 5", "clip 0"])},
    )
    if "pack" not in fields and "balance" not in fields:
        assert set(order.selected()) == set(undivided.selected()) - {row for _, row in hidden}
        assert order.num_selected == len(order.selected())


@pytest.mark.parametrize("mix", MIXES)
@settings(max_examples=8, deadline=None)
@given(
    names=NAMES,
    second_names=NAMES,
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 9),
)
def test_names_may_be_of_any_dataset_of_a_mix(mix, names, second_names, seed, epoch):
    second = {name: column[5:30] for name, column in COLUMNS.items() if name in ("key", "clip_id")}
    second = {name: [f"b {text}" for text in column] for name, column in second.items()}
    data = {
        "a": {name: COLUMNS[name] for name in ("key", "clip_id")},
        "b": second,
    }
    hidden_of_second = {
        row
        for row in range(25)
        if {second["clip_id"][row], second["key"][row]}
        & {f"b {text_name}" for text_name in second_names}
    }
    if not hidden_of_second:
        return
    stored_names = [
        f"b {text_name}"
        for text_name in second_names
        if f"b {text_name}" in {*second["clip_id"], *second["key"]}
    ]
    order = make_order({}, ((*names, *stored_names),), seed, data=data, mix=MIXES[mix])
    hidden = {(0, row) for row in find_rows(names).tolist()} | {
        (1, row) for row in hidden_of_second
    }
    undivided = make_order({}, (), seed, data=data, mix=MIXES[mix])
    remaining = [group for group in groups(undivided, epoch) if group[0] not in hidden]
    assert groups(order, epoch) == remaining
    with pytest.raises(
        OrderError,
        match=r"1 names are neither a key nor a clip of the samples there are, such as 'c'",
    ):
        make_order({}, ((*names, "c"),), seed, data=data, mix=MIXES[mix])


def sampler(
    fields,
    without=(),
    rank=0,
    size=1,
    global_batch=4,
    drop_last=True,
    **options,
):
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
    hidden = set(find_rows(names).tolist())
    undivided = sampler(fields, drop_last=drop_last).count()
    never = sampler(fields, (names,), drop_last=drop_last)
    expected = [never[step] for step in range(24)]
    rows_shown = set()
    num_clean = 0
    run = iter(undivided)
    for step in range(14):
        state = json.loads(json.dumps(undivided.state_dict()))
        tail = sampler(fields, (names,), drop_last=drop_last)
        if rows_shown & hidden:
            with pytest.raises(
                StateMismatchError,
                match="showed what `without` names at position",
            ):
                tail.load_state_dict(state)
        else:
            num_clean += 1
            tail.load_state_dict(state)
            batches = [batch for _ in range(3) for batch in tail.count()]
            assert batches[: 24 - step] == expected[step : step + len(batches)]
        batch = next(run, None)
        if batch is None:
            run = iter(undivided)
            batch = next(run)
        if not rows_shown & hidden:
            assert set(batch) & hidden or batch == expected[step]
        rows_shown.update(batch)
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
                sampler(
                    fields,
                    without=(names,),
                    rank=rank,
                    size=size,
                    global_batch=8,
                )
                for rank in range(size)
            ]
            assert [
                [row for rank_sampler in ranks for row in rank_sampler[step]] for step in range(3)
            ] == expected
    state = sampler(fields, global_batch=8).state_dict()
    for size in (1, 2, 8):
        ranks = [
            sampler(fields, without=(names,), rank=rank, size=size, global_batch=8)
            for rank in range(size)
        ]
        for rank_sampler in ranks:
            rank_sampler.load_state_dict(state)
        assert [
            sorted(row for batch in batches for row in batch)
            for batches in zip(*ranks, strict=True)
        ] == [sorted(never[step]) for step in range(never.steps_per_epoch)]


def test_64_ranks():
    names = tuple(range(100, 300, 7))
    data = {"key": [str(row_number) for row_number in range(4096)]}
    spec = OrderSpec(without=(tuple(map(str, names)),))
    ranks = [
        fr.order.BatchSampler(data, spec, global_batch=128, world=World(rank, 64))
        for rank in range(64)
    ]
    rows = []
    for batches in zip(*ranks, strict=True):
        for batch in batches:
            rows += batch
    undivided = fr.order.BatchSampler(data, OrderSpec(), global_batch=1)
    remaining = [row_number for (row_number,) in undivided if row_number not in names]
    assert rows == remaining[: len(remaining) // 128 * 128]


WINDOWS = {
    pad: FrameWindow(frames=(-1, 0, 1), pad=pad)
    for pad in ("repeat_edge", "repeat_current", "mask", "drop")
}


@pytest.mark.parametrize("pad", WINDOWS)
def test_a_window_lacks_the_frames(pad):
    names = (COLUMNS["key"][12], "clip 5")
    hidden = set(find_rows(names).tolist())
    options = {"window": WINDOWS[pad], "entries": True, "global_batch": 1}
    undivided = sampler({}, **options)
    thin = sampler({}, (names,), **options)
    thin_entries = [sample_entry for (sample_entry,) in thin]
    expected = [
        sample_entry
        for (sample_entry,) in undivided
        if sample_entry.row not in hidden
        and not (pad == "drop" and hidden & {*sample_entry.frames})
    ]
    assert [entry.row for entry in thin_entries] == [entry.row for entry in expected]
    for sample_entry, before in zip(thin_entries, expected, strict=True):
        assert not hidden & set(sample_entry.frames)
        same = [place for place, frame in enumerate(before.frames) if frame not in hidden]
        assert [sample_entry.frames[place] for place in same if before.present[place]] == [
            before.frames[place] for place in same if before.present[place]
        ]
        assert not any(sample_entry.present[place] for place in range(3) if place not in same)
    counted = undivided.count()
    dirty = False
    undivided.load_state_dict(sampler({}, **options).state_dict())
    for (entry,) in counted:
        state = undivided.state_dict()
        dirty |= bool(hidden & {entry.row, *entry.frames})
        if dirty:
            with pytest.raises(StateMismatchError, match="load a state from before it"):
                thin.load_state_dict(state)
            break
        thin.load_state_dict(state)


def test_a_second_deletion_continues_a_run_with_the_first():
    first = ("clip 3",)
    first_sampler = sampler({}, (first,)).count()
    second = (COLUMNS["key"][first_sampler.sampler[4][2]],)
    second_sampler = sampler({}, (first, second))
    for step, batch in enumerate(first_sampler):
        assert (batch == second_sampler[step]) == (step < 4)
        state = first_sampler.state_dict()
        if step < 4:
            second_sampler.load_state_dict(state)
            assert list(second_sampler.count()) == [
                second_sampler[number] for number in range(step + 1, second_sampler.steps_per_epoch)
            ]
        else:
            with pytest.raises(
                StateMismatchError,
                match="showed what `without` names at position 18 of epoch 0",
            ):
                second_sampler.load_state_dict(state)
    for deletions in ((second,), (), (second, first)):
        with pytest.raises(StateMismatchError, match="another training sequence"):
            sampler({}, deletions).load_state_dict(state)


def test_names_from_a_file_and_wrong_ones(tmp_path):
    file = tmp_path / "names.txt"
    file.write_text(f"# a comment\nclip 4\n\n{COLUMNS['key'][2]}\n")
    spec = OrderSpec(without=(str(file), ("clip 1",)))
    rows = OrderedRows(
        data=COLUMNS,
        spec=spec,
        blocks=None,
        mix=None,
        window=None,
        global_batch=4,
        entries=False,
    ).order
    assert set(rows.selected()) == set(range(NUM)) - set(
        find_rows(["clip 4", "clip 1", COLUMNS["key"][2]])
    )
    with pytest.raises(OrderError, match="nothing is left"):
        make_order({}, (tuple(CLIPS),))
    with pytest.raises(
        OrderError,
        match=r"2 names are neither a key nor a clip of .*, such as 'nobody'",
    ):
        make_order({}, (("nobody", "nowhere", "clip 1"),))
    with pytest.raises(OrderError, match="cannot be read"):
        make_order({}, (str(tmp_path / "none.txt"),))
    with pytest.raises(OrderError, match="without"):
        OrderSpec(without=(3,))
    with pytest.raises(OrderError, match="without"):
        OrderSpec(without="names.txt")


def test_what_is_left_of_a_million_rows():
    data = {"key": np.arange(10**6).astype(str)}
    order = make_order({}, (tuple(map(str, range(0, 10**6, 10_000))),), data=data)
    rows = make_order({}, data=data).epoch(0)(np.arange(10**6))
    assert np.array_equal(order.epoch(0)(np.arange(len(order.epoch(0)))), rows[rows % 10_000 != 0])
