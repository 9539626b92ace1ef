"""`fuelrail annotate` under torchrun: two processes, one layer, the bytes of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from support.datasets import build_dataset
from support.layers import digests

pytestmark = pytest.mark.process

MODEL = """
def mean(batch):
    return {"mean": batch["img"].float().flatten(1).mean(1), "name": batch["sample_key"]}
"""


def test_two_ranks_write_the_layer_of_one(tmp_path) -> None:
    build_dataset(tmp_path / "base", {"train": (3, 4), "val": (4,)})
    (tmp_path / "teacher.py").write_text(MODEL)
    options = ["--model", "teacher:mean", "--batch-size", "2", "--workers", "1", "--json"]
    launched = {"torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], "alone": []}
    reports = {}
    for name, launcher in launched.items():
        command = [sys.executable, *launcher, "-m", "fuelrail", "annotate", "base", f"{name}/teacher", *options]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        decoder, reports[name], text = json.JSONDecoder(), [], done.stdout.strip()
        while text:
            report, end = decoder.raw_decode(text)
            reports[name].append(report)
            text = text[end:].strip()
    ranks, (alone,) = reports["torchrun"], reports["alone"]
    assert len(ranks) == 2 and all(0 < one["num_written"] < 11 for one in ranks)
    assert sum(one["num_written"] for one in ranks) == alone["num_written"] == 11
    assert alone["fingerprint"] in [one["fingerprint"] for one in ranks]
    assert digests(tmp_path / "torchrun" / "teacher") == digests(tmp_path / "alone" / "teacher")
