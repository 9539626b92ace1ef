"""Plans of small models on small clusters, of the shipped scenarios, and what a scenario must say."""

from __future__ import annotations

import os
import re

import msgspec
import pytest

import fuelrail
from fuelrail.__main__ import main
from fuelrail.bench.planner import choice
from fuelrail.bench.planner.hardware import CLUSTERS
from fuelrail.bench.planner.quick import quick_stages
from fuelrail.bench.planner.scenario import Scenario
from fuelrail.bench.studies.plan.run import plan
from fuelrail.bench.trainer.strategies.settings import ParallelSettings
from fuelrail.pipeline.errors import ConfigError
from support.datasets import CAMERAS, build_dataset

pytestmark = pytest.mark.slow  # each strategy takes seconds

SCENARIOS = CLUSTERS.parent / "scenarios"
GPT = Scenario(name="tiny", model="gpt-tiny", cluster="1x8-h100", global_batch=16, precision="fp32")


def cluster(tmp_path, **values):
    """The cluster of one node with other numbers, by the beginning of their line."""
    lines = (CLUSTERS / "1x8-h100.yaml").read_text().splitlines()
    for name, value in values.items():
        (at,) = [at for at, line in enumerate(lines) if line.strip().startswith(f"{name}:")]
        lines[at] = lines[at].split(":")[0] + f': {{value: {value}, source: "made for this test"}}'
    path = tmp_path / "mine.yaml"
    path.write_text("\n".join(lines))
    return str(path)


def test_the_simplest_strategy_that_fits_and_why_the_simpler_one_does_not(tmp_path):
    small = msgspec.structs.replace(GPT, cluster=cluster(tmp_path, memory_gib=0.0021))
    found = plan(small, explain=True)
    assert [one.strategy for one in found.tried] == ["ddp", "zero1"]
    assert "GiB on stage 0 (" in found.tried[0].fails
    assert found.strategy == "zero1"
    assert found.peak_gib < found.usable_gib == pytest.approx(0.0021 * 0.9)
    assert found.explained["step.compute"].inputs["micro_batches"] == 2


def test_nothing_fits_with_a_reason_for_each(tmp_path):
    none = msgspec.structs.replace(GPT, cluster=cluster(tmp_path, memory_gib=0.0001), global_batch=8)
    with pytest.raises(
        ConfigError, match=r"does not fit on 8 x .*: ddp: needs .*; zero1: .*; tp=8, full recomputation"
    ):
        plan(none)


def test_slow_storage_and_few_decoders_are_named(tmp_path):
    camera = Scenario(
        name="images", model="bev-tiny", cluster=cluster(tmp_path, storage_gb_per_s=1e-4), global_batch=8,
        precision="fp32", cameras=2, height=64, width=128, sample_bytes=100_000,
    )  # fmt: skip
    found = plan(camera)
    assert found.bottleneck == "storage"
    assert found.step_s == pytest.approx(8 * 100_000 / 1e5)
    assert found.occupancy == pytest.approx(found.step.total / found.step_s)
    slow = cluster(tmp_path, cpus=1, images_per_cpu_s=1)
    found = plan(msgspec.structs.replace(camera, cluster=slow))
    assert (found.bottleneck, found.step_s) == ("decoding", 16.0)
    fast = cluster(tmp_path, images_per_cpu_s=1e6)
    free = plan(msgspec.structs.replace(camera, cluster=fast, sample_bytes=1000))
    assert free.occupancy == 1.0
    assert free.samples_per_s > found.samples_per_s


def test_a_pipeline_has_a_bubble_and_all_its_stages():
    parallel = ParallelSettings(mesh="pp=4,tp=2")
    found = plan(msgspec.structs.replace(GPT, parallel=parallel, failures_per_day=1.0))
    assert [shape.stage for shape in found.stages] == [0, 1, 2, 3]
    parts = found.step
    assert parts.bubble == pytest.approx(3 / 16 * (parts.compute + parts.memory + parts.tensor + parts.pipeline))
    weights = sum(shape.parameters for shape in plan(GPT).stages)
    # Norms and what else no plan divides lie on both ranks of the tensor-parallel group.
    assert found.checkpoint_gb == pytest.approx(12 * weights / 1e9, rel=0.05)
    assert found.checkpoint_interval_s > found.checkpoint_s


