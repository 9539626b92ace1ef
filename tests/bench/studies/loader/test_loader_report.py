"""Loader reports of runs that never happened: figures, doubts and pages."""

from __future__ import annotations

import msgspec
import pytest

from fuelrail.bench.report.page import render_markdown, render_page
from support.html_page import Page
from support.loader_runs import loader_report_of, loader_run


def test_figures_are_medians_of_the_steady_runs():
    figures = loader_report_of(
        [
            loader_run(100.0),
            loader_run(120.0),
            loader_run(125.0),
            loader_run(None),
        ]
    ).figures
    assert (
        figures.samples_per_s.median,
        figures.samples_per_s.low,
        figures.samples_per_s.high,
    ) == (120, 100, 125)
    assert figures.images_per_s.median == 240
    assert figures.stored_mb_per_s == pytest.approx(120)
    assert figures.cpu_s_per_1000_images == pytest.approx(7.5)
    assert (figures.bound.kind, figures.bound.stage) == ("cpu", "decode")


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ([loader_run(), loader_run(None)], "1 of 2 runs did not become steady"),
        ([loader_run(100.0), loader_run(125.0)], "differ by 22%"),
        ([loader_run(num_storage_faults=5000)], "Up to 5,000 pages"),
    ],
    ids=["unsteady", "spread", "storage"],
)
def test_doubts_are_said(runs, said):
    assert any(said in warning for warning in loader_report_of(runs).warnings)


def test_a_quiet_measurement_has_no_doubt():
    assert (
        loader_report_of([loader_run(124.0), loader_run(125.0), loader_run(126.0)]).warnings == []
    )


def both_texts(report):
    page = Page(render_page(report))
    page.check()
    return render_markdown(report), page.text


@pytest.mark.costly
@pytest.mark.parametrize(
    "runs",
    [[loader_run(124.0), loader_run(126.0)], [loader_run(None)]],
    ids=["figures", "none"],
)
def test_page_and_markdown_show_what_the_report_says(runs):
    report = loader_report_of(runs)
    markdown, page = both_texts(report)
    assert "a <tiny> set" in page
    said = report.figures.bound.finding if report.figures else "no run became steady"
    assert said in markdown
    assert said in page


def test_a_report_survives_its_file():
    report = loader_report_of([loader_run(), loader_run(None)])
    assert msgspec.json.decode(msgspec.json.encode(report), type=type(report)) == report


@pytest.mark.costly
@pytest.mark.parametrize(
    ("rates", "has_interval"),
    [([120.0, 121.0], False), ([120.0, 121.0, 122.0], True)],
)
def test_an_interval_needs_three_runs(rates, has_interval):
    report = loader_report_of([loader_run(rate) for rate in rates])
    for text in both_texts(report):
        assert ("240 to 244 in 3 runs" in text) is has_interval
        assert ("2 runs: no interval" in text) is not has_interval
