"""Comparisons that never happened: rates from arrivals, ratios with intervals, doubts, the page."""

from __future__ import annotations

import re

import msgspec
import numpy as np
import pytest

from fuelrail.bench.measure.rates import MIN_REPEATS, ratio_interval
from fuelrail.bench.report.page import render_markdown, render_page
from fuelrail.bench.studies.compare.page import rows
from fuelrail.bench.studies.compare.report import (
    load_compare_report,
    make_run,
    ranking,
    reasons_left_out,
)
from fuelrail.bench.studies.diff import compare
from fuelrail.pipeline.errors import ConfigError
from support.bench_runs import RESULTS
from support.compare_runs import (
    IMAGES_PER_BATCH,
    compare_report_of,
    contestant,
    timed,
)
from support.html_page import Page


def run_of(arrival_s, **changes):
    return make_run(
        0,
        timed(100.0, arrival_s=list(arrival_s), **changes),
        None,
        IMAGES_PER_BATCH,
    )


def test_a_steady_run_has_its_rate():
    run = make_run(2, timed(800.0), timed(900.0), IMAGES_PER_BATCH)
    assert (run.images_per_s, run.reference_images_per_s) == pytest.approx((800, 900))
    assert run.cpu_s_per_1000_images == pytest.approx(1e3 * 5.0 / (40 * IMAGES_PER_BATCH))
    assert (run.round, run.first_batch_s, run.doubt) == (2, 0.3, None)


@pytest.mark.parametrize("cut", range(5))
def test_where_a_burst_is_cut_does_not_matter_much(cut):
    """Four workers that finish together: four batches at once, then nothing for a while."""
    arrivals = np.repeat(np.arange(20) * 0.2, 4) + np.tile([0, 0.002, 0.004, 0.006], 20)
    assert run_of(arrivals[: 80 - cut]).images_per_s == pytest.approx(
        20 * IMAGES_PER_BATCH, rel=0.03
    )


@pytest.mark.parametrize(
    ("arrivals", "changes", "said"),
    [
        (
            np.arange(20) * 0.1,
            {"clock_jump_s": 3.0},
            "wall clock jumped by +3.0 s",
        ),
        (
            np.array([*range(20), *range(60, 80)]) * 0.1,
            {},
            "nothing came for 4.1 s",
        ),
        (np.arange(6) * 0.1, {}, "too few: 8 are needed"),
        ((), {}, "0 batches are too few"),
    ],
    ids=["clock", "stopped", "short", "none"],
)
def test_a_run_that_proves_nothing_does_not_count(arrivals, changes, said):
    run = run_of(arrivals, **changes)
    assert run.images_per_s is None
    assert said in run.doubt


def test_ratios_are_to_the_laps_between():
    """The machine halves its speed in the second round, and the reference's own laps elsewhere were slow."""
    ours = contestant("fuelrail:turbo", [700.0, 350.0, 700.0])
    theirs = contestant("wds:cv2fast", [600.0, 300.0, 600.0], reference=[900.0, 450.0, 900.0])
    by_name = {entry.name: entry.figures for entry in compare_report_of([theirs, ours]).contestants}
    times = by_name["wds:cv2fast"].ours_times_as_fast
    assert (times.median, times.low, times.high) == pytest.approx((1.5, 1.5, 1.5))
    assert by_name["wds:cv2fast"].images_per_s.low == pytest.approx(300)
    assert by_name["fuelrail:turbo"].ours_times_as_fast.median == pytest.approx(1)


def test_where_the_reference_was_disturbed_there_is_a_rate_and_no_ratio():
    run = make_run(0, timed(600.0), timed(900.0, clock_jump_s=9.0), IMAGES_PER_BATCH)
    assert (run.images_per_s, run.reference_images_per_s) == (
        pytest.approx(600),
        None,
    )


def test_the_interval_of_ratios_is_students():
    interval = ratio_interval([1.0, 1.1, 1.21])
    half = 4.302653 * np.log(1.1) / np.sqrt(3)
    assert (interval.median, interval.low) == pytest.approx((1.1, 1.1 * np.exp(-half)))
    assert interval.high == pytest.approx(1.1 * np.exp(half))
    assert (ratio_interval([2.0]).low, ratio_interval([2.0]).confidence) == (
        2.0,
        0.0,
    )


