"""Occupancy against demand: does the loader keep accelerators busy up to its capacity, and fall as theory says behind?

Two ranks train on six cameras of 1600x900 with emulated accelerators. First the loader alone says what both ranks
together can load (the *capacity*: batches taken and dropped as fast as they come), then the accelerators ask for
0.5 to 2 times that, the capacity measured anew in between: this machine's speed may drift. All of it in the same two
processes. A loader that loses nothing gives

    occupancy = min(1, capacity / demand)

and what must hold is: at least 0.99 up to a demand of 0.9, within 2 % of theory from 1.1 on.

    python -m fuelrail.bench.micro.occupancy --out bench/results/occupancy.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fuelrail.bench.accelerator import AcceleratorProfile, ReferenceInput
from fuelrail.bench.files import publish_json
from fuelrail.bench.machine import MachineFacts, machine_facts
from fuelrail.bench.micro.loader_data import write_cameras
from fuelrail.bench.micro.runs import arguments_for
from fuelrail.bench.train_run import TrainRun, measure_all
from fuelrail.pipeline.errors import FuelrailError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fuelrail.bench.cpu_watch import CpuUse
    from fuelrail.bench.train_report import Report

DEMANDS = (0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)
FED_UP_TO, FED = 0.9, 0.99
THEORY_FROM, THEORY_WITHIN = 1.1, 0.02
_NUM_RANKS = 2
# As in published trainings of such models a step lasts a few tenths of a second, which is what hides a link's latency.
_BATCH_SIZE = 24
_POINTS_A_CAPACITY = 3
_FORWARD_SHARE = 1 / 3
_GUESS_SAMPLES_PER_S = 60.0


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One demand: in parts of the capacity measured around it, and in samples/s; what came out and what theory says."""

    demand: float
    demand_samples_per_s: float
    capacity_samples_per_s: float
    occupancy: float
    theory: float
    num_steps: int
    data_wait_share: float
    all_reduce_share: float
    other_share: float
    overshoot_share: float
    overrun_share: float

    @property
    def verdict(self) -> str:
        """Whether it is as it must be; empty between the two regions."""
        if self.demand <= FED_UP_TO + 1e-9:
            return "holds" if self.occupancy >= FED else "TOO LOW"
        if self.demand >= THEORY_FROM - 1e-9:
            return "holds" if abs(self.occupancy / self.theory - 1) <= THEORY_WITHIN else "OFF"
        return ""


class OccupancySweep(msgspec.Struct, frozen=True, kw_only=True):
    """The result file. ``others_cpus``: mean CPUs that other processes used meanwhile."""

    benchmark: str
    machine: MachineFacts
    others_cpus: float | None
    num_ranks: int
    batch_size: int
    capacities_samples_per_s: list[float]
    points: list[Point]


def sweep(folder: Path, demands: Sequence[float], seconds: float, capacity: float | None = None) -> OccupancySweep:
    """Measure; ``seconds`` is about how long each point's measured window lasts.

    ``capacity`` is a first guess, which saves its own run; what counts is measured around each point.
    """
    dataset = folder / "cameras"
    write_cameras(dataset, 96)
    if capacity is None:
        capacity = _capacity(_run(dataset, folder / "first", None, _GUESS_SAMPLES_PER_S, seconds))
    plan: list[float | None] = [None]
    for first in range(0, len(demands), _POINTS_A_CAPACITY):
        plan += [*demands[first : first + _POINTS_A_CAPACITY], None]
    runs = [_run(dataset, folder / f"run-{number}", demand, capacity, seconds) for number, demand in enumerate(plan)]
    reports, outcome = measure_all(runs)
    if len(reports) < len(runs) or reports[-1].cut_off is not None:
        raise FuelrailError(f"the sweep was cut off: {reports[-1].cut_off or outcome}")
    capacities = {
        number: _rate(report)
        for number, (demand, report) in enumerate(zip(plan, reports, strict=True))
        if demand is None
    }
    points = []
    for number, (demand, report) in enumerate(zip(plan, reports, strict=True)):
        if demand is None:
            continue
        before = max(place for place in capacities if place < number)
        after = min(place for place in capacities if place > number)
        points.append(_point(report, demand * capacity, (capacities[before] + capacities[after]) / 2))
    cpu: CpuUse | None = reports[0].cpu
    return OccupancySweep(
        benchmark="occupancy",
        machine=machine_facts(),
        others_cpus=None if cpu is None else cpu.others,
        num_ranks=_NUM_RANKS,
        batch_size=_BATCH_SIZE,
        capacities_samples_per_s=list(capacities.values()),
        points=sorted(points, key=lambda point: point.demand),
    )


