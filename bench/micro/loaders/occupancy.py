"""Occupancy against demand: does the loader keep accelerators busy up to its capacity, and fall as theory says behind?

Two ranks train on six cameras of 1600x900 with emulated accelerators. Two references are measured, by runs of their
own that lie between the checked ones, since this machine's speed drifts:

- *alone*: batches taken and dropped as fast as they come, each rank for itself: the loader's own capacity.
- *in step*: the same training with accelerators that take no time. A step lasts T_load: until the slower of the two
  ranks has its batch, and with what the trainer itself takes of the CPUs that decode.

An accelerator that computes for T_compute a step, beside a loader that works meanwhile, makes steps as long as the
longer of both: the bound of any two stages that overlap, known as the roofline (Williams, Waterman, Patterson 2009,
doi:10.1145/1498765.1498785). With busy time over wall time, as MLPerf Storage defines its utilisation,

    occupancy = T_compute / max(T_compute, T_load) = min(1, capacity in step / demand)

T_load never comes from the run that is checked, but from those right before and behind it. What must hold, over all
rounds: at least 0.99 up to a demand of 0.9 of the capacity *alone*, which is the larger one; within 2 % of theory from
1.1 of the capacity in step on. A run's speed differs by some percent from the next one's on a virtual machine, so it
takes rounds to tell that.

    python -m fuelrail.bench.micro.loaders.occupancy --rounds 3 --out bench/results/occupancy.json [--add]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from fuelrail.bench.measure.machine import MachineFacts, machine_facts
from fuelrail.bench.measure.rates import Interval, ratio_interval
from fuelrail.bench.micro.profiles import made_profile
from fuelrail.bench.report.files import publish_json
from fuelrail.bench.studies.train.run import TrainRun, measure_all
from fuelrail.bench.studies.train.settings import TrainOptions
from fuelrail.pipeline.errors import FuelrailError
from support.cameras import write_cameras

if TYPE_CHECKING:
    from fuelrail.bench.measure.machine import CpuUse
    from fuelrail.bench.studies.train.report import Report

DEMANDS = (0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)
FED_UP_TO, FED = 0.9, 0.99
THEORY_FROM, THEORY_WITHIN = 1.1, 0.02
_NUM_RANKS = 2
# As in published trainings of such models a step lasts a few tenths of a second, which is what hides a link's latency.
_BATCH_SIZE = 24
_FORWARD_SHARE = 1 / 3
_BUCKET_MIB = 0.004  # a quarter of the model, so that its all-reduce overlaps as that of a real one does
_INSTANT_MS = 1e-6
_GUESS_SAMPLES_PER_S = 60.0

Reference = Literal["alone", "in step"]


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One run. ``asked``: the demand as it was planned; ``demand``: in parts of the capacity around it.

    ``reference`` says which capacity: the loader's alone where all demand must be met, in step beyond.
    """

    asked: float
    demand: float
    demand_samples_per_s: float
    reference: Reference
    capacity_samples_per_s: float
    occupancy: float
    theory: float
    num_steps: int
    data_wait_share: float
    all_reduce_share: float
    other_share: float
    overshoot_share: float
    overrun_share: float


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """All runs of one planned demand: means, and occupancy over theory (geometric mean, 95 % interval)."""

    asked: float
    reference: Reference
    demand: float
    occupancy: float
    lowest: float
    theory: float
    of_theory: Interval

    @property
    def verdict(self) -> str:
        """Whether it is as it must be; empty between the two regions."""
        if self.asked <= FED_UP_TO:
            return "holds" if self.occupancy >= FED else "TOO LOW"
        if self.asked >= THEORY_FROM:
            return "holds" if abs(self.of_theory.median - 1) <= THEORY_WITHIN else "OFF"
        return ""


class OccupancySweep(msgspec.Struct, frozen=True, kw_only=True):
    """The result file. ``others_cpus``: mean CPUs that other processes used during the run."""

    benchmark: str
    machine: MachineFacts
    others_cpus: float | None
    num_ranks: int
    batch_size: int
    capacities_samples_per_s: dict[Reference, list[float]]
    levels: list[Level]
    points: list[Point]


