"""Packs and balance through the DataLoader: batches, cu_seqlens, stops on other ranks, and what is refused."""

from __future__ import annotations

import json
import random
from itertools import islice, pairwise

import numpy as np
import pytest
import torch

from fuelrail.loaders import Balance, Cost, OrderSpec, Pack
from fuelrail.pipeline.channels.kinds import Packed
from fuelrail.pipeline.channels.table import Channel, Law, Vocabulary
from fuelrail.pipeline.errors import ConfigError, OrderError
from fuelrail.pipeline.format.attributes import Attributes
from fuelrail.pipeline.format.dataset import open_dataset
from support.batches import TINY, batches, load
from support.datasets import build_dataset

NUM = 46
TOKENS = Channel(
    name="words", kind="tokens", field="words.npy", dtype="int64", axes=("token",), shape=(None,), law=Law("fixed"),
    vocabulary=Vocabulary("words", 10_000),
)  # fmt: skip
LENGTH = Cost(linear={"frame": 2}, constant=1)
"""Frame f of a clip has 2 f + 1 tokens."""
PACK = Pack(budget=9, cost=LENGTH, window=10)
ORDER = OrderSpec(seed=3, pack=PACK)
BALANCED = OrderSpec(seed=3, pack=PACK, balance=Balance(cost=Cost(quadratic={"frame": 1})))


def words(row):
    return np.arange(100 * row, 100 * row + 2 * (row % 4) + 1)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packs") / "d"
    build_dataset(folder, {"train": (20, NUM - 20)}, extra=[(TOKENS, words)], size=(16, 16))
    return folder


def run(root, batch_size=3, **options):
    return batches(root, batch_size, image=TINY, **{"order": ORDER, "channels": ["words"], **options})


def packs(batch):
    """The rows of each pack of a batch."""
    bounds = batch["pack_offsets"].tolist()
    rows = batch["global_index"].tolist()
    return [rows[first:end] for first, end in pairwise(bounds)]


@pytest.mark.parametrize("decoder", ["turbo", "pillow"])
def test_a_batch_says_where_each_pack_sample_and_token_is(root, decoder):
    seen = []
    for batch in run(root, drop_last=False, decoder=decoder):
        rows, tokens = batch["global_index"].tolist(), batch["words"]
        assert isinstance(tokens, Packed)
        assert len(packs(batch)) == 3
        assert all(0 < sum(len(words(row)) for row in pack) <= 9 for pack in packs(batch))
        assert batch["pack"].tolist() == [number for number, pack in enumerate(packs(batch)) for _ in pack]
        assert torch.equal(tokens.values, torch.from_numpy(np.concatenate([words(row) for row in rows])))
        assert batch["cu_seqlens"].dtype == batch["sequence_ids"].dtype == batch["pack_offsets"].dtype == torch.int32
        assert batch["cu_seqlens"].tolist() == np.cumsum([0, *(len(words(row)) for row in rows)]).tolist()
        assert batch["max_seqlen"] == max(len(words(row)) for row in rows)
        assert batch["position_ids"].tolist() == [at for row in rows for at in range(len(words(row)))]
        assert batch["sequence_ids"].tolist() == [at for at, row in enumerate(rows) for _ in words(row)]
        assert len(batch["img"]) == len(batch["sample_key"]) == len(batch["valid"]) == len(rows)
        seen += [row for row, valid in zip(rows, batch["valid"].tolist(), strict=True) if valid]
    assert sorted(seen) == list(range(NUM))


def test_a_sample_in_a_pack_is_the_sample_alone(root):
    alone = {batch["global_index"].item(): batch for batch in batches(root, 1, image=TINY, channels=["words"])}
    for batch in run(root):
        for at, row in enumerate(batch["global_index"].tolist()):
            for name in ("img", "ego2img", "timestamp_ns"):
                assert torch.equal(batch[name][at], alone[row][name][0])


@pytest.mark.parametrize("spec", [ORDER, BALANCED, OrderSpec(seed=3, balance=Balance(cost=LENGTH, micro_batches=2))])
def test_ranks_and_threads_share_the_same_packs(root, spec):
    def rows(batch):
        return packs(batch) if "pack" in batch else [[row] for row in batch["global_index"].tolist()]

    whole = run(root, 12, order=spec, num_workers=3, drop_last=False)
    of_ranks = [run(root, 4, order=spec, rank=rank, size=3, drop_last=False) for rank in range(3)]
    assert len(whole) == len(of_ranks[0])
    for batch, *parts in zip(whole, *of_ranks, strict=True):
        found = [pack for part in parts for pack in rows(part)]
        assert sorted(found) == sorted(rows(batch))
        if spec is ORDER:
            assert found == rows(batch)


def stop_and_go(root, num_stops, seed):
    """Stop at random steps, continue on other ranks with a batch that divides; every sample once in each epoch."""
    draw, state, found, epoch = random.Random(seed), None, [], 0
    for _ in range(num_stops):
        size, batch = draw.choice([(1, 4), (2, 2), (4, 1), (1, 2), (2, 1)])
        steps, states, parts = draw.randint(1, 4), [], []
        for rank in range(size):
            with load(root, batch, rank=rank, size=size, image=TINY, order=ORDER, drop_last=False) as loader:
                if state is not None:
                    loader.load_state_dict(json.loads(state))
                made = [*islice(loader, steps)]
                states.append(json.dumps(loader.state_dict()))
                parts.append(made)
        assert len(set(states)) == 1
        for of_step in zip(*parts, strict=True):
            for one in of_step:
                found += one["global_index"][one["valid"]].tolist()
        state = states[0]
        epoch = json.loads(state)["epoch"]
    for number in range(epoch):
        assert sorted(found[NUM * number : NUM * (number + 1)]) == list(range(NUM))
    return epoch


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


def test_too_long_samples_are_cut_where_that_is_asked(root, tmp_path):
    order = OrderSpec(pack=Pack(budget=2, cost="frame", truncate=True), filter="frame > 0")
    for batch in run(root, 2, order=order):
        lengths = [len(words(row)) for row in batch["global_index"].tolist()]
        assert batch["cu_seqlens"].diff().tolist() == [min(2, length) for length in lengths]
    with pytest.raises(OrderError, match=r"sample 'clip-0000-000003' .* costs 3, above the budget of 2"):
        run(root, 2, order=OrderSpec(pack=Pack(budget=2, cost="frame"), filter="frame > 0"))


@pytest.mark.parametrize(
    ("options", "words_of_error"),
    [
        ({"transform": dict}, "transform cannot"),
        ({"collate_fn": list}, "collate_fn cannot"),
        ({"window": {"frames": [-1, 0]}}, "window cannot"),
        ({"two_views": True}, "two_views cannot"),
        ({"static": True}, "static cannot"),
        ({"on_error": "substitute"}, "substitute' cannot"),
    ],
)
def test_what_packs_do_not_go_with_is_refused_by_name(root, options, words_of_error):
    with pytest.raises(ConfigError, match=words_of_error):
        load(root, 2, image=TINY, order=ORDER, **options)


def test_the_order_is_as_compiled(root):
    frames = Attributes(open_dataset(root), "train").read(("frame",))["frame"].to_pylist()
    assert [2 * frame + 1 for frame in frames] == [len(words(row)) for row in range(NUM)]
