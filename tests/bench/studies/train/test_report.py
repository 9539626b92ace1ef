from __future__ import annotations

import json
import math
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuelrail.bench.measure.accelerator import EmulatedAccelerator
from fuelrail.bench.measure.machine import CpuUse
from fuelrail.bench.measure.records import InputFacts, RankLog, TransformUse
from fuelrail.bench.report.files import publish_json
from fuelrail.bench.report.page import render_markdown, render_page
from fuelrail.bench.studies.train.page import verdict
from fuelrail.bench.studies.train.report import build_report, load_report
from fuelrail.pipeline.errors import ConfigError
from support.bench_runs import (
    DATASET,
    MACHINE,
    MS,
    PROFILE,
    SETTINGS,
    HandClock,
    log,
    report_of,
    step,
    steps,
)
from support.html_page import Page


def test_rates_follow_from_samples_and_wall_time():
    priced = msgspec.structs.replace(SETTINGS, price_per_gpu_hour=3.0)
    figures = report_of(
        [log(steps(20, wait_ms=9)), log(steps(20, wait_ms=9))], settings=priced
    ).figures
    rate = figures.throughput
    assert rate.samples_per_s == pytest.approx(2 * 2 / 0.040)
    assert rate.images_per_s == pytest.approx(2 * 4 / 0.040)
    assert rate.demand_samples_per_s == pytest.approx(2 * 2 / 0.031)
    assert rate.gpu_hours_per_million_samples == pytest.approx(2 * 1e6 / 100 / 3600)
    assert rate.cost_per_million_samples == pytest.approx(3 * rate.gpu_hours_per_million_samples)
    assert figures.occupancy.mean == pytest.approx(31 / 40)


@given(
    wait_ms=st.floats(0, 100),
    reduce_ms=st.floats(0, 100),
    other_ms=st.floats(0, 10),
)
def test_shares_of_the_phases_add_up_to_one(wait_ms, reduce_ms, other_ms):
    records = steps(20, wait_ms=wait_ms, reduce_ms=reduce_ms, other_ms=other_ms)
    figures = report_of([log(records)]).figures
    assert sum(phase.share for phase in figures.phases) == pytest.approx(1, abs=1e-6)
    assert {phase.phase: phase.time.p50_ms for phase in figures.phases}[
        "data_wait"
    ] == pytest.approx(wait_ms, abs=1e-5)


def test_stage_figures_are_of_the_measured_window_summed_over_ranks():
    figures = report_of([log(steps(20)), log(steps(20))]).figures
    decode = figures.stages[0]
    assert (decode.name, decode.num_threads) == ("decode", 2)
    assert decode.busy == 1.0  # blocked time stood at one second at both ends
    assert decode.items_per_s == pytest.approx(2 * 30 / (16 * 0.031))


def test_a_rank_without_its_last_snapshot_leaves_the_stages_out():
    assert (
        report_of([log(steps(20)), log(steps(20), complete=False)], cut_off="x").figures.stages
        == []
    )


def test_runs_without_figures_make_a_report():
    short = report_of([log(steps(6))])
    assert short.figures is None
    assert "6 steps - " in short.window.too_short
    nothing = report_of([RankLog(), RankLog()], cut_off="everybody died")
    assert (nothing.figures, nothing.cut_off, nothing.num_ranks) == (
        None,
        "everybody died",
        2,
    )
    assert not nothing.ranks[0].completed


def on_another_input():
    rank_log = log(steps(20))
    rank_log.input = InputFacts(num_cameras=6, height=32, width=64)
    return [rank_log]


def fed_from_stock():
    fed = log(steps(20))
    first = fed.snapshots[0].stages
    first[-1] = msgspec.structs.replace(first[-1], waiting=2)
    return [fed]


def alike(**changes):
    return [log([step(n, 5_000 + n, **changes) for n in range(20)])]


