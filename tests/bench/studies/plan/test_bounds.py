"""Plans of models of which no step was published: a bound wherever a figure rests on the time of a step."""

from __future__ import annotations

import textwrap

import msgspec
import pytest

import fuelrail
from fuelrail.__main__ import main
from fuelrail.bench.planner.hardware import load_cluster
from fuelrail.bench.studies.plan import variants
from fuelrail.bench.studies.plan.page import (
    duration,
    figures,
    planned_rows,
    scaling_rows,
)
from fuelrail.pipeline.errors import ConfigError, FuelrailError
from support.datasets import CAMERAS, build_dataset

pytestmark = pytest.mark.slow

DETECTORS = """
    import torch
    from torch import nn

    class Detector(nn.Module):
        def __init__(self, batch):
            super().__init__()
            self.batch = batch
            self.image = nn.Conv2d(3, 8, 4, 4)
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def example(self, samples):
            return self.batch(samples)

        def forward(self, batch):
            images = batch["img"] if isinstance(batch, dict) else batch
            if images.shape[-1] == 3:
                images = images.movedim(-1, -3)
            hidden = self.image(images.reshape(-1, *images.shape[-3:])).flatten(2).mean(2)
            for block in self.blocks:
                hidden = block(hidden).relu()
            return hidden.square().mean()

    def cameras():
        return Detector(lambda n: {
            "img": torch.zeros(n, 6, 3, 32, 64),
            "intrinsics": torch.zeros(n, 6, 3, 3),
            "cam2ego": torch.zeros(n, 6, 4, 4),
        })

    def windows():
        return Detector(lambda n: {"img": torch.zeros(n, 4, 5, 3, 32, 64)})

    def channels_last():
        return Detector(lambda n: torch.zeros(n, 32, 64, 3))

    class Words(nn.Linear):
        def example(self, samples):
            return torch.zeros(samples, 8)

        def forward(self, batch):
            return super().forward(batch).mean()

    def words():
        return Words(8, 8)

    class Raises(Words):
        def example(self, samples):
            raise KeyError("img")

    def raises():
        return Raises(8, 8)
"""
FLAGS = {"cluster": "8x8-h100", "global_batch": 512, "micro_batch": 8}


