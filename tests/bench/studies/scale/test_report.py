from __future__ import annotations

import pytest

from fuelrail.bench.report.page import render_markdown, render_page
from fuelrail.bench.studies.diff import compare
from support.html_page import Page
from support.scale_runs import RUNS, measured, scale_report

pytestmark = pytest.mark.slow


def test_efficiency_is_reported_against_one_rank():
    runs = {(run.num_ranks, run.batch_size): run for run in scale_report().measured}
    assert (runs[1, 2].weak, runs[1, 2].strong) == (1.0, None)
    assert runs[4, 2].weak == runs[4, 2].strong == pytest.approx(100 / 110)
    assert (runs[2, 4].weak, runs[2, 4].strong) == (None, pytest.approx(400 / 420))
    assert "| 4 | 2 | 110.0 | 121.0 | 72.7 | 90.9% | 90.9% | 90.0% |" in render_markdown(
        scale_report()
    )


@pytest.mark.parametrize("cut_off", [None, "4 ranks: the run was interrupted"])
def test_page_and_markdown_hold_the_figures(cut_off):
    report = scale_report(cut_off=cut_off)
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
