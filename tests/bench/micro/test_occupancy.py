from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import astuple, replace

from fuelrail.bench.micro.loaders import occupancy
from fuelrail.bench.micro.loaders.occupancy import OccupancySweep, Point, levels_of

RESULTS = Path(__file__).parents[3] / "bench" / "results"


def point(asked, occupied, *, theory=None):
    return Point(
        asked=asked, demand=asked, demand_samples_per_s=1.0, reference="in step", capacity_samples_per_s=1.0,
        occupancy=occupied, theory=theory or min(1.0, 1 / asked), num_steps=10, data_wait_share=0.0,
        all_reduce_share=0.0, other_share=0.0, overshoot_share=0.0, overrun_share=0.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("demand", "measured", "verdict"),
    [(0.5, 0.991, "holds"), (0.9, 0.989, "TOO LOW"), (1.0, 0.5, ""), (1.25, 0.79, "holds"), (1.25, 0.77, "OFF")],
)
def test_what_must_hold_where(demand, measured, verdict):
    (level,) = levels_of([point(demand, measured)])
    assert level.verdict == verdict


def test_rounds_of_a_demand_are_judged_together_and_each_against_its_own_theory():
    first, second = levels_of([point(2.0, 0.5), point(1.25, 0.82, theory=0.80), point(1.25, 0.74, theory=0.76)])
    assert (first.asked, second.asked) == (1.25, 2.0)
    assert first.of_theory.median == pytest.approx(math.sqrt(0.82 / 0.80 * 0.74 / 0.76))
    assert first.of_theory.num_repeats == 2
    assert first.verdict == "holds"
    assert first.lowest == 0.74


def test_the_committed_sweep_holds_everywhere(tmp_path):
    result = msgspec.json.decode((RESULTS / "occupancy.json").read_bytes(), type=OccupancySweep)
    assert {level.asked for level in result.levels} == set(occupancy.DEMANDS)
    # The committed intervals are of rounded quantiles of t.
    for level, again in zip(result.levels, levels_of(result.points), strict=True):
        assert astuple(level.of_theory) == pytest.approx(astuple(again.of_theory), rel=1e-5)
        assert replace(level, of_theory=again.of_theory) == again
    assert [level.asked for level in result.levels if level.verdict not in ("holds", "")] == []
    rendered = occupancy.render(result)
    assert "capacity in step" in rendered
    # Two rounds give no interval.
    few = sum(level.of_theory.num_repeats < 3 for level in result.levels)
    assert rendered.count("  none  ") == few > 0
    occupancy.save_plot(result, tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_text().startswith("<?xml")
