"""A training run on packs that is continued on other ranks has the losses of one that nothing interrupted."""

from __future__ import annotations

import numpy as np
import pytest

from fuelrail.bench.studies.train.run import bench_train
from fuelrail.pipeline.order.balance import Balance
from fuelrail.pipeline.order.spec import OrderSpec
from support.packed_ranks import LENGTH, PACK, TOKENS, words

pytestmark = pytest.mark.long


def test_a_run_on_packs_continues_on_other_ranks_with_the_same_losses(tiny_dataset, tmp_path):
    root = tiny_dataset({"train": (16, 15)}, extra=[(TOKENS, words)]).root
    order = OrderSpec(seed=3, pack=PACK, balance=Balance(cost=LENGTH))
    same = {"model": "gpt-tiny", "warmup": 2, "workers": 1, "accelerator": "emulated:resnet50-224-h100", "order": order}
    cut = {"checkpoint": str(tmp_path / "checkpoints"), "every": 3}
    whole = bench_train(root, batch_size=4, steps=12, **same)
    bench_train(root, batch_size=4, steps=6, **cut, **same)
    rest = bench_train(root, ranks=2, batch_size=2, steps=12, **cut, **same)
    assert rest.series[0].first_step == 6
    means = np.mean([series.loss for series in rest.series], axis=0)
    assert means == pytest.approx(whole.series[0].loss[6:], abs=2e-6)
