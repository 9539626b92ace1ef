"""Records made by hand, in which what holds whom up is known to the microsecond."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from fuelrail.bench.report.page import render_markdown, render_page
from fuelrail.bench.studies.watch.judge import find_causes
from support.watch_records import PLAIN, STEPS, rank, record, report_on

if TYPE_CHECKING:
    from fuelrail.bench.measure.records import StepRecord


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
    assert [row.last_in for row in report.occupancy.ranks] == [0, 0, 1]


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
        (
            2,
            {"cpu_wall_ns": 1_000, "process_cpu_ns": 2_000, "trainer_cpu_ns": 100},
            "preprocessing",
        ),
        (2, {"cpu_wall_ns": 1_000, "workers_cpu_ns": 900}, "loader"),
    ],
)
def test_a_loader_computes_or_waits(num_workers, details, cause):
    report = report_on(rank({"data_wait": 40}, **details), num_workers=num_workers)
    assert report.findings[0].cause == cause


@pytest.mark.parametrize(
    ("host", "num_ranks", "text"),
    [
        (2_300, 1, "All 2 workers are busy, and 5 cores are idle."),
        (6_500, 1, "All 2 workers are busy, and a core is idle."),
        (6_500, 2, None),
        (0, 1, None),
    ],
    ids=["idle-cores", "an-idle-core", "fewer-cores-than-ranks", "unknown-host"],
)
def test_too_few_workers_are_named_if_they_are_busy_beside_idle_cores(host, num_ranks, text):
    used = {"cpu_wall_ns": 1_000, "workers_cpu_ns": 1_900, "host_cpu_ns": host}
    ranks = dict.fromkeys(range(num_ranks), rank({"data_wait": 40}, **used))
    finding = find_causes(ranks, num_workers=2, num_cpus=8, is_loaded=False)[0]
    if text is None:
        assert finding.cause == "preprocessing"
    else:
        assert finding.cause == "too few workers"
        assert text in finding.text
        assert "more workers" in finding.advice


@pytest.mark.parametrize(
    ("times", "cause"),
    [
        ({"host_to_device": 20}, "copy"),
        ({"evaluation": 20}, "evaluation"),
        ({"logging": 20}, "logging"),
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


def test_garbage_that_is_collected_outside_the_phases_is_named_once():
    (finding,) = report_on(rank({"other": 21}, collector_ns=20_000_000)).findings
    assert finding.cause == "garbage collection"


def sampled(times: dict[str, float], *, every: int = 6, **details: int) -> list[StepRecord]:
    """Steps of which each sixth has the process's times, of a second."""
    samples = {"cpu_wall_ns": 10**9, "process_cpu_ns": 10**8, "trainer_cpu_ns": 10**8} | details
    return [
        record(number, PLAIN | times, **(samples if number % every == 0 else {}))
        for number in range(STEPS)
    ]


@pytest.mark.parametrize(
    ("sizes", "is_leak"),
    [
        (lambda number: 10**9 + number * 5 * 10**6, True),
        (lambda number: 10**9 + min(number, 25) * 5 * 10**6, False),
        (lambda number: 10**9 + number * 10**5, False),
    ],
    ids=["to-the-end", "of-a-cache-that-is-full", "a-little"],
)
@pytest.mark.parametrize("kind", ["memory_bytes", "device_bytes"])
def test_memory_that_grows_to_the_end_is_named_with_its_rank(sizes, is_leak, kind):
    steps = [
        record(number, PLAIN, **({kind: sizes(number)} if number % 6 == 0 else {}))
        for number in range(STEPS)
    ]
    findings = report_on(rank(), steps).findings
    expected = [("memory leak", 1)] if is_leak else []
    assert [(finding.cause, finding.rank) for finding in findings] == expected
    if is_leak:
        assert "grows by 4.77 MiB a step" in findings[0].text


