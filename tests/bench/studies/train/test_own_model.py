"""`fuelrail bench train` of a model from outside, by ranks that something like torchrun started; and refusals."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from fuelrail.__main__ import main
from fuelrail.bench.studies.train import settings
from fuelrail.bench.studies.train.report import load_report
from support.ranks import environment, run_ranks

pytestmark = pytest.mark.process

MODEL = """
import time

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


class Sleeper(Brightness):
    def forward(self, batch):
        time.sleep(0.1)
        return super().forward(batch)


class Misspelt(Brightness):
    def forward(self, batch):
        return super().forward({"img": batch["image"]})


class Forgetful(Brightness):
    def forward(self, batch):
        super().forward(batch)


def late(sample):
    time.sleep(0.02)
    return sample
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
    return [
        "bench",
        "train",
        dataset,
        "--model",
        "outside:Brightness",
        *options,
    ]


def check(folder):
    report = json.loads((folder / "out" / "report.json").read_text())
    assert report["cut_off"] is None and report["model"] == {
        "name": "outside:Brightness",
        "num_parameters": 41,
    }
    assert [len(series["loss"]) for series in report["series"]] == [4, 4]


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
            [*torchrun, "--node-rank", node, *place, "-m", "fuelrail", *words],
            env=environment(),
        )
        for node in "01"
    ]
    assert [node.wait(500) for node in nodes] == [0, 0]
    check(tmp_path)


@pytest.mark.usefixtures("warm_ranks")
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
    assert re.search(message, capsys.readouterr().err.replace("\n", " "))


def run(words, model, *options):
    words[words.index("--model") + 1] = f"outside:{model}"
    return main([*words, *options])


@pytest.mark.usefixtures("warm_ranks")
def test_an_own_model_is_timed_on_the_cpu_and_not_as_another_network(words, tmp_path, monkeypatch):
    """Whatever else the host does: what sleeps is in forward, and waits for no CPU."""
    monkeypatch.setattr(settings, "installed_gpus", list)
    words[words.index("--steps") + 1] = "12"
    assert run(words, "Sleeper", "--transform", "outside:late", "--workers", "1") == 0
    report = load_report(tmp_path / "out" / "report.json")
    assert report.accelerator["kind"] == "cpu"
    shares = {phase.phase: phase.share for phase in report.figures.phases}
    assert max(shares, key=shares.get) == "forward"
    assert report.figures.waiting_share > 0.1
    assert any("it slept, or waited" in text for text in report.warnings)
    assert report.figures.transform.waits


WRONG_KEY = 'return super().forward({"img": batch["image"]})'
LINES = [line.strip() for line in MODEL.splitlines()]


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(
    ("model", "line", "message"),
    [
        (
            "Misspelt",
            WRONG_KEY,
            f"KeyError: 'image' at outside.py:LINE in forward: {WRONG_KEY}; the batch has img, cam_",
        ),
        (
            "Forgetful",
            "class Forgetful(Brightness):",
            "'Forgetful.forward' (outside.py:LINE) returned None: return the loss, a tensor without",
        ),
    ],
)
def test_an_error_in_an_own_model_has_its_place(words, model, line, message, capsys):
    assert run(words, model) == 2
    number = LINES.index(line) + (1 if model == "Misspelt" else 2)
    said = capsys.readouterr().err.replace("\n", " ")
    assert message.replace("LINE", str(number)) in said
