"""How the micro-benchmarks measure: candidates take turns in one run, and what counts is the ratio
between them.

A figure in seconds belongs to one machine at one moment; the ratio of two candidates that took
turns belongs to the code. So a benchmark hands its candidates to :func:`compare`, the one to be
compared with first::

    ours = lambda: read_tensors(data)
    library = lambda: safetensors.numpy.load(data)
    compare("geometry of one sample", {"safetensors": library, "fuelrail": ours})

Each *lap* calls one candidate as often as it takes to last ``min_lap_s``. A *round* is one lap of
each candidate; every second round runs them in reverse, so that a drift of the machine favours
neither. Ratios are taken within a round, and their median over the rounds is reported with the
quartiles, which say how far to trust it.

A benchmark module ends in ``sys.exit(main(argv, "name", measure))``: :func:`main` gives all of them
the same options, the same table and the same JSON.
"""

from __future__ import annotations

import argparse
import gc
import resource
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from fuelrail.bench.measure.machine import MachineFacts, machine_facts
from fuelrail.bench.report.files import publish_json

NUM_ROUNDS = 21
MIN_LAP_S = 0.01


class Effort(msgspec.Struct, frozen=True):
    """How long to measure: rounds of each comparison, and how long one lap lasts at least [s]."""

    num_rounds: int = NUM_ROUNDS
    min_lap_s: float = MIN_LAP_S


QUICK = Effort(num_rounds=1, min_lap_s=0.0)
"""One round of one call: shows that a benchmark still runs, measures nothing."""


class TimedCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate: median time of one call, and how many times as fast as the reference it is
    (median, quartiles).
    """

    name: str
    seconds_per_call: float
    speedup: float
    speedup_q25: float
    speedup_q75: float
    calls_per_lap: int


class TimedContest(msgspec.Struct, frozen=True, kw_only=True):
    """Candidates that do the same work, in the order given; the first is the reference, with a
    speed-up of 1.
    """

    title: str
    num_rounds: int
    entries: list[TimedCandidate]


class TimingReport(msgspec.Struct, frozen=True, kw_only=True):
    """All comparisons of one benchmark and the machine they were taken on."""

    benchmark: str
    machine: MachineFacts
    comparisons: list[TimedContest]


def compare(
    title: str,
    candidates: Mapping[str, Callable[[], object]],
    effort: Effort | None = None,
) -> TimedContest:
    """Measure the candidates in turns.

    The first one is the reference that the others' speed-ups refer to.

    Times are wall clock, so a candidate may use threads. Each candidate is called twice or more
    before the first lap, which fills caches; garbage collection waits until the end of each lap, as
    in the standard library's ``timeit``.
    """
    assert candidates, "nothing to compare"
    effort = effort or Effort()
    works = list(candidates.values())
    num_calls = []
    for work in works:
        work()
        calls = 1
        while (took_s := _lap_s(work, calls)) < effort.min_lap_s:
            expected = int(calls * effort.min_lap_s / max(took_s, 1e-9))
            calls = max(calls * 2, min(calls * 10, expected))
        num_calls.append(calls)
    lap_s = np.empty((effort.num_rounds, len(works)))
    turns = list(range(len(works)))
    for round_number in range(effort.num_rounds):
        for turn in turns:
            calls = num_calls[turn]
            lap_s[round_number, turn] = _lap_s(works[turn], calls) / calls
        turns.reverse()
    # Within a round first, then over the rounds: what slowed a whole round down cancels out.
    speedups = lap_s[:, :1] / lap_s
    low, median, high = np.quantile(speedups, (0.25, 0.5, 0.75), axis=0).tolist()
    times = np.median(lap_s, axis=0).tolist()
    entries = []
    for number, name in enumerate(candidates):
        entry = TimedCandidate(
            name=name,
            seconds_per_call=times[number],
            speedup=median[number],
            speedup_q25=low[number],
            speedup_q75=high[number],
            calls_per_lap=num_calls[number],
        )
        entries.append(entry)
    return TimedContest(title=title, num_rounds=effort.num_rounds, entries=entries)


def _lap_s(work: Callable[[], object], num_calls: int) -> float:
    collects = gc.isenabled()
    gc.disable()
    try:
        started = time.perf_counter()
        for _ in range(num_calls):
            work()
        return time.perf_counter() - started
    finally:
        if collects:
            gc.enable()


def render(report: TimingReport) -> str:
    """Return the report as a table of text."""
    lines = [f"fuelrail {report.benchmark} on {report.machine.cpu}"]
    for comparison in report.comparisons:
        lines += ["", f"{comparison.title} ({comparison.num_rounds} rounds)"]
        width = max(len(entry.name) for entry in comparison.entries)
        for entry in comparison.entries:
            duration = f"{entry.seconds_per_call * 1e9:.0f} ns"
            for unit, scale in (("us", 1e-6), ("ms", 1e-3), ("s", 1.0)):
                if entry.seconds_per_call >= scale:
                    duration = f"{entry.seconds_per_call / scale:.2f} {unit}"
            lines.append(
                f"  {entry.name:<{width}}  {duration:>10}"
                f"  {entry.speedup:7.2f} x  ({entry.speedup_q25:.2f} to {entry.speedup_q75:.2f})"
            )
    return "\n".join(lines)


class Quartiles(NamedTuple):
    """The quartiles of a ratio over the rounds."""

    q25: float
    median: float
    q75: float


class LapClock:
    """Calls something, and keeps the time that it took, and the CPU time with that of processes
    it waited for.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self.taken_s: list[float] = []
        self.cpu_s: list[float] = []

    def __call__(self) -> None:
        """Call it once."""
        before = _cpu_s()
        started = time.perf_counter()
        self._work()
        self.taken_s.append(time.perf_counter() - started)
        self.cpu_s.append(_cpu_s() - before)

    def over(self, second: LapClock, num_rounds: int) -> Quartiles:
        """Return how many times as fast as another one it is, by round; the calls before the first
        only warm up.
        """
        own_s = self.taken_s[-num_rounds:]
        second_s = second.taken_s[-num_rounds:]
        ratios = np.divide(second_s, own_s)
        low, median, high = np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()
        return Quartiles(low, median, high)


def _cpu_s() -> float:
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + (children.ru_utime + children.ru_stime)


def main(
    argv: Sequence[str] | None,
    benchmark: str,
    measure: Callable[[Effort], Iterable[TimedContest]],
) -> int:
    """Run a benchmark from its command line: print the table and, with ``--out``, write the
    report as JSON.
    """
    parser = argparse.ArgumentParser(prog=f"python -m fuelrail.bench.micro.{benchmark}")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="call everything a few times, to see that it runs",
    )
    options = parser.parse_args(argv)
    comparisons = list(measure(QUICK if options.quick else Effort()))
    report = TimingReport(benchmark=benchmark, machine=machine_facts(), comparisons=comparisons)
    print(render(report))  # noqa: T201
    if options.out is not None:
        publish_json(options.out, report)
    return 0