@pytest.fixture(autouse=True)
def detectors(tmp_path, monkeypatch):
    (tmp_path / "planned_detectors.py").write_text(textwrap.dedent(DETECTORS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def test_a_detector_of_ones_own_has_a_bound_wherever_its_time_is_used(tmp_path, capsys):
    command = [
        "plan",
        "--model",
        "planned_detectors:cameras",
        "--out",
        str(tmp_path / "out"),
    ]
    for name, value in {
        **FLAGS,
        "samples_per_epoch": 1000,
        "failures_per_day": 1,
    }.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    assert main([*command, "--recipe", "torchrun"]) == 0
    text = capsys.readouterr().out
    assert "samples/s at most: a bound, no prediction" in text
    assert "not faster than" in text and "--measure" in text
    assert "4 of 5 such steps" not in text
    report = msgspec.json.decode((tmp_path / "out" / "report.json").read_bytes())
    assert report["basis"] == "bound"
    assert report["step_range_s"] == [report["step_s"], None]
    assert all(row["is_bound"] for row in (*report["tried"], *report["scaling"]))
    assert report["remedies"] == {}, "a bound over a bound is no gain"
    assert "--every=100" in report["recipe"], "steps between checkpoints need the time of one"
    page = (tmp_path / "out" / "report.html").read_text()
    assert "at most: a bound, no prediction" in page and "4 of 5 such steps" not in page


def test_each_figure_and_row_says_on_which_side_of_it_the_truth_is():
    report = fuelrail.bench.plan(
        None, model="planned_detectors:cameras", **FLAGS, samples_per_epoch=9
    )
    lines = dict(figures(report))
    assert lines["rate"].startswith("at most ")
    assert "occupancy at least " in lines["rate"] and "MFU at most " in lines["rate"]
    for name in ("cost of a million samples", "cost of an epoch"):
        assert lines[name].startswith("at least ")
    assert lines["decoding"].startswith("at most ")
    assert lines["bottleneck"].endswith("where the devices reach their bound")
    assert all(row[3].startswith("\u2264 ") for row in planned_rows(report.tried))
    assert all(row[3].startswith("\u2265 ") for row in scaling_rows(report))
    # 76 operators or so for each of 8 micro-batches take the host milliseconds, however small they are.
    small_report = fuelrail.bench.plan(
        None, model="planned_detectors:cameras", **{**FLAGS, "micro_batch": 1}
    )
    assert small_report.step.total > 8 * 60 * 4e-6


def test_a_decoder_has_a_range_and_a_mixture_a_bound(tmp_path):
    flags = {
        "cluster": "1x8-h100",
        "global_batch": 8,
        "parallel": {"strategy": "ddp"},
    }
    shape = {
        "kind": "transformer",
        "layers": 2,
        "width": 32,
        "heads": 4,
        "vocabulary": 64,
    }
    basis = {}
    for experts in (1, 4):
        model = {**shape, "experts": experts, "active_experts": min(2, experts)}
        scenario = {**flags, "name": "n", "model": model, "sequence": 16}
        (tmp_path / "asked.yaml").write_bytes(msgspec.yaml.encode(scenario))
        basis[experts] = fuelrail.bench.plan(tmp_path / "asked.yaml").basis
    assert basis == {1: "range", 4: "bound"}


def test_a_sweep_of_bounds_says_so(monkeypatch):
    monkeypatch.setattr(variants, "_MICRO_BATCHES", (8,))
    monkeypatch.setattr(variants, "_RECOMPUTE", ("none",))
    monkeypatch.setattr(variants, "_SIMPLE", ("ddp",))
    report = fuelrail.bench.plan(None, model="planned_detectors:cameras", **FLAGS, sweep=True)
    fits = [row for row in report.sweep if row.fails is None]
    assert fits and all(row.is_bound for row in fits)


def test_a_measured_step_of_the_model_makes_a_time_of_the_bound(tmp_path):
    name = "planned_detectors:cameras"
    bound = fuelrail.bench.plan(None, model=name, **FLAGS)
    run = {**FLAGS, "name": "run", "parallel": {"strategy": "ddp"}}
    slow_s = 5 * bound.step.total
    for file, model in (("own", name), ("other", "planned_detectors:windows")):
        scenario = {**run, "model": model, "measured_step_s": slow_s}
        (tmp_path / f"{file}.yaml").write_bytes(msgspec.yaml.encode(scenario))
    measured = fuelrail.bench.plan(None, model=name, **FLAGS, measure=[str(tmp_path / "own.yaml")])
    assert measured.basis == "range"
    assert measured.step.total == pytest.approx(slow_s, rel=0.15)
    foreign = fuelrail.bench.plan(None, model=name, **FLAGS, measure=[str(tmp_path / "other.yaml")])
    assert foreign.basis == "bound" and foreign.step == bound.step
    assert any("it stays a bound: measure a step of this model" in text for text in foreign.assumed)


@pytest.mark.parametrize(
    ("model", "images"),
    [("cameras", 6), ("windows", 20), ("channels_last", 1), ("words", None)],
)
def test_images_of_a_sample_are_those_of_the_example(model, images):
    name = f"planned_detectors:{model}"
    report = fuelrail.bench.plan(None, model=name, **FLAGS)
    assert report.scenario.cameras == images
    if images is None:
        assert any(
            "has no images (tensors of 3 channels); give --cameras" in text
            for text in report.assumed
        )
        assert "no images are known of a sample" in dict(figures(report))["decoding"]
        return
    assert (report.scenario.height, report.scenario.width) == (32, 64)
    cluster = load_cluster("8x8-h100")
    decoding_s = 512 * images / cluster.nodes / cluster.images_per_node_s
    assert report.step_s >= decoding_s
    assert report.bottleneck == "decoding"
    assert report.images_per_node_s == pytest.approx(cluster.images_per_node_s)


def test_a_dataset_says_how_many_images_an_example_without_them_has(tmp_path):
    build_dataset(tmp_path / "data", {"train": (5, 4)})
    flags = {**FLAGS, "data": str(tmp_path / "data")}
    report = fuelrail.bench.plan(None, model="planned_detectors:words", **flags)
    assert report.scenario.cameras == len(CAMERAS)
    assert any(
        f"{len(CAMERAS)} images in a sample, as the dataset has them" in text
        for text in report.assumed
    )
    report = fuelrail.bench.plan(None, model="planned_detectors:cameras", **flags)
    assert report.scenario.cameras == 6, "what the model reads"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "os:getcwd",
            r"model 'os:getcwd' returned str, and a torch.nn.Module is needed",
        ),
        ("os:system", r"model 'os:system' cannot be made: TypeError"),
        ("planned_detectors:raises", r"example\(1\): KeyError"),
    ],
)
def test_what_is_no_model_is_refused_in_words(model, message):
    with pytest.raises(FuelrailError, match=message):
        fuelrail.bench.plan(None, model=model, **FLAGS)


@pytest.mark.parametrize(
    "change",
    [
        {"global_batch": 2**63},
        {"global_batch": 2**31},
        {"micro_batch": 2**40},
        {"sequence": 2**63},
        {"cameras": 2**31},
        {
            "model": {
                "kind": "transformer",
                "layers": 2**31,
                "width": 8,
                "heads": 2,
                "vocabulary": 8,
            }
        },
        {
            "model": {
                "kind": "transformer",
                "layers": 2,
                "width": 2**40,
                "heads": 2,
                "vocabulary": 8,
            }
        },
    ],
)
def test_numbers_that_no_training_has_are_refused_at_once(change, tmp_path):
    scenario = {
        "name": "n",
        "model": "gpt-tiny",
        "cluster": "1x8-h100",
        "global_batch": 8,
        **change,
    }
    (tmp_path / "asked.yaml").write_text(msgspec.json.encode(scenario).decode())
    with pytest.raises(ConfigError, match=r"asked\.yaml"):
        fuelrail.bench.plan(tmp_path / "asked.yaml")


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (
            "1x8-h100",
            "63 cannot be shared evenly by 8 devices .* multiple of 8, such as 56 or 64",
        ),
        (
            "8x8-h100",
            "63 cannot be shared evenly by 64 devices .* multiple of 64, such as 64 or 128",
        ),
    ],
)
def test_a_batch_that_no_strategy_divides_is_refused_without_one(cluster, message):
    with pytest.raises(ConfigError, match=message) as caught:
        fuelrail.bench.plan(
            None,
            model="planned_detectors:cameras",
            cluster=cluster,
            global_batch=63,
        )
    assert "mesh" not in str(caught.value) and "strategy" not in str(caught.value)


def test_short_times_have_units_that_say_something():
    assert [duration(seconds) for seconds in (1234.5, 2.345, 0.0131, 0.00001234)] == [
        "1,234 s",
        "2.35 s",
        "13.1 ms",
        "12.3 us",
    ]
