"""Step times by hand, and fits that find what made their cases."""

from __future__ import annotations

import msgspec
import pytest

from fuelrail.bench.planner.choice import buckets
from fuelrail.bench.planner.hardware import load_cluster
from fuelrail.bench.planner.step_time import Efficiency, Work, fit, step_time
from support.reference_figures import Case, Expected, compare


def test_parts_add_up():
    cluster = load_cluster("1x8-h100")
    work = Work(
        flop=989.5e12 / 4, activation_bytes=3350e9 / 10, tensor_bytes=37e9, tensor_reach=8, micro_batches=2, bubble=0.5,
        step_data_bytes=370e9, step_data_reach=8, step_hidden=0.5, step_state_bytes=335e9,
    )  # fmt: skip
    parts = step_time(work, cluster, "bf16", Efficiency(compute=0.5, passes=2))
    assert (parts.compute, parts.memory, parts.tensor) == pytest.approx((1.0, 0.4, 0.2))
    assert (parts.bubble, parts.data_total, parts.optimiser) == pytest.approx((0.8, 1.0, 0.1))
    assert parts.data_exposed == pytest.approx(1.0 - 0.5 * 1.4)
    assert parts.total == pytest.approx(1.0 + 0.4 + 0.2 + 0.8 + 0.3 + 0.1)


def test_the_last_bucket_of_copies_hides_behind_nothing():
    mib = 2**20
    assert [buckets(size * mib, None) for size in (1, 4, 32)] == [(1, 1.0), (2, 0.75), (3, 6 / 32)]
    assert buckets(16 * mib, 4.0) == (4, 0.25)
    work = Work(flop=989.5e12, activation_bytes=0.0, step_data_bytes=370e9, step_data_reach=8, step_hidden=2.0)
    half = msgspec.structs.replace(work, step_last=0.5)
    exposed = [step_time(one, load_cluster("1x8-h100"), "bf16", Efficiency(compute=1.0)) for one in (work, half)]
    assert [one.data_exposed for one in exposed] == pytest.approx([0.0, 0.5])


def test_attention_stays_in_16_bits():
    work = Work(flop=0.0, attention_flop=989.5e12, activation_bytes=0.0)
    assert step_time(work, load_cluster("1x8-h100"), "fp8", Efficiency(compute=1.0)).total == pytest.approx(1.0)


def test_a_fit_finds_the_efficiencies():
    cluster, truth = load_cluster("1x8-h100"), Efficiency(compute=0.63, passes=5.5)
    works = [Work(flop=1e14, activation_bytes=1e10), Work(flop=1e13, activation_bytes=1e11)]
    cases = [(work, cluster, "bf16", step_time(work, cluster, "bf16", truth).total) for work in works]
    assert fit(cases) == truth
    assert fit(cases[:1], truth) == truth


def test_a_case_is_fitted_on_what_it_names_only():
    given = {
        "layers": 96, "hidden": 12288, "heads": 96, "seq": 2048, "vocab": 51200, "micro_batch": 1, "global_batch": 64,
        "tp": 8, "pp": 8, "virtual_stages": 3, "gpus": 64, "gpu": "A100-80GB-SXM", "recompute": "selective",
    }  # fmt: skip

    def case(name, seconds, on):
        expected = Expected("iteration_time", seconds, "s", {"relative": 0.15})
        return Case(name, "measured_step_time", "made up", given, expected, on)

    figures = compare([case("slow", 20.0, []), case("fast", 13.75, []), case("asked", 13.75, ["slow"])])
    found = {one.id: one for one in figures.cases}
    assert found["asked"].fitted_on == ["slow"]
    assert found["asked"].predicted == pytest.approx(20.0, rel=0.02)
    assert found["slow"].role == "calibration"
    assert figures.measured_cases == 2


def test_a_case_of_an_unknown_quantity_is_refused_with_those_that_are_known():
    case = Case("x", "measured_step_time", "made up", {}, Expected("energy", 1.0, "J", {"relative": 0.1}))
    with pytest.raises(ValueError, match="case 'x': 'energy' is not predicted; predicted are iteration_time"):
        compare([case])
