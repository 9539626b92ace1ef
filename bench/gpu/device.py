"""GPU checks of the device: what machine it is, how batches get there, and that its times are right."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import time
from typing import Any

import numpy as np
import torch

from fuelrail.bench.gpu.base import (
    Bench,
    CheckFailed,
    cycles_per_ms,
    endless,
    keep_busy,
    make_loader,
    raise_clock,
    require_dali,
)
from fuelrail.bench.gpu.cameras import SOURCE_WH
from fuelrail.bench.gpu.images import jpeg
from fuelrail.bench.measure.accelerator import DEFAULT_PROFILE, Accelerator, EmulatedAccelerator, load_profile
from fuelrail.bench.measure.clock import NS_PER_MS, MonotonicClock
from fuelrail.bench.measure.cuda import CudaAccelerator
from fuelrail.bench.measure.nvml import NvmlWatch
from fuelrail.loaders import Transforms
from fuelrail.loaders.batch.transfer import make_transfer, map_tensors
from fuelrail.loaders.decode import dali_install, make_decoder
from fuelrail.pipeline.runtime.host import usable_cpus

_BATCH_SIZE = 2
_MAX_BATCHES = 16
_COPY_BYTES = 26 << 20  # B = 8 of six cameras of 704 x 256
# Kernels queued in front of each read of a batch, so that the batch is dropped long before the device reads it.
_DELAY_CYCLES = 20_000_000
_PHASE_MS = {"forward": 20.0, "backward": 40.0, "optimiser": 5.0}
_TIMING_TOLERANCE = 0.05


def machine(bench: Bench, facts: dict[str, Any]) -> None:
    """Facts on CPUs, bus and device; on a GPU, torch must compute on it and know NCCL, and NVML must answer."""
    decoder, picture = make_decoder("turbo"), np.empty((3, 256, 704), np.uint8)
    (image_map,) = Transforms().image.draw([SOURCE_WH], seed=0, epoch=0, sample=0)
    encoded = jpeg("plain")
    started_s, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - started_s < bench.pick(1.0, 0.05):
        decoder.decode_into(encoded, image_map, picture)
        count += 1
    facts["cpus"] = usable_cpus()
    facts["turbo_images_per_s_of_one_cpu"] = round(count / (time.perf_counter() - started_s), 1)
    product = (torch.ones(64, 64, device=bench.device) @ torch.ones(64, 64, device=bench.device)).sum().item()
    facts["torch"] = str(torch.__version__)
    if product != 64**3:
        raise CheckFailed(f"a product of two 64 x 64 matrices of ones sums to {product}, not {64**3}")
    if not bench.on_gpu:
        return
    properties = torch.cuda.get_device_properties(bench.device)
    facts |= {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "driver": dali_install.driver_version(),
        "libnvcuvid_loads": dali_install.has_libnvcuvid(),
        "nvidia_smi": _nvidia_smi(),
        **{f"host_to_device_gb_per_s_{kind}": _copy_rate(bench, kind == "pinned") for kind in ("pinned", "pageable")},
    }
    if not torch.distributed.is_nccl_available():
        raise CheckFailed("this build of torch has no NCCL")
    with NvmlWatch(1) as watch:
        time.sleep(0.3)
    facts["nvml"] = watch.reason or "usable"
    if watch.use() is None:
        raise CheckFailed(f"NVML does not answer: {watch.reason}")


def dali_decodes_by_hardware(bench: Bench, facts: dict[str, Any]) -> None:
    """DALI is installed with all that it needs, and baseline JPEGs will go to the JPEG engines."""
    require_dali()
    facts["dali"] = str(dali_install.installed_dali())
    found = dali_install.installed_dali()
    facts["known_faults"] = [] if found is None else [str(fault.effect) for fault in found.known_faults]
    if not bench.on_gpu:
        return
    engine = dali_install.gpu_engine(bench.device.index or 0)
    facts |= {"engine": engine.name, "reason": engine.reason, "advice": engine.advice}
    if engine.name != "hardware":
        raise CheckFailed(f"JPEGs are decoded by {engine.name}: {engine.reason}; {engine.advice}")


def transfer_is_exact(bench: Bench, facts: dict[str, Any]) -> None:
    """Batches on the device are bit for bit those of the loader without one."""
    num_batches = num_bytes = 0
    on_host = bench._replace(device=torch.device("cpu"))
    # The same backend on both sides: others agree in meaning, not bit for bit.
    with _points_loader(on_host) as plain, _points_loader(bench) as moved:
        for expected, batch in zip(plain, moved, strict=True):
            differing = _differing(expected, batch, bench.device)
            if differing:
                raise CheckFailed(f"batch {num_batches}: {', '.join(differing)} differ from the host's")
            num_bytes += batch["img"].nbytes
            num_batches += 1
            if num_batches == _MAX_BATCHES:
                break
        facts |= {"batches": num_batches, "image_bytes": num_bytes}
        if bench.on_gpu and "transfer" not in {clock.name for clock in moved.stats().stages}:
            raise CheckFailed("the loader has no transfer stage though it was given a CUDA device")
    if num_batches == 0:
        raise CheckFailed("the dataset gave no batch")


def batches_outlive_their_release(bench: Bench, facts: dict[str, Any], decoder: str) -> None:
    """A batch dropped while kernels that read it are queued is not overwritten, also where a transform made it.

    The trainer's stream is kept busy, so that whatever waits for it, or does not, shows.
    """
    for name, transform in (("plain", None), ("transform", _halved)):
        sums = []
        for is_busy in (False, True):
            kept: list[torch.Tensor] = []
            with make_loader(bench, bench.dataset, _BATCH_SIZE, decoder, transform=transform, num_workers=2) as loader:
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
        wrong = [number for number, (have, want) in enumerate(zip(busy, quiet, strict=True)) if have != want]
        facts[f"{name}_batches"] = len(quiet)
        if wrong or not quiet:
            raise CheckFailed(
                f"with {name} samples batches {wrong} of {len(quiet)} were overwritten before they were read"
            )


def batches_stay_right(bench: Bench, facts: dict[str, Any], decoder: str) -> None:
    """Ten thousand batches hold what those of the first epoch held, while the trainer's stream is busy now and then.

    A checksum of each is made on the device, where every pixel's weight is its place; the host waits for none of them.
    """
    num_batches = bench.pick(10_000, 40)
    sums: list[torch.Tensor] = []
    with make_loader(bench, bench.dataset, 1, decoder, shuffle=False) as loader:
        per_epoch = len(loader)
        for number, batch in enumerate(itertools.islice(endless(loader), num_batches)):
            if bench.on_gpu and number % 7 == 0:
                keep_busy(_DELAY_CYCLES // 10)
            pixels = batch["img"].flatten().long()
            sums.append((pixels * torch.arange(1, len(pixels) + 1, device=pixels.device)).sum())
            del batch, pixels
    values = [int(value) for value in sums]
    wrong = [number for number, value in enumerate(values) if value != values[number % per_epoch]]
    facts |= {"batches": len(values), "batches_of_an_epoch": per_epoch, "different_sums": len(set(values))}
    if wrong:
        raise CheckFailed(f"{len(wrong)} of {len(values)} batches changed between epochs, the first is {wrong[0]}")


def _halved(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "img": (sample["img"].float() * 0.5).to(torch.uint8)}


def copies_overlap(bench: Bench, facts: dict[str, Any]) -> None:
    """A batch is complete on the device while a kernel that was queued before its copy still computes."""
    if not bench.on_gpu:
        facts["watched"] = False
        return
    raise_clock(bench.device)
    copy_alone_ms, _ = _timed_transfer(bench)
    compute_ms = max(50.0, 10 * copy_alone_ms)
    keep_busy(round(compute_ms * cycles_per_ms(bench.device)))
    still_computing = torch.cuda.Event()  # type: ignore[no-untyped-call]
    still_computing.record()
    copy_ms, total = _timed_transfer(bench)
    overlapped = not still_computing.query()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(bench.device)
    facts |= {
        "compute_ms": round(compute_ms, 2),
        "copy_alone_ms": round(copy_alone_ms, 3),
        "copy_ms": round(copy_ms, 3),
    }
    if not overlapped or total != _COPY_BYTES:
        raise CheckFailed(
            f"the copy waited for {compute_ms:.0f} ms of kernels, or lost bytes ({total} of {_COPY_BYTES})"
        )


def accelerator_times_are_right(bench: Bench, facts: dict[str, Any]) -> None:
    """Phases of known length come out at that length."""
    accelerator: Accelerator
    if bench.on_gpu:
        accelerator = CudaAccelerator(bench.device.index or 0)
        raise_clock(bench.device)
        cycles = cycles_per_ms(bench.device)
        expected = _PHASE_MS

        def work(phase: str) -> None:
            keep_busy(round(expected[phase] * cycles))
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
    # Work is counted in cycles: a clock that changed meanwhile is no error of the measurement's.
    drift = cycles_per_ms(bench.device) / cycles if bench.on_gpu else 1.0
    for phase, expected_ms in expected.items():
        found_ms = getattr(times, f"{phase}_ns") / NS_PER_MS
        facts[f"{phase}_ms"] = [round(expected_ms, 3), round(found_ms, 3)]
        # Shorter than the work it holds is impossible; longer, by what a disturbed host adds, is not judged on the CPU.
        if found_ms < expected_ms * min(1.0, 1 / drift) * (1 - _TIMING_TOLERANCE) or (
            bench.on_gpu and found_ms > expected_ms * max(1.0, 1 / drift) * (1 + _TIMING_TOLERANCE)
        ):
            raise CheckFailed(f"{phase} of {expected_ms:.2f} ms was measured as {found_ms:.2f} ms")


def _points_loader(bench: Bench) -> Any:  # noqa: ANN401 - a loader, or what a test puts in its place
    return make_loader(bench, bench.dataset, _BATCH_SIZE, "turbo", transforms=Transforms(points=True))


def _timed_transfer(bench: Bench) -> tuple[float, int]:
    """Copy a batch as the loader does; return the milliseconds and the sum of its bytes, which are ones."""
    transfer = make_transfer(bench.device)
    assert transfer is not None, "a CUDA device needs a transfer"
    batch = {"img": torch.ones(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)}
    started_s = time.perf_counter()
    copied = transfer(batch)
    copy_ms = 1e3 * (time.perf_counter() - started_s)
    stream = torch.cuda.Stream(bench.device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):  # not behind what the default stream computes
        moved = transfer.hand_over(copied)
        total = int(moved["img"].sum(dtype=torch.int64))
    return copy_ms, total


def _copy_rate(bench: Bench, pinned: bool) -> float:
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, pin_memory=pinned)
    target = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=bench.device)
    target.copy_(source)
    torch.cuda.synchronize(bench.device)
    started_s = time.perf_counter()
    for _ in range(20):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize(bench.device)
    return round(20 * _COPY_BYTES / (time.perf_counter() - started_s) / 1e9, 2)


def _nvidia_smi() -> dict[str, str]:
    """Return what the driver says of bus and clocks."""
    names = ["pcie.link.gen.current", "pcie.link.width.current", "clocks.max.sm", "power.limit", "compute_mode"]
    if shutil.which("nvidia-smi") is None:
        return {}
    query = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader", "-i", "0"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    return dict(zip(names, answer.stdout.strip().split(", "), strict=False))


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
