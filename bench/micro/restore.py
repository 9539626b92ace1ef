"""Restoring a loader: seconds to the first batch, cold and at 1, 50 and 99 % of an epoch, for Fuelrail and its peers.

``python -m fuelrail.bench.micro.restore WORK [--samples N] [--loaders NAME ...] [--dataset OUT] [--out FILE]``.

Each loader first runs its epoch up to 99 %, saving its state at each point and the batch that comes next. Then every
start is a process of its own, the loaders taking turns; the time runs from the imports' end to the first batch, which
is compared with the one that the uninterrupted epoch had. Data lies in the page cache.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

from fuelrail.bench.measure.machine import MachineFacts, machine_facts
from fuelrail.bench.micro.restore_loaders import KINDS, remove
from fuelrail.bench.report.files import publish_json
from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

POINTS = (0.0, 0.01, 0.5, 0.99)
"""Fractions of the epoch that were consumed; 0: a cold start, without a state."""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """Starts at one point: time to the first batch [s], and whether that batch was always the right one."""

    fraction: float
    first_batch_s: list[float]
    cpu_s: list[float]
    """CPU time of the same starts, all threads [s]: what a busy machine disturbs less."""
    median_s: float
    median_cpu_s: float
    exact: bool
    state_bytes: int


class LoaderRestore(msgspec.Struct, frozen=True, kw_only=True):
    """One loader; ``failure`` says why where it has no figures."""

    name: str
    versions: dict[str, str]
    starts: list[Start]
    failure: str | None = None


class RestoreReport(msgspec.Struct, frozen=True, kw_only=True):
    """All loaders and the machine."""

    benchmark: str
    machine: MachineFacts
    num_samples: int
    loaders: list[LoaderRestore]


def main(argv: Sequence[str] | None = None) -> int:
    """Write the data, run the epochs, measure the starts; print a table and, with ``--out``, write the report."""
    parser = argparse.ArgumentParser(prog="python -m fuelrail.bench.micro.restore")
    parser.add_argument("work", type=Path, metavar="WORK", help="folder for the data sets; kept, and used again")
    parser.add_argument("--samples", type=int, default=1_000_000, help="samples of an epoch (default: %(default)s)")
    standard = [name for name in KINDS if name != "fuelrail-images"]
    parser.add_argument("--loaders", nargs="+", choices=list(KINDS), default=standard, help="default: %(default)s")
    parser.add_argument("--dataset", metavar="OUT", help="Fuelrail dataset whose images fuelrail-images decodes")
    parser.add_argument("--rounds", type=int, default=3, help="starts at each point (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--child", nargs=2, metavar=("NAME", "DOING"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        print(json.dumps(_child(options)))  # noqa: T201
        return 0
    report = measure(options)
    _print(report)
    if options.out is not None:
        publish_json(options.out, report)
    return 0


def measure(options: argparse.Namespace) -> RestoreReport:
    """Prepare all loaders, then measure their starts in turns."""
    prepared: dict[str, dict[str, Any]] = {}
    for name in options.loaders:
        prepared[name] = {}
        if not (options.work / name / "written").exists():
            remove(options.work / name)
            prepared[name] = _run(options, name, "write")
        if "failure" not in prepared[name] and not (options.work / name / "states" / f"{POINTS[-1]}.json").exists():
            prepared[name] = _run(options, name, "epoch")
    starts: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for turn in range(options.rounds):
        for fraction in POINTS if turn % 2 == 0 else POINTS[::-1]:
            for name in options.loaders:
                if "failure" not in prepared[name]:
                    starts.setdefault((name, fraction), []).append(_run(options, name, f"start:{fraction}"))
    loaders = []
    for name in options.loaders:
        known = prepared[name]
        found = {fraction: starts.get((name, fraction), []) for fraction in POINTS}
        failure = known.get("failure") or next(
            (s["failure"] for f in found.values() for s in f if "failure" in s), None
        )
        loaders.append(
            LoaderRestore(
                name=name,
                versions={package: importlib.metadata.version(package) for package in KINDS[name].packages},
                failure=failure,
                starts=[] if failure else [_summary(fraction, runs) for fraction, runs in found.items()],
            )
        )
    return RestoreReport(benchmark="restore", machine=machine_facts(), num_samples=options.samples, loaders=loaders)


def _summary(fraction: float, runs: list[dict[str, Any]]) -> Start:
    times, cpu_s = [run["first_batch_s"] for run in runs], [run["cpu_s"] for run in runs]
    return Start(
        fraction=fraction,
        first_batch_s=times,
        cpu_s=cpu_s,
        median_s=median(times),
        median_cpu_s=median(cpu_s),
        exact=all(run["exact"] for run in runs),
        state_bytes=runs[0]["state_bytes"],
    )


def _run(options: argparse.Namespace, name: str, doing: str) -> dict[str, Any]:
    """One child process; what it prints last is its answer, and a failure is one too."""
    command = [
        sys.executable,
        "-m",
        "fuelrail.bench.micro.restore",
        str(options.work),
        "--samples",
        str(options.samples),
    ]
    command += ["--child", name, doing, *(["--dataset", options.dataset] if options.dataset else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        print(f"{name}, {doing}: {lines[-1]}", file=sys.stderr)  # noqa: T201
        return {"failure": f"{doing}: {lines[-1]}"}
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def _child(options: argparse.Namespace) -> dict[str, Any]:
    name, doing = options.child
    kind, folder = KINDS[name], options.work / name
    data, states = folder / "data", folder / "states"
    if doing == "write":
        kind.write(data, options.samples, options.dataset)
        (folder / "written").touch()
        return {}
    if doing == "epoch":
        return _epoch(name, data, states, options.samples)
    fraction = float(doing.partition(":")[2])
    saved = json.loads((states / f"{fraction}.json").read_text())
    for module in kind.modules:
        import_module(module)
    started, started_cpu = time.perf_counter(), time.process_time()
    loader = kind.start(data, saved["state"])
    first = next(iter(loader.batches()))
    took, took_cpu = time.perf_counter() - started, time.process_time() - started_cpu
    return {
        "first_batch_s": took,
        "cpu_s": took_cpu,
        "exact": first == saved["next"],
        "state_bytes": 0 if saved["state"] is None else len(json.dumps(saved["state"])),
    }


def _epoch(name: str, data: Path, states: Path, num_samples: int) -> dict[str, Any]:
    """Run an epoch up to its last point, saving the state at each and the batch that followed it."""
    states.mkdir(parents=True, exist_ok=True)
    told = {fraction: KINDS[name].point(data, int(fraction * num_samples)) for fraction in POINTS}
    for fraction, point in told.items():
        if point is not None:
            _save(states, fraction, point[0] if fraction else None, point[1])
    if None not in told.values():
        return {}
    loader = KINDS[name].start(data, None)
    consumed, pending, state = 0, None, None
    left = list(POINTS)
    for batch in loader.batches():
        if pending is not None:
            _save(states, pending, state, batch)
            pending = None
        elif consumed == 0:
            _save(states, left.pop(0), None, batch)
        consumed += len(batch)
        if left and consumed >= left[0] * num_samples:
            pending, state = left.pop(0), loader.state()
        elif not left and pending is None:
            break
    if left or pending is not None:
        raise ConfigError(f"{name} ended its epoch after {consumed} of {num_samples} samples")
    return {}


def _save(states: Path, fraction: float, state: dict[str, Any] | None, following: list[int]) -> None:
    (states / f"{fraction}.json").write_text(json.dumps({"state": state, "next": following}))


def _print(report: RestoreReport) -> None:
    print(f"first batch after a restore, {report.num_samples:,} samples an epoch, on {report.machine.cpu}")  # noqa: T201
    print(f"{'':28}" + "".join(f"{'cold' if not f else f'{f:.0%}':>12}" for f in POINTS) + "   exact")  # noqa: T201
    for loader in report.loaders:
        if loader.failure:
            print(f"{loader.name:28}{loader.failure}")  # noqa: T201
            continue
        exact = "yes" if all(start.exact for start in loader.starts) else "no"
        for what, times in (
            ("", [s.median_s for s in loader.starts]),
            (" (CPU)", [s.median_cpu_s for s in loader.starts]),
        ):
            print(f"{loader.name + what:28}" + "".join(f"{t:10.3f} s" for t in times) + f"   {exact}")  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