def levels_of(points: Sequence[Point]) -> list[Level]:
    """The runs by planned demand."""
    found = []
    for asked in sorted({point.asked for point in points}):
        runs = [point for point in points if point.asked == asked]
        found.append(
            Level(
                asked=asked,
                reference=runs[0].reference,
                demand=statistics.mean(run.demand for run in runs),
                occupancy=statistics.mean(run.occupancy for run in runs),
                lowest=min(run.occupancy for run in runs),
                theory=statistics.mean(run.theory for run in runs),
                of_theory=ratio_interval([run.occupancy / run.theory for run in runs]),
            )
        )
    return found


def sweep(folder: Path, demands: Sequence[float], seconds: float, capacity: float | None = None) -> OccupancySweep:
    """Measure; ``seconds`` is about how long each run's measured window lasts.

    ``capacity`` is a first guess, which saves its own run; what counts is measured right before and behind each point.
    """
    dataset = folder / "cameras"
    write_cameras(dataset, 96)
    if capacity is None:
        first = measure_all([_run(dataset, folder / "first", "in step", _GUESS_SAMPLES_PER_S, seconds)])
        capacity = _rate(first.reports[0])
    plan: list[Reference | float] = []
    for demand in demands:
        reference = _reference(demand)
        if not plan or plan[-1] != reference:
            plan.append(reference)
        plan += [demand, reference]
    runs = [_run(dataset, folder / f"run-{number}", what, capacity, seconds) for number, what in enumerate(plan)]
    reports, cut_off, _ = measure_all(runs)
    if cut_off is not None:
        raise FuelrailError(f"the sweep was cut off: {cut_off}")
    capacities: dict[Reference, list[float]] = {"alone": [], "in step": []}
    points = []
    for number, (what, report) in enumerate(zip(plan, reports, strict=True)):
        if isinstance(what, str):
            capacities[what].append(_rate(report))
        else:
            around = (_rate(reports[number - 1]) + _rate(reports[number + 1])) / 2
            points.append(_point(report, what, around))
    cpu: CpuUse | None = reports[0].cpu
    return OccupancySweep(
        benchmark="occupancy",
        machine=machine_facts(),
        others_cpus=None if cpu is None else cpu.others,
        num_ranks=_NUM_RANKS,
        batch_size=_BATCH_SIZE,
        capacities_samples_per_s=capacities,
        levels=levels_of(points),
        points=points,
    )


def _reference(demand: float) -> Reference:
    return "alone" if demand <= FED_UP_TO else "in step"


def _run(dataset: Path, folder: Path, what: Reference | float, capacity: float, seconds: float) -> TrainRun:
    """A run that asks for that many times the capacity, or one that measures it."""
    rate = capacity if isinstance(what, str) else capacity * min(1.0, what)
    steps_per_s = rate / _NUM_RANKS / _BATCH_SIZE
    folder.mkdir()
    # Batches prefetched before the window must not feed a notable part of it: use them up first.
    warmup = 4
    steps = warmup + max(10, round(seconds * steps_per_s))
    options = TrainOptions(
        ranks=_NUM_RANKS, batch_size=_BATCH_SIZE, steps=steps, warmup=warmup, model="light", bucket_mib=_BUCKET_MIB
    )
    if what == "alone":
        return TrainRun(dataset, msgspec.structs.replace(options, leave_out=("training",)), folder / "records")
    if isinstance(what, str):
        optimiser_ms = phases_ms = _INSTANT_MS
    else:
        optimiser_ms = 1.0
        phases_ms = 1e3 * _NUM_RANKS / (what * capacity) - optimiser_ms / _BATCH_SIZE
    profile = made_profile(
        f"demand-{what}",
        "a GPU that takes that much",
        forward_ms=_FORWARD_SHARE * phases_ms,
        backward_ms=(1.0 - _FORWARD_SHARE) * phases_ms,
        optimiser_ms=optimiser_ms,
        derivation="The loader's measured capacity times the demand.",
    )
    return TrainRun(dataset, msgspec.structs.replace(options, profile=profile), folder / "records")


def _rate(report: Report) -> float:
    if report.figures is None:
        raise FuelrailError(f"no figures: {report.cut_off or report.window.too_short}")
    return report.figures.throughput.samples_per_s


