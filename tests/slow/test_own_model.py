"""A model from outside the trainer, divided in every way that takes one, trains and evaluates as one process does."""

from __future__ import annotations

import json

import pytest

from support import own_model
from support.datasets import build_dataset
from support.own_model import STRATEGIES
from support.ranks import run_ranks

pytestmark = [pytest.mark.long, pytest.mark.process, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("world", [2, 4, 8])
def test_ranks_train_and_evaluate_as_one_process(world, tmp_path):
    build_dataset(tmp_path / "data", {"train": (16, 16, 16), "val": (7, 6)})
    run_ranks(world, own_model.__file__, tmp_path / "data", tmp_path / "out.json", 20, timeout_s=3000)
    found = json.loads((tmp_path / "out.json").read_text())
    assert {name: found[name] for name in STRATEGIES if found[name] > 2e-6} == {}
    assert all(abs(found[f"{name} moved"]) > 1e-3 and found[f"{name} evaluated"] for name in STRATEGIES)
