from __future__ import annotations

import types

import pytest
import torch

from fuelrail.bench.measure.nvml import NvmlWatch


class Card:
    """Stands in for `pynvml` on hosts without a driver: the functions that the watch calls, and their answers."""

    NVML_CLOCK_SM = 1

    def __init__(self, *, jpeg: bool = True, driver: bool = True) -> None:
        self.calls: list[str] = []
        self._jpeg = jpeg
        self._driver = driver

    def nvmlInit(self):  # noqa: N802
        if not self._driver:
            raise OSError("Driver Not Loaded")
        self.calls.append("init")

    def nvmlShutdown(self):  # noqa: N802
        self.calls.append("shutdown")

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return index

    def nvmlDeviceGetHandleByUUID(self, name):  # noqa: N802
        return {"GPU-b": 3, "GPU-1234-fast": 2, "GPU-5678-slow": 1}[name]

    def nvmlDeviceGetUtilizationRates(self, handle):  # noqa: N802
        return types.SimpleNamespace(gpu=90 + handle, memory=40)

    def nvmlDeviceGetDecoderUtilization(self, handle):  # noqa: N802
        return [25, 1000]

    def nvmlDeviceGetJpgUtilization(self, handle):  # noqa: N802
        if not self._jpeg:
            raise RuntimeError("Not Supported")
        return [50, 1000]

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        return types.SimpleNamespace(used=2**34)

    def nvmlDeviceGetClockInfo(self, handle, kind):  # noqa: N802
        return 1980


def watched(num_gpus, card):
    with NvmlWatch(num_gpus, card) as watch:
        while watch.use() is None:
            pass
    return watch.use()


@pytest.mark.parametrize("jpeg", [True, False])
def test_every_gpu_is_sampled_from_start_to_end(jpeg):
    card = Card(jpeg=jpeg)
    first, second = watched(2, card)
    assert (first.index, first.kernels, second.kernels) == (
        0,
        pytest.approx(0.90),
        pytest.approx(0.91),
    )
    assert (first.memory_traffic, first.decoder) == (
        pytest.approx(0.40),
        pytest.approx(0.25),
    )
    assert first.jpeg == (pytest.approx(0.5) if jpeg else None)
    assert (first.peak_memory_bytes, first.mean_sm_clock_mhz) == (2**34, 1980)
    assert card.calls == ["init", "shutdown"]


@pytest.mark.parametrize(
    ("visible", "handles"),
    [("2,0", [2, 0]), ("GPU-b, 1", [3, 1]), ("", [0, 1])],
)
def test_gpus_are_numbered_as_cuda_does(visible, handles, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.kernels for gpu in watched(2, Card())] == [
        pytest.approx(0.90 + handle / 100) for handle in handles
    ]


def test_gpus_are_found_by_the_uuid_of_torchs_device(monkeypatch):
    uuids = [
        "1234-fast",
        "5678-slow",
    ]  # CUDA numbers the fastest first, NVML by the bus
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: types.SimpleNamespace(uuid=uuids[index]),
    )
    monkeypatch.setenv(
        "CUDA_VISIBLE_DEVICES", "GPU-1"
    )  # an abbreviation, which CUDA accepts and NVML does not
    assert [gpu.kernels for gpu in watched(2, Card())] == [
        pytest.approx(0.92),
        pytest.approx(0.91),
    ]


def test_why_nvml_says_nothing_is_logged(caplog):
    card = Card(driver=False)
    with NvmlWatch(1, card) as watch:
        pass
    assert (watch.use(), card.calls) == (None, [])
    assert (
        watch.reason
        == "OSError: Driver Not Loaded; it needs nvidia-ml-py, a driver and a whole card"
    )
    assert (
        "no facts from NVML: OSError: Driver Not Loaded; it needs nvidia-ml-py, a driver and a whole card"
        in caplog.text
    )


def test_without_gpus_and_of_a_card_that_does_not_answer_there_is_nothing_to_say(
    monkeypatch,
):
    def unsupported(self, handle):
        raise RuntimeError("Not Supported")

    monkeypatch.setattr(Card, "nvmlDeviceGetUtilizationRates", unsupported)
    for num_gpus, calls in ((1, ["init", "shutdown"]), (0, [])):
        card = Card()
        with NvmlWatch(num_gpus, card) as watch:
            pass
        assert (watch.use(), card.calls) == (None, calls)
