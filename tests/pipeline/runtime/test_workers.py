"""Work in threads: results in order, few at once, an early end. Ctrl-C waits while worker processes are started."""

from __future__ import annotations

import signal
import threading

import pytest

from fuelrail.pipeline.runtime.workers import ctrl_c_waits, in_threads


@pytest.mark.parametrize("num_threads", [1, 3])
def test_results_come_in_order(num_threads):
    assert list(in_threads(lambda n: n * n, range(50), num_threads)) == [n * n for n in range(50)]
    assert list(in_threads(str, [], num_threads)) == []


def test_items_are_taken_as_they_are_needed():
    numbers = []

    def items():
        for number in range(1000):
            numbers.append(number)
            yield number

    results = in_threads(str, items(), 2)
    assert next(results) == "0"
    assert len(numbers) == 4
    results.close()


def test_an_error_ends_the_rest():
    started = []
    release = threading.Event()

    def work(number):
        started.append(number)
        if number == 0:
            raise ValueError("first")
        release.wait(10)

    results = in_threads(work, range(1000), 2)
    threading.Timer(0.05, release.set).start()
    with pytest.raises(ValueError, match="first"):
        next(results)
    assert len(started) <= 4


def test_a_signal_that_another_thread_gets_waits_for_the_end_too():
    started = threading.Event()
    sent = threading.Event()

    def another() -> None:
        started.wait(200)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        sent.set()

    thread = threading.Thread(target=another)
    thread.start()
    before = signal.getsignal(signal.SIGINT)
    done = False
    with pytest.raises(KeyboardInterrupt), ctrl_c_waits():
        started.set()
        sent.wait(200)
        thread.join()
        done = True
    assert done
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_without_a_signal_all_is_as_before():
    before = signal.getsignal(signal.SIGINT)
    with ctrl_c_waits():
        pass
    assert signal.getsignal(signal.SIGINT) is before


def test_off_the_main_thread_it_holds_back_that_threads_signals_only():
    held = []

    def work() -> None:
        with ctrl_c_waits():
            held.append(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert held == [True]
