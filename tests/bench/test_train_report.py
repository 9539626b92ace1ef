from __future__ import annotations

import json
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuelrail.bench.files import publish_json
from fuelrail.bench.records import InputFacts, RankLog
from fuelrail.bench.train_report import load_report
from fuelrail.pipeline.errors import ConfigError
from support.bench_runs import PROFILE, SETTINGS, log, report_of, step, steps


def test_rates_follow_from_samples_and_wall_time():
    figures = report_of([log(0, steps(20, wait_ms=9)), log(1, steps(20, wait_ms=9))], price=3.0).figures
    rate = figures.throughput
    assert rate.samples_per_s == pytest.approx(2 * 2 / 0.040)
    assert rate.images_per_s == pytest.approx(2 * 4 / 0.040)
    assert rate.demand_samples_per_s == pytest.approx(2 * 2 / 0.031)
    assert rate.gpu_hours_per_million_samples == pytest.approx(2 * 1e6 / 100 / 3600)
    assert rate.cost_per_million_samples == pytest.approx(3 * rate.gpu_hours_per_million_samples)
    assert figures.occupancy.mean == pytest.approx(31 / 40)


@given(wait_ms=st.floats(0, 100), reduce_ms=st.floats(0, 100), other_ms=st.floats(0, 10))
def test_shares_of_the_phases_add_up_to_one(wait_ms, reduce_ms, other_ms):
    records = steps(20, wait_ms=wait_ms, reduce_ms=reduce_ms, other_ms=other_ms)
    figures = report_of([log(0, records)]).figures
    assert sum(phase.share for phase in figures.phases) == pytest.approx(1, abs=1e-6)
    assert {phase.phase: phase.time.p50_ms for phase in figures.phases}["data_wait"] == pytest.approx(wait_ms, abs=1e-5)


def test_stage_figures_are_of_the_measured_window_summed_over_ranks():
    figures = report_of([log(0, steps(20)), log(1, steps(20))]).figures
    decode = figures.stages[0]
    assert (decode.name, decode.num_threads) == ("decode", 2)
    assert decode.busy == 1.0  # blocked time stood at one second at both ends
    assert decode.items_per_s == pytest.approx(2 * 30 / (16 * 0.031))


def test_a_rank_without_its_last_snapshot_leaves_the_stages_out():
    assert report_of([log(0, steps(20)), log(1, steps(20), complete=False)], cut_off="x").figures.stages == []


def test_a_run_too_short_has_no_figures():
    report = report_of([log(0, steps(6))])
    assert report.figures is None
    assert "6 steps were run" in report.window.too_short


def test_a_run_without_any_record_still_makes_a_report():
    report = report_of([RankLog(), RankLog()], cut_off="everybody died")
    assert (report.figures, report.cut_off, report.num_ranks) == (None, "everybody died", 2)
    assert not report.ranks[0].completed


@pytest.mark.parametrize(
    ("logs", "said"),
    [
        ([log(0, [step(n, 5_000 + n, overrun_ns=5_000_000) for n in range(20)])], "outlasted"),
        ([log(0, [step(n, 5_000 + n, overshoot_ns=5_000_000) for n in range(20)])], "ended late"),
        ([log(0, steps(20), digest="a"), log(1, steps(20), digest="b")], "different weights"),
        ([log(0, steps(20), labelled=False)], "no boxes"),
        ([log(0, [step(n, 5_000 + n, loss=None) for n in range(20)])], "not finite"),
    ],
    ids=["overrun", "overshoot", "weights", "labels", "loss"],
)
def test_doubts_are_said(logs, said):
    assert any(said in warning for warning in report_of(logs).warnings)


def test_a_healthy_run_has_no_warning():
    assert report_of([log(0, steps(20)), log(1, steps(20))]).warnings == []


def test_another_input_than_the_profiles_is_said():
    other = log(0, steps(20))
    other.input = InputFacts(num_cameras=6, height=32, width=64, labelled=True)
    assert any("2 x 64x32" in warning and "6 x 64x32" in warning for warning in report_of([other]).warnings)


def test_waits_at_the_turns_of_short_epochs_are_said():
    first = step(0, 0)
    records = [first]
    for number in range(1, 20):
        turn = number % 4 == 0
        last = records[-1]
        records.append(step(number, last.end_ns, wait_ms=20 if turn else 0.1, epoch=number // 4))
    told = [warning for warning in report_of([log(0, records)]).warnings if "first step of an epoch" in warning]
    assert "has only 4 steps" in told[0]
    steady = [step(number, 35_000_000 * number, wait_ms=4, epoch=number // 4) for number in range(20)]
    assert not any("first step of an epoch" in warning for warning in report_of([log(0, steady)]).warnings)


def test_steps_fed_from_stock_are_said():
    fed = log(0, steps(20))
    first = fed.snapshots[0].stages
    first[-1] = msgspec.structs.replace(first[-1], waiting=2)
    assert any("were prefetched" in warning for warning in report_of([fed]).warnings)


def test_a_report_survives_its_file_and_names_no_place(tmp_path):
    report = report_of([log(0, steps(20)), log(1, steps(20))], cut_off="the run was interrupted")
    path = tmp_path / "report.json"
    publish_json(path, report)
    assert load_report(path) == report
    assert "/somewhere" not in path.read_text()
    assert list(tmp_path.iterdir()) == [path]
    assert not any(math.isnan(value) for value in json.loads(path.read_text())["series"][0]["loss"])


@pytest.mark.parametrize("text", ["", "[]", '{"schema": "fuelrail-bench-train", "version": 99}'])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"report\.json"):
        load_report(path)


def test_a_run_on_cuda_names_its_device():
    cuda = msgspec.structs.replace(SETTINGS, profile=None)
    assert report_of([log(0, steps(20))], settings=cuda).accelerator == {"kind": "cuda", "device": "Test GPU"}
    assert report_of([log(0, steps(20))]).accelerator["sources"] == PROFILE.sources
