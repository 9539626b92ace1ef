"""`fuelrail bench train` of a model from outside, by ranks that something like torchrun started; and refusals."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from fuelrail.__main__ import main
from support.ranks import environment, run_ranks

pytestmark = pytest.mark.process

MODEL = """
from torch import nn


class Brightness(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 8), nn.Linear(8, 1)])

    def forward(self, batch):
        value = batch["img"].float().mean((1, 3, 4)) / 255
        for block in self.blocks:
            value = block(value)
        return {"size": value.square().mean(), "distance": (value - 1).abs().mean()}
"""


@pytest.fixture
def words(tiny_dataset, tmp_path, monkeypatch):
    (tmp_path / "outside.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    dataset = str(tiny_dataset({"train": (16, 16, 16), "val": (7, 6)}).root)
    options = [
        "--strategy",
        "fsdp2",
        "--steps",
        "4",
        "--warmup",
        "1",
        "--batch-size",
        "2",
        "--no-html",
        "--out",
        "out",
    ]
    return ["bench", "train", dataset, "--model", "outside:Brightness", *options]


def check(folder):
    report = json.loads((folder / "out" / "report.json").read_text())
    assert report["cut_off"] is None and report["model"] == {
        "name": "outside:Brightness",
        "num_parameters": 41,
    }
    assert [len(one["loss"]) for one in report["series"]] == [4, 4]


@pytest.mark.slow
def test_ranks_of_a_world_train_a_model_from_outside_and_the_first_one_reports(words, tmp_path):
    run_ranks(2, "-m", "fuelrail", *words)
    check(tmp_path)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_nodes_of_torchrun_are_one_world(words, tmp_path):
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
    ]
    place = ["--master-addr", "127.0.0.1", "--master-port", "29655"]
    nodes = [
        subprocess.Popen(
            [*torchrun, "--node-rank", node, *place, "-m", "fuelrail", *words], env=environment()
        )
        for node in "01"
    ]
    assert [node.wait(500) for node in nodes] == [0, 0]
    check(tmp_path)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nothing", "must be light, .*, or MODULE:FUNCTION of your own"),
        ("nowhere:build", "cannot be imported"),
    ],
)
def test_a_model_that_is_not_there_is_refused(words, model, message, capsys):
    words[words.index("--model") + 1] = model
    assert main(words) == 2
    import re

    assert re.search(message, capsys.readouterr().err.replace("\n", " "))
