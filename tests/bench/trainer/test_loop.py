"""The loop against a clock turned by hand, so that injected stalls of known length must come out exactly."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fuelrail.bench.measure.accelerator import EmulatedAccelerator
from fuelrail.bench.measure.occupancy import occupancy_of, window_of
from fuelrail.bench.measure.records import PHASES
from fuelrail.bench.trainer.loop import train
from fuelrail.bench.trainer.models.bev import BevOccupancy
from fuelrail.bench.trainer.models.settings import MODELS
from fuelrail.bench.trainer.strategies.step import Parallel
from support.bench_runs import MS, PROFILE, HandClock


@pytest.fixture(scope="module", autouse=True)
def _hand_clock():
    with HandClock.driving_recorders():
        yield


class Slow(nn.Module):
    """One weight; its forward takes ``forward_ms`` of the clock."""

    def __init__(self, clock, forward_ms=0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.clock = clock
        self.forward_ms = forward_ms

    def forward(self, img, cam_valid, intrinsics, cam2ego, target, weight):
        self.clock.pass_ms(self.forward_ms)
        return (self.weight * img.float().mean() - 1).square().sum()


def parallel(model):
    optimiser = torch.optim.AdamW(model.parameters())
    inputs = BevOccupancy(MODELS["light"]).inputs
    return Parallel(
        [model],
        optimiser,
        inputs,
        accelerator=EmulatedAccelerator(PROFILE, model.clock),
    )


def batch(number, *, samples=2, cameras=2):
    return {
        "img": torch.full((samples, cameras, 3, 4, 4), number % 200 + 1, dtype=torch.uint8),
        "cam_valid": torch.ones(samples, cameras, dtype=torch.bool),
        "intrinsics": torch.eye(3).expand(samples, cameras, 3, 3),
        "cam2ego": torch.eye(4).expand(samples, cameras, 4, 4),
        "gt_boxes_3d": [torch.zeros(1, 7)] * samples,
        "valid": torch.ones(samples, dtype=torch.bool),
        "epoch": number // 100,
    }


def stalling(clock, waits_ms, **shape):
    for number, wait_ms in enumerate(waits_ms):
        clock.pass_ms(wait_ms)
        yield batch(number, **shape)


def run(waits_ms, *, forward_ms=0.0, **options):
    clock = HandClock()
    batches = options.pop("batches", None) or stalling(clock, waits_ms)
    return list(train(parallel(Slow(clock, forward_ms)), batches, **options))


@settings(deadline=None, max_examples=30)
@given(
    waits_ms=st.lists(st.floats(0, 100), min_size=8, max_size=12),
    forward_ms=st.floats(0, 40),
)
def test_injected_stalls_come_out_exactly(waits_ms, forward_ms):
    records = run(waits_ms, forward_ms=forward_ms)
    assert [record.data_wait_ns for record in records] == pytest.approx(
        [wait * MS for wait in waits_ms], abs=2
    )
    # Two samples: 20 ms forward, 40 ms backward, 1 ms optimiser.
    assert all(record.device_busy_ns == 61 * MS for record in records)
    wall_ms = sum(waits_ms) + len(waits_ms) * (41 + max(20, forward_ms))
    occupancy = occupancy_of([records], window_of([records], 0))
    assert occupancy.mean == pytest.approx(61 * len(waits_ms) / wall_ms, rel=1e-6)


def test_phases_leave_no_gap_within_and_between_steps():
    records = run([1, 2, 3, 4], forward_ms=30)
    for record in records:
        assert sum(record.phase_ns(phase) for phase in PHASES) == record.wall_ns
        # The device's forward takes 20 ms; the host's 10 ms more are no phase of the device.
        assert (record.other_ns, record.overrun_ns) == (10 * MS, 10 * MS)
    assert all(before.end_ns == after.start_ns for before, after in pairwise(records))


def test_what_the_caller_does_with_a_record_belongs_to_the_next_step():
    clock = HandClock()
    loop = train(parallel(Slow(clock)), stalling(clock, [0, 0]))
    first = next(loop)
    clock.pass_ms(5)
    second = next(loop)
    assert second.start_ns == first.end_ns
    assert second.other_ns == 5 * MS


def test_it_stops_after_its_steps_and_asks_for_no_batch_too_many():
    clock = HandClock()
    source = stalling(clock, [0] * 10)
    records = list(train(parallel(Slow(clock)), source, num_steps=3))
    assert [record.step for record in records] == [0, 1, 2]
    assert int(next(source)["img"][0, 0, 0, 0, 0]) == 4


def test_accumulation_joins_batches_and_leaves_out_a_rest():
    records = run([1, 2, 3, 4, 5], accumulation=2)
    assert [record.data_wait_ns for record in records] == [3 * MS, 7 * MS]
    assert [record.num_samples for record in records] == [4, 4]
    assert all(record.device_busy_ns == 121 * MS for record in records)


def test_accumulated_gradients_are_the_mean():
    clock = HandClock()
    joined = Slow(clock)
    single = Slow(clock)
    batches = [batch(0), batch(0)]
    list(train(parallel(joined), batches, accumulation=2))
    list(train(parallel(single), batches[:1]))
    assert torch.equal(joined.weight, single.weight)
    assert joined.weight.item() != 1.0


def test_padding_and_absent_cameras_do_not_count_and_a_loss_that_is_not_finite_is_none():
    rest = batch(0)
    rest["valid"] = torch.tensor([True, False])
    rest["cam_valid"] = torch.tensor([[True, False], [True, True]])
    bad = batch(0) | {"img": torch.full((2, 2, 3, 4, 4), float("inf"))}
    padded, broken = run([], batches=iter([rest, bad]))
    assert (padded.num_samples, padded.num_images) == (1, 1)
    assert padded.loss is not None
    assert broken.loss is None


def test_epochs_are_noted():
    assert [record.epoch for record in run([0] * 101)][-2:] == [0, 1]
