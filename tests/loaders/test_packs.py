"""Packs and balance through the DataLoader: batches, cu_seqlens, stops on other ranks, and what is refused."""

from __future__ import annotations

import json
import random
from itertools import islice, pairwise

import numpy as np
import pytest
import torch

from fuelrail import (
    Balance,
    Bucket,
    CameraGroup,
    Cost,
    ImageAugment,
    OrderSpec,
    Pack,
)
from fuelrail.loaders.integrations.iterable import IterableView
from fuelrail.pipeline.channels.kinds import Packed
from fuelrail.pipeline.errors import ConfigError, OrderError
from fuelrail.pipeline.format.attributes import Attributes
from fuelrail.pipeline.format.dataset import open_dataset
from support.batches import TINY, batches, load
from support.channels import tokens
from support.datasets import build_dataset

NUM = 46
TOKENS = tokens(words=10_000)
LENGTH = Cost(linear={"frame": 2}, constant=1)
"""Frame f of a clip has 2 f + 1 tokens."""
PACK = Pack(budget=9, cost=LENGTH, window=10)
ORDER = OrderSpec(seed=3, pack=PACK)
GROUPS = {
    "front": CameraGroup(
        cameras=("cam_front",),
        image=ImageAugment(height=8, width=16, resize="stretch"),
    ),
    "back": CameraGroup(cameras=("cam_back",), image=TINY),
}
BALANCED = OrderSpec(seed=3, pack=PACK, balance=Balance(cost=Cost(quadratic={"frame": 1})))


def words(row):
    return np.arange(100 * row, 100 * row + 2 * (row % 4) + 1)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packs") / "d"
    build_dataset(
        folder,
        {"train": (20, NUM - 20)},
        extra=[(TOKENS, words)],
        size=(16, 16),
    )
    return folder


def run(root, batch_size=3, **options):
    return batches(
        root,
        batch_size,
        image=TINY,
        **{"order": ORDER, "select": ["words"], **options},
    )


def packs(batch):
    """The rows of each pack of a batch."""
    bounds = batch["pack_offsets"].tolist()
    rows = batch["global_index"].tolist()
    return [rows[first:end] for first, end in pairwise(bounds)]


@pytest.mark.parametrize("decoder", ["turbo", "pillow"])
def test_a_batch_says_where_each_pack_sample_and_token_is(root, decoder):
    all_rows = []
    for batch in run(root, drop_last=False, decoder=decoder):
        rows = batch["global_index"].tolist()
        tokens = batch["words"]
        assert isinstance(tokens, Packed)
        assert len(packs(batch)) == 3
        assert all(0 < sum(len(words(row)) for row in pack) <= 9 for pack in packs(batch))
        assert batch["pack"].tolist() == [
            number for number, pack in enumerate(packs(batch)) for _ in pack
        ]
        assert torch.equal(
            tokens.values,
            torch.from_numpy(np.concatenate([words(row) for row in rows])),
        )
        assert (
            batch["cu_seqlens"].dtype
            == batch["sequence_ids"].dtype
            == batch["pack_offsets"].dtype
            == torch.int32
        )
        assert (
            batch["cu_seqlens"].tolist()
            == np.cumsum([0, *(len(words(row)) for row in rows)]).tolist()
        )
        assert batch["max_seqlen"] == max(len(words(row)) for row in rows)
        assert batch["position_ids"].tolist() == [
            position for row in rows for position in range(len(words(row)))
        ]
        assert batch["sequence_ids"].tolist() == [
            number for number, row in enumerate(rows) for _ in words(row)
        ]
        assert len(batch["img"]) == len(batch["sample_key"]) == len(batch["valid"]) == len(rows)
        all_rows += [row for row, valid in zip(rows, batch["valid"].tolist(), strict=True) if valid]
    assert sorted(all_rows) == list(range(NUM))


def test_a_sample_in_a_pack_is_the_sample_alone(root):
    alone = {
        batch["global_index"].item(): batch
        for batch in batches(root, 1, image=TINY, select=["words"])
    }
    for batch in run(root):
        for index, row in enumerate(batch["global_index"].tolist()):
            for name in ("img", "ego2img", "timestamp_ns"):
                assert torch.equal(batch[name][index], alone[row][name][0])


