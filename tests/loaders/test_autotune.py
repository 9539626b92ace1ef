"""The tuner against modelled machines: where it ends up, that it stays there, and that it keeps to its bounds."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuelrail.loaders.autotune import Autotuner, Tuning
from fuelrail.pipeline.runtime.stages import StageClock


class Machine:
    """A trainer that takes a batch every ``step_s``, over decoding of ``decode_s`` thread-seconds on ``cores`` cores.

    More threads than cores cost each of them ``crowding`` of its speed.
    """

    def __init__(self, *, step_s, decode_s, cores, crowding=0.0, burst_s=0.0):
        self.step_s = step_s
        self.decode_s = decode_s
        self.cores = cores
        self.crowding = crowding
        self.burst_s = burst_s
        self.now_s = self.waited_s = self.busy_s = 0.0
        self.pauses = {}

    def step(self, number, tuning):
        """One batch; returns when it was handed out."""
        useful = min(tuning.num_workers, self.cores)
        slower = 1 + self.crowding * max(0, tuning.num_workers - self.cores)
        load_s = self.decode_s * slower / useful + self.burst_s / tuning.ready
        wait_s = max(0.0, load_s - self.step_s)
        took_s = max(load_s, self.step_s) + self.pauses.get(number, 0.0)
        self.now_s += took_s
        self.waited_s += wait_s
        self.busy_s += min(
            tuning.num_workers * took_s,
            self.decode_s * slower * tuning.num_workers / useful,
        )

    def clocks(self, tuning):
        return (
            StageClock(
                name="decode",
                num_threads=tuning.num_workers,
                items=0,
                busy_s=self.busy_s,
                starved_s=0.0,
                blocked_s=0.0,
                waiting=0,
                capacity=8,
            ),
        )


def drive(machine, tuner, batches=4000):
    history = [tuner.tuning]
    for number in range(batches):
        machine.step(number, tuner.tuning)
        if tuner.due(machine.now_s):
            changed = tuner.update(machine.now_s, machine.waited_s, machine.clocks(tuner.tuning))
            if changed is not None:
                history.append(changed)
    return history


def make(start, limits, **options):
    return Autotuner(
        Tuning(*start),
        Tuning(*limits),
        window_s=1.0,
        window_batches=4,
        **options,
    )


def test_a_trainer_that_does_not_wait_is_left_alone():
    tuner = make((4, 2), (16, 8))
    assert drive(Machine(step_s=0.2, decode_s=0.4, cores=16), tuner) == [(4, 2)]


def test_threads_are_added_until_the_trainer_does_not_wait():
    tuner = make((2, 2), (16, 8))
    drive(Machine(step_s=0.1, decode_s=0.8, cores=16), tuner)
    assert 8 <= tuner.tuning.num_workers <= 10


def test_threads_that_do_not_help_are_taken_back():
    tuner = make((4, 2), (16, 8))
    history = drive(Machine(step_s=0.01, decode_s=0.8, cores=4), tuner)
    assert tuner.tuning == (4, 2)
    assert len(history) > 1, "it did try"


def test_a_crowd_is_thinned_out():
    tuner = make((12, 2), (12, 8))
    drive(Machine(step_s=0.01, decode_s=0.8, cores=8, crowding=0.1), tuner)
    assert 8 <= tuner.tuning.num_workers <= 9


def test_bursts_are_evened_out_by_batches_in_store():
    tuner = make((4, 2), (4, 8))
    drive(Machine(step_s=0.1, decode_s=0.2, cores=4, burst_s=0.3), tuner)
    assert tuner.tuning == (4, 6), "0.05 + 0.3 / 6 = 0.1 s is the step's time"


def test_tries_without_gain_become_rare():
    tuner = make((4, 2), (16, 2))
    machine = Machine(step_s=0.01, decode_s=0.8, cores=4)
    first = len(drive(machine, tuner, 2000))
    second = len(drive(machine, tuner, 2000))
    assert second < first / 2


def test_a_pause_does_not_look_like_a_slow_change():
    """Validation runs, checkpoints: the loader is not what was slow then."""
    calm = make((2, 2), (16, 8))
    paused = make((2, 2), (16, 8))
    machine = Machine(step_s=0.1, decode_s=0.8, cores=16)
    drive(machine, calm)
    interrupted = Machine(step_s=0.1, decode_s=0.8, cores=16)
    interrupted.pauses = dict.fromkeys(range(0, 4000, 25), 30.0)
    drive(interrupted, paused)
    assert paused.tuning.num_workers >= 8


def test_it_says_what_it_does(caplog):
    with caplog.at_level(logging.INFO, "fuelrail"):
        drive(Machine(step_s=0.1, decode_s=0.3, cores=4), make((2, 2), (4, 2)))
    assert "trying 2 threads, 2 ready batches -> 3 threads" in caplog.text
    assert "the trainer waited 33 % of the time, busy: decode 100 %" in caplog.text
    assert "kept 2 threads" in caplog.text


@given(
    step_s=st.floats(0.01, 0.5),
    decode_s=st.floats(0.01, 4),
    cores=st.integers(1, 32),
    crowding=st.floats(0, 0.3),
    burst_s=st.floats(0, 1),
    start=st.tuples(st.integers(1, 16), st.integers(1, 4)),
    limits=st.tuples(st.integers(1, 32), st.integers(1, 8)),
)
@settings(max_examples=60, deadline=None)
def test_bounds_are_kept_and_the_result_is_no_slower_than_the_start(
    step_s, decode_s, cores, crowding, burst_s, start, limits
):
    tuner = make(start, limits)
    history = drive(
        Machine(
            step_s=step_s,
            decode_s=decode_s,
            cores=cores,
            crowding=crowding,
            burst_s=burst_s,
        ),
        tuner,
        1500,
    )
    for tuning in history:
        assert 1 <= tuning.num_workers <= max(start[0], limits[0])
        assert 1 <= tuning.ready <= max(start[1], limits[1])

    def pace(tuning):
        fresh = Machine(
            step_s=step_s,
            decode_s=decode_s,
            cores=cores,
            crowding=crowding,
            burst_s=burst_s,
        )
        fresh.step(0, tuning)
        return fresh.now_s

    settled = min(
        pace(history[-1]),
        pace(history[-2]) if len(history) > 1 else float("inf"),
    )  # one may be on trial
    assert settled <= pace(Tuning(*start)) * 1.0001


def test_a_restart_forgets_the_window_under_way():
    tuner = make((2, 2), (4, 2))
    machine = Machine(step_s=0.1, decode_s=0.8, cores=4)
    drive(machine, tuner, 3)
    tuner.restart()
    assert tuner.due(machine.now_s)
    assert tuner.update(0.0, 0.0, machine.clocks(tuner.tuning)) is None


@pytest.mark.parametrize("limits", [(1, 1), (2, 2)])
def test_the_start_is_always_allowed(limits):
    assert make((4, 3), limits).tuning == (4, 3)
