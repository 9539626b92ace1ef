"""How often a piece of work can be done in a second by a number of threads, and what CPU time it takes."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of work on one sample: how often a second with all threads, and CPU time of one [ms]."""

    name: str
    num_threads: int
    samples_per_s: float
    cpu_ms_per_sample: float


def median_rates(repeats: Sequence[Sequence[Rate]]) -> list[Rate]:
    """The medians over repeats that each measured the same rates in the same order."""
    return [
        Rate(
            name=rates[0].name,
            num_threads=rates[0].num_threads,
            samples_per_s=statistics.median(rate.samples_per_s for rate in rates),
            cpu_ms_per_sample=statistics.median(rate.cpu_ms_per_sample for rate in rates),
        )
        for rates in zip(*repeats, strict=True)
    ]


def measure_rate(name: str, work: Callable[[int], Any], num_threads: int, seconds: float) -> Rate:
    """Call ``work(n)`` with rising n in ``num_threads`` threads for about ``seconds``; one call is one sample.

    Each thread does at least one call after one that is not counted, which makes its scratch memory. What ``work``
    raises is raised here.
    """
    numbers = itertools.count()
    start_line = threading.Barrier(num_threads)
    laps: list[tuple[int, float, float, float]] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work(next(numbers))
            start_line.wait()
            count, started_s, cpu_s = 0, time.perf_counter(), time.thread_time()
            while count == 0 or time.perf_counter() - started_s < seconds:
                work(next(numbers))
                count += 1
            laps.append((count, started_s, time.perf_counter(), time.thread_time() - cpu_s))
        except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
            errors.append(error)
            start_line.abort()

    threads = [threading.Thread(target=run, name=f"rate-{name}-{number}") for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        # Threads at the start line are let go with an error of their own, which is not the cause.
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    total = sum(count for count, *_ in laps)
    # Each thread over its own time: the last call of one may outlast the others'.
    samples_per_s = sum(count / (ended_s - started_s) for count, started_s, ended_s, _ in laps)
    cpu_s = sum(cpu for *_, cpu in laps)
    return Rate(name=name, num_threads=num_threads, samples_per_s=samples_per_s, cpu_ms_per_sample=1e3 * cpu_s / total)
