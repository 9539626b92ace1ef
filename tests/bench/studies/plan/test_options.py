"""Plans by flags, with measurements of a loader and of training, and the report's files."""

from __future__ import annotations

import re

import msgspec
import pytest

import fuelrail
from fuelrail.__main__ import main
from fuelrail.bench.planner import choice
from fuelrail.bench.planner.fake_rank import run_rank
from fuelrail.bench.planner.hardware import CLUSTERS, load_cluster
from fuelrail.bench.planner.scenario import PlanOptions, Scenario, with_options
from fuelrail.bench.studies.plan import variants
from fuelrail.bench.studies.plan.measured import measured
from fuelrail.bench.studies.plan.page import figures
from fuelrail.bench.trainer.strategies.settings import ParallelSettings
from fuelrail.pipeline.errors import ConfigError
from support.bench_runs import SETTINGS, log, report_of, steps
from support.datasets import build_dataset
from support.loader_runs import loader_report_of, loader_run

TINY = {
    "model": "bev-tiny",
    "cluster": "1x8-h100",
    "global_batch": 8,
    "precision": "fp32",
}
IMAGES = {"cameras": 2, "height": 64, "width": 128}


def test_flags_replace_what_a_scenario_says():
    scenario = Scenario(name="n", model="gpt-tiny", cluster="1x8-h100", global_batch=16)
    changed = with_options(
        scenario,
        PlanOptions(cluster="8x8-h100", sequence=16, strategy="fsdp2", recompute="full"),
    )
    assert (changed.cluster, changed.settings.context, changed.name) == (
        "8x8-h100",
        16,
        "n",
    )
    assert changed.parallel == ParallelSettings(strategy="fsdp2", recompute="full")
    restored = with_options(changed, PlanOptions(recompute="none"))
    assert restored.parallel == ParallelSettings(strategy="fsdp2")
    assert with_options(changed, PlanOptions(strategy="auto")).parallel == "auto"


def test_what_flags_must_say():
    with pytest.raises(
        ConfigError,
        match=r"needs cluster, global_batch: .*--cluster --global-batch",
    ):
        with_options(None, PlanOptions(model="gpt2"))
    with pytest.raises(
        ConfigError,
        match="strategy auto looks for the rest itself, and recompute is given",
    ):
        with_options(
            Scenario(name="n", **TINY),
            PlanOptions(strategy="auto", recompute="full"),
        )
    with pytest.raises(ConfigError, match="recompute is given without a strategy"):
        with_options(Scenario(name="n", **TINY), PlanOptions(recompute="full"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"model": "gpt2", "cameras": 6},
            "model 'gpt2' reads tokens, and cameras is given",
        ),
        (
            {**TINY, **IMAGES, "sequence": 9},
            "model 'bev-tiny' reads images, and sequence is given",
        ),
        (
            {**TINY, **IMAGES, "max_global_batch": 4},
            "global_batch is 8, and max_global_batch, .* trains as well, 4;",
        ),
    ],
)
def test_what_contradicts_the_model_or_the_batch_is_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        fuelrail.bench.plan(None, **{**TINY, **flags})


