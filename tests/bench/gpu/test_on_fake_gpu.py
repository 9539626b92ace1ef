"""The arm of the GPU checks that only runs on a GPU, on fake devices that check the order of streams."""

from __future__ import annotations

import pytest
import torch

from fuelrail.bench.gpu import base, device, feeding, pixels
from fuelrail.bench.gpu.base import Bench, CheckFailed
from fuelrail.loaders.batch.transfer import CudaTransfer
from support.backends import dali_on_host, needs_dali
from support.fake_cuda import FakeCuda
from support.nvml_watch import Watch

CUDA = torch.device("cuda", 0)


@pytest.fixture
def on_fake_gpu(bench, monkeypatch):
    """A bench on a fake device, with the sizes of the twin."""
    cuda = FakeCuda(monkeypatch)
    monkeypatch.setattr(Bench, "pick", lambda self, on_gpu, on_cpu: on_cpu)
    monkeypatch.setattr(base, "NvmlWatch", Watch)
    monkeypatch.setattr(device, "NvmlWatch", Watch)
    monkeypatch.setattr(base, "_CLOCK_RISES_S", 0.0)
    yield bench._replace(device=CUDA)
    assert cuda.finish() == []


DALI = pytest.param("dali", marks=needs_dali)
ON_FAKE_GPU = [
    device.batches_outlive_their_release, device.batches_stay_right,
    feeding.loader_alone, feeding.occupancy_curve, feeding.memory_stays,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("decoder", ["turbo", DALI])
@pytest.mark.parametrize("run", ON_FAKE_GPU, ids=lambda run: run.__name__)
def test_f27_the_arm_of_the_gpu_runs_on_fake_devices(run, decoder, on_fake_gpu, monkeypatch):
    if decoder == "dali":
        dali_on_host(monkeypatch)
    facts = {}
    run(on_fake_gpu, facts, decoder)
    assert facts


@pytest.mark.parametrize("run", [device.transfer_is_exact, device.copies_overlap])
def test_f27_transfers_are_checked_on_fake_devices(run, on_fake_gpu):
    facts = {}
    run(on_fake_gpu, facts)
    assert facts


@needs_dali
@pytest.mark.slow
@pytest.mark.parametrize("run", [pixels.decoders_agree, pixels.pixels_do_not_depend_on_company])
def test_f32_pixels_are_checked_on_fake_devices(run, on_fake_gpu, monkeypatch):
    dali_on_host(monkeypatch)
    facts = {}
    run(on_fake_gpu, facts)
    assert facts


def test_f27_a_copy_that_waits_for_the_computation_is_found(on_fake_gpu, monkeypatch):
    honest = CudaTransfer.__call__

    def waiting(self, batch):
        torch.cuda.synchronize()
        return honest(self, batch)

    monkeypatch.setattr(CudaTransfer, "__call__", waiting)
    with pytest.raises(CheckFailed, match="the copy waited for"):
        device.copies_overlap(on_fake_gpu, {})


@pytest.mark.parametrize(("occupancies", "holds"), [({10.0: 0.985}, False), ({5.0: 0.5, 10.0: 0.995}, True)])
def test_f24_occupancy_is_judged_from_ten_milliseconds_on(occupancies, holds, on_fake_gpu, monkeypatch):
    monkeypatch.setattr(feeding, "_point", lambda bench, batches, ms, compute: {"occupancy": occupancies.get(ms, 1.0)})
    monkeypatch.setattr(Bench, "pick", lambda self, on_gpu, on_cpu: on_gpu if isinstance(on_gpu, tuple) else on_cpu)
    facts = {}
    if holds:
        feeding.occupancy_curve(on_fake_gpu, facts, "turbo")
    else:
        with pytest.raises(CheckFailed, match=r"98.5% at 10 ms \(600 images/s needed\), not 99%"):
            feeding.occupancy_curve(on_fake_gpu, facts, "turbo")
    assert {name for name in facts if name.startswith("step")} == {f"step_{ms:g}_ms" for ms in (1, 2, 5, 10, 20, 50)}


def test_a_batch_that_changed_is_found(bench, monkeypatch):
    honest = device.endless

    def tampering(loader):
        for number, batch in enumerate(honest(loader)):
            if number == 33:
                batch["img"].view(-1)[[5, 6]] = batch["img"].view(-1)[[6, 5]] + torch.tensor([1, 0], dtype=torch.uint8)
            yield batch

    monkeypatch.setattr(device, "endless", tampering)
    with pytest.raises(CheckFailed, match="1 of 40 batches changed between epochs, the first is 33"):
        device.batches_stay_right(bench, {}, "turbo")
