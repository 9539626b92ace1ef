"""Are bounds named rightly? Twelve of them put into real runs one at a time, and one run with nothing wrong.

Two ranks train on six cameras of 1600x900 with emulated accelerators slow enough that this machine can feed them; then
something is made slow for real: reads, a server's link, a stage, one rank, the all-reduce. What only a GPU has (the
copy, launches, decoding beside the training) is made slow in the emulation. `bench diagnose` must name each. With
``--apply`` it also tries its advice, as far as settings of the trainer go; what came of that is kept, and printed as a
table.

    python -m fuelrail.bench.micro.bottlenecks --apply --out bench/results/bottlenecks.json [--only NAME ...]
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fuelrail.bench.gpu.cameras import write_cameras
from fuelrail.bench.measure.machine import MachineFacts, machine_facts
from fuelrail.bench.micro.runs import made_profile
from fuelrail.bench.report.files import publish_json
from fuelrail.bench.report.markdown import table
from fuelrail.bench.studies.diagnose.command import trial_lines
from fuelrail.bench.studies.diagnose.report import Tried, best
from fuelrail.bench.studies.diagnose.run import diagnose
from fuelrail.bench.trainer.injection import Injection, compute_in_python
from fuelrail.pipeline.errors import FuelrailError
from support.fault_server import FaultServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_NUM_SAMPLES = 96
# One sample of a rank a step; this machine's loader needs a third of the time for one.
_PROFILE = made_profile("40-ms", "a GPU that takes 40 ms a sample", forward_ms=13.0, backward_ms=26.0, optimiser_ms=1.0)
_TRANSFORM_S = 0.07


def slow_transform(sample: dict[str, Any]) -> dict[str, Any]:
    """A user's function that takes 70 ms of Python a sample."""
    compute_in_python(_TRANSFORM_S)
    return sample


@dataclass(frozen=True, slots=True)
class Case:
    """A bound put into a run: what `diagnose` must call it, and how it is made."""

    bound: str
    how: str
    settings: dict[str, Any] = field(default_factory=dict)
    profile: dict[str, Any] = field(default_factory=dict)
    server: dict[str, Any] | None = None
    num_shards: int = 8


_MB = 1e6
_TRANSFORM = f"fuelrail.bench.micro.bottlenecks:{slow_transform.__name__}"
CASES = {
    "healthy": Case("compute", "nothing"),
    "storage": Case("storage", "each read takes 60 ms longer", {"storage": "pread", "inject": Injection(read=60)}),
    "cold cache": Case(
        "cold cache",
        "the first read of each place takes 60 ms longer",
        {"storage": "pread", "inject": Injection(read=60, cold_only=True)},
    ),
    "network": Case("network", "an HTTP server that sends 20 MB/s in all", server={"bytes_per_s": 20 * _MB}),
    "too few shards": Case(
        "too few shards",
        "two shards on an HTTP server that sends 10 MB/s of each file",
        server={"bytes_per_s": 10 * _MB, "each_file": True},
        num_shards=2,
    ),
    "decompression": Case(
        "decompression", "parsing takes 70 ms of CPU more a sample", {"inject": Injection(stage_cpu={"parse": 70})}
    ),
    "CPU decode": Case(
        "CPU decode", "an accelerator ten times as fast", profile={"forward_ms": 1.3, "backward_ms": 2.6}
    ),
    "Python": Case("Python", "a transform of 70 ms of Python", {"transform": _TRANSFORM}),
    "host to device": Case("host to device", "a bus of 0.16 GB/s (emulated)", profile={"copy_gb_per_s": 0.16}),
    "GPU decode contention": Case(
        "GPU decode contention",
        "decoding takes 15 ms of the device a sample (emulated)",
        profile={"gpu_decode_ms": 15.0},
    ),
    "kernel launches": Case(
        "kernel launches", "3000 launches of 20 us a step (emulated)", profile={"num_kernels": 3000, "launch_us": 20.0}
    ),
    "all-reduce": Case("all-reduce", "each step's all-reduce takes 20 ms longer", {"inject": Injection(all_reduce=20)}),
    "slow rank": Case(
        "slow rank", "rank 1 needs 40 ms of the host in each forward pass", {"inject": Injection(forward=40, rank=1)}
    ),
}


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """One case: what was put in, what was found, the gain that was expected, and what trying the advice brought."""

    name: str
    injected: str
    expected: str
    found: str
    finding: str
    advice: str
    occupancy: float
    step_ms: float
    expected_gain: float
    gains: dict[str, float]
    tried: list[Tried] | None

    @property
    def right(self) -> bool:
        """Whether it was named rightly."""
        return self.found == self.expected