@pytest.mark.parametrize(
    "spec",
    [
        ORDER,
        BALANCED,
        OrderSpec(seed=3, balance=Balance(cost=LENGTH, micro_batches=2)),
    ],
)
def test_ranks_and_threads_share_the_same_packs(root, spec):
    def rows(batch):
        return (
            packs(batch) if "pack" in batch else [[row] for row in batch["global_index"].tolist()]
        )

    all_batches = run(root, 12, order=spec, num_workers=3, drop_last=False)
    rank_batches = [
        run(root, 4, order=spec, rank=rank, size=3, drop_last=False) for rank in range(3)
    ]
    assert len(all_batches) == len(rank_batches[0])
    for batch, *parts in zip(all_batches, *rank_batches, strict=True):
        rank_packs = [pack for part in parts for pack in rows(part)]
        assert sorted(rank_packs) == sorted(rows(batch))
        if spec is ORDER:
            assert rank_packs == rows(batch)


def stop_and_go(root, num_stops, seed):
    """Stop at random steps, continue on other ranks with a batch that divides; every sample once in each epoch."""
    draw = random.Random(seed)
    state = None
    all_rows = []
    epoch = 0
    for _ in range(num_stops):
        size, batch = draw.choice([(1, 4), (2, 2), (4, 1), (1, 2), (2, 1)])
        steps = draw.randint(1, 4)
        states = []
        parts = []
        for rank in range(size):
            with load(
                root,
                batch,
                rank=rank,
                size=size,
                image=TINY,
                order=ORDER,
                drop_last=False,
            ) as loader:
                if state is not None:
                    loader.load_state_dict(json.loads(state))
                received = [*islice(loader, steps)]
                states.append(json.dumps(loader.state_dict()))
                parts.append(received)
        assert len(set(states)) == 1
        for step_batches in zip(*parts, strict=True):
            for rank_batch in step_batches:
                all_rows += rank_batch["global_index"][rank_batch["valid"]].tolist()
        state = states[0]
        epoch = json.loads(state)["epoch"]
    for number in range(epoch):
        assert sorted(all_rows[NUM * number : NUM * (number + 1)]) == list(range(NUM))
    return epoch


@pytest.mark.costly
def test_stops_on_other_ranks_lose_and_repeat_nothing(root):
    assert stop_and_go(root, 12, seed=1) >= 1


def test_the_length_is_that_of_the_epoch_at_hand(root):
    lengths = []
    with load(root, 1, image=TINY, order=ORDER) as loader:
        for _ in range(6):
            expected = len(loader)
            lengths.append(sum(1 for _ in loader))
            assert lengths[-1] == expected
    assert len(set(lengths)) > 1, "epochs of one length would not show that the others work"


@pytest.mark.parametrize("num_processes", [None, 0, 1])
def test_an_epoch_without_a_full_batch_is_passed_over(root, num_processes):
    with load(root, 1, image=TINY, order=ORDER) as loader:
        lengths = [loader.where.order.length(epoch) for epoch in range(12)]
    global_batch = lengths[0]
    epochs = [epoch for epoch, length in enumerate(lengths) if length >= global_batch]
    assert epochs != list(range(len(epochs))), "an epoch without a full batch lies between"
    with load(root, global_batch, image=TINY, order=ORDER) as loader:
        iterated = loader
        if num_processes is not None:
            view = IterableView(loader)
            iterated = torch.utils.data.DataLoader(view, batch_size=None, num_workers=num_processes)
        loaded_epochs = [[batch["epoch"] for batch in iterated] for _ in epochs]
    assert loaded_epochs == [[epoch] for epoch in epochs]


def test_batches_are_of_one_bucket_on_any_ranks(root):
    order = OrderSpec(seed=3, bucket=Bucket(by="frame", bounds=(0, 2, 3), window=20))
    all_batches = run(root, 6, order=order)  # the rests of buckets come with drop_last, too
    rank_batches = [run(root, 2, order=order, rank=rank, size=3) for rank in range(3)]
    all_rows = []
    for batch, *parts in zip(all_batches, *rank_batches, strict=True):
        rows = batch["global_index"].tolist()
        assert [row for part in parts for row in part["global_index"].tolist()] == rows
        (bucket,) = {(0, 1, 1, 2)[row % 4] for row in rows}
        assert batch["bucket"].tolist() == [bucket] * 6
        all_rows += batch["global_index"][batch["valid"]].tolist()
    assert sorted(all_rows) == list(range(NUM))
    with pytest.raises(ConfigError, match="substitute' cannot be used with an order in buckets"):
        load(root, 6, image=TINY, order=order, on_error="substitute")


def test_too_long_samples_are_cut_where_that_is_asked(root, tmp_path):
    order = OrderSpec(pack=Pack(budget=2, cost="frame", truncate=True), filter="frame > 0")
    for batch in run(root, 2, order=order):
        lengths = [len(words(row)) for row in batch["global_index"].tolist()]
        assert batch["cu_seqlens"].diff().tolist() == [min(2, length) for length in lengths]
    with pytest.raises(
        OrderError,
        match=r"sample 'clip-0000-000003' .* costs 3, above the budget of 2",
    ):
        run(
            root,
            2,
            order=OrderSpec(pack=Pack(budget=2, cost="frame"), filter="frame > 0"),
        )


