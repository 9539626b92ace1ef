"""``make gpu-check``: everything of Fuelrail that needs a GPU, checked on one, with a result file to keep.

The checks take the torch device as an argument. On the CPU the same code runs with the emulated accelerator and the
loader's plain batches; that is how the tests keep it alive on machines without a GPU.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from fuelrail.__main__ import main as fuelrail_main
from fuelrail.bench.accelerator import DEFAULT_PROFILE, Accelerator, EmulatedAccelerator, load_profile
from fuelrail.bench.clock import NS_PER_MS, MonotonicClock
from fuelrail.bench.cuda import CudaAccelerator
from fuelrail.bench.files import publish_json
from fuelrail.bench.gpu_training import (
    CheckFailed,
    cameras_are_fed,
    decoders_agree,
    decoding_rate,
    no_wait_in_a_step,
    resnet_is_fed,
)
from fuelrail.bench.machine import MachineFacts, installed_gpus, machine_facts
from fuelrail.bench.train_report import load_report
from fuelrail.loaders import DataLoader
from fuelrail.loaders.transfer import map_tensors
from fuelrail.pipeline.errors import ConfigError, FuelrailError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SCHEMA = "fuelrail-gpu-check"
VERSION = 1
_BATCH_SIZE = 2
_MAX_BATCHES = 16
# Kernels queued in front of each read of a batch, so that the batch is dropped long before the device reads it.
_DELAY_CYCLES = 20_000_000
_CALIBRATION_CYCLES = 50_000_000
_CLOCK_RISES_S = 1.0
_PHASE_MS = {"forward": 20.0, "backward": 40.0, "optimiser": 5.0}
_TIMING_TOLERANCE = 0.05


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """One check: whether it held, what was measured, and what was wrong."""

    name: str
    passed: bool
    seconds: float
    facts: dict[str, Any]
    problem: str | None


class GpuCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The result file."""

    schema: str
    version: int
    created: str
    device: str
    machine: MachineFacts
    checks: list[CheckResult]