@pytest.mark.parametrize(
    ("logs", "said"),
    [
        (alike(overrun_ns=5_000_000), "longer than the emulated GPU"),
        (alike(overshoot_ns=5_000_000), "late"),
        (
            [log(steps(20), digest="a"), log(steps(20), digest="b")],
            "different weights",
        ),
        (alike(loss=None), "not finite"),
        (on_another_input(), r"2 x 64x32.*6 x 64x32|6 x 64x32.*2 x 64x32"),
        (fed_from_stock(), "were prefetched"),
    ],
    ids=["overrun", "overshoot", "weights", "loss", "input", "stock"],
)
def test_doubts_are_said(logs, said):
    assert any(re.search(said, warning) for warning in report_of(logs).warnings)


def test_a_healthy_run_has_no_warning():
    assert report_of([log(steps(20)), log(steps(20))]).warnings == []


def test_a_report_survives_its_file_and_names_no_place(tmp_path):
    report = report_of([log(steps(20)), log(steps(20))], cut_off="the run was interrupted")
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
    cuda = msgspec.structs.replace(SETTINGS, accelerator="cuda", profile=None)
    assert report_of([log(steps(20))], settings=cuda).accelerator == {
        "kind": "cuda",
        "device": "Test GPU",
    }
    assert report_of([log(steps(20))]).accelerator["sources"] == PROFILE.sources


def on_data(read_bytes, *, ranks=2, leave_out=(), num_samples=10):
    """Ranks that took 20 steps of 2 samples of 1 MB each, for which storage read that much."""
    dataset = msgspec.structs.replace(DATASET, num_samples=num_samples, mean_sample_bytes=1e6)
    logs = [log(steps(20)) for rank in range(ranks)]
    for rank_log in logs:
        rank_log.end = msgspec.structs.replace(rank_log.end, read_bytes=read_bytes)
    settings = msgspec.structs.replace(SETTINGS, leave_out=leave_out)
    return build_report(settings, logs, machine=MACHINE, dataset=dataset, cut_off=None)


@pytest.mark.costly
def test_a_run_from_the_page_cache_says_so():
    report = on_data(0)
    (warning,) = [warning for warning in report.warnings if "page cache" in warning]
    assert "0% of the bytes of 80 samples, 8.0 times through the split" in warning
    for text in (render_markdown(report), Page(render_page(report)).text):
        assert warning in text


@pytest.mark.parametrize(
    ("read_bytes", "said"),
    [
        (40_000_000, None),
        (10_000_000, "Storage read 25% of the bytes"),
        (None, "may have been read from a cache"),
    ],
)
def test_what_storage_read_is_reported(read_bytes, said):
    report = on_data(read_bytes)
    assert (
        [said] == [said for warning in report.warnings if said in warning]
        if said
        else report.warnings == []
    )


def test_a_run_without_loading_has_no_source():
    assert not any("bytes" in warning for warning in on_data(0, leave_out=("loading",)).warnings)


def test_headline_bar_and_sentence_agree_on_a_loaded_host():
    """The stand-in's surplus and late waking count as other, in the bar and in the sentence."""
    with HandClock.driving_recorders():
        clock = HandClock(lateness_ns=2 * MS)
        accelerator = EmulatedAccelerator(PROFILE, clock)
        records = []
        for _ in range(20):
            accelerator.recorder.ask()
            accelerator.recorder.got(())
            with accelerator.forward(1, 2):
                clock.pass_ms(1)
            with accelerator.backward():
                clock.pass_ms(28)
            with accelerator.optimiser():
                clock.pass_ms(0.1)
            records.append(msgspec.structs.replace(accelerator.finish_step(), num_samples=1))
    report = report_of([log(records)])
    share = {phase.phase: phase.share for phase in report.figures.phases}
    bar = share["forward"] + share["backward"] + share["optimiser"]
    assert bar == pytest.approx(report.figures.occupancy.mean)
    assert share["other"] == pytest.approx(1 - bar)
    assert share["other"] > 0.2
    assert "Work outside of forward, backward and optimiser holds all ranks up" in verdict(report)


