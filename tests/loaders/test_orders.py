"""Orders through the DataLoader: filtered, weighted, in lanes; on any ranks, from any step, refused elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fuelrail.loaders import AttributeWeights, ImageAugment, Mix, OrderSpec, World
from fuelrail.pipeline.errors import OrderError, StateMismatchError
from support.datasets import build_dataset
from support.loaders import make_loader

SMALL = ImageAugment(height=64, width=96, resize=1.0)
NUM = 26  # clips of four frames, the last of two


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("orders") / "OUT"
    build_dataset(folder, {"val": (5,), "train": (9, 10, NUM - 19)})
    return folder


def make(root, batch_size, rank=0, size=1, **options):
    return make_loader(root, batch_size, world=World(rank, size), image=SMALL, num_workers=1, **options)


def run(root, global_batch, size, *, epoch=0, state=None, **options):
    """One epoch over all ranks: for each step the rows of names, joined in the order of the ranks."""
    names = ("global_index", "frame", "valid", "prev_exists", "lane")
    ranks = []
    for rank in range(size):
        with make(root, global_batch // size, rank, size, **options) as loader:
            if state is not None:
                loader.load_state_dict(state)
            else:
                loader.set_epoch(epoch)
            ranks.append([{name: batch.get(name) for name in names} | batch for batch in loader])
    return [
        {name: torch.cat([part[name] for part in parts]).tolist() for name in names if parts[0][name] is not None}
        | {"clip_id": [clip for part in parts for clip in part["clip_id"]]}
        for parts in zip(*ranks, strict=True)
    ]


def column(batches, name):
    return [value for batch in batches for value in batch[name]]


def test_a_filter_leaves_exactly_what_it_selects(root):
    order = OrderSpec(filter="frame >= 2 and clip_id != 'clip-0002'", seed=3)
    with make(root, 4, order=order, drop_last=False) as loader:
        batches = list(loader)
        assert len(batches) == len(loader)
    rows = np.array([row for batch in batches for row in batch["global_index"][batch["valid"]].tolist()])
    every = np.arange(5, 5 + NUM)
    assert np.array_equal(np.sort(rows), every[(every % 4 >= 2) & (every // 4 != 2)])


def test_weights_repeat_samples_in_one_epoch(root):
    order = OrderSpec(weights=(AttributeWeights(attribute="frame"),), epoch_length=40)
    with make(root, 4, order=order) as loader:
        assert len(loader) == 10
        frames = np.array([frame for batch in loader for frame in batch["frame"].tolist()])
    counts = np.bincount(frames, minlength=4)
    assert counts[0] == 0
    assert counts[3] > counts[2] > counts[1] > 0


LANES = OrderSpec(kind="lanes", seed=1)


def test_lanes_follow_clips_and_say_when_to_forget(root):
    batches = run(root, 4, 1, order=LANES)
    rows, exists, valid = (
        np.array([batch[name] for batch in batches]) for name in ("global_index", "prev_exists", "valid")
    )
    lanes = np.array([batch["lane"] for batch in batches])
    assert (lanes == np.arange(4)).all()
    assert np.array_equal(np.sort(rows[valid]), np.arange(5, 5 + NUM))
    assert not exists[0].any()
    assert (rows[1:][exists[1:]] == rows[:-1][exists[1:]] + 1).all()
    clips = np.array([batch["clip_id"] for batch in batches])
    assert (clips[1:][exists[1:]] == clips[:-1][exists[1:]]).all()
    assert (clips[1:][~exists[1:] & valid[1:]] != clips[:-1][~exists[1:] & valid[1:]]).all()


@pytest.mark.parametrize(
    "order", [LANES, OrderSpec(filter="frame > 0", weights=(AttributeWeights(attribute="frame"),))]
)
@pytest.mark.slow
def test_ranks_and_resuming_change_nothing(root, order):
    whole = run(root, 4, 1, epoch=1, order=order)
    assert run(root, 4, 2, epoch=1, order=order) == run(root, 4, 4, epoch=1, order=order) == whole
    with make(root, 2, 0, 2, order=order) as loader:
        loader.set_epoch(1)
        batches = iter(loader)
        for done in range(1, len(whole)):
            next(batches)
            state = loader.state_dict()
            assert run(root, 4, 4, state=state, order=order) == whole[done:]


def test_flags_reach_the_users_functions(root):
    def transform(sample):
        return {"lane": sample["lane"], "prev_exists": sample["prev_exists"], "at": int(sample["frame"])}

    plain = run(root, 4, 1, order=LANES)
    with make(root, 4, order=LANES, transform=transform) as loader:
        batches = list(loader)
    assert [batch["lane"].tolist() for batch in batches] == [batch["lane"] for batch in plain]
    assert [batch["prev_exists"].tolist() for batch in batches] == [batch["prev_exists"] for batch in plain]
    assert [batch["at"].tolist() for batch in batches] == [batch["frame"] for batch in plain]


def test_a_bad_frame_is_replaced_by_the_lanes_next(root, tmp_path):
    own = tmp_path / "OUT"
    build_dataset(own, {"val": (5,), "train": (9, 10, NUM - 19)})
    whole = run(own, 4, 1, order=LANES)
    bad = whole[1]["global_index"][2]
    row = make_loader(own, 1, world=World(), image=SMALL).dataset.index.row(bad)
    shard = own / f"train-{row.shard - 1:06d}.tar"
    content = bytearray(shard.read_bytes())
    content[row.offset + row.length // 2] ^= 255
    shard.write_bytes(content)
    batches = run(own, 4, 1, order=LANES, on_error="substitute", file=None)
    assert batches[1]["global_index"][2] == whole[2]["global_index"][2]
    batches[1]["global_index"][2], batches[1]["frame"][2] = bad, whole[1]["frame"][2]
    batches[1]["clip_id"][2] = whole[1]["clip_id"][2]
    assert batches == whole


def test_batches_of_other_orders_have_no_lanes(root):
    with make(root, 4) as loader:
        assert {"lane", "prev_exists"}.isdisjoint(next(iter(loader)))


def test_a_mix_holds_in_every_global_batch(root):
    order = OrderSpec(mix=Mix(attribute="frame", ratios={"0": 1, "3": 2}))
    for batch in run(root, 6, 2, order=order):
        assert sorted(batch["frame"]) == [0, 0, 3, 3, 3, 3]


OTHERS = [
    OrderSpec(),
    OrderSpec(mix=Mix(attribute="frame", ratios={"0": 1, "3": 2})),
    OrderSpec(filter="frame > 0"),
    OrderSpec(filter="frame > 1"),
    OrderSpec(weights=(AttributeWeights(attribute="frame"),)),
    LANES,
    OrderSpec(kind="lanes", seed=1, pieces_per_clip=2),
]


def test_states_of_other_orders_are_refused(root):
    states = []
    for order in OTHERS:
        with make(root, 2, order=order) as loader:
            states.append(loader.state_dict())
    for number, order in enumerate(OTHERS):
        for other, state in enumerate(states):
            with make(root, 2, order=order) as loader:
                if number == other:
                    loader.load_state_dict(state)
                    continue
                with pytest.raises(StateMismatchError, match=r"order: state has .* loader has"):
                    loader.load_state_dict(state)


def test_lanes_of_another_global_batch_are_refused(root):
    with make(root, 4, order=LANES) as four:
        state = four.state_dict()
    with make(root, 2, order=LANES) as two, pytest.raises(StateMismatchError, match=r"'lanes': 4.*'lanes': 2"):
        two.load_state_dict(state)


def test_orders_that_cannot_be_are_refused_at_once(root):
    with pytest.raises(OrderError, match="selects no sample"):
        make(root, 2, order=OrderSpec(filter="frame > 9"))
    with pytest.raises(OrderError, match="7 pieces of clips for 8 lanes"):
        make(root, 8, order=LANES)