class Bench(NamedTuple):
    """What a check gets: the torch device, a dataset, and a folder to write to."""

    device: torch.device
    dataset: Path
    work: Path

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a CUDA one."""
        return self.device.type == "cuda"


def device_facts(bench: Bench) -> dict[str, Any]:
    """What the device is; on a GPU, that torch can compute on it and knows NCCL."""
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


def training_runs(bench: Bench) -> dict[str, Any]:
    """``fuelrail bench train`` on all GPUs (one emulated rank on the CPU): it ends, it learns, the ranks agree."""
    num_ranks = torch.cuda.device_count() if bench.on_gpu else 1
    steps, warmup = (60, 10) if bench.on_gpu else (12, 2)
    accelerator = "cuda" if bench.on_gpu else "emulated:resnet50-224-h100"
    out = bench.work / "bench-train"
    arguments = ["bench", "train", str(bench.dataset), "--ranks", str(num_ranks), "--batch-size", str(_BATCH_SIZE)]
    arguments += ["--steps", str(steps), "--warmup", str(warmup), "--accelerator", accelerator]
    arguments += ["--out", str(out), "--no-html"]
    code = fuelrail_main(arguments)
    if code != 0:
        log = out / "records" / "ranks.log"
        tail = log.read_text(encoding="utf-8", errors="replace")[-2000:] if log.exists() else ""
        raise CheckFailed(f"`fuelrail {' '.join(arguments)}` ended with exit code {code}; {tail}")
    report = load_report(out / "report.json")
    assert report.figures is not None, "a run of enough steps has figures"
    losses = [math.inf if loss is None else loss for loss in report.series[0].loss]
    if not sum(losses[-5:]) < sum(losses[:5]):
        raise CheckFailed(f"the loss did not fall: first {losses[:5]}, last {losses[-5:]}")
    if report.ranks_disagree:
        raise CheckFailed("the ranks ended with different weights")
    return {
        "ranks": num_ranks,
        "all_reduce_by": report.ranks[0].backend,
        "occupancy": round(report.figures.occupancy.mean, 4),
        "samples_per_s": round(report.figures.throughput.samples_per_s, 2),
        "images_per_s": round(report.figures.throughput.images_per_s, 2),
        "phases_mean_ms": {phase.phase: round(phase.time.mean_ms, 3) for phase in report.figures.phases},
        "peak_device_bytes": report.ranks[0].peak_device_bytes,
        "warnings": report.warnings,
    }


CHECKS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "device": device_facts,
    "transfer is exact": transfer_is_exact,
    "batches outlive their release": batches_outlive_their_release,
    "accelerator times are right": accelerator_times_are_right,
    "training runs": training_runs,
    "no wait in a step": no_wait_in_a_step,
    "decoders agree": decoders_agree,
    "decoding rate": decoding_rate,
    "ResNet-50 is fed": resnet_is_fed,
    "six cameras are fed": cameras_are_fed,
}


def run_checks(bench: Bench) -> GpuCheck:
    """Run all checks, each to its end whatever the others found."""
    results = []
    for name, check in CHECKS.items():
        started = time.monotonic()
        problem, facts = None, {}
        try:
            facts = check(bench)
        except (CheckFailed, FuelrailError) as error:
            problem = str(error)
        except Exception:  # noqa: BLE001 - one broken check must not hide what the others find
            problem = traceback.format_exc(limit=-3)
        seconds = round(time.monotonic() - started, 2)
        results.append(CheckResult(name=name, passed=problem is None, seconds=seconds, facts=facts, problem=problem))
        sys.stdout.write(f"{'ok    ' if problem is None else 'FAILED'} {name} ({seconds:.1f} s) {problem or facts}\n")
    return GpuCheck(
        schema=SCHEMA,
        version=VERSION,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        device=str(bench.device),
        machine=machine_facts(),
        checks=results,
    )


def synthesise(folder: Path, *, num_clips: int = 5, num_frames: int = 10, size: str = "1600x900") -> Path:
    """A synthetic dataset of six cameras, through the same commands that users take."""
    source, out = folder / "synth", folder / "dataset"
    length = ["--clips", str(num_clips), "--frames", str(num_frames), "--size", size]
    for arguments in (
        ["synth", str(source), "--seed", "7", *length],
        ["shard", f"nuscenes:{source}", str(out), "--version", "v1.0-mini", "--seed", "7"],
    ):
        code = fuelrail_main(arguments)
        if code != 0:
            raise ConfigError(f"`fuelrail {' '.join(arguments)}` ended with exit code {code}")
    return out


def main(arguments: Sequence[str]) -> int:
    """Check this machine's GPU; 0 if all holds, 1 if something doesn't, 2 if it cannot be checked."""
    parser = argparse.ArgumentParser(prog="gpu-check", description="Check everything that needs a GPU.")
    parser.add_argument("--dataset", type=Path, help="folder of a dataset with boxes (default: a synthetic one)")
    parser.add_argument("--out", type=Path, default=Path("gpu-check.json"), help="result file (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        _require_gpu()
        with tempfile.TemporaryDirectory(prefix="fuelrail-gpu-check-") as folder:
            dataset = options.dataset or synthesise(Path(folder))
            result = run_checks(Bench(torch.device("cuda", 0), dataset, Path(folder)))
        publish_json(options.out, result)
    except FuelrailError as error:
        sys.stderr.write(f"gpu-check: {error}\n")
        return 2
    failed = [check.name for check in result.checks if not check.passed]
    sys.stdout.write(f"{len(failed)} of {len(result.checks)} checks failed; result in {options.out}\n")
    return 1 if failed else 0


def _require_gpu() -> None:
    gpus = installed_gpus()
    if not gpus:
        raise ConfigError("the NVIDIA driver shows no GPU here, so there is nothing to check; run it on a GPU machine")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"there is an {gpus[0].name} (driver {gpus[0].driver}), but torch {torch.__version__} cannot use it: "
            "install a build of torch for CUDA that this driver supports"
        )


def _loader(bench: Bench, device: torch.device | None) -> DataLoader:
    # The same backend on both sides: others agree in meaning, not bit for bit.
    return DataLoader(bench.dataset, _BATCH_SIZE, seed=7, device=device, points=True, decoder="turbo")


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
    """How many cycles of :func:`_keep_busy` last a millisecond, by the host's clock around a long one."""
    torch.cuda.synchronize(device)
    started_ns = time.monotonic_ns()
    _keep_busy(_CALIBRATION_CYCLES)
    torch.cuda.synchronize(device)
    return _CALIBRATION_CYCLES / ((time.monotonic_ns() - started_ns) / NS_PER_MS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
