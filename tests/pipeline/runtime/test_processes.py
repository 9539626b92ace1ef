"""Ctrl-C while worker processes are being started."""

from __future__ import annotations

import signal
import threading

import pytest

from fuelrail.pipeline.runtime.workers import ctrl_c_waits


def test_a_signal_that_another_thread_gets_waits_for_the_end_too():
    begun, sent = threading.Event(), threading.Event()

    def another() -> None:
        begun.wait(20)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        sent.set()

    thread = threading.Thread(target=another)
    thread.start()
    before = signal.getsignal(signal.SIGINT)
    done = False
    with pytest.raises(KeyboardInterrupt), ctrl_c_waits():
        begun.set()
        sent.wait(20)
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
