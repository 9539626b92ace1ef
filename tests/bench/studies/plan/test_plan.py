"""Plans of small models on small clusters, of the shipped scenarios, and what a scenario must say."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import fuelrail
from fuelrail.__main__ import main
from fuelrail.bench.planner.choice import inputs_of
from fuelrail.bench.planner.fake_rank import run_rank
from fuelrail.bench.planner.hardware import CLUSTERS
from fuelrail.bench.planner.scenario import Scenario
from fuelrail.bench.planner.shape import shape_of
from fuelrail.bench.studies.plan.page import figures
from fuelrail.bench.studies.plan.run import plan
from fuelrail.bench.trainer.strategies.settings import (
    ParallelSettings,
    degrees_of,
)
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.settings import load_yaml
from support.datasets import CAMERAS, build_dataset

pytestmark = pytest.mark.slow  # each strategy takes seconds

SCENARIOS = CLUSTERS.parent / "scenarios"
REPORTS = Path(__file__).parent / "reports"
GPT = Scenario(name="tiny", model="gpt-tiny", cluster="1x8-h100", global_batch=16)


def cluster(tmp_path, **values):
    """The cluster of one node with other numbers, by the beginning of their line."""
    lines = (CLUSTERS / "1x8-h100.yaml").read_text().splitlines()
    for name, value in values.items():
        (index,) = [
            index for index, line in enumerate(lines) if line.strip().startswith(f"{name}:")
        ]
        lines[index] = (
            lines[index].split(":")[0] + f': {{value: {value}, source: "made for this test"}}'
        )
    path = tmp_path / "mine.yaml"
    path.write_text("\n".join(lines))
    return str(path)


def test_the_simplest_strategy_that_fits_and_why_the_simpler_one_does_not(
    tmp_path,
):
    small = msgspec.structs.replace(GPT, cluster=cluster(tmp_path, memory_gib=0.0021))
    report = plan(small, explain=True)
    assert [row.strategy for row in report.tried] == [
        "ddp",
        "zero1",
        "zero2",
        "fsdp2",
    ]
    assert "MiB (the largest parts: " in report.tried[0].fails
    assert report.strategy == "zero1"
    assert report.peak_gib < report.usable_gib == pytest.approx(0.0021 * 0.9)
    assert report.explained["step.compute"].inputs["micro_batches"] == 2


def test_nothing_fits_with_a_reason_for_each(tmp_path):
    none = msgspec.structs.replace(
        GPT, cluster=cluster(tmp_path, memory_gib=0.0001), global_batch=8
    )
    with pytest.raises(
        ConfigError,
        match=r"does not fit on 8 x .*: ddp: needs .*; zero1: .*; tp=8, full recomputation",
    ):
        plan(none)


def test_slow_storage_and_few_decoders_are_named(tmp_path):
    camera = Scenario(
        name="images",
        model="bev-tiny",
        cluster=cluster(tmp_path, storage_gb_per_s=1e-4),
        global_batch=8,
        precision="fp32",
        cameras=2,
        height=64,
        width=128,
        sample_bytes=100_000,
    )
    report = plan(camera)
    assert report.bottleneck == "storage"
    assert report.step_s == pytest.approx(8 * 100_000 / 1e5)
    assert report.occupancy == pytest.approx(report.step.total / report.step_s)
    slow = cluster(tmp_path, cpus=1, images_per_cpu_s=1)
    report = plan(msgspec.structs.replace(camera, cluster=slow))
    assert (report.bottleneck, report.step_s) == ("decoding", 16.0)
    fast = cluster(tmp_path, images_per_cpu_s=1e6)
    free = plan(msgspec.structs.replace(camera, cluster=fast, sample_bytes=1000))
    assert free.occupancy == 1.0
    assert free.samples_per_s > report.samples_per_s


def test_a_pipeline_has_a_bubble_and_all_its_stages():
    parallel = ParallelSettings(mesh="pp=4,tp=2")
    report = plan(msgspec.structs.replace(GPT, parallel=parallel, failures_per_day=1.0))
    assert [shape.stage for shape in report.stages] == [0, 1, 2, 3]
    parts = report.step
    assert parts.bubble == pytest.approx(
        3 / 16 * (parts.compute + parts.memory + parts.launch + parts.tensor + parts.pipeline)
    )
    weights = sum(shape.parameters for shape in plan(GPT).stages)
    # Norms and what else no plan divides lie on both ranks of the tensor-parallel group.
    assert report.checkpoint_gb == pytest.approx(12 * weights / 1e9, rel=0.05)
    assert report.checkpoint_interval_s > report.checkpoint_s


def test_other_strategies_that_may_be_faster_are_tried_and_named():
    report = plan(msgspec.structs.replace(GPT, cluster="8x8-h100", global_batch=64))
    assert report.strategy == "ddp"
    assert [row.strategy for row in report.tried] == [
        "ddp",
        "zero1",
        "zero2",
        "dp_replicate=8,dp_shard=8",
        "fsdp2",
    ]
    rates = {row.strategy: row.samples_per_s for row in report.tried}
    assert rates["zero1"] < rates["ddp"], "it sends its parameters"
    assert rates["dp_replicate=8,dp_shard=8"] > rates["fsdp2"], (
        "small messages take longer between nodes"
    )
    best = max(report.tried, key=lambda row: row.samples_per_s)
    used = [change for change in report.remedies if change.startswith("use ")]
    assert (f"use {best.strategy}" in used) == (best.samples_per_s > 1.02 * rates["ddp"])
    assert [point.num_ranks for point in report.scaling[0].points] == [
        2**power for power in range(11)
    ]


def test_a_batch_that_does_not_divide_is_refused_and_one_that_is_too_small_divides_the_model():
    with pytest.raises(
        ConfigError,
        match=r"batch of 12 cannot be shared evenly by 8 devices .* multiple of 8, such as 8 or 16",
    ):
        plan(msgspec.structs.replace(GPT, global_batch=12))
    report = plan(msgspec.structs.replace(GPT, global_batch=4))
    assert report.strategy.startswith("dp_shard=4,tp=2")
    assert any(
        "a global_batch of 4 is less than one micro-batch of 1 on each of 8 devices" in text
        for text in report.assumed
    )


def test_a_small_cost_has_digits():
    report = plan(msgspec.structs.replace(GPT, samples_per_epoch=100))
    (epoch,) = [text for name, text in figures(report) if name == "cost of an epoch"]
    assert float(epoch.split()[0]) == pytest.approx(report.device_hours_per_epoch, rel=0.05) != 0


def test_a_dataset_says_what_it_is(tmp_path, capsys):
    build_dataset(tmp_path / "data", {"train": (5, 4)})
    text = "name: mine\nmodel: bev-tiny\ncluster: 1x8-h100\nglobal_batch: 8\nprecision: fp32\nheight: 64\nwidth: 128\n"
    (tmp_path / "mine.yaml").write_text(text)
    assert (
        main(
            [
                "plan",
                str(tmp_path / "mine.yaml"),
                "--data",
                str(tmp_path / "data"),
            ]
        )
        == 0
    )
    assert " of 20 GB/s" in capsys.readouterr().out
    report = fuelrail.bench.plan(tmp_path / "mine.yaml", data=str(tmp_path / "data"))
    assert (report.scenario.samples_per_epoch, report.scenario.cameras) == (
        9,
        len(CAMERAS),
    )


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


@pytest.mark.parametrize(
    ("name", "runs"),
    # Of 2 and 3 blocks: copies and two kinds of shards, three stages with recomputation and without; else whole models.
    # One run more is of a remedy.
    [
        ("bev-student-8-gpus", 4),
        pytest.param("gpt-1.3b-4-gpus", 10, marks=pytest.mark.long),
        pytest.param("gpt-100b-64-gpus", 12, marks=pytest.mark.long),
        pytest.param("resnet50-4-gpus", 6, marks=pytest.mark.long),
        pytest.param("vit-2b-64-gpus", 12, marks=pytest.mark.long),
    ],
)
def test_the_report_of_a_shipped_scenario_is_what_the_command_writes(name, runs, tmp_path, capsys):
    run_rank.cache_clear()
    assert (
        main(
            [
                "plan",
                str(SCENARIOS / f"{name}.yaml"),
                "--json",
                "--out",
                str(tmp_path),
                "--no-html",
            ]
        )
        == 0
    )
    assert (tmp_path / "report.md").read_text().startswith((REPORTS / f"{name}.txt").read_text())
    report = msgspec.json.decode(capsys.readouterr().out)
    assert 0 < report["peak_gib"] <= report["usable_gib"]
    assert 0.1 < report["mfu"] < 0.7
    assert run_rank.cache_info().misses <= runs, "its plans share runs, each of about a second"


@pytest.mark.long
def test_the_first_stage_of_a_hundred_billion_parameters_needs_what_its_report_says():
    """Run whole: the text is of runs with fewer blocks."""
    scenario = load_yaml(SCENARIOS / "gpt-100b-64-gpus.yaml", Scenario)
    settings, inputs = inputs_of(
        scenario,
        scenario.parallel,
        degrees := degrees_of(scenario.parallel, 64),
    )
    stage = shape_of(
        scenario.settings,
        settings,
        degrees,
        inputs,
        precision=scenario.precision,
    )
    text = (REPORTS / "gpt-100b-64-gpus.txt").read_text()
    assert f": {stage.peak_bytes / 2**30:.1f} of 72.0 GiB" in text
