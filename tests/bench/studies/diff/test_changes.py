from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest

from fuelrail.__main__ import main
from fuelrail.bench.report.files import publish_json
from fuelrail.bench.studies.diff import compare, diff, differences
from fuelrail.pipeline.errors import ConfigError
from support.bench_runs import MACHINE, SETTINGS, log, report_of, step
from support.loader_runs import loader_report_of, loader_run
from support.watch_records import rank, report_on


def noisy(seed, *, slower_ms=0.0, count=60, settings=SETTINGS):
    """A training report whose steps wait for data for a random while, ``slower_ms`` longer."""
    waits_ms = np.random.default_rng(seed).gamma(2, 1.5, count) + slower_ms
    records = [step(0, 0)]
    for number, wait_ms in enumerate(waits_ms, 1):
        records.append(step(number, records[-1].end_ns, wait_ms=wait_ms))
    return report_of([log(records)], settings=settings)


def test_a_report_is_no_worse_than_itself():
    changes = compare(noisy(0), noisy(0))
    assert [change.name for change in changes] == [
        "mean step time [ms]",
        "occupancy",
        "samples/s",
    ]
    assert not any(change.is_real or change.is_worse(0) for change in changes)
    assert all(change.ratio == pytest.approx(1) for change in changes)


@pytest.mark.costly
def test_noise_is_seldom_taken_for_a_change():
    real = [compare(noisy(2 * seed), noisy(2 * seed + 1))[0].is_real for seed in range(60)]
    assert sum(real) <= 9  # 5% are meant, a short series makes it some more


@pytest.mark.parametrize("seed", range(5))
def test_a_slower_run_is_worse_and_the_other_way_round_better(seed):
    quick = noisy(seed)
    slow = noisy(seed + 100, slower_ms=4.0)
    assert all(change.is_worse(0.02) for change in compare(quick, slow))
    back = compare(slow, quick)
    assert all(change.is_real for change in back)
    assert not any(change.is_worse(0.0) for change in back)


def test_a_real_loss_below_the_threshold_is_tolerated():
    step_time = compare(noisy(1), noisy(2, slower_ms=4.0))[0]
    assert step_time.is_worse(0.02)
    assert not step_time.is_worse(0.5)


def test_runs_with_other_batches_are_compared_by_their_steps_alone():
    smaller_batches = noisy(1, settings=msgspec.structs.replace(SETTINGS, batch_size=4))
    assert [change.name for change in compare(noisy(0), smaller_batches)] == ["mean step time [ms]"]
    assert "option batch_size: 2 -> 4" in differences(noisy(0), smaller_batches)


def test_loaders_differ_when_their_repeats_do_not_overlap():
    before = loader_report_of([loader_run(rate) for rate in (100.0, 104.0, 102.0)])
    same = loader_report_of([loader_run(rate) for rate in (99.0, 101.0, 103.0)])
    slow = loader_report_of([loader_run(rate) for rate in (80.0, 81.0, 79.0)])
    assert not compare(before, same)[0].is_real
    assert not compare(before, same)[0].is_worse(0.0), "a loss within noise"
    assert compare(before, slow)[0].is_worse(0.1)
    assert not compare(slow, before)[0].is_worse(0.0)


@pytest.mark.parametrize(("before", "after"), [(0.0, 100.0), (100.0, 0.0), (-1.0, 100.0)])
def test_figures_that_are_not_above_zero_are_refused(before, after):
    report = loader_report_of([loader_run(100.0)])
    figures = report.figures
    replace = msgspec.structs.replace
    old, new = (
        replace(
            report,
            figures=replace(
                figures,
                samples_per_s=replace(figures.samples_per_s, median=median),
            ),
        )
        for median in (before, after)
    )
    with pytest.raises(
        ConfigError,
        match=f"'samples/s' is {before:g} in A and {after:g} in B; both must be above 0",
    ):
        compare(old, new)


