"""Figures of a card in the place of NVML's."""

from __future__ import annotations

from fuelrail.bench.measure.nvml import GpuUse


class Watch:
    """A stand-in for `NvmlWatch`."""

    jpeg: float | None = 0.5
    reason: str | None = None

    def __init__(self, num_gpus):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def use(self):
        if self.reason:
            return None
        return [
            GpuUse(
                index=0,
                kernels=0.9,
                memory_traffic=0.1,
                decoder=0.0,
                jpeg=self.jpeg,
                peak_memory_bytes=1,
                mean_sm_clock_mhz=1980.0,
                num_samples=9,
            )
        ]
