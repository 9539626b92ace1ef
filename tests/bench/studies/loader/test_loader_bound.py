"""Each kind of bound, injected into the figures of a run of ten seconds on four CPUs."""

from __future__ import annotations

import pytest

from fuelrail.bench.measure.machine import CpuUse
from fuelrail.bench.measure.rates import Rate
from fuelrail.bench.measure.records import Stage
from fuelrail.bench.studies.loader.report import find_bound

SECONDS = 10.0
CPU_MS = {"fetch": 0.5, "parse": 0.5, "decode": 20.0, "collate": 0.2}


def judge(*, samples_per_s, busy, threads=None, cpu_ms=CPU_MS, usable=4.0, others=0.0, jpeg_ms=15.0):
    """``busy`` gives each stage's busy share, the rest is starved; CPU in use follows from rate and CPU time."""
    threads = {"decode": 4} | (threads or {})
    clocks = [
        Stage(
            name=name,
            num_threads=threads.get(name, 1),
            items=int(samples_per_s * SECONDS),
            busy_s=share * threads.get(name, 1) * SECONDS,
            starved_s=(1 - share) * threads.get(name, 1) * SECONDS,
            blocked_s=0.0,
            waiting=0,
            capacity=2,
        )
        for name, share in busy.items()
    ]
    alone = [
        Rate(name=name, num_threads=threads.get(name, 1), samples_per_s=1e3 / ms, cpu_ms_per_sample=ms)
        for name, ms in cpu_ms.items()
    ]
    total_ms = sum(cpu_ms.values())
    own = samples_per_s * total_ms / 1e3
    jpeg = None if jpeg_ms is None else Rate(name="j", num_threads=4, samples_per_s=1, cpu_ms_per_sample=jpeg_ms)
    return find_bound(
        samples_per_s, total_ms, CpuUse(seconds=SECONDS, own=own, others=others, usable=usable), clocks, alone, jpeg
    )


IDLE = {"fetch": 0.1, "parse": 0.1, "decode": 0.5, "collate": 0.1}


def test_cpus_used_up_by_decoding():
    bound = judge(samples_per_s=180, busy=IDLE | {"decode": 0.99})
    assert (bound.kind, bound.stage) == ("cpu", "decode")
    assert "15.0 ms of it" in bound.finding
    assert bound.gain == pytest.approx(21.2 / 15)


def test_a_library_that_decodes_more_than_the_loader_is_no_limit():
    """The loader leaves out what the crop leaves out."""
    bound = judge(samples_per_s=180, busy=IDLE | {"decode": 0.99}, jpeg_ms=25.0)
    assert (bound.kind, bound.stage, bound.gain) == ("cpu", "decode", None)
    assert "on whole images, takes 25.0 ms" in bound.finding
    assert "no loader can" not in bound.advice


def test_cpus_used_up_by_reading():
    bound = judge(samples_per_s=180, busy=IDLE, cpu_ms={"fetch": 15.0, "parse": 1.0, "decode": 4.0, "collate": 0.1})
    assert (bound.kind, bound.stage) == ("cpu", "fetch")
    assert bound.gain == pytest.approx(20.1 / 5.1)


def test_cpus_that_others_took_count_as_used_up():
    bound = judge(samples_per_s=45, busy=IDLE | {"decode": 0.99}, others=3.0)
    assert bound.kind == "cpu"
    assert "of the 1.0 CPUs that other processes left free of 4" in bound.finding


def test_too_few_threads():
    bound = judge(samples_per_s=48, busy=IDLE | {"decode": 0.98}, threads={"decode": 1})
    assert (bound.kind, bound.stage) == ("threads", "decode")
    assert "--workers 4" in bound.advice
    assert bound.gain == pytest.approx(1e3 * 4 / 21.2 / 48)


def test_one_thread_of_python():
    cpu_ms = {"fetch": 0.5, "parse": 9.0, "decode": 5.0, "collate": 0.2}
    bound = judge(samples_per_s=105, busy=IDLE | {"parse": 0.99}, cpu_ms=cpu_ms)
    assert (bound.kind, bound.stage) == ("single thread", "parse")
    assert bound.gain == pytest.approx(200 / 105)  # decode is next


def test_storage():
    bound = judge(samples_per_s=40, busy=IDLE | {"fetch": 0.99})
    assert (bound.kind, bound.stage) == ("storage", "fetch")


def test_threads_that_wait_for_each_other():
    cpu_ms = {"fetch": 0.5, "parse": 0.5, "decode": 10.0, "collate": 0.2}
    bound = judge(samples_per_s=100, busy=IDLE | {"decode": 0.99}, cpu_ms=cpu_ms)
    assert (bound.kind, bound.stage) == ("waiting", "decode")


def test_nobody_is_busy():
    bound = judge(samples_per_s=40, busy=IDLE)
    assert (bound.kind, bound.stage, bound.gain) == ("hand-over", None, None)


def test_stages_without_any_time_are_not_divided_by():
    bound = judge(samples_per_s=1, busy=dict.fromkeys(CPU_MS, 0.0))
    assert bound.kind == "hand-over"
