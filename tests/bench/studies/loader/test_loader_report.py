"""Loader reports of runs that never happened: figures, doubts and pages."""

from __future__ import annotations

import msgspec
import pytest

from fuelrail.bench.measure.limits import HOST_TO_DEVICE
from fuelrail.bench.measure.rates import Rate
from fuelrail.bench.report.page import render_markdown, render_page
from support.html_page import Page
from support.loader_runs import LIMITS, loader_report_of, loader_run


def test_figures_are_medians_of_the_steady_runs():
    figures = loader_report_of([loader_run(100.0), loader_run(120.0), loader_run(125.0), loader_run(None)]).figures
    assert (figures.samples_per_s.median, figures.samples_per_s.low, figures.samples_per_s.high) == (120, 100, 125)
    assert figures.images_per_s.median == 240
    assert figures.stored_mb_per_s == pytest.approx(120)
    assert figures.cpu_s_per_1000_images == pytest.approx(7.5)
    assert [step.of_previous for step in figures.waterfall] == [
        *(pytest.approx(share) for share in (1, 130 / 160, 128 / 130, 120 / 128)),
        None,
    ]
    assert (figures.bound.kind, figures.bound.stage) == ("cpu", "decode")


def test_without_jpeg_the_waterfall_begins_at_the_decode_stage():
    figures = loader_report_of([loader_run()], limits=LIMITS[:1]).figures
    assert [step.name.split()[0] for step in figures.waterfall] == ["decode", "fetch", "whole", "host"]


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ([loader_run(), loader_run(None)], "1 of 2 runs did not become steady"),
        ([loader_run(100.0), loader_run(125.0)], "differ by 22%"),
        ([loader_run(num_storage_faults=5000)], "Up to 5,000 pages"),
        ([loader_run(), loader_run(clock_jump_s=-30.0)], "clock jumped by -30.0 s"),
    ],
    ids=["unsteady", "spread", "storage", "clock"],
)
def test_doubts_are_said(runs, said):
    assert any(said in warning for warning in loader_report_of(runs).warnings)


def test_a_quiet_measurement_has_no_doubt():
    assert loader_report_of([loader_run(124.0), loader_run(125.0), loader_run(126.0)]).warnings == []


def both_texts(report):
    page = Page(render_page(report))
    page.check()
    return render_markdown(report), page.text


@pytest.mark.costly
@pytest.mark.parametrize("runs", [[loader_run(124.0), loader_run(126.0)], [loader_run(None)]], ids=["figures", "none"])
def test_page_and_markdown_show_what_the_report_says(runs):
    report = loader_report_of(runs)
    markdown, page = both_texts(report)
    assert "a <tiny> set" in page
    said = [report.figures.bound.finding, "host to device: no GPU"] if report.figures else ["no run became steady"]
    for text in (markdown, page):
        assert all(one in text for one in said)


def test_a_report_survives_its_file():
    report = loader_report_of([loader_run(), loader_run(None)])
    assert msgspec.json.decode(msgspec.json.encode(report), type=type(report)) == report


def test_a_run_across_a_jump_of_the_clock_gives_no_figure():
    report = loader_report_of([loader_run(100.0), loader_run(500.0, clock_jump_s=3600.0)])
    assert report.figures.samples_per_s.high == 100.0


@pytest.mark.parametrize(("bus", "left"), [(600.0, 1.0), (60.0, 0.5)])
def test_the_bus_to_a_device_takes_part_in_the_waterfall(bus, left):
    """Copies run beside the loading: a fast bus costs nothing."""
    limits = [*LIMITS, Rate(name=HOST_TO_DEVICE, num_threads=1, samples_per_s=bus, cpu_ms_per_sample=0.1)]
    report = loader_report_of([loader_run(120.0)], limits=limits)
    last = report.figures.waterfall[-1]
    assert (last.of_previous, last.samples_per_s) == (pytest.approx(left), pytest.approx(120 * left))
    assert f"to the device, which takes {bus:.0f} samples/s" in render_markdown(report)


@pytest.mark.costly
@pytest.mark.parametrize(("rates", "shown"), [([120.0, 121.0], False), ([120.0, 121.0, 122.0], True)])
def test_an_interval_needs_three_runs(rates, shown):
    report = loader_report_of([loader_run(rate) for rate in rates])
    for text in both_texts(report):
        assert ("240 to 244 in 3 runs" in text) is shown
        assert ("2 runs: no interval" in text) is not shown


@pytest.mark.costly
def test_the_waterfall_is_refused_where_the_repeats_differ_by_more_than_its_steps():
    figures = loader_report_of([loader_run(rate) for rate in (80.0, 120.0, 125.0)]).figures
    assert figures.is_waterfall_noise
    assert "the repeats of the same run differ by 38%" in figures.waterfall_doubt
    for text in both_texts(loader_report_of([loader_run(rate) for rate in (80.0, 120.0, 125.0)])):
        assert "they are within noise" in text
        assert "whole loader: batches assembled" not in text


@pytest.mark.costly
def test_a_stage_above_its_limit_is_said_at_the_chart():
    report = loader_report_of([loader_run(rate) for rate in (149.0, 150.0, 151.0)])
    assert not report.figures.is_waterfall_noise
    for text in both_texts(report):
        assert "reaches 117% of the step before it, which should be its limit" in text
