"""Loaders that leave out the work of some parts: shapes and numbers stay, what is left out is not done."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from fuelrail import DataLoader
from fuelrail.pipeline.errors import ConfigError


@pytest.fixture(scope="module")
def dataset(build_once):
    return build_once({"train": (12, 12)})[0]


def mark(sample):
    sample["img"][0, 0, 0, 0] = 77
    return sample


def batches(dataset, parts=(), kind=DataLoader, **options):
    with kind(dataset, 2, num_workers=1, **options) as loader:
        loader.leave_out(parts)
        return [
            {
                name: value.clone() if hasattr(value, "clone") else value
                for name, value in batch.items()
            }
            for batch in itertools.islice(loader, 10)
        ]


@pytest.mark.costly
@pytest.mark.parametrize("part", ["storage", "decompression", "decode", "transform"])
def test_batches_keep_their_shape_and_number(dataset, part):
    plain = batches(dataset, transform=mark)
    without = batches(dataset, {part}, transform=mark)
    assert len(without) == len(plain)
    for ours, theirs in zip(without, plain, strict=True):
        assert ours.keys() == theirs.keys()
        assert ours["img"].shape == theirs["img"].shape
        assert np.array_equal(ours["global_index"], theirs["global_index"])
        if part in ("decode", "transform"):
            assert ours["sample_key"] == theirs["sample_key"]
    if part in ("storage", "decompression"):
        assert len({key for batch in without for key in batch["sample_key"]}) <= 8


def test_a_transform_that_is_left_out_is_not_called(dataset):
    without = batches(dataset, {"transform"}, transform=mark)[0]
    assert np.array_equal(without["img"], batches(dataset)[0]["img"])


def test_nothing_is_read_without_storage(dataset):
    with DataLoader(dataset, 2, num_workers=1) as loader:
        loader.leave_out({"storage"})
        before = loader.stats().storage.spans
        for _ in loader:
            pass
        assert loader.stats().storage.spans == before <= 8


def test_several_datasets_each_replay_their_own_samples(dataset, tiny):
    mixed_batches = batches({"a": dataset, "b": tiny}, {"storage"}, mix={"a": 1, "b": 1})
    assert {name for batch in mixed_batches for name in batch["dataset"]} == {
        "a",
        "b",
    }


def test_a_stage_that_a_subclass_wraps_is_left_out_with_its_wrapping(dataset):
    calls = []

    class Counting(DataLoader):
        def stages(self):
            def counted(stage):
                def work(item):
                    calls.append(stage.name)
                    return stage.work(item)

                return replace(stage, work=work)

            return [counted(stage) for stage in super().stages()]

    batches(dataset, {"decode"}, Counting)
    assert "parse" in calls
    assert "decode" not in calls


def test_an_unknown_part_is_refused(dataset):
    with (
        DataLoader(dataset, 2) as loader,
        pytest.raises(ConfigError, match=r"no part 'nope'.*allowed: storage"),
    ):
        loader.leave_out({"nope"})
