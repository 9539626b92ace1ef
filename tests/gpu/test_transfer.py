"""GPU checks of how batches get to the device: exact, few copies, beside the computation, safe until they are read."""

from __future__ import annotations

import collections
import time

import pytest
import torch

from fuelrail import Transforms
from fuelrail.loaders.batch.transfer import (
    CudaTransfer,
    make_transfer,
    map_tensors,
)
from support.batches import unlike
from support.gpu_bench import (
    check,
    cycles_per_ms,
    each_decoder,
    endless,
    keep_busy,
    make_loader,
    raise_clock,
)

_MAX_BATCHES = 16
_MAX_COPIES = 3
_COPY_BYTES = 26 << 20  # B = 8 of six cameras of 704 x 256
# Kernels queued in front of each read of a batch, so that the batch is dropped long before the device reads it.
_DELAY_CYCLES = 20_000_000


@check(5, twins=("cpu", "fake"), lane=pytest.mark.unit)
def test_copies_overlap(bench, facts):
    """A batch is complete on the device while a kernel that was queued before its copy still computes."""
    facts["watched"] = bench.on_gpu
    if not bench.on_gpu:
        return
    raise_clock(bench)
    copy_alone_ms, _ = _timed_transfer(bench)
    compute_ms = max(50.0, 10 * copy_alone_ms)
    keep_busy(round(compute_ms * cycles_per_ms(bench.device)))
    still_computing = torch.cuda.Event()
    still_computing.record()
    copy_ms, total = _timed_transfer(bench)
    overlapped = not still_computing.query()
    torch.cuda.synchronize(bench.device)
    facts |= {
        "compute_ms": round(compute_ms, 2),
        "copy_alone_ms": round(copy_alone_ms, 3),
        "copy_ms": round(copy_ms, 3),
    }
    assert overlapped, f"the copy waited for {compute_ms:.0f} ms of kernels"
    assert total == _COPY_BYTES, "the copy lost bytes"


@check(15)
@each_decoder
def test_few_copies(bench, facts, decoder):
    """The loader makes at most three copies to the device for a batch, and none from pageable memory.

    As the profiler sees them. With DALI its own copies of encoded images count too, and are not judged.
    """
    activities = [
        torch.profiler.ProfilerActivity.CUDA
        if bench.on_gpu
        else torch.profiler.ProfilerActivity.CPU
    ]
    with make_loader(
        bench, bench.dataset, 2, decoder, transforms=Transforms(points=True)
    ) as loader:
        batches = endless(loader)
        count = bench.pick(20, 2)
        for _ in range(5):
            next(batches)
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(count):
                next(batches)
    names = collections.Counter(
        event.name for event in profile.events() if "Memcpy HtoD" in event.name
    )
    facts |= {
        "batches": count,
        "copies_a_batch": {name: round(number / count, 2) for name, number in names.items()},
    }
    assert decoder == "dali" or names.total() <= _MAX_COPIES * (count + 4), (
        f"{names.total() / count:.1f} copies to the device for each batch, not {_MAX_COPIES}"
    )


@pytest.mark.costly
@check(10, twins=("cpu", "fake"), lane=pytest.mark.unit)
def test_transfer_is_exact(bench, facts):
    """Batches on the device are bit for bit those of the loader without one."""
    # The same backend on both sides: others agree in meaning, not bit for bit.
    with (
        _points_loader(bench._replace(device=torch.device("cpu"))) as plain,
        _points_loader(bench) as moved,
    ):
        num_bytes = []
        for expected, batch in zip(plain, moved, strict=True):
            places = set()
            differing = unlike(expected, _home(batch, places))
            assert not differing, (
                f"batch {len(num_bytes)}: {', '.join(differing)} differ from the host's"
            )
            assert places == {bench.device.type}
            num_bytes.append(batch["img"].nbytes)
            if len(num_bytes) == _MAX_BATCHES:
                break
        facts |= {"batches": len(num_bytes), "image_bytes": sum(num_bytes)}
        assert not bench.on_gpu or "transfer" in {clock.name for clock in moved.stats().stages}
    assert num_bytes, "the dataset gave no batch"


@check(15, twins=("cpu", "fake"))
@each_decoder
def test_batches_outlive_their_release(bench, facts, decoder):
    """A batch dropped while kernels that read it are queued is not overwritten, also where a transform made it.

    The trainer's stream is kept busy, so that whatever waits for it, or does not, shows.
    """
    for name, transform in (("plain", None), ("transform", _halved)):
        sums = []
        for is_busy in (False, True):
            kept = []
            with make_loader(
                bench,
                bench.dataset,
                2,
                decoder,
                transform=transform,
                num_workers=2,
            ) as loader:
                for batch in loader:
                    if is_busy and bench.on_gpu:
                        keep_busy(_DELAY_CYCLES)
                    kept.append(batch["img"].long().sum())
                    del batch
                    if not is_busy and bench.on_gpu:
                        torch.cuda.synchronize(bench.device)
                    if len(kept) == _MAX_BATCHES:
                        break
            sums.append([int(value) for value in kept])
        quiet, busy = sums
        wrong = [
            number
            for number, (have, want) in enumerate(zip(busy, quiet, strict=True))
            if have != want
        ]
        facts[f"{name}_batches"] = len(quiet)
        assert quiet, "the dataset gave no batch"
        assert not wrong, (
            f"with {name} samples batches {wrong} of {len(quiet)} were overwritten before they were read"
        )


def _halved(sample):
    return {**sample, "img": (sample["img"].float() * 0.5).to(torch.uint8)}


def _points_loader(bench):
    return make_loader(bench, bench.dataset, 2, "turbo", transforms=Transforms(points=True))


def _home(batch, places):
    """Return the batch in host memory; ``places`` gets the kinds of device that its tensors were on."""
    return map_tensors(batch, lambda tensor: places.add(tensor.device.type) or tensor.cpu())


def _timed_transfer(bench):
    """Copy a batch as the loader does; return the milliseconds and the sum of its bytes, which are ones."""
    transfer = make_transfer(bench.device)
    batch = {"img": torch.ones(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)}
    started_s = time.perf_counter()
    copied = transfer(batch)
    copy_ms = 1e3 * (time.perf_counter() - started_s)
    with torch.cuda.stream(
        torch.cuda.Stream(bench.device)
    ):  # not behind what the default stream computes
        return copy_ms, int(transfer.hand_over(copied)["img"].sum(dtype=torch.int64))


def test_a_difference_between_batches_is_found(bench, monkeypatch):
    honest = _home
    monkeypatch.setitem(
        globals(),
        "_home",
        lambda *moved: (home := honest(*moved)) | {"intrinsics": home["intrinsics"] + 1},
    )
    with pytest.raises(AssertionError, match=r"batch 0: \.intrinsics differ"):
        test_transfer_is_exact(bench, {})


@pytest.mark.costly
@pytest.mark.parametrize("bench", ["fake"], indirect=True)
def test_a_copy_that_waits_for_the_computation_is_found(bench, monkeypatch):
    honest = CudaTransfer.__call__

    def waiting(self, batch):
        torch.cuda.synchronize()
        return honest(self, batch)

    monkeypatch.setattr(CudaTransfer, "__call__", waiting)
    with pytest.raises(AssertionError, match="the copy waited for"):
        test_copies_overlap(bench, {})
