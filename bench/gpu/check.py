"""``make gpu-check``: everything of Fuelrail that needs a GPU, checked on one, with a result file to keep.

The checks take the torch device as an argument. On the CPU the same code runs with the emulated accelerator and the
loader's plain batches; that is how the tests keep it alive on machines without a GPU. The file is written after every
check, so that a run that is stopped leaves what it found. README.md in this folder says how to run it without a
registry.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import torch

from fuelrail.__main__ import main as fuelrail_main
from fuelrail.bench.gpu import bare, device, feeding, pixels, training
from fuelrail.bench.gpu.base import Bench, CheckFailed
from fuelrail.bench.measure.machine import MachineFacts, installed_gpus, machine_facts
from fuelrail.bench.report.files import created_now, publish_json
from fuelrail.pipeline.errors import ConfigError, FuelrailError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

SCHEMA = "fuelrail-gpu-check"
VERSION = 1

DECODERS = ("turbo", "dali")


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """One check: what became of it, what was measured, also by one that failed, and what was wrong."""

    name: str
    outcome: Literal["passed", "failed", "not run"]
    seconds: float
    facts: dict[str, Any]
    problem: str | None


class GpuCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The result file; ``cut_off`` says why there is no more."""

    schema: str
    version: int
    created: str
    device: str
    machine: MachineFacts
    cut_off: str | None
    checks: list[CheckResult]


class Check(NamedTuple):
    """One check: its name, its function of (bench, facts to fill), and the seconds that it may take on an H100."""

    name: str
    run: Callable[[Bench, dict[str, Any]], None]
    seconds: float


def _each(name: str, run: Callable[[Bench, dict[str, Any], str], None], seconds: float) -> list[Check]:
    """Return the check with each decoder."""

    def with_decoder(decoder: str) -> Callable[[Bench, dict[str, Any]], None]:
        return lambda bench, facts: run(bench, facts, decoder)

    return [Check(f"{name} ({decoder})", with_decoder(decoder), seconds) for decoder in DECODERS]


CHECKS: list[Check] = [
    Check("machine", device.machine, 10),
    Check("DALI decodes by hardware", device.dali_decodes_by_hardware, 5),
    Check("first runs of the decoder", bare.first_runs, 40),
    Check("share of the bare decoder", bare.share_of_the_bare_decoder, 110),
    Check("decoders agree", pixels.decoders_agree, 30),
    Check("pixels do not depend on company", pixels.pixels_do_not_depend_on_company, 20),
    *_each("loader alone", feeding.loader_alone, 50),
    Check("copies overlap", device.copies_overlap, 5),
    *_each("few copies", feeding.few_copies, 15),
    Check("transfer is exact", device.transfer_is_exact, 10),
    *_each("batches outlive their release", device.batches_outlive_their_release, 15),
    Check("accelerator times are right", device.accelerator_times_are_right, 5),
    *_each("occupancy against the step", feeding.occupancy_curve, 45),
    *_each("six cameras are fed", training.cameras_are_fed, 90),
    *_each("ResNet-50 is fed", training.resnet_is_fed, 120),
    *_each("contention", feeding.contention, 60),
    *_each("no wait in a step", training.no_wait_in_a_step, 20),
    *_each("graphs beside the loader", feeding.graphs_beside_the_loader, 15),
    Check("ways to compute a step", training.ways_to_compute, 150),
    Check("distillation", training.distillation, 150),
    *_each("ranks of one", training.ranks_of_one, 40),
    *_each("memory stays", feeding.memory_stays, 60),
    *_each("trace of steps", training.trace_of_steps, 15),
    Check("training runs", training.training_runs, 90),
    *_each("batches stay right", device.batches_stay_right, 90),
]
"""All checks, the most valuable first: what a run of ten minutes must show stands before what it may miss."""