def _run(dataset: Path, folder: Path, demand: float | None, capacity: float, seconds: float) -> TrainRun:
    """A run that asks for ``demand`` times the capacity; None: the loader alone."""
    rate = capacity * min(1.0, demand or 1.0)
    steps_per_s = rate / _NUM_RANKS / _BATCH_SIZE
    folder.mkdir()
    # What lay ready when the window opens must not feed a notable part of it: first the stock is used up.
    warmup = 5
    steps = warmup + max(10, round(seconds * steps_per_s))
    arguments = arguments_for(
        dataset,
        ranks=_NUM_RANKS,
        batch_size=_BATCH_SIZE,
        steps=steps,
        warmup=warmup,
        model="light",
    )
    if demand is None:
        return TrainRun(arguments, folder / "records", ("training",))
    sample_ms = 1e3 * _NUM_RANKS / (demand * capacity)
    phases_ms = sample_ms - 1.0 / _BATCH_SIZE  # without the optimiser's
    profile = AcceleratorProfile(
        name=f"demand-{demand:g}",
        device="a GPU that takes that much",
        network="none",
        per="sample",
        reference_input=ReferenceInput(cameras=6, height=256, width=704),
        optimiser_ms=1.0,
        sources=["made for this measurement"],
        derivation="The loader's measured capacity times the demand.",
        forward_ms=_FORWARD_SHARE * phases_ms,
        backward_ms=(1.0 - _FORWARD_SHARE) * phases_ms,
    )
    return TrainRun(arguments, folder / "records", (), profile=profile)


def _capacity(run: TrainRun) -> float:
    report, _ = run.measure()
    return _rate(report)


def _rate(report: Report) -> float:
    if report.figures is None:
        raise FuelrailError(f"no figures: {report.cut_off or report.window.too_short}")
    return report.figures.throughput.samples_per_s


def _point(report: Report, demand_samples_per_s: float, capacity: float) -> Point:
    figures = report.figures
    if figures is None:
        raise FuelrailError(f"no figures: {report.cut_off or report.window.too_short}")
    shares = {phase.phase: phase.share for phase in figures.phases}
    demand = figures.throughput.demand_samples_per_s / capacity
    return Point(
        demand=demand,
        demand_samples_per_s=demand_samples_per_s,
        capacity_samples_per_s=capacity,
        occupancy=figures.occupancy.mean,
        theory=min(1.0, 1 / demand),
        num_steps=report.window.num_measured_steps,
        data_wait_share=shares["data_wait"],
        all_reduce_share=shares["all_reduce"],
        other_share=shares["other"],
        overshoot_share=figures.overshoot_share,
        overrun_share=figures.overrun_share,
    )


def render(result: OccupancySweep) -> str:
    """The result as text."""
    capacity = statistics.mean(result.capacities_samples_per_s)
    spread = max(result.capacities_samples_per_s) / min(result.capacities_samples_per_s) - 1
    others = "unknown" if result.others_cpus is None else f"{result.others_cpus:.2f}"
    head = (
        f"capacity {capacity:.1f} samples/s on {result.num_ranks} ranks, measured "
        f"{len(result.capacities_samples_per_s)} times, spread {spread:.1%}; CPUs that others used: {others}"
    )
    lines = [
        head,
        "demand  occupancy  theory   data wait  all-reduce  other  woke late",
    ]
    lines += [
        f"{point.demand:6.2f}  {point.occupancy:9.4f}  {point.theory:6.4f}  {point.data_wait_share:9.2%}"
        f"  {point.all_reduce_share:9.2%} {point.other_share:6.2%}  {point.overshoot_share:8.2%}  {point.verdict}"
        for point in result.points
    ]
    return "\n".join(lines)


def save_plot(result: OccupancySweep, path: Path) -> None:
    """Occupancy over demand beside theory, as SVG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    grid = [0.4 + 0.01 * number for number in range(171)]
    axes.plot(grid, [min(1, 1 / demand) for demand in grid], color="#888", label="theory: min(1, capacity / demand)")
    points = result.points
    axes.plot([p.demand for p in points], [p.occupancy for p in points], "o", color="#1668a7", label="measured")
    axes.set(xlabel="demand / the loader's own capacity", ylabel="occupancy", ylim=(0, 1.05))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, format="svg", metadata={"Date": None})


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; 1 if a point is not as it must be."""
    parser = argparse.ArgumentParser(prog="python -m fuelrail.bench.micro.occupancy", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result as JSON, and a plot beside it")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each point (default: %(default)s)")
    parser.add_argument("--demands", type=float, nargs="+", default=DEMANDS, help="in parts of the capacity")
    parser.add_argument("--capacity", type=float, help="first guess of the capacity, in samples/s")
    parser.add_argument("--add", action="store_true", help="to the points that the result file has already")
    parser.add_argument("--quick", action="store_true", help="two points of a second, to see that it runs")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="fuelrail-occupancy-") as folder:
        demands, seconds = ((0.5, 2.0), 1.0) if options.quick else (options.demands, options.seconds)
        result = sweep(Path(folder), demands, seconds, options.capacity)
    if options.add:
        before = msgspec.json.decode(options.out.read_bytes(), type=OccupancySweep)
        result = msgspec.structs.replace(
            result,
            capacities_samples_per_s=before.capacities_samples_per_s + result.capacities_samples_per_s,
            points=sorted(before.points + result.points, key=lambda point: point.demand),
        )
    print(render(result))  # noqa: T201
    if options.out is not None:
        publish_json(options.out, result)
        save_plot(result, options.out.with_suffix(".svg"))
    return 1 if any(point.verdict in ("TOO LOW", "OFF") for point in result.points) else 0


if __name__ == "__main__":
    sys.exit(main())
