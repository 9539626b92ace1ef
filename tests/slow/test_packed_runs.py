"""Packs and balance in training runs: under all strategies, continued on other ranks, and of a model of one's own."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fuelrail.bench.studies.train.run import bench_train
from fuelrail.pipeline.order.balance import Balance
from fuelrail.pipeline.order.spec import OrderSpec
from support import balanced_vla
from support.packed_ranks import CASES, LENGTH, PACK, TOKENS, largest, words
from support.ranks import run_ranks

pytestmark = [pytest.mark.long, pytest.mark.process]


def test_packed_loss_and_gradients_are_those_of_the_documents_alone(tiny_dataset, tmp_path):
    root = tiny_dataset({"train": (16, 15)}, extra=[(TOKENS, words)], size=(16, 16)).root
    differences = largest(root, tmp_path / "out.json", list(CASES))
    assert {name: loss for name, (loss, _) in differences.items() if loss > 1e-6} == {}
    assert {name: gradient for name, (_, gradient) in differences.items() if gradient > 1e-5} == {}


def test_a_run_on_packs_continues_on_other_ranks_with_the_same_losses(tiny_dataset, tmp_path):
    root = tiny_dataset({"train": (16, 15)}, extra=[(TOKENS, words)]).root
    order = OrderSpec(seed=3, pack=PACK, balance=Balance(cost=LENGTH))
    same = {
        "model": "gpt-tiny",
        "warmup": 2,
        "workers": 1,
        "accelerator": "emulated:resnet50-224-h100",
        "order": order,
    }
    cut = {"checkpoint": str(tmp_path / "checkpoints"), "every": 3}
    uninterrupted = bench_train(root, batch_size=4, steps=12, **same)
    bench_train(root, batch_size=4, steps=6, **cut, **same)
    rest = bench_train(root, ranks=2, batch_size=2, steps=12, **cut, **same)
    assert rest.series[0].first_step == 6
    means = np.mean([series.loss for series in rest.series], axis=0)
    assert means == pytest.approx(uninterrupted.series[0].loss[6:], abs=2e-6)


def test_balance_deals_samples_to_other_ranks_and_changes_no_loss(tiny_dataset, tmp_path):
    run_ranks(
        2,
        balanced_vla.__file__,
        tiny_dataset({"train": (16, 16, 16), "val": (7, 6)}).root,
        tmp_path,
    )
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    for rank_losses in ranks:
        for (_, plain), (_, balanced) in zip(
            rank_losses["plain"], rank_losses["balanced"], strict=True
        ):
            assert plain.keys() == {"loss", "words", "trajectory"}
            assert balanced == pytest.approx(plain, rel=1e-5)
    first_rank = {name: [loss for loss, _ in ranks[0][name]] for name in ("plain", "balanced")}
    assert first_rank["balanced"] != pytest.approx(first_rank["plain"], rel=1e-3)