@pytest.mark.costly
@pytest.mark.parametrize(
    ("how", "row_bytes"),
    [("layer", 2 * 64), ("topk:8", 8 * 3 // 8 + 2 + 8 + 4), ("sampled:8", 5)],
)
def test_a_stored_teacher_says_bytes_a_token_and_when_it_pays(how, row_bytes):
    flags = {
        "model": "gpt-tiny",
        "cluster": "1x8-h100",
        "global_batch": 8,
        "strategy": "ddp",
    }
    flags |= {"teacher": "gpt-tiny", "teacher_from": how, "sample_bytes": 66}
    report = fuelrail.bench.plan(None, **flags)
    teacher = report.teacher
    assert teacher.bytes_per_token == row_bytes and teacher.layer_bytes == 32 * row_bytes
    writing_s = teacher.layer_device_hours_per_million / 1e6 * 3600
    read = teacher.layer_bytes / (report.cluster.storage_gb_per_s.value * 1e9) * 8
    expected_epochs = pytest.approx(writing_s / (writing_s - read)) if read < writing_s else None
    assert teacher.pays_after_epochs == expected_epochs
    assert f"({row_bytes:,} a token)" in dict(figures(report))["teacher"]


def test_stored_tokens_are_of_a_teacher_of_tokens():
    flags = {**TINY, **IMAGES, "teacher": "vit-tiny", "teacher_from": "topk:8"}
    with pytest.raises(
        ConfigError,
        match="teacher_from 'topk:8' is of a teacher of tokens, and 'vit-tiny' says occup",
    ):
        fuelrail.bench.plan(None, **flags)
    with pytest.raises(ConfigError, match="teacher_from"):
        fuelrail.bench.plan(
            None,
            **{**TINY, **IMAGES, "teacher": "vit-tiny", "teacher_from": "topk"},
        )


@pytest.mark.slow
def test_a_plan_by_flags_alone_and_its_files(tmp_path, capsys):
    flags = [
        "--model",
        "bev-tiny",
        "--cluster",
        "1x8-h100",
        "--global-batch",
        "8",
        "--precision",
        "fp32",
    ]
    flags += [
        "--cameras",
        "2",
        "--height",
        "64",
        "--width",
        "128",
        "--strategy",
        "zero1",
        "--explain",
    ]
    assert main(["plan", *flags, "--out", str(tmp_path / "out"), "--json"]) == 0
    report = msgspec.json.decode(capsys.readouterr().out)
    assert report["strategy"] == "zero1"
    assert report == msgspec.json.decode((tmp_path / "out" / "report.json").read_bytes())
    assert {"peak_gib", "step.compute", "mfu", "usd_per_million"} <= report["explained"].keys()
    assert all(entry["source"] for entry in report["explained"].values())
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<svg") == 2
    text = (tmp_path / "out" / "report.md").read_text()
    assert all(
        f"## {title}" in text
        for title in (
            "What was tried",
            "Memory and work of each stage",
            "Scaling",
        )
    )
    weak, strong = (
        next(entry for entry in report["scaling"] if entry["scaling"] == kind)
        for kind in ("weak", "strong")
    )
    assert [point["num_ranks"] for point in weak["points"]] == [1, 2, 4, 8], (
        "no link leads out of the node"
    )
    assert any("scaling ends at 8 devices, one node" in text for text in report["assumed"])
    assert [point["num_ranks"] for point in strong["points"]] == [1, 2, 4, 8]
    assert weak["points"][0]["efficiency"] == 1.0
    assert all(point["global_batch"] == 8 for point in strong["points"])
    assert any("max_global_batch" in question for question in report["questions"])


@pytest.mark.slow
def test_a_sweep_says_what_fits_and_how_fast_by_a_few_small_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(variants, "_MICRO_BATCHES", (1, 3, 8, 16, 32))
    monkeypatch.setattr(variants, "_RECOMPUTE", ("none",))
    monkeypatch.setattr(variants, "_SIMPLE", ("ddp", "fsdp2"))
    pair = (
        (CLUSTERS / "1x8-h100.yaml")
        .read_text()
        .replace("devices_per_node: 8", "devices_per_node: 2")
    )
    (tmp_path / "pair.yaml").write_text(
        pair.replace("memory_gib: {value: 80,", "memory_gib: {value: 0.009,")
    )
    cluster = load_cluster(str(tmp_path / "pair.yaml"))
    scenario = Scenario(
        name="n",
        model="gpt-tiny",
        cluster="pair",
        global_batch=64,
        precision="fp32",
    )
    run_rank.cache_clear()
    rows = {(row.strategy, row.micro_batch): row for row in variants.sweep(scenario, cluster)}
    # Two for each role of a rank, of which a pipeline has two, whatever the micro-batch.
    assert run_rank.cache_info().misses == 10, "plans share small runs"
    assert {strategy for strategy, _ in rows} == {
        "ddp",
        "fsdp2",
        "pp=2",
        "tp=2",
    }
    assert rows["ddp", 1].peak_gib < rows["ddp", 8].peak_gib
    assert rows["ddp", 8].samples_per_s > rows["ddp", 1].samples_per_s
    assert "do not divide the global batch of 64" in rows["fsdp2", 3].fails
    words = (
        r"needs [\d.]+ MiB \(the largest parts: activations of a micro-batch [\d.]+ MiB, optimiser"
    )
    assert re.match(words, rows["ddp", 16].fails)
    assert rows["ddp", 32].fails == f"a smaller micro-batch {rows['ddp', 16].fails}", (
        "it is not tried"
    )
    assert rows["tp=2", 16].fails is None
    # What ranks share does not lie on each of them.
    assert rows["fsdp2", 1].peak_gib < rows["ddp", 1].peak_gib


def test_a_sweep_has_shards_within_nodes_and_copies_across_them():
    names = {choice.named(settings) for settings in variants._strategies(load_cluster("8x8-h100"))}
    hybrid = "dp_replicate=8,dp_shard=8"
    assert {hybrid, f"{hybrid}, full recomputation", "fsdp2"} <= names
    one_node = choice.candidates(Scenario(name="n", **TINY, **IMAGES), load_cluster("1x8-h100"))
    assert not any("dp_replicate" in choice.named(settings) for settings in one_node)


@pytest.mark.slow
def test_a_loaders_report_says_what_decoding_and_storage_can_do(tmp_path):
    path = tmp_path / "report.json"
    path.write_bytes(msgspec.json.encode(loader_report_of([loader_run()])))
    report = fuelrail.bench.plan(None, **TINY, height=64, width=128, loader_report=str(path))
    # 15 ms of CPU a sample of two cameras, and a megabyte of it.
    cpus = load_cluster("1x8-h100").host.cpus.value
    assert report.cluster.images_per_node_s == pytest.approx(cpus * 2 / 0.015)
    assert (report.scenario.cameras, report.scenario.sample_bytes) == (
        2,
        1_000_000,
    )
    assert report.cluster.storage_gb_per_s == load_cluster("1x8-h100").storage_gb_per_s
    assert any(
        "storage is the cluster file's: the measured loader was held up by cpu" in text
        for text in report.assumed
    )
    short = tmp_path / "short.json"
    short.write_bytes(msgspec.json.encode(loader_report_of([loader_run(None)])))
    with pytest.raises(
        ConfigError,
        match=r"--loader-report '.*' has no figures: no run became steady",
    ):
        fuelrail.bench.plan(None, **TINY, **IMAGES, loader_report=str(short))


@pytest.mark.slow
def test_a_dataset_without_a_loaders_report_says_what_is_assumed(tmp_path):
    build_dataset(tmp_path / "data", {"train": (5, 4)})
    report = fuelrail.bench.plan(None, **TINY, height=64, width=128, data=str(tmp_path / "data"))
    assert any(
        "no report of `fuelrail bench loader` for the dataset" in text for text in report.assumed
    )


@pytest.mark.slow
def test_efficiencies_are_fitted_to_training_on_the_cluster(tmp_path):
    settings = msgspec.structs.replace(SETTINGS, model="bev-tiny", accelerator="cuda", profile=None)
    report = report_of([log(steps(20)), log(steps(20))], settings=settings)
    report = msgspec.structs.replace(report, model={"name": "bev-tiny", "num_parameters": None})
    path = tmp_path / "report.json"
    path.write_bytes(msgspec.json.encode(report))
    scenario = Scenario(name="n", **TINY, **IMAGES)
    cluster = load_cluster("1x8-h100")
    fit, said = measured(scenario, cluster, [str(path)])
    # A tiny model takes milliseconds, of which an H100 needs none: it goes as far as one step may move the numbers.
    assert fit.efficiency.convolution < choice.efficiency(scenario, cluster).convolution
    assert "5 numbers fitted to 1 measured step; identifiable by them: " in said[0]
    emulated = report_of([log(steps(20))])
    path.write_bytes(msgspec.json.encode(emulated))
    with pytest.raises(
        ConfigError,
        match="its accelerator was emulated, which says nothing of 'NVIDIA H100",
    ):
        measured(scenario, cluster, [str(path)])


FLAGS = {
    "model": "gpt-tiny",
    "cluster": "1x8-h100",
    "global_batch": 16,
    "strategy": "ddp",
}


@pytest.mark.slow
def test_a_users_own_measured_steps_narrow_the_range(tmp_path):
    scenario = {
        "model": "gpt-tiny",
        "cluster": "1x8-h100",
        "global_batch": 16,
        "parallel": {"strategy": "ddp"},
    }
    for number, size in enumerate((1, 2)):
        text = {
            **scenario,
            "name": "mine",
            "micro_batch": size,
            "measured_step_s": 0.04 / size,
        }
        (tmp_path / f"{number}.yaml").write_bytes(msgspec.yaml.encode(text))
    files = (str(tmp_path / "0.yaml"), str(tmp_path / "1.yaml"))
    before = fuelrail.bench.plan(None, **FLAGS)
    after = fuelrail.bench.plan(None, **FLAGS, measure=files)
    assert any("identifiable by them" in text for text in after.assumed)
    assert after.step_s > before.step_s, (
        "a step takes milliseconds, which no H100 needs for so little"
    )
    assert after.step_range_s[0] < after.step_s < after.step_range_s[1]
    (tmp_path / "0.yaml").write_bytes(msgspec.yaml.encode({**scenario, "name": "mine"}))
    with pytest.raises(ConfigError, match="needs parallel, and measured_step_s"):
        fuelrail.bench.plan(None, **FLAGS, measure=files)


def test_every_scenario_is_of_a_cluster():
    for path in (CLUSTERS.parent / "scenarios").glob("*.yaml"):
        assert (
            load_cluster(msgspec.yaml.decode(path.read_bytes(), type=dict)["cluster"]).num_devices
            >= 4
        )
