"""Plans by flags, with measurements of a loader and of training, and the report's files."""

from __future__ import annotations

import sys

import msgspec
import pytest

import fuelrail
from fuelrail.__main__ import main
from fuelrail.bench.planner import quick
from fuelrail.bench.planner.hardware import CLUSTERS, load_cluster
from fuelrail.bench.planner.scenario import Data, PlanOptions, Scenario, with_options
from fuelrail.bench.planner.step_time import Efficiency
from fuelrail.bench.studies.plan import sweep
from fuelrail.bench.studies.plan.measured import calibrated
from fuelrail.bench.trainer.strategies.settings import ParallelSettings
from fuelrail.pipeline.errors import ConfigError
from support.bench_runs import SETTINGS, log, report_of, steps
from support.datasets import build_dataset
from support.loader_runs import loader_report_of, loader_run

TINY = {"model": "bev-tiny", "cluster": "1x8-h100", "global_batch": 8, "precision": "fp32"}
IMAGES = {"cameras": 2, "height": 64, "width": 128}


def test_flags_replace_what_a_scenario_says():
    asked = Scenario(name="n", model="gpt-tiny", cluster="1x8-h100", global_batch=16)
    changed = with_options(asked, PlanOptions(cluster="8x8-h100", sequence=16, strategy="fsdp2", recompute="full"))
    assert (changed.cluster, changed.settings.context, changed.name) == ("8x8-h100", 16, "n")
    assert changed.parallel == ParallelSettings(strategy="fsdp2", recompute="full")
    again = with_options(changed, PlanOptions(recompute="none"))
    assert again.parallel == ParallelSettings(strategy="fsdp2")
    assert with_options(changed, PlanOptions(strategy="auto")).parallel == "auto"


def test_what_flags_must_say():
    with pytest.raises(ConfigError, match=r"needs cluster, global_batch: .*--cluster --global-batch"):
        with_options(None, PlanOptions(model="gpt2"))
    with pytest.raises(ConfigError, match="strategy auto looks for the rest itself, and recompute is given"):
        with_options(Scenario(name="n", **TINY), PlanOptions(strategy="auto", recompute="full"))
    with pytest.raises(ConfigError, match="recompute is given without a strategy"):
        with_options(Scenario(name="n", **TINY), PlanOptions(recompute="full"))


@pytest.mark.slow
def test_a_plan_by_flags_alone_and_its_files(tmp_path, capsys):
    given = ["--model", "bev-tiny", "--cluster", "1x8-h100", "--global-batch", "8", "--precision", "fp32"]
    given += ["--cameras", "2", "--height", "64", "--width", "128", "--strategy", "zero1", "--explain"]
    assert main(["plan", *given, "--out", str(tmp_path / "out"), "--json"]) == 0
    found = msgspec.json.decode(capsys.readouterr().out)
    assert found["strategy"] == "zero1"
    assert found == msgspec.json.decode((tmp_path / "out" / "report.json").read_bytes())
    assert {"peak_gib", "step.compute", "mfu", "usd_per_million"} <= found["explained"].keys()
    assert all(one["source"] for one in found["explained"].values())
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<svg") == 2
    text = (tmp_path / "out" / "report.md").read_text()
    assert all(f"## {title}" in text for title in ("What was tried", "Memory and work of each stage", "Scaling"))
    weak, strong = (next(one for one in found["scaling"] if one["scaling"] == kind) for kind in ("weak", "strong"))
    assert [point["devices"] for point in weak["points"]] == [2**power for power in range(11)]
    assert [point["devices"] for point in strong["points"]] == [1, 2, 4, 8]
    assert weak["points"][0]["efficiency"] == 1.0
    assert all(point["global_batch"] == 8 for point in strong["points"])
    assert any("max_global_batch" in question for question in found["questions"])


@pytest.mark.slow
def test_a_sweep_says_what_fits_and_how_fast_by_a_few_small_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "_MICRO_BATCHES", (1, 3, 8, 16, 32))
    monkeypatch.setattr(sweep, "_RECOMPUTE", ("none",))
    monkeypatch.setattr(sweep, "_SIMPLE", ("ddp", "fsdp2"))
    pair = (CLUSTERS / "1x8-h100.yaml").read_text().replace("devices_per_node: 8", "devices_per_node: 2")
    (tmp_path / "pair.yaml").write_text(pair.replace("memory_gib: {value: 80,", "memory_gib: {value: 0.009,"))
    cluster = load_cluster(str(tmp_path / "pair.yaml"))
    asked = Scenario(name="n", model="gpt-tiny", cluster="pair", global_batch=64, precision="fp32")
    data = Data(images_per_node_s=1.0, images_source="none", storage_gb_per_s=1.0, storage_source="none")
    quick._small.cache_clear()
    found = {(one.strategy, one.micro_batch): one for one in sweep.sweep(asked, cluster, data)}
    # Two for each role of a rank, of which a pipeline has two, whatever the micro-batch.
    assert quick._small.cache_info().misses == 5, "plans share small runs"
    assert {strategy for strategy, _ in found} == {"ddp", "fsdp2", "pp=2", "tp=2"}
    assert found["ddp", 1].peak_gib < found["ddp", 8].peak_gib
    assert found["ddp", 8].samples_per_s > found["ddp", 1].samples_per_s
    assert "do not divide the global batch of 64" in found["fsdp2", 3].fails
    assert found["ddp", 16].fails.startswith("needs 0.0 GiB, and 0.0 GiB of a device are usable")
    assert found["ddp", 32].fails == f"a smaller micro-batch {found['ddp', 16].fails}", "it is not tried"
    assert found["tp=2", 16].fails is None
    # What ranks share does not lie on each of them.
    assert found["fsdp2", 1].peak_gib < found["ddp", 1].peak_gib


