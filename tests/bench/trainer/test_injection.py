from __future__ import annotations

import os

import pytest

from fuelrail.bench.measure.accelerator import EmulatedAccelerator
from fuelrail.bench.ranks import injection
from fuelrail.bench.ranks.injection import Injection, StallingAccelerator, delayed_stages, late_batches, slow_reads
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.runtime.stages import Stage
from support.bench_runs import MS, PROFILE, HandClock


@pytest.mark.parametrize(
    ("inject", "grown", "by_ms"),
    [
        (Injection(host_to_device=7), "host_to_device_ns", 7),
        (Injection(forward=25), "overrun_ns", 15),  # 10 of it lie under the emulated phase
        (Injection(forward=4), "overrun_ns", 0),
        (Injection(all_reduce=5), "all_reduce_ns", 5),
    ],
)
def test_a_stall_of_known_length_is_found_in_its_phase_and_nowhere_else(inject, grown, by_ms):
    plain, stalled = times_of(Injection()), times_of(inject)
    for name in plain.__struct_fields__:
        if name.startswith(("stand_in", "all_reduce_total")):
            continue
        expected = by_ms * MS if name == grown else 0
        assert getattr(stalled, name) - getattr(plain, name) == pytest.approx(expected, abs=10), name
    assert stalled.device_busy_ns == 31 * MS


def times_of(inject):
    """One step of one sample on a clock that only waiting moves, its gradients reduced in two buckets."""
    clock = HandClock()
    accelerator = StallingAccelerator(EmulatedAccelerator(PROFILE, clock), inject, clock)
    with accelerator.host_to_device(1000):
        pass
    with accelerator.forward(1, 2):
        pass
    with accelerator.backward():
        for share in (0.5, 1.0):
            accelerator.gradients_ready(share)
            accelerator.all_reduce_started()
            accelerator.all_reduce_finished()
    with accelerator.optimiser():
        pass
    return accelerator.finish_step()


def test_a_stall_between_steps_moves_the_clock_and_no_phase():
    clock = HandClock()
    accelerator = StallingAccelerator(EmulatedAccelerator(PROFILE, clock), Injection(other=9), clock)
    before = clock.now_ns()
    assert accelerator.finish_step().device_busy_ns == 0
    assert clock.now_ns() - before == 9 * MS


def test_batches_come_late():
    clock = HandClock()
    arrivals = [(batch, clock.now_ns()) for batch in late_batches(["a", "b"], 3.0, clock)]
    assert [batch for batch, _ in arrivals] == ["a", "b"]
    assert arrivals[1][1] - arrivals[0][1] == 3 * MS


@pytest.mark.parametrize("kind", ["stage_lasts", "stage_cpu", "stage_python"])
def test_a_delayed_stage_does_its_work_and_others_are_left_alone(kind):
    stages = [Stage("fetch", str.upper, 1, 1), Stage("decode", str.lower, 2, 3)]
    delayed = delayed_stages(stages, Injection(**{kind: {"decode": 0.5}}))
    assert delayed[0] is stages[0]
    assert delayed[1].work("ABC") == "abc"
    assert (delayed[1].name, delayed[1].num_threads, delayed[1].capacity) == ("decode", 2, 3)


def test_a_stage_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"no stage 'decompress' to delay; its stages: fetch"):
        delayed_stages([Stage("fetch", str.upper, 1, 1)], Injection(stage_cpu={"decompress": 1}))


@pytest.mark.parametrize(("cold_only", "slow"), [(False, 3), (True, 2)])
def test_reads_are_slow_while_inside(tmp_path, monkeypatch, cold_only, slow):
    slept: list[float] = []
    monkeypatch.setattr(injection.time, "sleep", slept.append)
    monkeypatch.setattr(injection, "_READ", set())
    path = tmp_path / "shard"
    path.write_bytes(bytes(range(256)) * 64)
    fast = os.preadv
    with path.open("rb") as file, slow_reads(Injection(read=60, cold_only=cold_only)):
        for offset in (0, 8192, 0):
            buffer = bytearray(4)
            assert os.preadv(file.fileno(), [buffer], offset) == 4
            assert buffer == bytes([0, 1, 2, 3])
    assert slept == [0.06] * slow
    assert os.preadv is fast
