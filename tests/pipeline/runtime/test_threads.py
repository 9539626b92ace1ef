"""Results in order, few at once, and an early end."""

from __future__ import annotations

import threading

import pytest

from fuelrail.pipeline.runtime.workers import in_threads


@pytest.mark.parametrize("num_threads", [1, 3])
def test_results_come_in_order(num_threads):
    assert list(in_threads(lambda n: n * n, range(50), num_threads)) == [n * n for n in range(50)]
    assert list(in_threads(str, [], num_threads)) == []


def test_items_are_taken_as_they_are_needed():
    taken = []

    def items():
        for number in range(1000):
            taken.append(number)
            yield number

    results = in_threads(str, items(), 2)
    assert next(results) == "0"
    assert len(taken) == 4
    results.close()


def test_an_error_ends_the_rest():
    begun, release = [], threading.Event()

    def work(number):
        begun.append(number)
        if number == 0:
            raise ValueError("first")
        release.wait(10)

    results = in_threads(work, range(1000), 2)
    threading.Timer(0.05, release.set).start()
    with pytest.raises(ValueError, match="first"):
        next(results)
    assert len(begun) <= 4