def test_a_lock_that_other_threads_hold_is_named():
    held = {"process_cpu_ns": 10**9, "trainer_cpu_ns": 10**8}
    (finding,) = report_on(sampled({}, lock_ns=5_000_000, **held)).findings
    assert finding.cause == "interpreter lock"
    assert "waits 5.0 ms" in finding.text
    now_and_then = sampled({}, lock_ns=5_000_000, **held)
    for step in now_and_then:
        step.details.lock_ns *= step.step in (12, 36)
    assert report_on(now_and_then).findings
    now_and_then[36].details.lock_ns = 0
    assert not report_on(now_and_then).findings
    assert not report_on(sampled({}, lock_ns=5_000_000)).findings
    assert not report_on(sampled({}, lock_ns=100_000, **held)).findings


def test_more_threads_than_cpus_are_named():
    many = {"process_cpu_ns": 10**9, "threads_queued_ns": 900 * 10**9, "trainer_queued_ns": 10**9}
    steps = sampled({}, **many)
    (finding,) = report_on(steps, steps).findings
    assert (finding.cause, finding.phase, finding.rank) == ("threads", "backward", None)
    others = sampled({}, **many | {"trainer_cpu_ns": 10**9})
    assert not report_on(others, others).findings


def test_a_wait_of_the_first_epoch_or_of_few_steps_is_told_apart():
    def waiting(long, ms):
        return [
            msgspec.structs.replace(
                record(number, PLAIN | {"data_wait": ms if long(number) else 1}),
                epoch=int(number >= 30),
            )
            for number in range(STEPS)
        ]

    cold = report_on(waiting(lambda number: number < 30, 40)).findings[0]
    assert (cold.cause, cold.phase) == ("cold cache", "data_wait")
    assert "40.0 ms a step in the first epoch, 1.0 ms later" in cold.text
    stalls = report_on(waiting(lambda number: number % 10 == 5, 900)).findings[0]
    assert stalls.cause == "stalls"
    assert report_on(waiting(lambda number: number % 2 == 1, 90)).findings[0].cause == "storage"


def test_values_that_are_read_from_the_device_are_named_if_its_queue_would_hide_the_rest():
    steps = rank({"data_wait": 9, "other": 9}, sync_ns=70_000_000)
    (finding,) = report_on(steps).findings
    assert (finding.cause, finding.phase) == ("synchronisation", "other")
    assert finding.share == pytest.approx(18 / 105, rel=1e-2)
    # What the host itself needs would not be hidden.
    first, second = report_on(rank({"data_wait": 90}, sync_ns=9_000_000)).findings
    assert (first.cause, second.cause) == ("storage", "synchronisation")
    assert second.share == pytest.approx(9 / 178, rel=1e-2)


def test_a_collective_that_takes_long_on_all_ranks_is_named():
    (finding,) = report_on(rank({"all_reduce": 40}), rank({"all_reduce": 41})).findings
    assert (finding.cause, finding.rank) == ("collective", None)


def test_collectives_are_no_finding_of_ranks_that_share_cpus_which_is_said():
    ranks = [rank({"all_reduce": 40}), rank({"all_reduce": 41})]
    report = report_on(*ranks, ranks_on_host=100_000)
    assert not report.findings
    assert "note: 100000 ranks share" in report.as_text()
    late = [*ranks, rank({"forward": 70})]
    (finding,) = report_on(*late, ranks_on_host=100_000).findings
    assert (finding.cause, finding.rank) == ("slow rank", 2)


def test_processes_of_others_are_said_and_little_is_certain_then():
    seconds = {"cpu_wall_ns": 90_000_000, "process_cpu_ns": 10_000_000}
    slow = rank({"forward": 42}, host_cpu_ns=900_000_000, **seconds)
    waiting = rank({"all_reduce": 14}, host_cpu_ns=900_000_000, **seconds)
    report = report_on(slow, waiting)
    assert report.disturbed is not None
    assert "loaded host" in report.as_text()
    assert not report.findings
    (finding,) = report_on(rank({"forward": 42}), rank({"all_reduce": 14})).findings
    assert (finding.cause, finding.rank) == ("slow rank", 0)


def test_collectives_are_a_finding_where_they_take_more_than_is_common():
    assert not report_on(rank({"all_reduce": 14}), rank({"all_reduce": 14})).findings
    (finding,) = report_on(rank({"all_reduce": 24}), rank({"all_reduce": 24})).findings
    assert (finding.cause, finding.phase, finding.rank) == ("collective", "all_reduce", None)


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
