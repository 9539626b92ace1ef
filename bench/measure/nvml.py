"""GPU measurements of NVIDIA's management library during a run: busy shares, memory, clock."""

from __future__ import annotations

import importlib
import logging
import os
import threading
from typing import Annotated, Any, Self

import msgspec

from fuelrail.bench.measure.display import display

_LOG = logging.getLogger(__name__)

_INTERVAL_S = 0.1


class GpuUse(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU over a run, by samples ten times a second; shares from 0 to 1.

    ``kernels`` is the share of time in which any kernel ran, however small (NVML's "utilisation");
    ``memory_traffic`` in which memory was read or written; ``decoder`` and ``jpeg`` how busy its
    decoding units were, None where the driver does not report it.
    """

    index: Annotated[int, display("GPU")]
    kernels: Annotated[float, display("kernels ran", digits=".0%")]
    memory_traffic: Annotated[float, display("memory busy", digits=".0%")]
    decoder: Annotated[float | None, display("video decoder", digits=".0%", missing="unknown")]
    jpeg: Annotated[float | None, display("JPEG decoder", digits=".0%", missing="unknown")]
    peak_memory_bytes: Annotated[int, display("memory", unit="GiB", digits=".1f", scale=2**-30)]
    mean_sm_clock_mhz: Annotated[float, display("SM clock", unit="MHz", digits=".0f")]
    num_samples: int


class NvmlWatch:
    """Samples ``num_gpus`` GPUs from number ``first`` on in a thread between entering and leaving;
    use as a context manager.

    ``nvml`` is the module `pynvml` (package nvidia-ml-py), imported if not given. Without it,
    without a driver, or with no GPUs to look at, :meth:`use` is None; :attr:`reason` says why, and
    is logged.
    """

    def __init__(self, num_gpus: int, nvml: Any = None, *, first: int = 0) -> None:
        self._num_gpus = num_gpus
        self._first = first
        self._nvml = nvml
        self.reason: str | None = None
        """Why there are no measurements; None where nothing failed."""
        self._samples: list[list[tuple[float, float, float | None, float | None, int, float]]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="nvml", daemon=True)

    def __enter__(self) -> Self:
        if self._num_gpus:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._num_gpus:
            self._thread.join()

    def use(self) -> list[GpuUse] | None:
        """Return the measurements, after the end; None if there are none."""
        if not self._samples or not all(self._samples):
            return None

        def mean(values: tuple[float | None, ...]) -> float | None:
            numbers = [value for value in values if value is not None]
            return sum(numbers) / len(numbers) if numbers else None

        uses = []
        for index, samples in enumerate(self._samples):
            kernels, traffic, decoder, jpeg, memory, clock = zip(*samples, strict=True)
            uses.append(
                GpuUse(
                    index=self._first + index,
                    kernels=mean(kernels) or 0.0,
                    memory_traffic=mean(traffic) or 0.0,
                    decoder=mean(decoder),
                    jpeg=mean(jpeg),
                    peak_memory_bytes=max(memory),
                    mean_sm_clock_mhz=mean(clock) or 0.0,
                    num_samples=len(samples),
                )
            )
        return uses

    def _watch(self) -> None:
        try:
            self._nvml = self._nvml or importlib.import_module("pynvml")
            nvml = self._nvml
            nvml.nvmlInit()
            try:
                self._samples = [[] for _ in range(self._num_gpus)]
                numbers = range(self._first, self._first + self._num_gpus)
                handles = [self._handle(index) for index in numbers]
                is_stopped = False
                while not is_stopped:
                    for samples, handle in zip(self._samples, handles, strict=True):
                        rates = nvml.nvmlDeviceGetUtilizationRates(handle)
                        samples.append(
                            (
                                rates.gpu / 100,
                                rates.memory / 100,
                                self._engine("nvmlDeviceGetDecoderUtilization", handle),
                                self._engine("nvmlDeviceGetJpgUtilization", handle),
                                int(nvml.nvmlDeviceGetMemoryInfo(handle).used),
                                float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
                            )
                        )
                    is_stopped = self._stop.wait(_INTERVAL_S)
            finally:
                nvml.nvmlShutdown()
        except Exception as error:  # noqa: BLE001 - not installed, no driver, a part of a card (MIG): NVML's own errors
            self._samples = []
            self.reason = (
                f"{type(error).__name__}: {error}; it needs nvidia-ml-py, a driver and a whole card"
            )
            _LOG.warning("no facts from NVML: %s", self.reason)

    def _handle(self, index: int) -> Any:
        """Return NVML's handle of torch's GPU ``index``, by UUID where torch knows it.

        NVML numbers all of the host's GPUs by their place on the bus. CUDA numbers those that
        CUDA_VISIBLE_DEVICES names, in that order, and without it the fastest one first.
        """
        import torch

        uuid = None
        if torch.cuda.is_available() and index < torch.cuda.device_count():
            # Torch before 2.5 has none.
            uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        if uuid is not None:
            return self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        visible = [
            name.strip()
            for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            if name.strip()
        ]
        if not visible:
            return self._nvml.nvmlDeviceGetHandleByIndex(index)
        if visible[index].isdigit():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(visible[index]))
        return self._nvml.nvmlDeviceGetHandleByUUID(visible[index])

    def _engine(self, name: str, handle: Any) -> float | None:
        """Return a decoding unit's share, where this driver and card know one."""
        try:
            return float(getattr(self._nvml, name)(handle)[0]) / 100
        except Exception:  # noqa: BLE001 - NVML raises its own errors for what a card does not have
            return None
