from __future__ import annotations

import pytest

from fuelrail.bench.report.page import render_markdown, render_page
from fuelrail.bench.studies.diff import compare
from fuelrail.bench.studies.scale.page import measured_rows
from support.html_page import Page
from support.scale_runs import RUNS, measured, scale_report

pytestmark = pytest.mark.slow


def test_efficiency_is_reported_against_one_rank():
    report = scale_report()
    efficiencies = {(run.num_ranks, run.batch_size): run.efficiency for run in report.measured}
    assert efficiencies[1, 2] == {"weak": 1.0}
    assert efficiencies[4, 2] == pytest.approx({"weak": 100 / 110, "strong": 100 / 110})
    assert efficiencies[2, 4] == pytest.approx({"strong": 400 / 420})


def test_the_model_is_tried_on_every_run_and_those_with_more_ranks_are_held_out():
    report = scale_report()
    assert all(
        run.error == pytest.approx(run.simulated_ms / run.step_ms.median - 1)
        for run in report.measured
    )
    assert [row[-1].endswith("(held out)") for row in measured_rows(report)] == [
        False,
        False,
        False,
        False,
        True,
    ]


def test_a_model_that_is_off_says_so():
    assert not scale_report().warnings
    report = scale_report([measured(1, 2, 300.0)])
    assert any("off by" in warning for warning in report.warnings)
    assert report.curves == [], "a simulation that missed what was measured simulates nothing else"
    assert "ranks it gives" not in render_markdown(report)
    assert "within" not in render_markdown(report).split("##")[0]


def test_curves_show_what_stragglers_and_storage_cost():
    ends = {curve.name: curve.points[-1] for curve in scale_report().curves}
    names = (
        "as measured",
        "5.0% of the ranks 50% slower",
        "storage gives 0.5 GB/s",
    )
    plain, slow, starved = (ends[name] for name in names)
    assert plain.num_ranks == 64
    assert plain.efficiency > 0.9 > slow.efficiency > starved.efficiency
    # 64 ranks x 2 MB a step at 0.5 GB/s.
    assert starved.step_ms == pytest.approx(256, rel=0.01)


@pytest.mark.parametrize("cut_off", [None, "4 ranks: the run was interrupted"])
def test_page_and_markdown_hold_the_figures(cut_off):
    changes = {"cut_off": cut_off, "curves": [], "fit": None} if cut_off else {}
    report = scale_report(**changes)
    text = render_markdown(report)
    page = Page(render_page(report))
    page.check()
    for rendered in (text, page.text):
        assert "110.0" in rendered
        assert ("Partial" in rendered) is bool(cut_off)


@pytest.mark.slow
def test_reports_differ_by_their_steps():
    slower = [measured(run.num_ranks, run.batch_size, run.step_ms.median * 1.5) for run in RUNS]
    changes = compare(scale_report(), scale_report(slower))
    assert len(changes) == len(RUNS)
    assert all(change.is_worse(0.02) for change in changes)
    assert not any(change.is_worse(0.0) for change in compare(scale_report(), scale_report()))


@pytest.mark.parametrize(("runs", "said"), [(RUNS[:1], "1 rank makes"), (RUNS, " ranks make ")])
def test_one_rank_and_several_are_counted_in_words(runs, said):
    assert said in render_markdown(scale_report(runs))
