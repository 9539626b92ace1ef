from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest

from fuelrail import OrderSpec, Pack
from fuelrail.bench.studies.train.experiment import TimedTransform, make_loader
from fuelrail.pipeline.errors import ConfigError
from support.bench_runs import SETTINGS
from support.packed_ranks import LENGTH, PACK, TOKENS, words


def batches(dataset, count=10, **changes):
    settings = msgspec.structs.replace(
        SETTINGS,
        dataset=str(dataset),
        **{"batch_size": 2, "workers": 1, **changes},
    )
    with make_loader(settings, None) as loader:
        return [
            {
                name: value.clone() if hasattr(value, "clone") else value
                for name, value in batch.items()
            }
            for batch in itertools.islice(loader, count)
        ]


def test_without_changes_it_is_the_plain_loader(dataset):
    assert [batch["sample_key"] for batch in batches(dataset)] == [
        batch["sample_key"] for batch in batches(dataset)
    ]


@pytest.mark.parametrize("left_out", ["storage", "decompression", "decode", "transform"])
def test_without_a_stages_work_batches_keep_their_shape_and_number(dataset, left_out):
    name = f"{__name__}:mark"
    plain = batches(dataset, transform=name)
    without = batches(dataset, leave_out=(left_out,), transform=name)
    assert len(without) == len(plain)
    for ours, theirs in zip(without, plain, strict=True):
        assert ours.keys() == theirs.keys()
        assert ours["img"].shape == theirs["img"].shape
        assert np.array_equal(ours["global_index"], theirs["global_index"])
        if left_out in ("decode", "transform"):
            assert ours["sample_key"] == theirs["sample_key"]
        else:
            assert len({key for batch in without for key in batch["sample_key"]}) <= 8


def test_a_transform_is_found_and_run_unless_left_out(dataset):
    name = f"{__name__}:mark"
    assert int(batches(dataset, 1, transform=name)[0]["img"][0, 0, 0, 0, 0]) == 77
    unmarked = batches(dataset, 1, transform=name, leave_out=("transform",))[0]
    assert np.array_equal(unmarked["img"], batches(dataset, 1)[0]["img"])


def mark(sample):
    sample["img"][0, 0, 0, 0] = 77
    return sample


@pytest.mark.parametrize("name", ["no_such_module:f", "json:no_such", "json", "json:__doc__"])
def test_a_transform_that_is_not_there_is_refused(dataset, name):
    with pytest.raises(ConfigError, match="transform"):
        batches(dataset, 1, transform=name)


@pytest.fixture
def documents(tiny_dataset):
    return tiny_dataset({"train": (16, 15)}, extra=[(TOKENS, words)]).root


def test_an_order_of_its_own_packs_what_the_decoder_reads(documents):
    packed = batches(
        documents,
        batch_size=3,
        model="gpt-tiny",
        order=OrderSpec(seed=3, pack=PACK),
    )
    assert all(len(batch["pack_offsets"]) == 4 and "cu_seqlens" in batch for batch in packed)
    assert sum(len(batch["sample_key"]) for batch in packed) > 2 * len(packed)


@pytest.mark.parametrize(
    ("changes", "words_of_error"),
    [
        (
            {"model": "bev-tiny"},
            "model 'bev-tiny' reads packs of up to 0 tokens",
        ),
        (
            {"order": OrderSpec(pack=Pack(budget=34, cost=LENGTH))},
            "reads packs of up to 33 tokens of this dataset, and the order's have 34",
        ),
        (
            {"order": None, "teacher": "folder"},
            "a teacher needs tokens of a fixed number",
        ),
    ],
)
def test_orders_that_a_model_cannot_read_are_refused(documents, changes, words_of_error):
    with pytest.raises(ConfigError, match=words_of_error):
        batches(
            documents,
            1,
            **{"model": "gpt-tiny", "order": OrderSpec(pack=PACK), **changes},
        )


def test_packs_of_a_dataset_without_documents_are_refused(dataset):
    with pytest.raises(ConfigError, match="model 'gpt-tiny' reads packs of up to 0 tokens"):
        batches(dataset, 1, model="gpt-tiny", order=OrderSpec(pack=PACK))


class Tilt:
    """A transform that is an object with settings of its own."""

    def __init__(self):
        self._function = "its own"

    def __call__(self, sample):
        if sample < 0:
            raise ValueError(sample)
        return sample + 1


def doubled(sample):
    return 2 * sample


def test_a_timed_transform_is_the_function_by_name_and_counts_calls_that_fail_too():
    for function, name, value in ((doubled, "doubled", 6), (Tilt(), "Tilt", 4)):
        timed = TimedTransform(function)
        assert timed.use() is None
        assert (timed.__module__, timed.__qualname__) == (__name__, name)
        assert timed(3) == value
        use = timed.use()
        assert use.num_calls == 1 and 0 < use.wall_ns <= use.span_ns
    with pytest.raises(ValueError, match="-1"):
        timed(-1)
    assert timed.use().num_calls == 2
    assert timed.use().wall_ns > use.wall_ns
