"""The micro-benchmarks' stop-watch, on a clock that the test moves."""

from __future__ import annotations

import gc
import json
import time

import pytest

from fuelrail.bench.micro import timing
from fuelrail.bench.micro.timing import Effort, compare, main


class FakeTime:
    """A clock that only the candidates move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.calls: list[str] = []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now_s)

    def candidate(self, name: str, *costs_s: float):
        """A candidate whose calls cost the given times in turn, the last one for ever."""
        remaining_costs = list(costs_s)

        def call() -> None:
            self.calls.append(name)
            self.now_s += remaining_costs.pop(0) if len(remaining_costs) > 1 else remaining_costs[0]

        return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    return FakeTime(monkeypatch)


def test_speedup_is_relative_to_the_first(clock: FakeTime) -> None:
    comparison = compare(
        "t",
        {
            "slow": clock.candidate("slow", 0.5),
            "fast": clock.candidate("fast", 0.125),
        },
    )
    slow, fast = comparison.entries
    assert (slow.name, slow.speedup, slow.seconds_per_call) == (
        "slow",
        1.0,
        0.5,
    )
    assert (fast.name, fast.speedup, fast.seconds_per_call) == (
        "fast",
        4.0,
        0.125,
    )
    assert comparison.num_rounds == timing.NUM_ROUNDS


def test_calls_fill_a_lap(clock: FakeTime) -> None:
    comparison = compare(
        "t",
        {"a": clock.candidate("a", 0.001), "b": clock.candidate("b", 4.0)},
        Effort(3, 0.25),
    )
    assert comparison.entries[0].calls_per_lap >= 250
    assert comparison.entries[0].seconds_per_call == pytest.approx(0.001)
    assert comparison.entries[1].calls_per_lap == 1


def test_a_candidate_that_takes_no_time_ends_too(clock: FakeTime) -> None:
    # Below the clock's resolution: the number of calls must grow until the lap is filled, here it is at the third try.
    name = "nothing"
    comparison = compare("t", {name: clock.candidate(name, *[0.0] * 12, 1.0)}, Effort(1, 0.5))
    assert comparison.entries[0].calls_per_lap >= 2


def test_order_turns_round_in_every_second_round(clock: FakeTime) -> None:
    compare(
        "t",
        {n: clock.candidate(n, 1.0) for n in "abc"},
        Effort(num_rounds=2, min_lap_s=0.0),
    )
    assert (
        "".join(clock.calls) == "aabbcc" + "abc" + "cba"
    )  # twice each to warm up, then the rounds


def test_a_slow_round_cancels_out(clock: FakeTime) -> None:
    warm_up = [1.0, 1.0]
    a = clock.candidate("a", *warm_up, 1.0, 100.0, 1.0)
    b = clock.candidate("b", *warm_up, 2.0, 200.0, 2.0)
    _, second = compare("t", {"a": a, "b": b}, Effort(num_rounds=3, min_lap_s=0.0)).entries
    assert (second.speedup_q25, second.speedup, second.speedup_q75) == (
        0.5,
        0.5,
        0.5,
    )


def test_collector_is_put_back_when_a_candidate_fails() -> None:
    def fail() -> None:
        if not gc.isenabled():
            raise RuntimeError("in the lap")

    with pytest.raises(RuntimeError, match="in the lap"):
        compare("t", {"a": fail})
    assert gc.isenabled()


def test_main_prints_and_writes_the_same_figures(clock: FakeTime, tmp_path, capsys) -> None:
    out = tmp_path / "report.json"
    candidates = {
        "a": clock.candidate("a", 2e-6),
        "b": clock.candidate("b", 5e-7),
    }
    assert (
        main(
            ["--quick", "--out", str(out)],
            "thing",
            lambda effort: [compare("title", candidates, effort)],
        )
        == 0
    )
    report = json.loads(out.read_text())
    assert report["benchmark"] == "thing"
    assert [e["speedup"] for e in report["comparisons"][0]["entries"]] == pytest.approx([1, 4])
    assert report["machine"]["python"]
    printed = capsys.readouterr().out
    assert "title" in printed
    assert "2.00 us" in printed
    assert "500 ns" in printed
    assert "4.00 x" in printed
