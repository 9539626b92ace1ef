"""Records made by hand, in which what holds whom up is known to the microsecond."""

from __future__ import annotations

import pytest

from fuelrail.bench.measure.recorder import NAMED
from fuelrail.bench.measure.records import RankHeader, RankLog, StepDetails, StepRecord
from fuelrail.bench.report.page import render_markdown, render_page
from fuelrail.bench.studies.watch.judge import PARTS
from fuelrail.bench.studies.watch.report import build_report

STEPS = 60
PLAIN = {"data_wait": 1, "forward": 30, "backward": 50, "optimiser": 5, "all_reduce": 2, "other": 1}


def record(number: int, times: dict[str, float], **details: int) -> StepRecord:
    """A step of these milliseconds, which vary by a per mille."""
    ns = {part: round(ms * 1e6 * (1 + 1e-3 * (number % 3))) for part, ms in times.items()}
    named = {f"{part}_ns": ns.pop(part, 0) for part in NAMED}
    ns["other"] = ns.get("other", 0) + sum(named.values())
    start_ns = number * sum(ns.values())
    return StepRecord(
        step=number,
        epoch=0,
        num_samples=8,
        num_images=0,
        loss=None,
        start_ns=start_ns,
        end_ns=start_ns + sum(ns.values()),
        device_busy_ns=ns["forward"] + ns["backward"] + ns["optimiser"],
        details=StepDetails(**named, **details),
        **{f"{phase}_ns": ns.get(phase, 0) for phase in PARTS if f"{phase}_ns" not in named},
    )


def report_on(*ranks: list[StepRecord], world: int | None = None, num_workers: int = 0):
    header = RankHeader(
        device="d", backend="gloo", num_parameters=1, world=len(ranks), num_workers=num_workers
    )
    logs = {rank: RankLog(header=header, steps=steps) for rank, steps in enumerate(ranks)}
    return build_report(logs, world=world or len(ranks))


def rank(times: dict[str, float] | None = None, **details: int) -> list[StepRecord]:
    return [record(number, PLAIN | (times or {}), **details) for number in range(STEPS)]


def test_ranks_without_losses_have_no_finding():
    report = report_on(rank(), rank(), rank())
    assert report.findings == []
    assert report.verdict().startswith("Nothing certain")
    assert report.occupancy.mean == pytest.approx(85 / 89, rel=1e-2)


def test_the_late_rank_is_charged_with_what_the_others_wait_and_it_loses_itself():
    waiting = {"all_reduce": 2 + 20}
    report = report_on(rank(waiting), rank(waiting), rank({"data_wait": 21}))
    (finding,) = report.findings
    assert (finding.cause, finding.phase, finding.rank) == ("storage", "data_wait", 2)
    assert finding.share == pytest.approx(20 / 109, rel=1e-3)
    assert finding.low <= finding.share <= finding.high
    assert [row.last_in for row in report.ranks] == [0, 0, 1]


def test_a_slow_update_makes_a_rank_late_to_the_next_steps_collectives():
    waiting = {"all_reduce": 2 + 20}
    (finding,) = report_on(rank(waiting), rank({"optimiser": 25})).findings
    assert (finding.cause, finding.phase, finding.rank) == ("slow rank", "optimiser", 1)


def test_a_rank_that_saves_in_some_steps_is_named():
    late = [
        record(number, PLAIN | ({"checkpoint": 400} if number % 4 == 0 else {}))
        for number in range(STEPS)
    ]
    waits = [
        record(number, PLAIN | ({"all_reduce": 402} if number % 4 == 0 else {}))
        for number in range(STEPS)
    ]
    first = report_on(late, waits).findings[0]
    assert (first.cause, first.phase, first.rank) == ("checkpoint", "checkpoint", 0)


def test_ranks_that_are_late_in_turns_are_none_of_them_to_blame():
    sides = [
        [
            record(number, PLAIN | ({"forward": 60} if number % 2 == side else {"all_reduce": 32}))
            for number in range(STEPS)
        ]
        for side in (0, 1)
    ]
    (finding,) = report_on(*sides).findings
    assert (finding.cause, finding.phase, finding.rank) == ("uneven ranks", "forward", None)


