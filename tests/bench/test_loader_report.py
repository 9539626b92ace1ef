"""Loader reports of runs that never happened: figures, doubts and pages."""

from __future__ import annotations

import msgspec
import pytest

from fuelrail.bench.cpu_watch import CpuUse
from fuelrail.bench.limits import SampleSizes
from fuelrail.bench.loader_page import render_loader_html
from fuelrail.bench.loader_report import build_loader_report
from fuelrail.bench.loader_run import LoaderRun
from fuelrail.bench.rates import Rate
from fuelrail.bench.records import Stage
from support.bench_runs import DATASET, MACHINE
from support.html_page import Page

STAGES = [
    Rate(name="fetch", num_threads=1, samples_per_s=3000, cpu_ms_per_sample=0.2),
    Rate(name="parse", num_threads=1, samples_per_s=2000, cpu_ms_per_sample=0.3),
    Rate(name="decode", num_threads=2, samples_per_s=130, cpu_ms_per_sample=14.0),
    Rate(name="collate", num_threads=1, samples_per_s=9000, cpu_ms_per_sample=0.1),
]
LIMITS = [
    Rate(name="xxh3 digest", num_threads=2, samples_per_s=20_000, cpu_ms_per_sample=0.1),
    Rate(name="libjpeg-turbo at 1/2", num_threads=2, samples_per_s=160, cpu_ms_per_sample=12.0),
]


def run(samples_per_s=125.0, **changes):
    batch_s = 2 / (samples_per_s or 10.0)
    stages = [
        Stage(
            name=rate.name, num_threads=rate.num_threads, items=400, busy_s=2.0 if rate.name == "decode" else 0.1,
            starved_s=0.0, blocked_s=0.1, waiting=1, capacity=2,
        )
        for rate in STAGES
    ]  # fmt: skip
    made = {
        "first_batch_s": 0.3,
        "num_warm_up_batches": 2,
        "batch_s": [0.3, 2 * batch_s] + [batch_s] * 20,
        "samples_per_s": samples_per_s,
        "cpu_ms_per_sample": 15.0,
        "cpu": CpuUse(seconds=3.0, own=1.9, others=0.0, usable=2.0),
        "stages": stages,
        "num_storage_faults": 0,
    }
    return LoaderRun(**(made | changes))


def report_of(runs, *, limits=LIMITS, dataset=DATASET):
    return build_loader_report(
        machine=MACHINE,
        dataset=dataset,
        options={"batch_size": 2, "num_workers": 2},
        sizes=SampleSizes(stored_bytes=1e6, encoded_image_bytes=9e5, output_bytes=3_000_000),
        limits=limits,
        stages=STAGES,
        runs=runs,
        peak_rss_bytes=2**30,
    )


def test_figures_are_medians_of_the_steady_runs():
    figures = report_of([run(100.0), run(120.0), run(125.0), run(None)]).figures
    assert (figures.samples_per_s.median, figures.samples_per_s.low, figures.samples_per_s.high) == (120, 100, 125)
    assert figures.images_per_s.median == 240
    assert figures.stored_mb_per_s == pytest.approx(120)
    assert figures.cpu_s_per_1000_images == pytest.approx(7.5)
    assert [step.of_previous for step in figures.waterfall] == pytest.approx([1, 130 / 160, 120 / 130])
    assert (figures.bound.kind, figures.bound.stage) == ("cpu", "decode")


def test_without_jpeg_the_waterfall_begins_at_the_decode_stage():
    figures = report_of([run()], limits=LIMITS[:1]).figures
    assert [step.name.split()[0] for step in figures.waterfall] == ["decode", "whole"]


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ([run(cpu=CpuUse(seconds=3.0, own=0.9, others=1.1, usable=2.0))], "Other processes used up to 1.1"),
        ([run(), run(None)], "1 of 2 runs did not become steady"),
        ([run(100.0), run(125.0)], "differ by 22%"),
        ([run(num_storage_faults=5000)], "Up to 5,000 pages"),
    ],
    ids=["disturbed", "unsteady", "spread", "storage"],
)
def test_doubts_are_said(runs, said):
    assert any(said in warning for warning in report_of(runs).warnings)


def test_a_quiet_measurement_has_no_doubt():
    assert report_of([run(124.0), run(125.0), run(126.0)]).warnings == []


@pytest.mark.parametrize("runs", [[run(124.0), run(126.0)], [run(None)]], ids=["figures", "none"])
def test_the_page_is_well_formed_and_tells_what_the_report_tells(runs):
    report = report_of(runs)
    page = Page(render_loader_html(report))
    page.check()
    assert "a <tiny> set" in page.text
    assert (report.figures.bound.finding if report.figures else "no run became steady") in page.text


def test_a_report_survives_its_file():
    report = report_of([run(), run(None)])
    assert msgspec.json.decode(msgspec.json.encode(report), type=type(report)) == report
