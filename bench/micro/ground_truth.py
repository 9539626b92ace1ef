"""The harness's own error: stalls of known length put into real runs, against what the report makes of them.

Two ranks train on emulated accelerators, with batches from memory. One run is as it is; in the others one phase of
every step is stalled by a known time on the host's own clock, or one stage of the loader delivers a sample every so
many milliseconds. The truth of a stalled run is the undisturbed run's step plus what was put in, so that what this
machine itself needs (a real all-reduce, the stand-in's set-up) is on both sides. Then what the harness's book-keeping
itself costs: the same steps with and without it, in turns.

Must hold: occupancy within a percentage point, phases within 3 %, book-keeping under 1 % of a step.

    python -m fuelrail.bench.micro.ground_truth --out bench/results/ground_truth.json
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from fuelrail.bench.gpu.cameras import write_cameras
from fuelrail.bench.measure.accelerator import EmulatedAccelerator
from fuelrail.bench.measure.clock import MonotonicClock
from fuelrail.bench.measure.machine import MachineFacts, machine_facts
from fuelrail.bench.measure.records import RankWriter
from fuelrail.bench.micro.runs import made_profile
from fuelrail.bench.report.files import publish_json
from fuelrail.bench.studies.train.run import TrainRun, measure_all
from fuelrail.bench.trainer.injection import Injection
from fuelrail.bench.trainer.loop import train
from fuelrail.bench.trainer.models.settings import MODELS
from fuelrail.bench.trainer.settings import TrainOptions
from fuelrail.bench.trainer.strategies.parallel import build, parallelise
from fuelrail.bench.trainer.strategies.settings import Degrees, ParallelSettings
from fuelrail.loaders import DataLoader
from fuelrail.pipeline.errors import FuelrailError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fuelrail.bench.studies.train.report import Figures, Report

_NUM_RANKS = 2
_FROM_MEMORY = ("loading",)
_WARMUP = 5
_STALL_MS = 30.0
_PROFILE = made_profile("120-ms", "a GPU that takes 120 ms a step", forward_ms=39.0, backward_ms=80.0, optimiser_ms=1.0)
_BUSY_MS = _PROFILE.step_ms(1, 6)
_FORWARD_MS = _PROFILE.forward_ms + _STALL_MS  # in all, of which the emulated phase hides its own part
_COLLATE_MS = 160.0
# Phase: what is injected, and by how much the phase grows from it.
_PHASES: dict[str, tuple[Injection, float]] = {
    "data_wait": (Injection(data_wait=_STALL_MS), _STALL_MS),
    "host_to_device": (Injection(host_to_device=_STALL_MS), _STALL_MS),
    "forward": (Injection(forward=_FORWARD_MS), _STALL_MS),
    "all_reduce": (Injection(all_reduce=_STALL_MS), _STALL_MS),
    "other": (Injection(other=_STALL_MS), _STALL_MS),
}
# What outlasts an emulated phase is time of the host outside the phases.
_GROWS_IN = {"forward": "other"}
OCCUPANCY_WITHIN, PHASE_WITHIN, OVERHEAD_UNDER = 0.01, 0.03, 0.01


class Stalled(msgspec.Struct, frozen=True, kw_only=True):
    """One run: the truth and the report's figures; times are means in milliseconds."""

    name: str
    true_occupancy: float
    occupancy: float
    true_phase_ms: float
    phase_ms: float

    @property
    def holds(self) -> bool:
        """Whether both errors are within what they may be."""
        return (
            abs(self.occupancy - self.true_occupancy) <= OCCUPANCY_WITHIN
            and abs(self.phase_ms / self.true_phase_ms - 1) <= PHASE_WITHIN
        )


class GroundTruth(msgspec.Struct, frozen=True, kw_only=True):
    """The result file. ``book_keeping_ms`` is what the harness adds to a step, ``overhead`` its share of one."""

    benchmark: str
    machine: MachineFacts
    others_cpus: float | None
    undisturbed_step_ms: float
    undisturbed_occupancy: float
    runs: list[Stalled]
    book_keeping_ms: float
    overhead: float


