"""A model from outside the trainer, divided in every way that takes one, trains and evaluates as one process does."""

from __future__ import annotations

import json

import pytest

from support import own_model
from support.datasets import build_dataset
from support.own_model import STRATEGIES
from support.ranks import run_ranks

pytestmark = [pytest.mark.long, pytest.mark.process, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    place = tmp_path_factory.mktemp("own-model") / "data"
    build_dataset(place, {"train": (16, 16, 16), "val": (7, 6)})
    return place


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (2e-6, ()),
        (2e-6, ("vla", "float32")),
        (2e-6, ("detector", "float32", "frozen")),
        # With statistics of few samples a rounding error of fp32 grows in one process too (docs/training.md).
        (1e-12, ("detector", "float64", "local")),
    ],
    ids=lambda value: "-".join(value) or "own" if isinstance(value, tuple) else None,
)
def test_ranks_train_and_evaluate_as_one_process(limit, words, world, dataset, tmp_path):
    run_ranks(world, own_model.__file__, dataset, tmp_path / "out.json", 20, *words, timeout_s=3000)
    found = json.loads((tmp_path / "out.json").read_text())
    print(words, world, found)
    assert {name: found[name] for name in STRATEGIES if found[name] > limit} == {}
    assert all(abs(found[f"{name} moved"]) > 1e-3 and found[f"{name} evaluated"] for name in STRATEGIES)
