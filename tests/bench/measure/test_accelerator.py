"""Accelerators, emulated and the CPU, against a clock that is turned by hand: exact times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuelrail.bench.measure.accelerator import (
    PROFILES,
    Accelerator,
    EmulatedAccelerator,
    load_profile,
)
from fuelrail.bench.measure.cuda import CudaAccelerator
from fuelrail.bench.measure.records import PHASES
from fuelrail.pipeline.errors import ConfigError
from support.bench_runs import MS, PROFILE, HandClock
from support.fake_cuda import FakeCuda


@pytest.fixture(scope="module", autouse=True)
def _hand_clock():
    with HandClock.driving_recorders():
        yield


def run_step(accelerator, clock, real_ms, *, samples=1):
    """One step whose stand-in really takes these milliseconds in forward, backward and optimiser."""
    forward_ms, backward_ms, optimiser_ms = real_ms
    with accelerator.forward(samples, 2 * samples):
        clock.pass_ms(forward_ms)
    with accelerator.backward():
        clock.pass_ms(backward_ms)
    with accelerator.optimiser():
        clock.pass_ms(optimiser_ms)
    return accelerator.finish_step()


@pytest.mark.parametrize(
    ("real_ms", "samples", "overrun_ms"),
    [((3, 4, 0.1), 3, 0), ((14, 20, 1.5), 1, 4.5)],
)
def test_phases_last_as_the_profile_says_and_work_that_takes_longer_is_overrun(
    real_ms, samples, overrun_ms
):
    clock = HandClock()
    start = clock.now
    times = run_step(EmulatedAccelerator(PROFILE, clock), clock, real_ms, samples=samples)
    expected = (10 * samples * MS, 20 * samples * MS, MS)
    assert (times.forward_ns, times.backward_ns, times.optimiser_ns) == expected
    assert times.device_busy_ns == sum(expected)
    assert (times.overrun_ns, times.overshoot_ns) == (round(overrun_ms * MS), 0)
    assert times.stand_in_ns == round(sum(real_ms) * MS)
    assert clock.now - start == times.device_busy_ns + times.overrun_ns


def test_a_host_that_wakes_late_does_not_delay_the_next_phase_on_the_device():
    clock = HandClock(lateness_ns=2 * MS)
    start = clock.now
    times = run_step(EmulatedAccelerator(PROFILE, clock), clock, (0, 0, 0))
    assert (times.forward_ns, times.backward_ns) == (10 * MS, 20 * MS)
    assert (
        times.overshoot_ns == 4 * MS
    )  # the optimiser's millisecond had passed when the host woke from backward
    assert clock.now - start == 32 * MS


def test_the_device_idles_between_steps_while_the_host_waits_for_data():
    clock = HandClock()
    accelerator = EmulatedAccelerator(PROFILE, clock)
    start = clock.now
    for _ in range(2):
        clock.pass_ms(50)
        times = run_step(accelerator, clock, (1, 1, 0))
        assert times.device_busy_ns == 31 * MS
    assert clock.now - start == 2 * (50 + 31) * MS


def test_a_bucket_is_held_until_its_gradients_would_exist_and_its_all_reduce_overlaps_the_rest():
    clock = HandClock()
    accelerator = EmulatedAccelerator(PROFILE, clock)
    with accelerator.forward(1, 2):
        pass
    backward_start = clock.now
    with accelerator.backward():
        clock.pass_ms(1)
        accelerator.gradients_ready(0.25)
        assert clock.now == backward_start + 5 * MS
        accelerator.all_reduce_started()
        clock.pass_ms(3)
        accelerator.all_reduce_finished()
        accelerator.gradients_ready(1.0)
        assert clock.now == backward_start + 20 * MS
        accelerator.all_reduce_started()
        clock.pass_ms(7)
        accelerator.all_reduce_finished()
    times = accelerator.finish_step()
    assert times.backward_ns == 20 * MS
    assert times.all_reduce_ns == 7 * MS  # exposed
    assert times.all_reduce_total_ns == 10 * MS  # hidden or exposed
    assert times.device_busy_ns == 30 * MS
    assert times.overrun_ns == 0


def test_overlapping_all_reduces_count_once():
    clock = HandClock()
    accelerator = EmulatedAccelerator(PROFILE, clock)
    accelerator.all_reduce_started()
    clock.pass_ms(2)
    accelerator.all_reduce_started()
    clock.pass_ms(2)
    accelerator.all_reduce_finished()
    clock.pass_ms(1)
    accelerator.all_reduce_finished()
    assert accelerator.finish_step().all_reduce_total_ns == 5 * MS


def test_late_gradients_are_overrun():
    clock = HandClock()
    accelerator = EmulatedAccelerator(PROFILE, clock)
    with accelerator.forward(1, 2):
        pass
    with accelerator.backward():
        clock.pass_ms(26)
        accelerator.gradients_ready(1.0)
        clock.pass_ms(2)
    times = accelerator.finish_step()
    assert (times.backward_ns, times.all_reduce_ns, times.overrun_ns) == (
        20 * MS,
        2 * MS,
        6 * MS,
    )
    assert times.device_busy_ns == 30 * MS


@given(
    real_ms=st.tuples(*[st.floats(0, 60)] * 3),
    lateness_ns=st.integers(0, 3 * MS),
    samples=st.integers(1, 4),
)
def test_busy_time_is_the_profiles_whatever_the_host_does(real_ms, lateness_ns, samples):
    clock = HandClock(lateness_ns)
    start = clock.now
    times = run_step(EmulatedAccelerator(PROFILE, clock), clock, real_ms, samples=samples)
    assert times.device_busy_ns == round(PROFILE.step_ms(samples, 2 * samples) * MS)
    phases = times.forward_ns + times.backward_ns + times.optimiser_ns
    assert times.device_busy_ns == phases <= clock.now - start


def test_what_is_copied_is_measured():
    clock = HandClock()
    accelerator = EmulatedAccelerator(PROFILE, clock)
    with accelerator.host_to_device():
        clock.pass_ms(2)
    assert accelerator.finish_step().host_to_device_ns == 2 * MS
    assert accelerator.finish_step().host_to_device_ns == 0


@pytest.mark.parametrize(("device", "seconds"), [("a100", 0.435), ("h100", 0.224)])
def test_profiles_follow_from_mlperf_storages_step_times(device, seconds):
    assert load_profile(f"resnet50-224-{device}").step_ms(400, 400) == pytest.approx(
        1e3 * seconds, rel=1e-3
    )
    bev = load_profile(f"bevdet-r50-704x256-{device}")
    assert bev.forward_ms + bev.backward_ms == pytest.approx(
        1e3 * seconds / 400 / 4.09 * 215.3, rel=1e-3
    )
    assert bev.backward_ms == pytest.approx(2 * bev.forward_ms, rel=1e-3)
    assert bev.reference_input.cameras == 6


def test_an_unknown_profile_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="resnet50-224-a100"):
        load_profile("resnet51")


def test_a_profile_of_ones_own_is_loaded_by_path_and_checked(tmp_path):
    text = (PROFILES / "resnet50-224-a100.yaml").read_text()
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    assert load_profile(str(path)).device == "NVIDIA A100"
    path.write_text(text.replace("forward_ms: 0.3624", "forward_ms: -1"))
    with pytest.raises(ConfigError, match="forward_ms"):
        load_profile(str(path))


def test_the_phases_of_a_cpu_are_what_the_thread_takes_and_say_what_it_waited():
    clock = HandClock()
    accelerator = Accelerator(clock)
    with accelerator.host_to_device():
        clock.pass_ms(1)
    with accelerator.forward(2, 4):
        clock.compute_ms(10)
        clock.pass_ms(500)  # it sleeps
    with accelerator.backward():
        accelerator.gradients_ready(0.5)
        clock.compute_ms(20, queued_ms=5)
        accelerator.all_reduce_started()
        accelerator.gradients_ready(1.0)
        clock.pass_ms(7)
        accelerator.all_reduce_finished()
    with accelerator.optimiser():
        clock.compute_ms(3)
    times = accelerator.finish_step()
    assert (times.host_to_device_ns, times.forward_ns) == (1 * MS, 510 * MS)
    assert (times.backward_ns, times.all_reduce_ns, times.optimiser_ns) == (
        25 * MS,
        7 * MS,
        3 * MS,
    )
    assert times.device_busy_ns == (510 + 25 + 3) * MS
    assert (times.cpu_ns, times.queued_ns) == (33 * MS, 5 * MS)
    assert times.all_reduce_total_ns == 7 * MS
    assert accelerator.finish_step().device_busy_ns == 0


def test_micro_batches_on_a_cpu_add_up():
    clock = HandClock()
    accelerator = Accelerator(clock)
    for _ in range(2):
        with accelerator.forward(2, 4):
            clock.compute_ms(10)
        with accelerator.backward():
            clock.compute_ms(20)
    times = accelerator.finish_step()
    assert (times.forward_ns, times.backward_ns, times.all_reduce_ns) == (
        20 * MS,
        40 * MS,
        0,
    )
    assert times.cpu_ns == times.device_busy_ns == 60 * MS


def test_what_a_stage_waits_for_others_between_its_passes_is_in_no_phase():
    clock = HandClock()
    accelerator = Accelerator(clock)
    with accelerator.forward(1, 1):
        clock.pass_ms(3)
    clock.pass_ms(40)
    with accelerator.backward():
        clock.pass_ms(5)
    record = accelerator.finish_step()
    assert (record.device_busy_ns, record.other_ns) == (8 * MS, 40 * MS)


def test_a_gpus_phases_are_those_of_its_events(monkeypatch):
    """Between any two events the fake device takes a millisecond."""
    with FakeCuda(monkeypatch):
        accelerator = CudaAccelerator(0)
        for _ in range(2):
            accelerator.recorder.ask()
            accelerator.recorder.got(())
            with accelerator.host_to_device():
                pass
            with accelerator.forward(1, 1):
                pass
            with accelerator.backward():
                accelerator.all_reduce_started()
                accelerator.gradients_ready(1.0)
                accelerator.all_reduce_finished()
            with accelerator.optimiser():
                pass
            record = accelerator.finish_step()
    phases = ("data_wait", "host_to_device", "forward", "backward", "all_reduce", "optimiser")
    assert [record.phase_ns(phase) for phase in phases] == [1 * MS] * 6
    assert record.device_busy_ns == 3 * MS
    assert record.wall_ns == sum(record.phase_ns(phase) for phase in PHASES)
