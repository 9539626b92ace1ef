from __future__ import annotations

import pytest

from fuelrail.bench.measure.records import PHASES, RankLog
from fuelrail.bench.studies.train.page import PHASE_COLOURS, PHASE_LABELS
from fuelrail.bench.studies.train.plots import plots
from support.bench_runs import log, report_of, step, steps


def test_every_phase_has_a_colour_of_its_own_and_a_label():
    assert list(PHASE_COLOURS) == list(PHASE_LABELS) == list(PHASES)
    assert len(set(PHASE_COLOURS.values())) == len(PHASES)


@pytest.mark.costly
def test_a_whole_run_has_every_plot():
    drawn = plots(report_of([log(steps(20, wait_ms=1)), log(steps(20))]))
    assert set(drawn) == {"occupancy", "breakdown", "stages", "loss"}
    assert all(
        svg.startswith("<svg viewBox=") and svg.rstrip().endswith("</svg>")
        for svg in drawn.values()
    )


@pytest.mark.costly
@pytest.mark.parametrize(
    ("logs", "drawn"),
    [
        ([log(steps(1))], {"occupancy", "breakdown", "loss"}),
        ([log(steps(3))], {"occupancy", "breakdown", "loss"}),
        ([RankLog()], set()),
        ([log(steps(5)), RankLog()], {"occupancy", "breakdown", "loss"}),
        (
            [log([step(0, 0)])],
            {"occupancy", "breakdown", "loss"},
        ),  # the warm-up is longer
    ],
)
def test_a_short_run_has_what_there_is(logs, drawn):
    assert set(plots(report_of(logs))) == drawn


@pytest.mark.costly
def test_many_ranks_are_drawn_in_part():
    svg = plots(report_of([log(steps(20, wait_ms=rank)) for rank in range(16)]))["occupancy"]
    assert "rank 7" in svg
    assert "rank 8" not in svg