class Bottlenecks(msgspec.Struct, frozen=True, kw_only=True):
    """The result file."""

    benchmark: str
    machine: MachineFacts
    cases: list[Judged]


def judge(name: str, folder: Path, *, apply: bool, steps: int) -> Judged:
    """Make one case's runs and have them diagnosed."""
    case = CASES[name]
    dataset = folder / f"cameras-{case.num_shards}"
    if not dataset.exists():
        write_cameras(dataset, _NUM_SAMPLES, num_shards=case.num_shards)
    with _served(dataset, case) as place:
        result = diagnose(
            place, out=folder / name.replace(" ", "-"), html=False, apply=apply, ranks=2, batch_size=1, steps=steps,
            model="light", workers=1, profile=msgspec.structs.replace(_PROFILE, **case.profile), **case.settings,
        )  # fmt: skip
    diagnosis = result.diagnosis
    if diagnosis is None or result.cut_off is not None:
        raise FuelrailError(f"{name}: {result.cut_off}")
    return Judged(
        name=name,
        injected=case.how,
        expected=case.bound,
        found=diagnosis.bound,
        finding=diagnosis.finding,
        advice=diagnosis.advice,
        occupancy=diagnosis.occupancy,
        step_ms=diagnosis.step_ms,
        expected_gain=diagnosis.expected_gain,
        gains={entry.left_out: entry.gain for entry in diagnosis.counterfactuals},
        tried=result.tried,
    )


@contextlib.contextmanager
def _served(dataset: Path, case: Case) -> Iterator[Path | str]:
    if case.server is None:
        yield dataset
        return
    with FaultServerProcess(dataset, **case.server) as server:
        yield server.url


def rendered(cases: Sequence[Judged]) -> list[str]:
    """The cases as a table's lines (Markdown)."""
    rows = []
    for case in cases:
        winner = best(case.tried or [])
        came = "not tried" if case.tried is None else "nothing to try" if not case.tried else "nothing tried helps"
        if winner is not None:
            came = f"{winner.options}: {winner.gain:+.0%} ({winner.gain_low:+.0%} to {winner.gain_high:+.0%})"
        others = [f"{entry.options}: {entry.gain:+.0%}" for entry in case.tried or [] if entry is not winner]
        named = case.found if case.right else f"WRONG: {case.found}"
        gain = f"{case.expected_gain:+.0%}" if case.expected_gain else ""
        rows.append([case.injected, named, f"{case.step_ms:.0f}", gain, came, "; ".join(others)])
    return table(("put in", "named", "step ms", "gain if lifted", "best of what was tried", "also tried"), rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Put the bounds in, print what was found; 1 if one was not named rightly."""
    parser = argparse.ArgumentParser(prog="python -m fuelrail.bench.micro.bottlenecks", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result as JSON; cases already there stay")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), metavar="NAME")
    parser.add_argument("--apply", action="store_true", help="also try what may help")
    parser.add_argument("--steps", type=int, default=34, help="of each run, 10 of them warm-up (default: %(default)s)")
    options = parser.parse_args(argv)
    judged: dict[str, Judged] = {}
    if options.out is not None and options.out.exists():
        before = msgspec.json.decode(options.out.read_bytes(), type=Bottlenecks)
        judged = {case.name: case for case in before.cases}
    with tempfile.TemporaryDirectory(prefix="fuelrail-bottlenecks-") as folder:
        for name in options.only:
            found = judged[name] = judge(name, Path(folder), apply=options.apply, steps=options.steps)
            gains = ", ".join(f"{what} {gain:+.0%}" for what, gain in found.gains.items())
            print(f"{'ok   ' if found.right else 'WRONG'} {name}: {found.found} ({gains})", flush=True)  # noqa: T201
            for line in trial_lines(found.tried):
                print(f"      {line}", flush=True)  # noqa: T201
            if options.out is not None:
                cases = [judged[name] for name in CASES if name in judged]
                publish_json(options.out, Bottlenecks(benchmark="bottlenecks", machine=machine_facts(), cases=cases))
    print("\n".join(rendered([judged[name] for name in CASES if name in judged])))  # noqa: T201
    return 0 if all(judged[name].right for name in options.only) else 1


if __name__ == "__main__":
    sys.exit(main())
