"""Rates of work by a number of threads, and its CPU time."""

from __future__ import annotations

import itertools
import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fuelrail.bench.measure.display import display
from fuelrail.pipeline.errors import needs

_NUM_RESAMPLES = 2000

MIN_REPEATS = 3
"""Fewer repeats of a measurement give no interval: two values do not show how far a third may
lie.
"""


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of work on one sample: how often a second with all threads, and CPU time of one
    [ms].
    """

    name: Annotated[str, display("what")]
    num_threads: Annotated[int, display("threads")]
    samples_per_s: Annotated[float, display("samples/s", digits=",.1f")]
    cpu_ms_per_sample: Annotated[float, display("CPU time a sample", unit="ms", digits=".3f")]


def median_rates(repeats: Sequence[Sequence[Rate]]) -> list[Rate]:
    """Return the medians over repeats that each measured the same rates in the same order."""
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
    """Call ``work(n)`` with rising n in ``num_threads`` threads for about ``seconds``; one call is
    one sample.

    Each thread does at least one call after one that is not counted, which makes its scratch
    memory. What ``work`` raises is raised here.
    """
    numbers = itertools.count()
    start_line = threading.Barrier(num_threads)
    laps: list[tuple[int, float, float, float]] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work(next(numbers))
            start_line.wait()
            count = 0
            started_s = time.perf_counter()
            cpu_s = time.thread_time()
            while count == 0 or time.perf_counter() - started_s < seconds:
                work(next(numbers))
                count += 1
            laps.append(
                (
                    count,
                    started_s,
                    time.perf_counter(),
                    time.thread_time() - cpu_s,
                )
            )
        except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
            errors.append(error)
            start_line.abort()

    threads = [
        threading.Thread(target=run, name=f"rate-{name}-{number}") for number in range(num_threads)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        # Threads at the start line are let go with an error of their own, which is not the cause.
        raise next(
            (error for error in errors if not isinstance(error, threading.BrokenBarrierError)),
            errors[0],
        )
    total = sum(count for count, *_ in laps)
    # Each thread over its own time: the last call of one may outlast the others'.
    samples_per_s = sum(count / (ended_s - started_s) for count, started_s, ended_s, _ in laps)
    cpu_s = sum(cpu for *_, cpu in laps)
    return Rate(
        name=name,
        num_threads=num_threads,
        samples_per_s=samples_per_s,
        cpu_ms_per_sample=1e3 * cpu_s / total,
    )


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """A middle over repeats (median, or geometric mean of ratios), and an interval that holds the
    true one with probability ``confidence``.
    """

    median: float
    low: float
    high: float
    confidence: float
    num_repeats: int

    @property
    def has_interval(self) -> bool:
        """Whether there are enough repeats for an interval: three. Fewer show no spread."""
        return self.num_repeats >= MIN_REPEATS

    def in_words(self, spec: str) -> str:
        """Return the interval as text, such as ``63.1 to 64.0 in 3 runs``, or that there is
        none.
        """
        if self.has_interval:
            return f"{self.low:{spec}} to {self.high:{spec}} in {self.num_repeats} runs"
        return f"{self.num_repeats} run{'s' if self.num_repeats != 1 else ''}: no interval"


def warm_up_length(values: Sequence[float]) -> int:
    """Return the number of warm-up values at the start: the marginal standard error rule (MSER).

    The cut d, up to half of the values, that makes the standard error of the mean of the rest
    smallest: ``sum((x[d:] - mean(x[d:]))^2) / (n - d)^2`` (K. P. White, Simulation 69(6), 1997). It
    needs no threshold and adapts to the noise; without a transient it cuts off little.
    """
    series = np.asarray(values, dtype=np.float64)
    count = len(series)
    if count < 2:
        return 0
    # Sums over the tails that begin at each cut.
    sums = np.cumsum(series[::-1])[::-1]
    squares = np.cumsum(series[::-1] ** 2)[::-1]
    lengths = np.arange(count, 0, -1)
    errors = (squares - sums**2 / lengths) / lengths.astype(np.float64) ** 2
    return int(np.argmin(np.maximum(errors[: count // 2 + 1], 0.0)))


def interval_of(values: Sequence[float]) -> Interval:
    """Return the median of at least one repeat, between the lowest and the highest.

    Whatever the distribution, n independent repeats all fall on one side of the true median with
    probability ``2^(1-n)``: so lowest to highest is a confidence interval of ``1 - 2^(1-n)``, 94 %
    for five.
    """
    assert values, "no repeats"
    return Interval(
        median=float(np.median(values)),
        low=min(values),
        high=max(values),
        confidence=1.0 - 2.0 ** (1 - len(values)),
        num_repeats=len(values),
    )


def ratio_interval(ratios: Sequence[float]) -> Interval:
    """Return the geometric mean of ratios, each of one round, with a 95 % interval: Student's t on
    the logs.

    What disturbs a whole round cancels in its ratio; what is left multiplies: so the logarithm. One
    ratio alone has no interval: low and high are the value, with a confidence of 0.
    """
    with needs("an interval of ratios", "fuelrail[bench]"):
        from scipy.special import stdtrit

    assert ratios, "no ratios"
    logs = np.log(np.asarray(ratios, dtype=np.float64))
    count = len(logs)
    half = (
        0.0
        if count == 1
        else float(stdtrit(count - 1, 0.975) * logs.std(ddof=1)) / math.sqrt(count)
    )
    centre = float(logs.mean())
    return Interval(
        median=math.exp(centre),
        low=math.exp(centre - half),
        high=math.exp(centre + half),
        confidence=0.95 if count > 1 else 0.0,
        num_repeats=count,
    )


def bootstrap_means(values: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """Return means of 2,000 resamples of blocks of consecutive values: circular block bootstrap,
    length n^(1/3).

    Steps are alike but not independent (epochs turn, queues drain), so blocks of them are drawn;
    scipy's bootstrap has no blocks.
    """
    count = len(values)
    length = max(1, round(count ** (1 / 3)))
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, count, (_NUM_RESAMPLES, -(-count // length)))
    rows = (starts[:, :, None] + np.arange(length)) % count
    means: NDArray[np.float64] = values[rows.reshape(_NUM_RESAMPLES, -1)[:, :count]].mean(axis=1)
    return means
