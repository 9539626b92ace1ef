"""GPU checks of the device: batches arrive unchanged, live long enough, and times are right."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from fuelrail.bench.gpu.rates import CheckFailed
from fuelrail.bench.measure.accelerator import DEFAULT_PROFILE, Accelerator, EmulatedAccelerator, load_profile
from fuelrail.bench.measure.clock import NS_PER_MS, MonotonicClock
from fuelrail.bench.measure.cuda import CudaAccelerator
from fuelrail.loaders import DataLoader, Transforms
from fuelrail.loaders.batch.transfer import map_tensors

if TYPE_CHECKING:
    from fuelrail.bench.gpu.rates import Bench

_BATCH_SIZE = 2
_MAX_BATCHES = 16
# Kernels queued in front of each read of a batch, so that the batch is dropped long before the device reads it.
_DELAY_CYCLES = 20_000_000
_CALIBRATION_CYCLES = 50_000_000
_CLOCK_RISES_S = 1.0
_PHASE_MS = {"forward": 20.0, "backward": 40.0, "optimiser": 5.0}
_TIMING_TOLERANCE = 0.05


def device_facts(bench: Bench) -> dict[str, Any]:
    """Facts on the device; on a GPU, torch must compute on it and know NCCL."""
    product = (torch.ones(64, 64, device=bench.device) @ torch.ones(64, 64, device=bench.device)).sum().item()
    if product != 64**3:
        raise CheckFailed(f"a product of two 64 x 64 matrices of ones sums to {product}, not {64**3}")
    if not bench.on_gpu:
        return {"torch": str(torch.__version__)}
    properties = torch.cuda.get_device_properties(bench.device)
    if not torch.distributed.is_nccl_available():
        raise CheckFailed("this build of torch has no NCCL")
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        "bf16": torch.cuda.is_bf16_supported(),
    }


def transfer_is_exact(bench: Bench) -> dict[str, Any]:
    """Batches on the device are bit for bit those of the loader without one."""
    num_batches = num_bytes = 0
    with _loader(bench, None) as plain, _loader(bench, bench.device) as moved:
        for expected, batch in zip(plain, moved, strict=True):
            differing = _differing(expected, batch, bench.device)
            if differing:
                raise CheckFailed(f"batch {num_batches}: {', '.join(differing)} differ from the host's")
            num_bytes += batch["img"].nbytes
            num_batches += 1
            if num_batches == _MAX_BATCHES:
                break
        facts: dict[str, Any] = {"batches": num_batches, "image_bytes": num_bytes}
        clocks = {clock.name: clock for clock in moved.stats().stages}
        if bench.on_gpu:
            if "transfer" not in clocks:
                raise CheckFailed("the loader has no transfer stage though it was given a CUDA device")
            transfer = clocks["transfer"]
            per_batch = num_bytes / num_batches
            facts["host_to_device_gb_per_s"] = round(per_batch * transfer.items / transfer.busy_s / 1e9, 2)
    if num_batches == 0:
        raise CheckFailed("the dataset gave no batch")
    return facts


def batches_outlive_their_release(bench: Bench) -> dict[str, Any]:
    """A batch dropped while kernels that read it are still queued is not overwritten by the ones that follow."""
    sums: list[torch.Tensor] = []
    expected: list[int] = []
    with _loader(bench, None) as plain:
        for batch in plain:
            expected.append(int(batch["img"].long().sum()))
            if len(expected) == _MAX_BATCHES:
                break
    with _loader(bench, bench.device) as moved:
        for batch in moved:
            if bench.on_gpu:
                _keep_busy(_DELAY_CYCLES)
            sums.append(batch["img"].long().sum())
            del batch
            if len(sums) == len(expected):
                break
    found = [int(value) for value in sums]
    wrong = [number for number, (have, want) in enumerate(zip(found, expected, strict=True)) if have != want]
    if wrong:
        raise CheckFailed(f"batches {wrong} were overwritten before the device read them")
    return {"batches": len(found)}


def accelerator_times_are_right(bench: Bench) -> dict[str, Any]:
    """Phases of known length come out at that length."""
    accelerator: Accelerator
    if bench.on_gpu:
        accelerator = CudaAccelerator(bench.device.index or 0)
        _raise_clock(bench.device)
        cycles_per_ms = _cycles_per_ms(bench.device)
        expected = _PHASE_MS

        def work(phase: str) -> None:
            _keep_busy(round(expected[phase] * cycles_per_ms))
    else:
        profile = load_profile(DEFAULT_PROFILE)
        accelerator = EmulatedAccelerator(profile, MonotonicClock())
        expected = {
            "forward": profile.forward_ms,
            "backward": profile.backward_ms,
            "optimiser": profile.optimiser_ms,
        }

        def work(phase: str) -> None:
            """Nothing: the emulated device is busy by itself."""

    with accelerator.forward(1, 1):
        work("forward")
    with accelerator.backward():
        work("backward")
    with accelerator.optimiser():
        work("optimiser")
    times = accelerator.finish_step()
    facts = {}
    # Work is counted in cycles: a clock that changed meanwhile is no error of the measurement's.
    drift = _cycles_per_ms(bench.device) / cycles_per_ms if bench.on_gpu else 1.0
    for phase, expected_ms in expected.items():
        found_ms = getattr(times, f"{phase}_ns") / NS_PER_MS
        facts[f"{phase}_ms"] = [round(expected_ms, 3), round(found_ms, 3)]
        # Shorter than the work it holds is impossible; longer, by what a disturbed host adds, is not judged on the CPU.
        if found_ms < expected_ms * min(1.0, 1 / drift) * (1 - _TIMING_TOLERANCE) or (
            bench.on_gpu and found_ms > expected_ms * max(1.0, 1 / drift) * (1 + _TIMING_TOLERANCE)
        ):
            raise CheckFailed(f"{phase} of {expected_ms:.2f} ms was measured as {found_ms:.2f} ms")
    return facts


def _loader(bench: Bench, device: torch.device | None) -> DataLoader:
    # The same backend on both sides: others agree in meaning, not bit for bit.
    return DataLoader(
        bench.dataset, _BATCH_SIZE, seed=7, device=device, points=True, transforms=Transforms(decoder="turbo")
    )


def _differing(expected: dict[str, Any], batch: dict[str, Any], device: torch.device) -> list[str]:
    """Names of the entries that differ in value, shape, dtype or, for tensors of ``batch``, lie elsewhere."""
    misplaced: list[torch.Tensor] = []

    def home(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != device.type:
            misplaced.append(tensor)
        return tensor.cpu()

    back = map_tensors(batch, home)
    names = [name for name in expected.keys() | back.keys() if not _equal(expected.get(name), back.get(name))]
    return sorted([*names, *(["(entries that are not on the device)"] if misplaced else [])])


def _equal(a: Any, b: Any) -> bool:  # noqa: ANN401
    if isinstance(a, torch.Tensor):
        if not isinstance(b, torch.Tensor) or a.dtype != b.dtype or a.shape != b.shape:
            return False
        # Bytes, not values: NaN means unknown in several entries, and must arrive as it was.
        return a.contiguous().numpy().tobytes() == b.contiguous().numpy().tobytes()
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)


def _keep_busy(cycles: int) -> None:
    """Queue a kernel on the current stream that only counts clock cycles."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # noqa: SLF001 - there is no public way


def _raise_clock(device: torch.device) -> None:
    """Keep an idle GPU busy until its clock has risen: it starts at a fraction of what it runs at."""
    ends_s = time.monotonic() + _CLOCK_RISES_S
    while time.monotonic() < ends_s:
        _keep_busy(_CALIBRATION_CYCLES)
        torch.cuda.synchronize(device)


def _cycles_per_ms(device: torch.device) -> float:
    """Measure the cycles of :func:`_keep_busy` in a millisecond, by the host's clock around a long one."""
    torch.cuda.synchronize(device)
    started_ns = time.monotonic_ns()
    _keep_busy(_CALIBRATION_CYCLES)
    torch.cuda.synchronize(device)
    return _CALIBRATION_CYCLES / ((time.monotonic_ns() - started_ns) / NS_PER_MS)