@pytest.mark.parametrize(
    ("idle", "rank_named"), [(9, 1), (1, None)], ids=["stock-elsewhere", "no-stock-anywhere"]
)
def test_a_loader_with_workers_is_to_blame_alone_only_if_those_of_other_ranks_have_stock(
    idle, rank_named
):
    first = rank({"all_reduce": 42}, num_counted=10, num_idle=idle)
    second = rank({"data_wait": 41}, num_counted=10)
    finding = report_on(first, second, num_workers=2).findings[0]
    assert (finding.phase, finding.rank) == ("data_wait", rank_named)
    assert finding.share == pytest.approx(41 / 129 if rank_named is None else 40 / 129, abs=0.01)


@pytest.mark.parametrize(
    ("num_workers", "details", "cause"),
    [
        (0, {"data_cpu_ns": 39_000_000}, "preprocessing"),
        (0, {"data_cpu_ns": 2_000_000}, "storage"),
        (2, {"cpu_wall_ns": 1_000, "workers_cpu_ns": 1_900}, "preprocessing"),
        (2, {"cpu_wall_ns": 1_000, "workers_cpu_ns": 100}, "storage"),
        (2, {"cpu_wall_ns": 1_000, "workers_cpu_ns": 900}, "loader"),
    ],
)
def test_a_loader_computes_or_waits(num_workers, details, cause):
    report = report_on(rank({"data_wait": 40}, **details), num_workers=num_workers)
    assert report.findings[0].cause == cause


@pytest.mark.parametrize(
    ("times", "cause"),
    [
        ({"host_to_device": 20}, "copy"),
        ({"evaluation": 20}, "evaluation"),
        ({"other": 20}, "host"),
        ({"optimiser": 60}, "optimiser"),
    ],
)
def test_a_loss_of_all_ranks_is_named(times, cause):
    (finding,) = report_on(rank(times), rank(times)).findings
    assert (finding.cause, finding.rank) == (cause, None)


@pytest.mark.parametrize("count", [2, 3])
def test_an_evaluation_in_few_steps_is_named_if_it_came_three_times(count):
    times = [
        PLAIN | ({"evaluation": 3000} if number >= STEPS - count else {}) for number in range(STEPS)
    ]
    steps = [record(number, parts) for number, parts in enumerate(times)]
    causes = [finding.cause for finding in report_on(steps).findings]
    assert causes == (["evaluation"] if count == 3 else [])


def test_garbage_collection_is_named():
    (finding,) = report_on(rank(collector_ns=9_000_000)).findings
    assert finding.cause == "garbage collection"


def test_a_collective_that_takes_long_on_all_ranks_is_named():
    (finding,) = report_on(rank({"all_reduce": 40}), rank({"all_reduce": 41})).findings
    assert (finding.cause, finding.rank) == ("collective", None)


def test_processes_of_others_are_said_and_little_is_certain_then():
    seconds = {"cpu_wall_ns": 90_000_000, "process_cpu_ns": 10_000_000}
    busy = rank({"all_reduce": 14}, host_cpu_ns=900_000_000, **seconds)
    report = report_on(busy, busy)
    assert report.disturbed is not None
    assert "loaded host" in report.as_text()
    assert not report.findings
    assert report_on(rank({"all_reduce": 14}), rank({"all_reduce": 14})).findings


def test_a_missing_rank_is_said_and_a_short_run_has_no_verdict():
    report = report_on(rank(), rank(), world=4)
    assert report.warnings == ["no steps of rank 2, 3 of 4: what they wait for is not known"]
    short = report_on(rank()[:5])
    assert short.verdict().startswith("No verdict: 5 steps")
    assert short.as_text()
    assert "No verdict" in render_markdown(short)


def test_a_page_says_what_the_terminal_says():
    report = report_on(rank({"all_reduce": 22}), rank({"forward": 50}))
    assert report.findings[0].text in render_markdown(report)
    page = render_page(report)
    assert "Rank 1 holds the others up" in page
    assert "wait for data" in page
    assert report.as_text().splitlines()[0] == report.verdict()
    assert len(report.as_text().splitlines()) < 24