def measure(folder: Path, num_steps: int) -> GroundTruth:
    """Make the runs."""
    dataset = folder / "cameras"
    write_cameras(dataset, 48)
    plan: dict[str, dict[str, Any]] = {"undisturbed": {"leave_out": _FROM_MEMORY}}
    for phase, (inject, _) in _PHASES.items():
        plan[phase] = {"leave_out": _FROM_MEMORY, "inject": inject}
    # A stage of one thread that takes that long for each batch.
    plan["collate"] = {"inject": Injection(stage_lasts={"collate": _COLLATE_MS})}
    options = TrainOptions(
        ranks=_NUM_RANKS, batch_size=1, steps=_WARMUP + num_steps, warmup=_WARMUP, model="light", workers=1,
        profile=_PROFILE,
    )  # fmt: skip
    runs = [
        TrainRun(dataset, msgspec.structs.replace(options, **changes), folder / name / "records")
        for name, changes in plan.items()
    ]
    for run in runs:
        run.records.parent.mkdir()
    reports, cut_off, _ = measure_all(runs)
    if cut_off is not None:
        raise FuelrailError(f"the measurement was cut off: {cut_off}")
    figures = {name: _figures(report) for name, report in zip(plan, reports, strict=True)}
    base = figures["undisturbed"]
    stalled = [_stalled(name, figures[name], base, grows_ms) for name, (_, grows_ms) in _PHASES.items()]
    collate = figures["collate"]
    stalled.append(
        Stalled(
            # A rank that gets its batch sooner than the other waits for it in the all-reduce.
            name="collate: data wait + all-reduce",
            true_occupancy=_BUSY_MS / _COLLATE_MS,
            occupancy=collate.occupancy.mean,
            true_phase_ms=_COLLATE_MS - base.step_time.mean_ms + _waits_ms(base),
            phase_ms=_waits_ms(collate),
        )
    )
    book_keeping_ms = _book_keeping_ms(dataset, folder)
    cpu = reports[0].cpu
    return GroundTruth(
        benchmark="ground_truth",
        machine=machine_facts(),
        others_cpus=None if cpu is None else cpu.others,
        undisturbed_step_ms=base.step_time.mean_ms,
        undisturbed_occupancy=base.occupancy.mean,
        runs=stalled,
        book_keeping_ms=book_keeping_ms,
        overhead=book_keeping_ms / _BUSY_MS,
    )


def _figures(report: Report) -> Figures:
    if report.figures is None:
        raise FuelrailError(f"no figures: {report.window.too_short}")
    return report.figures


def _phase_ms(figures: Figures, name: str) -> float:
    return next(phase.time.mean_ms for phase in figures.phases if phase.phase == name)


def _waits_ms(figures: Figures) -> float:
    return _phase_ms(figures, "data_wait") + _phase_ms(figures, "all_reduce")


def _stalled(name: str, figures: Figures, base: Figures, grows_ms: float) -> Stalled:
    phase = _GROWS_IN.get(name, name)
    return Stalled(
        name=name,
        true_occupancy=_BUSY_MS / (base.step_time.mean_ms + grows_ms),
        occupancy=figures.occupancy.mean,
        true_phase_ms=_phase_ms(base, phase) + grows_ms,
        phase_ms=_phase_ms(figures, phase),
    )


def _book_keeping_ms(dataset: Path, folder: Path, *, num_rounds: int = 9, num_steps: int = 40) -> float:
    """What a step costs more under the harness than bare: the median over rounds that run both in turns."""
    with DataLoader(dataset, 1, num_workers=1) as loader:
        batches = list(itertools.islice(loader, 4))
    torch.set_num_threads(1)
    model = build(MODELS["light"], "cpu", 0)
    instant = msgspec.structs.replace(_PROFILE, forward_ms=1e-6, backward_ms=1e-6, optimiser_ms=1e-6)
    clock = MonotonicClock()

    def bare() -> None:
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for batch in itertools.islice(itertools.cycle(batches), num_steps):
            loss = model(*model.inputs(batch))
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            float(loss.detach())

    def measured() -> None:
        with RankWriter(folder / "book-keeping.jsonl") as writer:
            accelerator = EmulatedAccelerator(instant, clock)
            parallel = parallelise(model, ParallelSettings(), Degrees(), None, batch_size=1)
            for record in train(parallel, itertools.cycle(batches), accelerator, clock, num_steps=num_steps):
                writer.write(record)

    def seconds(work: Any) -> float:  # noqa: ANN401
        started_s = time.perf_counter()
        work()
        return time.perf_counter() - started_s

    bare()
    measured()
    return statistics.median(1e3 * (seconds(measured) - seconds(bare)) / num_steps for _ in range(num_rounds))


def render(result: GroundTruth) -> str:
    """The result as text."""
    others = "unknown" if result.others_cpus is None else f"{result.others_cpus:.2f}"
    head = f"undisturbed: {result.undisturbed_step_ms:.2f} ms a step, occupancy {result.undisturbed_occupancy:.4f}"
    lines = [f"{head}; CPUs that others used: {others}"]
    for run in result.runs:
        error = run.phase_ms / run.true_phase_ms - 1
        phase = f"phase {run.phase_ms:7.2f} ms (truth {run.true_phase_ms:7.2f}, {error:+.2%})"
        lines.append(
            f"{run.name:31} occupancy {run.occupancy:.4f} (truth {run.true_occupancy:.4f}), {phase}  "
            f"{'holds' if run.holds else 'OFF'}"
        )
    verdict = "holds" if result.overhead < OVERHEAD_UNDER else "TOO MUCH"
    lines.append(
        f"book-keeping {result.book_keeping_ms:.3f} ms a step of {_BUSY_MS:g}: {result.overhead:.2%}  {verdict}"
    )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; 1 if an error is larger than it may be."""
    parser = argparse.ArgumentParser(prog="python -m fuelrail.bench.micro.ground_truth", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument("--steps", type=int, default=40, help="measured in each run (default: %(default)s)")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="fuelrail-ground-truth-") as folder:
        result = measure(Path(folder), options.steps)
    print(render(result))  # noqa: T201
    if options.out is not None:
        publish_json(options.out, result)
    return 0 if all(run.holds for run in result.runs) and result.overhead < OVERHEAD_UNDER else 1


if __name__ == "__main__":
    sys.exit(main())
