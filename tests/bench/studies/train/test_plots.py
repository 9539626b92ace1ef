from __future__ import annotations

import pytest

from fuelrail.bench.measure.records import PHASES, RankLog
from fuelrail.bench.studies.train.page import PHASE_COLOURS, PHASE_LABELS
from fuelrail.bench.studies.train.plots import plots
from support.bench_runs import log, report_of, step, steps


def test_every_phase_has_a_colour_of_its_own_and_a_label():
    assert list(PHASE_COLOURS) == list(PHASE_LABELS) == list(PHASES)
    assert len(set(PHASE_COLOURS.values())) == len(PHASES)


def test_a_whole_run_has_every_plot():
    drawn = plots(report_of([log(0, steps(20, wait_ms=1)), log(1, steps(20))]))
    assert set(drawn) == {"occupancy", "timeline", "breakdown", "waits", "histogram", "stages", "loss"}
    assert all(svg.startswith("<svg viewBox=") and svg.rstrip().endswith("</svg>") for svg in drawn.values())


@pytest.mark.parametrize("count", [1, 3])
def test_a_short_run_has_what_there_is(count):
    assert set(plots(report_of([log(0, steps(count))]))) == {"occupancy", "breakdown", "loss"}


def test_many_ranks_are_drawn_in_part():
    svg = plots(report_of([log(rank, steps(20, wait_ms=rank)) for rank in range(16)]))["timeline"]
    assert "rank 7" in svg
    assert "rank 8" not in svg


def test_no_steps_no_plots():
    assert plots(report_of([RankLog()])) == {}


def test_a_rank_that_did_no_step_does_not_spoil_the_others_plots():
    assert "occupancy" in plots(report_of([log(0, steps(5)), RankLog()]))


def test_a_warm_up_longer_than_the_run_is_drawn():
    assert "breakdown" in plots(report_of([log(0, [step(0, 0)])]))