class Stopped(BaseException):
    """SIGTERM or SIGINT: the run ends with what it has; ``result`` is that of the check under way."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number).name
        self.result: CheckResult | None = None
        super().__init__(self.signal)


def run_checks(bench: Bench, out: Path, *, only: Sequence[str] = (), seconds: float | None = None) -> GpuCheck:
    """Run the checks in their order, each to its end whatever the others found; write ``out`` after each.

    ``only``: names, or parts of names, of the checks to run. ``seconds``: start no check that would end later than that
    by what it usually takes. On SIGTERM the check under way is recorded as failed, with the facts that it has.
    """
    started_s, machine, results = time.monotonic(), machine_facts(), list[CheckResult]()
    cut_off: str | None = None

    def result() -> GpuCheck:
        return GpuCheck(
            schema=SCHEMA,
            version=VERSION,
            created=created_now(),
            device=str(bench.device),
            machine=machine,
            cut_off=cut_off,
            checks=results,
        )

    with _signals_stop():
        for check in CHECKS:
            if only and not any(name in check.name for name in only):
                continue
            left_s = None if seconds is None else seconds - (time.monotonic() - started_s)
            if left_s is not None and left_s < check.seconds:
                problem = f"it takes about {check.seconds:.0f} s, and {max(0.0, left_s):.0f} s are left"
                results.append(CheckResult(name=check.name, outcome="not run", seconds=0.0, facts={}, problem=problem))
            else:
                try:
                    results.append(_run(bench, check))
                except Stopped as stopped:
                    cut_off = f"{stopped.signal} during '{check.name}'"
                    assert stopped.result is not None, "a check records what it has"
                    results.append(stopped.result)
            publish_json(out, result())
            _say(results[-1])
            if cut_off is not None:
                break
    return result()


def _run(bench: Bench, check: Check) -> CheckResult:
    """Run one check. Raises Stopped, with the result so far, on a signal."""
    started_s = time.monotonic()
    problem: str | None = None
    facts: dict[str, Any] = {}
    stopped: Stopped | None = None
    try:
        check.run(bench, facts)
    except (CheckFailed, FuelrailError) as error:
        problem = str(error)
    except Stopped as error:
        problem, stopped = f"stopped by {error}", error
    except Exception:  # noqa: BLE001 - one broken check must not hide what the others find
        problem = traceback.format_exc(limit=-3)
    made = CheckResult(
        name=check.name,
        outcome="passed" if problem is None else "failed",
        seconds=round(time.monotonic() - started_s, 2),
        facts=facts,
        problem=problem,
    )
    if stopped is not None:
        stopped.result = made
        raise stopped
    return made


def _say(made: CheckResult) -> None:
    sys.stdout.write(f"{made.outcome:8}{made.name} ({made.seconds:.1f} s) {made.problem or made.facts}\n")
    sys.stdout.flush()


@contextmanager
def _signals_stop() -> Iterator[None]:
    """Turn SIGTERM and SIGINT into Stopped, which no check takes for a failure of its own."""

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - as signal calls it
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def synthesise(folder: Path, *, num_clips: int = 5, num_frames: int = 10, size: str = "480x270") -> Path:
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
    """Check this machine's GPU; 0 if all that ran holds, 1 if something doesn't, 2 if it cannot be checked."""
    parser = argparse.ArgumentParser(prog="gpu-check", description="Check everything that needs a GPU.")
    parser.add_argument("--dataset", type=Path, help="folder of a dataset with boxes (default: a synthetic one)")
    parser.add_argument("--out", type=Path, default=Path("gpu-check.json"), help="result file (default: %(default)s)")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="checks whose names contain one of these")
    parser.add_argument("--seconds", type=float, help="start no check that would end later than this")
    parser.add_argument("--list", action="store_true", help="list the checks, with the seconds that each may take")
    options = parser.parse_args(arguments)
    if options.list:
        sys.stdout.writelines(f"{check.seconds:5.0f} s  {check.name}\n" for check in CHECKS)
        return 0
    unknown = [name for name in options.only if not any(name in check.name for check in CHECKS)]
    if unknown:
        parser.error(f"--only {' '.join(unknown)}: no check has such a name; --list shows all")
    try:
        _require_gpu()
        started_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="fuelrail-gpu-check-") as folder:
            dataset = options.dataset or synthesise(Path(folder))
            bench = Bench(torch.device("cuda", 0), dataset, Path(folder), options.out.parent)
            left_s = None if options.seconds is None else options.seconds - (time.monotonic() - started_s)
            result = run_checks(bench, options.out, only=options.only, seconds=left_s)
    except FuelrailError as error:
        sys.stderr.write(f"gpu-check: {error}\n")
        return 2
    outcomes = [check.outcome for check in result.checks]
    sys.stdout.write(
        f"{outcomes.count('failed')} of {len(outcomes)} checks failed, {outcomes.count('not run')} were not run; "
        f"result in {options.out}\n"
    )
    return 1 if "failed" in outcomes or result.cut_off else 0


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
