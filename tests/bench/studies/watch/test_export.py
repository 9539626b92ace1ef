"""The figures of a watch as other tools read them."""

from __future__ import annotations

import pytest

from fuelrail.bench.measure.records import RankLog
from fuelrail.bench.studies.watch.report import log_to_wandb, write_tensorboard
from support.watch_records import rank, report_on


@pytest.fixture(scope="module")
def report():
    return report_on(rank({"all_reduce": 22}), rank({"forward": 50}))


def test_prometheus_reads_the_figures(report):
    parser = pytest.importorskip("prometheus_client.parser", reason="prometheus-client")
    families = {
        family.name: family.samples
        for family in parser.text_string_to_metric_families(report.as_prometheus().decode())
    }
    (finding,) = families["fuelrail_watch_finding_ratio"]
    assert finding.labels == {"cause": "slow rank", "phase": "forward", "rank": "1"}
    assert finding.value == pytest.approx(report.findings[0].share, rel=1e-4)
    steps = {
        sample.labels["rank"]: sample.value for sample in families["fuelrail_watch_step_seconds"]
    }
    assert steps["0"] == pytest.approx(report.ranks[0].step_ms / 1e3, rel=1e-4)
    parts = families["fuelrail_watch_part_ratio"]
    assert sum(sample.value for sample in parts if sample.labels["rank"] == "1") == pytest.approx(1)


def test_tensorboard_reads_a_run_for_each_rank(tmp_path):
    package = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard"
    )
    for _ in range(2):  # the second time in the place of the first
        write_tensorboard({3: RankLog(steps=rank())}, tmp_path / "events")
    (folder,) = (tmp_path / "events").iterdir()
    assert folder.name == "rank-00003"
    events = package.EventAccumulator(str(folder))
    events.Reload()
    forward = events.Scalars("watch/forward_ms")
    assert [event.step for event in forward] == list(range(60))
    assert forward[0].value == pytest.approx(30)
    assert events.Scalars("watch/occupancy")[0].value == pytest.approx(85 / 89, rel=1e-3)


def test_wandb_takes_a_ranks_scalars(tmp_path):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    run = wandb.init(mode="offline", dir=tmp_path, project="watch")
    log_to_wandb(RankLog(steps=rank()), run)
    logged = dict(run.summary)
    run.finish()
    assert logged["watch/step"] == 59
    assert logged["watch/forward_ms"] == pytest.approx(30.06)