@pytest.mark.slow
def test_a_loaders_report_says_what_decoding_and_storage_can_do(tmp_path):
    path = tmp_path / "report.json"
    path.write_bytes(msgspec.json.encode(loader_report_of([loader_run()])))
    found = fuelrail.plan(None, **TINY, height=64, width=128, loader_report=str(path))
    # 15 ms of CPU a sample of two cameras, and a megabyte of it.
    cpus = load_cluster("1x8-h100").host.cpus.value
    assert found.data.images_per_node_s == pytest.approx(cpus * 2 / 0.015)
    assert (found.scenario.cameras, found.scenario.sample_bytes) == (2, 1_000_000)
    assert found.data.storage_gb_per_s == load_cluster("1x8-h100").storage_gb_per_s.value
    assert any("storage is the cluster file's: the measured loader was held up by cpu" in one for one in found.assumed)
    short = tmp_path / "short.json"
    short.write_bytes(msgspec.json.encode(loader_report_of([loader_run(None)])))
    with pytest.raises(ConfigError, match=r"--loader-report '.*' has no figures: no run became steady"):
        fuelrail.plan(None, **TINY, **IMAGES, loader_report=str(short))


@pytest.mark.slow
def test_a_dataset_without_a_loaders_report_says_what_is_assumed(tmp_path):
    build_dataset(tmp_path / "data", {"train": (5, 4)})
    found = fuelrail.plan(None, **TINY, height=64, width=128, data=str(tmp_path / "data"))
    assert any("no report of `fuelrail bench loader` for the dataset" in one for one in found.assumed)


@pytest.mark.slow
def test_efficiencies_are_fitted_to_training_on_the_cluster(tmp_path):
    settings = msgspec.structs.replace(SETTINGS, model="bev-tiny", profile=None)
    report = report_of([log(0, steps(20)), log(1, steps(20))], settings=settings)
    report = msgspec.structs.replace(report, model={"name": "bev-tiny", "num_parameters": None})
    path = tmp_path / "report.json"
    path.write_bytes(msgspec.json.encode(report))
    asked = Scenario(name="n", **TINY, **IMAGES)
    cluster = load_cluster("1x8-h100")
    found, said = calibrated(asked, cluster, [str(path)])
    # A tiny model takes milliseconds, of which an H100 needs none: the fit goes to its lowest share of the peak.
    assert found.efficiency == Efficiency(compute=0.2, passes=asked.efficiency.passes)
    assert "fitted to 1 report; off by " in said[0]
    emulated = report_of([log(0, steps(20))])
    path.write_bytes(msgspec.json.encode(emulated))
    with pytest.raises(ConfigError, match="its accelerator was emulated, which says nothing of 'NVIDIA H100"):
        calibrated(asked, cluster, [str(path)])


def test_closed_formulas_plan_where_torch_has_moved_a_private_part(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.testing._internal.distributed.fake_pg", None)
    found = fuelrail.plan(None, model="gpt-100b", cluster="8x8-h100", global_batch=64, mesh="pp=4,dp_shard=2,tp=8")
    assert found.assumed[1].startswith("memory, FLOP and collectives by closed formulas")
    # 16 bytes of state a parameter over 64 ranks, and a mixed-precision step of 6 N FLOP a token.
    assert found.stages[0].memory["weights, gradients, moments"] == pytest.approx(16 * 101e9 / 64, rel=0.02)
    assert sum(stage.flop for stage in found.stages) * 8 == pytest.approx(6 * 101e9 * 2048, rel=0.05)
    with pytest.raises(ConfigError, match="pipeline_schedule ZBVZeroBubble gives each rank two stages"):
        fuelrail.plan(None, model="gpt-100b", cluster="8x8-h100", global_batch=64, mesh="pp=4,dp_shard=2,tp=8",
                      pipeline_schedule="ZBVZeroBubble")  # fmt: skip
    with pytest.raises(ConfigError, match="closed formulas describe GPT models, and this one is BevSettings"):
        fuelrail.plan(None, **TINY, **IMAGES, strategy="ddp")


def test_every_scenario_is_of_a_cluster():
    for path in (CLUSTERS.parent / "scenarios").glob("*.yaml"):
        assert load_cluster(msgspec.yaml.decode(path.read_bytes(), type=dict)["cluster"]).num_devices >= 4
