from __future__ import annotations

import threading

import pytest

from fuelrail.bench.measure.rates import Rate, measure_rate, median_rates


def test_every_thread_works_and_numbers_are_not_repeated():
    numbers = []
    threads = set()

    def work(number):
        numbers.append(number)
        threads.add(threading.current_thread().name)

    rate = measure_rate("work", work, 3, 0.01)
    assert len(threads) == 3
    assert sorted(numbers) == list(range(len(numbers)))
    assert (rate.name, rate.num_threads) == ("work", 3)
    assert rate.samples_per_s > 0


def test_work_longer_than_the_time_is_done_once_and_once_before():
    calls = []
    measure_rate("work", calls.append, 2, 0.0)
    assert sorted(calls) == [0, 1, 2, 3]


def test_waiting_costs_no_cpu_time():
    rate = measure_rate("wait", lambda _: threading.Event().wait(0.02), 1, 0.1)
    assert rate.cpu_ms_per_sample < 10 < 20 < 1e3 / rate.samples_per_s + 1e-6


@pytest.mark.parametrize("fails_at", [0, 1, 5])
def test_what_the_work_raises_is_raised(fails_at):
    def work(number):
        if number == fails_at:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        measure_rate("work", work, 2, 0.05)


def test_medians_are_taken_rate_by_rate():
    def rate(name, samples_per_s, cpu_ms):
        return Rate(
            name=name,
            num_threads=2,
            samples_per_s=samples_per_s,
            cpu_ms_per_sample=cpu_ms,
        )

    repeats = [
        [rate("a", 1, 9), rate("b", 10, 1)],
        [rate("a", 3, 7), rate("b", 30, 1)],
        [rate("a", 2, 8), rate("b", 0, 1)],
    ]
    assert median_rates(repeats) == [rate("a", 2, 8), rate("b", 10, 1)]