def _point(report: Report, asked: float, capacity: float) -> Point:
    figures = report.figures
    if figures is None:
        raise FuelrailError(f"no figures: {report.cut_off or report.window.too_short}")
    shares = {phase.phase: phase.share for phase in figures.phases}
    demand_samples_per_s = figures.throughput.demand_samples_per_s
    return Point(
        asked=asked,
        demand=demand_samples_per_s / capacity,
        demand_samples_per_s=demand_samples_per_s,
        reference=_reference(asked),
        capacity_samples_per_s=capacity,
        occupancy=figures.occupancy.mean,
        theory=min(1.0, capacity / demand_samples_per_s),
        num_steps=report.window.num_measured_steps,
        data_wait_share=shares["data_wait"],
        all_reduce_share=shares["all_reduce"],
        other_share=shares["other"],
        overshoot_share=figures.overshoot_share,
        overrun_share=figures.overrun_share,
    )


def render(result: OccupancySweep) -> str:
    """The result as text."""
    others = "unknown" if result.others_cpus is None else f"{result.others_cpus:.2f}"
    lines = [f"{result.num_ranks} ranks; CPUs that others used: {others}"]
    lines += [
        f"capacity {reference}: {statistics.mean(found):.1f} samples/s, measured {len(found)} times, "
        f"{min(found):.1f} to {max(found):.1f}"
        for reference, found in result.capacities_samples_per_s.items()
        if found
    ]
    lines.append("demand  of capacity  rounds  occupancy  lowest  theory  off      95 % interval")
    for level in result.levels:
        ratio = level.of_theory
        interval = f"{ratio.low - 1:+6.1%} to {ratio.high - 1:+6.1%}" if ratio.has_interval else "none"
        lines.append(
            f"{level.demand:6.2f}  {level.reference:11}  {ratio.num_repeats:6}  {level.occupancy:9.4f}"
            f"  {level.lowest:.4f}  {level.theory:.4f}  {ratio.median - 1:+6.1%}"
            f"  {interval:16}  {level.verdict}"
        )
    return "\n".join(lines)


def save_plot(result: OccupancySweep, path: Path) -> None:
    """Occupancy over demand beside theory, as SVG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    last = max([2.1, *(point.demand for point in result.points)])
    grid = [0.4 + 0.01 * number for number in range(int((last - 0.4) / 0.01) + 2)]
    axes.plot(grid, [min(1, 1 / demand) for demand in grid], color="#888", label="theory: min(1, capacity / demand)")
    for reference, marker in (("alone", "o"), ("in step", "s")):
        points = [point for point in result.points if point.reference == reference]
        at, found = [point.demand for point in points], [point.occupancy for point in points]
        axes.plot(at, found, marker, color="#1668a7", markersize=4, alpha=0.5, label=f"a run; capacity {reference}")
    means = [level for level in result.levels if level.of_theory.num_repeats > 1]
    if means:
        at, found = [level.demand for level in means], [level.occupancy for level in means]
        axes.plot(at, found, "_", color="#c33", markersize=16, markeredgewidth=2, label="mean of the runs")
    axes.set(xlabel="demand / capacity", ylabel="occupancy", ylim=(0, 1.05))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, format="svg", metadata={"Date": None})


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; 1 if a demand is not met as it must be."""
    parser = argparse.ArgumentParser(prog="python -m fuelrail.bench.micro.loaders.occupancy", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result as JSON, and a plot beside it")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each run (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="over all demands (default: %(default)s)")
    parser.add_argument("--demands", type=float, nargs="+", default=list(DEMANDS), help="in parts of the capacity")
    parser.add_argument("--capacity", type=float, help="first guess of the capacity, in samples/s")
    parser.add_argument("--add", action="store_true", help="to the points that the result file has already")
    parser.add_argument("--quick", action="store_true", help="two demands of a second, to see that it runs")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="fuelrail-occupancy-") as folder:
        demands, seconds = ((0.5, 2.0), 1.0) if options.quick else (options.demands * options.rounds, options.seconds)
        result = sweep(Path(folder), demands, seconds, options.capacity)
    if options.add:
        before = msgspec.json.decode(options.out.read_bytes(), type=OccupancySweep)
        points = before.points + result.points
        capacities = {
            reference: before.capacities_samples_per_s[reference] + found
            for reference, found in result.capacities_samples_per_s.items()
        }
        result = msgspec.structs.replace(
            result, capacities_samples_per_s=capacities, points=points, levels=levels_of(points)
        )
    print(render(result))  # noqa: T201
    if options.out is not None:
        publish_json(options.out, result)
        save_plot(result, options.out.with_suffix(".svg"))
    return 1 if any(level.verdict in ("TOO LOW", "OFF") for level in result.levels) else 0


if __name__ == "__main__":
    sys.exit(main())