NAMES = sorted(path.stem for path in SCENARIOS.glob("*.yaml"))
LARGE = ["gpt-1.3b-4-gpus", "gpt-100b-64-gpus", "vit-2b-64-gpus"]  # a minute or more for all of them
PLANNED_WHOLE = NAMES if os.environ.get("FUELRAIL_ATTACK") == "all" else sorted({*NAMES} - {*LARGE})


@pytest.mark.parametrize("name", PLANNED_WHOLE)
def test_the_text_beside_a_shipped_scenario_is_what_the_command_writes(name, tmp_path, capsys):
    """Of every scenario with ``FUELRAIL_ATTACK=all``; the large ones by small runs below."""
    assert main(["plan", str(SCENARIOS / f"{name}.yaml"), "--json", "--out", str(tmp_path), "--no-html"]) == 0
    assert (tmp_path / "report.md").read_text().startswith((SCENARIOS / f"{name}.md").read_text())
    found = msgspec.json.decode(capsys.readouterr().out)
    assert 0 < found["peak_gib"] <= found["usable_gib"]
    assert 0.1 < found["mfu"] < 0.7


@pytest.mark.parametrize(
    ("name", "fails"), [("gpt-1.3b-4-gpus", ["ddp", "zero1"]), ("gpt-100b-64-gpus", []), ("vit-2b-64-gpus", [])]
)
def test_small_runs_decide_as_the_text_beside_a_large_scenario_says(name, fails, monkeypatch):
    monkeypatch.setattr(choice, "stages", quick_stages)
    found = plan(SCENARIOS / f"{name}.yaml")
    text = (SCENARIOS / f"{name}.md").read_text()
    strategy, *figures = re.search(
        r"^(.+): ([\d.]+) of ([\d.]+) GiB, a step in ([\d.]+) s", text, re.MULTILINE
    ).groups()
    assert found.strategy == strategy
    wanted = [float(figure) for figure in figures]
    assert [found.peak_gib, found.usable_gib, found.step_s] == pytest.approx(wanted, rel=0.03)
    assert [one.strategy for one in found.tried] == [*fails, strategy]
    for one in found.tried[:-1]:
        (needed,) = re.findall(rf"^\| {one.strategy} \|  \|  \| needs ([\d.]+) GiB on stage 0 \(", text, re.MULTILINE)
        assert float(re.match(r"needs ([\d.]+) GiB", one.fails)[1]) == pytest.approx(float(needed), rel=0.03)


def test_a_dataset_says_what_it_is(tmp_path, capsys):
    build_dataset(tmp_path / "data", {"train": (5, 4)})
    text = "name: mine\nmodel: bev-tiny\ncluster: 1x8-h100\nglobal_batch: 8\nprecision: fp32\nheight: 64\nwidth: 128\n"
    (tmp_path / "mine.yaml").write_text(text)
    assert main(["plan", str(tmp_path / "mine.yaml"), "--data", str(tmp_path / "data")]) == 0
    assert " of 20 GB/s" in capsys.readouterr().out
    found = fuelrail.plan(tmp_path / "mine.yaml", data=str(tmp_path / "data"))
    assert (found.scenario.samples_per_epoch, found.scenario.cameras) == (9, len(CAMERAS))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": "vit-base", "height": 256},
            "model 'vit-base' reads images, and cameras, width of a sample are not given",
        ),
        (
            {"global_batch": 12, "parallel": ParallelSettings()},
            "do not divide the global batch of 12; use a multiple of 8",
        ),
        (
            {"parallel": ParallelSettings(mesh="pp=4,tp=2", micro_batches=4)},
            r"parallel.micro_batches is 4, and a global batch of 16 is 16 micro-batches",
        ),
        ({"cluster": "x"}, "cluster 'x' is not known"),
    ],
)
def test_what_a_scenario_must_say(changes, message):
    with pytest.raises(ConfigError, match=message):
        plan(msgspec.structs.replace(GPT, **changes))