def test_what_else_differs_is_reported():
    before = loader_report_of([loader_run()])
    machine = msgspec.structs.replace(MACHINE, cpu="Other CPU", packages={"numpy": "2.3"})
    after = msgspec.structs.replace(before, machine=machine)
    assert differences(before, after) == [
        "processor: Test CPU -> Other CPU",
        "package torch: 2.13.0 -> none",
        "package numpy: none -> 2.3",
    ]
    assert differences(before, before) == []


@pytest.fixture
def reports(tmp_path):
    for name, report in {
        "quick": noisy(0),
        "slow": noisy(1, slower_ms=4.0),
        "short": report_of([log([step(0, 0)])]),
        "loader": loader_report_of([loader_run()]),
        "other": {"schema": "x", "version": 1},
    }.items():
        (tmp_path / name).mkdir()
        publish_json(tmp_path / name / "report.json", report)
    return tmp_path


def test_the_exit_code_is_for_ci_and_the_names_of_figures_are_printed_whole(reports, capsys):
    words = ["bench", "diff", str(reports / "quick"), str(reports / "slow")]
    assert main(words) == 1
    printed = capsys.readouterr().out
    assert (
        "worse by more than 2.0%, beyond noise: mean step time [ms], occupancy, samples/s"
        in printed
    )
    assert "mean , " not in printed
    assert main([*words, "--json"]) == 1
    printed_diff = json.loads(capsys.readouterr().out)
    assert printed_diff["worse"] == [
        "mean step time [ms]",
        "occupancy",
        "samples/s",
    ]
    assert printed_diff["changes"][0]["ratio_low"] > 1
    assert (
        main(
            [
                "bench",
                "diff",
                str(reports / "slow" / "report.json"),
                str(reports / "quick"),
            ]
        )
        == 0
    )
    assert "nothing is worse" in capsys.readouterr().out
    assert main([*words, "--threshold", "0.5"]) == 0


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("quick", "loader", "different kinds"),
        ("quick", "short", "no figures"),
        ("other", "quick", "schema 'x'"),
        ("nothing", "quick", "cannot be read"),
    ],
)
def test_what_cannot_be_compared_is_refused(reports, capsys, before, after, said):
    assert main(["bench", "diff", str(reports / before), str(reports / after)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def replace_data(report, **changes):
    return msgspec.structs.replace(
        report, dataset=msgspec.structs.replace(report.dataset, **changes)
    )


@pytest.mark.parametrize(
    "changes",
    [{"fingerprint": "e" * 16}, {"split": "val"}],
    ids=["dataset", "split"],
)
def test_reports_of_different_data_are_refused_unless_allowed(reports, capsys, changes):
    foreign_report = replace_data(noisy(1, slower_ms=4.0), **changes)
    publish_json(reports / "other" / "report.json", foreign_report)
    words = ["bench", "diff", str(reports / "quick"), str(reports / "other")]
    assert main(words) == 2
    assert "different data" in capsys.readouterr().err
    assert main([*words, "--other-dataset"]) == 1
    assert capsys.readouterr().out.startswith("warning: the reports are of different data")


def test_fewer_than_three_repeats_give_no_interval_and_no_verdict():
    single_run = loader_report_of([loader_run(50.0)])
    three_runs = loader_report_of([loader_run(100.0 + n) for n in range(3)])
    change = compare(single_run, three_runs)[0]
    assert (change.ratio_low, change.ratio_high, change.is_real) == (
        None,
        None,
        False,
    )
    assert compare(three_runs, three_runs)[0].ratio_low is not None


def test_a_watch_is_worse_if_its_step_is_and_its_parts_say_why():
    before = report_on(rank(), rank())
    slower = diff(before, report_on(rank({"data_wait": 20}), rank({"data_wait": 20})))
    assert slower.worse == ["step [ms]"]
    ratios = {change.name: change.ratio for change in slower.changes}
    assert ratios["wait for data [ms]"] == pytest.approx(20)
    assert ratios["forward pass [ms]"] == pytest.approx(1)
    shifted = {"data_wait": 6, "forward": 25}
    assert diff(before, report_on(rank(shifted), rank(shifted))).worse == []
