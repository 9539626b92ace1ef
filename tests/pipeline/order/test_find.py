"""The inverse of every order: where a sample is shown, against a search through the whole epoch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuelrail.pipeline.errors import OrderError
from fuelrail.pipeline.order.mix import Mix, MixStage
from fuelrail.pipeline.order.spec import OrderSpec, OrderStage
from fuelrail.pipeline.order.table import OrderedRows
from fuelrail.pipeline.order.weights import AttributeWeights

NUM = 37
COLUMNS = {
    "clip_id": np.arange(NUM) // 5,
    "night": np.arange(NUM) % 3 == 0,
    "loss": (np.arange(NUM) * 7 % 11) / 4,
}
LOSS = (AttributeWeights(attribute="loss"),)
KINDS = {
    "shuffled": ({}, None),
    "sequential": ({"kind": "sequential"}, None),
    "windowed": ({"kind": "windowed", "window": 2}, (3, 9, 1, 4, 2, 11, 7)),
    "lanes": ({"kind": "lanes"}, None),
    "pieces": (
        {"kind": "lanes", "pieces_per_clip": 2, "filter": "loss > 0.5"},
        None,
    ),
    "filter": ({"filter": "night or loss > 2"}, None),
    "weights": ({"weights": LOSS}, None),
    "weights and filter": (
        {"weights": LOSS, "filter": "night", "epoch_length": 90},
        None,
    ),
    "weights in windows": (
        {"kind": "windowed", "window": 3, "weights": LOSS, "epoch_length": 23},
        6,
    ),
    "mix of parts": (
        {"mix": Mix(attribute="night", ratios={"true": 3, "false": 2})},
        None,
    ),
    "weighted mix": (
        {
            "mix": Mix(attribute="night", ratios={"false": 1}),
            "weights": LOSS,
            "epoch_length": 60,
        },
        None,
    ),
}
STAGES = [
    MixStage({"a": 3, "b": 0, "c": 1}, until=40, ramp=True),
    MixStage({"a": 1, "b": 2, "c": 1}, until=80),
    MixStage({"a": 0, "b": 1, "c": 3}),
]
MIXES = {"ratios": {"a": 2, "b": 1, "c": 5}, "stages": STAGES}


def rows(data, spec, blocks=None, mix=None, global_batch=4):
    return OrderedRows(
        data=data,
        spec=spec,
        blocks=blocks,
        mix=mix,
        window=None,
        global_batch=global_batch,
        entries=False,
    ).order


def check(order, epoch, sizes):
    """Compare `find` with a search, for all samples of all parts at once and for some twice."""
    plan = order.epoch(epoch)
    entries = plan.entries(np.arange(len(plan)))
    for part, size in enumerate(sizes):
        samples = np.append(np.arange(size), np.arange(size)[::-7])
        indices, positions = plan.find(samples, part)
        expected = [
            np.flatnonzero((entries.samples == sample) & (entries.parts == part))
            for sample in samples
        ]
        assert np.array_equal(
            indices,
            np.repeat(np.arange(len(samples)), [len(places) for places in expected]),
        )
        assert np.array_equal(positions, np.concatenate(expected))
        assert len(plan.find([], part).indices) == 0


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 2**20),
    global_batch=st.integers(1, 8),
)
def test_find_is_a_search_through_the_epoch(name, seed, epoch, global_batch):
    fields, blocks = KINDS[name]
    check(
        rows(
            COLUMNS,
            OrderSpec(seed=seed, **fields),
            blocks,
            global_batch=global_batch,
        ),
        epoch,
        [NUM],
    )


@pytest.mark.parametrize("epoch", range(4))
def test_find_in_stages(epoch):
    stages = (
        OrderStage(until=70),
        OrderStage(filter="night", weights=LOSS, until=110, ramp=True),
        OrderStage(weights=LOSS),
    )
    check(
        rows(COLUMNS, OrderSpec(seed=1, stages=stages, epoch_length=37)),
        epoch,
        [NUM],
    )


@pytest.mark.parametrize("mix", MIXES)
@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**63 - 1),
    sizes=st.lists(st.integers(1, 30), min_size=3, max_size=3),
    epoch=st.integers(0, 9),
    fields=st.sampled_from([{}, {"kind": "sequential"}, {"epoch_length": 13}]),
)
def test_find_in_a_mix_of_datasets(mix, seed, sizes, epoch, fields):
    data = dict(zip("abc", sizes, strict=True))
    check(rows(data, OrderSpec(seed=seed, **fields), mix=MIXES[mix]), epoch, sizes)


def test_a_sample_that_does_not_exist_is_refused():
    for fields, blocks in KINDS.values():
        if not {"filter", "mix"} & fields.keys():
            with pytest.raises(OrderError, match="is outside 0"):
                rows(COLUMNS, OrderSpec(**fields), blocks).epoch(0).find([NUM])
    with pytest.raises(OrderError, match="the mix has no dataset 3"):
        rows({"a": 4, "b": 4, "c": 4}, OrderSpec(), mix=MIXES["ratios"]).epoch(0).find([1], 3)


@pytest.mark.parametrize(
    ("spec", "blocks", "mix"),
    [
        (OrderSpec(), None, None),
        (OrderSpec(kind="windowed", window=100), 10_000, None),
        (
            OrderSpec(),
            None,
            [
                MixStage({"a": 3, "b": 1}, until=2**27, ramp=True),
                MixStage({"a": 1, "b": 1}),
            ],
        ),
    ],
    ids=["shuffled", "windowed", "stages"],
)
def test_find_of_a_hundred_million_rows_gives_back_the_sample(spec, blocks, mix):
    num = 10**8
    data = num if mix is None else {"a": num, "b": num // 3}
    plan = rows(data, spec, blocks, mix).epoch(5)
    drawn = np.random.default_rng(0).integers(0, len(plan), 20)
    parts, samples, _, _ = plan.entries(drawn)
    for part, sample, position in zip(
        parts.tolist(), samples.tolist(), drawn.tolist(), strict=True
    ):
        assert position in plan.find([sample], part).positions