@pytest.mark.parametrize("seed", range(3))
def test_the_interval_of_ratios_covers_as_often_as_it_says(seed):
    rng = np.random.default_rng(seed)
    intervals = [ratio_interval(np.exp(rng.normal(0.3, 0.1, 4)).tolist()) for _ in range(400)]
    covered = np.mean([interval.low <= np.exp(0.3) <= interval.high for interval in intervals])
    assert 0.91 < covered < 0.985


def test_the_fastest_stands_first_and_who_was_left_out_is_named():
    entries = [
        contestant("loose:pil", [200.0], reference=[900.0]),
        contestant("fuelrail:turbo", [900.0]),
        contestant(
            "mds:cv2",
            [],
            left_out="'streaming' is not installed: pip install mosaicml-streaming",
        ),
    ]
    report = compare_report_of(entries, cut_off="the run was interrupted")
    assert [entry.name for entry in ranking(report)] == [
        "fuelrail:turbo",
        "loose:pil",
    ]
    page = Page(render_page(report))
    page.check()
    for text in (page.text, render_markdown(report)):
        assert "mds:cv2: 'streaming' is not installed: pip install mosaicml-streaming" in text
        assert re.search("Partial( report)?: the run was interrupted", text)
        assert "webdataset 1.0" in text or "webdataset=1.0" in text
    assert "4.50 x" in page.text


@pytest.mark.parametrize(
    ("ours", "undecided"),
    [([650.0, 900.0, 550.0], True), ([900.0, 905.0, 910.0], False)],
)
def test_a_lead_within_the_noise_is_reported_as_none(ours, undecided):
    entries = [
        contestant("fuelrail:turbo", ours),
        contestant("wds:cv2fast", [600.0] * 3, reference=ours),
    ]
    assert (
        "The interval contains 1" in Page(render_page(compare_report_of(entries))).text
    ) == undecided


def test_without_our_reference_there_are_rates_and_no_ratios():
    run = make_run(0, timed(200.0), None, IMAGES_PER_BATCH)
    alone = msgspec.structs.replace(contestant("loose:pil", []), runs=[run])
    (entry,) = compare_report_of([alone]).contestants
    assert entry.figures.ours_times_as_fast is None
    Page(render_page(compare_report_of([alone]))).check()


def test_comparisons_differ_by_what_both_timed():
    before = compare_report_of(
        [
            contestant("fuelrail:turbo", [900.0, 905.0, 910.0]),
            contestant("loose:pil", [200.0]),
        ]
    )
    after = compare_report_of(
        [
            contestant("fuelrail:turbo", [700.0, 705.0, 710.0]),
            contestant("wds:cv2", [300.0]),
        ]
    )
    (change,) = compare(before, after)
    assert change.is_worse(0.1)
    with pytest.raises(ConfigError, match="nothing to compare"):
        compare(before, compare_report_of([contestant("wds:cv2", [300.0])]))


def test_two_runs_show_no_range():
    report = load_compare_report(RESULTS / "compare.json")
    short_rows = [row for row in rows(report) if int(row[-1]) < MIN_REPEATS]
    assert short_rows
    assert all(row[2] == row[4] == "" for row in short_rows)


def test_one_cause_is_said_once_with_all_that_it_holds_for():
    fault = "images differ from the definition: {} dB at worst, 36 dB are required"
    requirement = "'streaming' is not installed: pip install mosaicml-streaming==2.1"
    entries = [
        contestant("loose:cv2", [], left_out=fault.format("28.6")),
        contestant("mds:cv2", [], left_out=requirement),
        contestant("wds:cv2", [], left_out=fault.format("27.2")),
        contestant("fuelrail:turbo", [900.0]),
        contestant("mds:pil", [], left_out=requirement),
        contestant("wds:pil", [], left_out=fault.format("100.0")),
    ]
    lines = [
        f"loose:cv2, wds:cv2, wds:pil: {fault.format('27.2 to 100.0')}",
        f"mds:cv2, mds:pil: {requirement}",
    ]
    assert reasons_left_out(entries) == lines
    text = Page(render_page(compare_report_of(entries))).text
    assert all(text.count(line) == 1 for line in lines)
    assert text.count("differ from the definition") == 1