CPU = msgspec.structs.replace(SETTINGS, accelerator="cpu", profile=None, model="own:Net")


def test_a_model_that_sleeps_on_a_cpu_is_not_said_to_overload_it():
    """Forward, backward and optimiser take 31 ms, of which the thread computes for one."""
    idle = CpuUse(seconds=10.0, own_cpus=0.2, other_cpus=0.0, usable=2.0)
    report = report_of([log(steps(20, cpu_ns=1 * MS))], settings=CPU, cpu=idle)
    assert report.figures.waiting_share == pytest.approx(30 / 31)
    said = " ".join(report.warnings)
    assert "In 97% of the wall time the thread that trains" in said and "it slept" in said
    assert "overloaded" not in said
    assert verdict(report).startswith("Forward, backward and optimiser take 100.0% of the time")
    assert "most of it backward" in verdict(report)


def test_a_model_that_stands_in_the_queue_for_a_cpu_is_said_to():
    report = report_of([log(steps(20, cpu_ns=11 * MS, queued_ns=20 * MS))], settings=CPU)
    assert (report.figures.waiting_share, report.figures.queued_share) == (
        0,
        20 / 31,
    )
    said = " ".join(report.warnings)
    assert "In 65% of the wall time the thread that trains stood in the queue" in said
    assert "slept" not in said


def test_an_own_model_on_an_emulated_gpu_is_said_not_to_be_what_is_timed():
    own_settings = msgspec.structs.replace(SETTINGS, model="own:Net")
    late = steps(20, overrun_ns=500 * MS, other_ms=500)
    idle = CpuUse(seconds=10.0, own_cpus=0.2, other_cpus=0.0, usable=2.0)
    said = " ".join(report_of([log(late)], settings=own_settings, cpu=idle).warnings)
    assert "those of test network on one Test GPU, not as those of model 'own:Net'" in said
    assert "--accelerator cpu" in said
    assert "The ranks used only 0.2 of 2 CPUs, but" in said and "overloaded" not in said
    busy = msgspec.structs.replace(idle, own_cpus=1.9)
    said = " ".join(report_of([log(late)], cpu=busy).warnings)
    assert "The CPUs are overloaded" in said and "not as those of" not in said


def transform_log(**use):
    records = log(steps(20))
    end = msgspec.structs.replace(records.end, transform=TransformUse(num_calls=10, **use))
    records.end = end
    return records


@pytest.mark.parametrize(
    ("use", "waits"),
    [
        # Ten calls of 40 ms, in a second.
        (
            {
                "wall_ns": 400 * MS,
                "cpu_ns": 4 * MS,
                "queued_ns": 0,
                "span_ns": 1000 * MS,
            },
            True,
        ),
        (
            {
                "wall_ns": 400 * MS,
                "cpu_ns": 390 * MS,
                "queued_ns": 0,
                "span_ns": 400 * MS,
            },
            False,
        ),
        # Four threads that take turns in the interpreter: each waits, and together they keep a CPU
        # busy.
        (
            {
                "wall_ns": 400 * MS,
                "cpu_ns": 98 * MS,
                "queued_ns": 0,
                "span_ns": 100 * MS,
            },
            False,
        ),
        # Threads that wait for a CPU.
        (
            {
                "wall_ns": 400 * MS,
                "cpu_ns": 90 * MS,
                "queued_ns": 300 * MS,
                "span_ns": 900 * MS,
            },
            False,
        ),
    ],
)
def test_a_transform_waits_where_it_takes_neither_a_cpu_nor_the_interpreters_lock(use, waits):
    transform = report_of([transform_log(**use)]).figures.transform
    assert transform.waits == waits
    assert transform.wall_ms == 40