@pytest.mark.parametrize("images", [{}, {"camera_groups": GROUPS}])
def test_static_packs_hold_the_same_in_fixed_shapes(root, images):
    order = OrderSpec(seed=3, pack=Pack(budget=9, cost=LENGTH, window=10, max_samples=4))
    options = {"order": order, "drop_last": False, **images}
    shapes = set()
    places = set()
    with load(
        root,
        3,
        select=["words"],
        static={"max_boxes": 40},
        **{"image": TINY, **options},
    ) as loader:
        for expected, got in zip(run(root, **options), loader, strict=True):
            num = len(expected["pack"])
            tokens = len(expected["words"].values)
            flat = {name: value for name, value in got.items() if isinstance(value, torch.Tensor)}
            flat |= {
                "values": got["words"].values,
                "offsets": got["words"].offsets,
            }
            flat |= got["img"] if images else {}
            shapes.add(tuple((name, *value.shape) for name, value in flat.items()))
            places.add(tuple(value.data_ptr() for value in flat.values()))
            assert len(got["pack"]) == len(got["valid"]) == 12
            assert got["max_seqlen"] == 9
            assert got["pack"].tolist() == [
                *expected["pack"].tolist(),
                *[-1] * (12 - num),
            ]
            assert not got["valid"][num:].any()
            assert not got["gt_mask"][num:].any()
            assert (got["gt_labels_3d"][~got["gt_mask"]] == -1).all()
            assert got["cu_seqlens"].tolist() == [
                *expected["cu_seqlens"].tolist(),
                *[tokens] * (12 - num),
            ]
            assert torch.equal(got["words"].offsets, got["cu_seqlens"].long())
            assert got["sequence_ids"].tolist() == [
                *expected["sequence_ids"].tolist(),
                *[-1] * (27 - tokens),
            ]
            assert torch.equal(got["words"].values[:tokens], expected["words"].values)
            assert not got["words"].values[tokens:].any()
            assert torch.equal(got["position_ids"][:tokens], expected["position_ids"])
            assert torch.equal(got["pack_offsets"], expected["pack_offsets"])
            for name, value in expected.items():
                if isinstance(value, torch.Tensor) and name not in (
                    "position_ids",
                    "sequence_ids",
                ):
                    assert torch.equal(got[name][: len(value)], value), name
                elif isinstance(value, list) and not isinstance(value[0], torch.Tensor):
                    assert got[name] == value
            if images:
                assert all(
                    torch.equal(got["img"][name][:num], group_images)
                    for name, group_images in expected["img"].items()
                )
    assert len(shapes) == 1
    assert len(places) == 2  # the sets of buffers


def test_static_packs_need_room_for_their_tokens(root):
    pack = Pack(
        budget=9,
        cost=Cost(linear={"frame": 2}, constant=1, divisor=2),
        window=10,
        max_samples=12,
    )
    options = {
        "order": OrderSpec(pack=pack),
        "select": ["words"],
        "image": TINY,
    }
    with (
        load(root, 2, static=True, **options) as loader,
        pytest.raises(ConfigError, match="raise max_tokens"),
    ):
        list(loader)
    with load(root, 2, static={"max_tokens": 72}, **options) as loader:
        assert {len(batch["words"].values) for batch in loader} == {72}


@pytest.mark.parametrize(
    ("options", "words_of_error"),
    [
        ({"transform": dict}, "transform cannot"),
        ({"collate_fn": list}, "collate_fn cannot"),
        ({"window": {"frames": [-1, 0]}}, "window cannot"),
        ({"two_views": True}, "two_views cannot"),
        ({"static": True}, r"static cannot .* Pack\(max_samples"),
        ({"on_error": "substitute"}, "substitute' cannot"),
    ],
)
def test_what_packs_do_not_go_with_is_refused_by_name(root, options, words_of_error):
    with pytest.raises(ConfigError, match=words_of_error):
        load(root, 2, image=TINY, order=ORDER, **options)


def test_the_order_is_as_compiled(root):
    frames = Attributes(open_dataset(root), "train").read(("frame",))["frame"].to_pylist()
    assert [2 * frame + 1 for frame in frames] == [len(words(row)) for row in range(NUM)]


def test_a_ledger_refuses_what_it_cannot_replay(root, tmp_path):
    with pytest.raises(ConfigError, match="cannot record an order with bucket"):
        load(
            root,
            2,
            image=TINY,
            order=OrderSpec(bucket=Bucket(by="frame")),
            ledger=tmp_path / "run",
        )
