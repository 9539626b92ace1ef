"""``make gpu-check``: everything of Fuelrail that needs a GPU, checked on one, with a result file to keep.

The checks take the torch device as an argument. On the CPU the same code runs with the emulated accelerator and the
loader's plain batches; that is how the tests keep it alive on machines without a GPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from fuelrail.__main__ import main as fuelrail_main
from fuelrail.bench.gpu.device import (
    accelerator_times_are_right,
    batches_outlive_their_release,
    device_facts,
    transfer_is_exact,
)
from fuelrail.bench.gpu.rates import Bench, CheckFailed
from fuelrail.bench.gpu.training import (
    cameras_are_fed,
    decoders_agree,
    decoding_rate,
    no_wait_in_a_step,
    resnet_is_fed,
    training_runs,
)
from fuelrail.bench.measure.machine import MachineFacts, installed_gpus, machine_facts
from fuelrail.bench.report.files import created_now, publish_json
from fuelrail.pipeline.errors import ConfigError, FuelrailError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SCHEMA = "fuelrail-gpu-check"
VERSION = 1


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
        created=created_now(),
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
        ["shard", f"nuscenes:{source}", str(out), "-o", "version=v1.0-mini", "--seed", "7"],
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
