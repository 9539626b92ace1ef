"""The page of a scaling report."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from fuelrail.bench.report.page import facts, figure, head, hero, note, page, table
from fuelrail.bench.report.plots import PercentFormatter, legend_above, new_figure, style, to_svg
from fuelrail.bench.studies.scale.markdown import CURVES_HEADER, MEASURED_HEADER, curve_rows, measured_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fuelrail.bench.studies.scale.report import ScaleReport, Scaling

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")


_METHOD = (
    "Weak scaling keeps each rank's batch, strong scaling shares one batch among the ranks. Efficiency is samples/s "
    "over those of one rank times the ranks. The simulation gives each rank a loader with a bounded queue, an "
    "accelerator, and a step that ends when every rank has computed; it draws the loader's times between batches "
    "and the steps' overhead from those measured with up to two ranks, so that runs with more try it. Exposed "
    "all-reduce grows with the bytes that a rank of a ring sends. Ranks of one host share its CPUs, all ranks share "
    "the storage. Service times are drawn independently: what slows all ranks of a real cluster at once is not in it."
)


def render_page(report: ScaleReport) -> str:
    """Return the page as one string; it refers to nothing outside itself."""
    device = str(report.accelerator.get("name", "cuda"))
    about = f"Emulated <b>{escape(device)}</b>, dataset {escape(report.dataset.name)}"
    parts = head(report, "Fuelrail scaling report", "How does training scale?", about)
    weak = [run for run in report.measured if "weak" in run.efficiency]
    if weak:
        last = max(weak, key=lambda run: run.num_ranks)
        error = max((abs(trial.error) for trial in report.trials), default=None)
        model = "" if error is None else f" The simulation is within {error:.1%} of every measured step time."
        ends = [curve for curve in report.curves if curve.scaling == "weak"]
        told = "; ".join(f"{curve.name}: {curve.points[-1].efficiency:.1%}" for curve in ends)
        far = f" At {ends[0].points[-1].result.num_ranks:,} ranks it gives {told}." if ends else ""
        parts.append(
            hero(
                f"{last.efficiency['weak']:.1%}",
                f"weak scaling efficiency at {last.num_ranks} ranks, measured",
                f"{last.num_ranks} ranks make {last.samples_per_s:.0f} samples/s, each {last.occupancy:.1%} "
                f"occupied.{model}{far}",
            )
        )
    parts += map(note, report.warnings)
    scalings: tuple[Scaling, ...] = ("weak", "strong")
    for scaling in scalings:
        if any(scaling in run.efficiency for run in report.measured):
            caption = f"Lines: simulated{_simulated_batch(report, scaling)}. Dots: measured, all ranks on this host."
            parts += [f"<h2>{scaling.title()} scaling</h2>", figure(_plot(report, scaling), caption)]
    if report.measured:
        parts += ["<h2>Measured, and the model's error</h2>", _table(MEASURED_HEADER, measured_rows(report))]
    if report.curves:
        parts += ["<h2>Simulated</h2>", _table(CURVES_HEADER, curve_rows(report))]
    parts += ["<h2>How these figures are made</h2>", f"<p>{escape(_METHOD)}</p>"]
    parts += facts(report.machine, report.dataset, report.options)
    return page("Fuelrail scaling report", parts)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return table([*map(escape, header)], [[*map(escape, row)] for row in rows])


def _simulated_batch(report: ScaleReport, scaling: Scaling) -> str:
    """Label what the lines of strong scaling share and the dots do not."""
    first = next((curve.points[0].result for curve in report.curves if curve.scaling == scaling), None)
    if scaling == "weak" or first is None:
        return ""
    return f", {first.batch_size:,} samples shared among the ranks (the dots: {report.options['global_batch']})"


def _plot(report: ScaleReport, scaling: Scaling) -> str:
    with style():
        drawn, axes = new_figure(2.9)
        for curve, colour in zip((c for c in report.curves if c.scaling == scaling), _COLOURS, strict=False):
            counts = [point.result.num_ranks for point in curve.points]
            values = [point.efficiency for point in curve.points]
            axes.plot(counts, values, color=colour, linewidth=1.6, label=curve.name)
        runs = [run for run in report.measured if scaling in run.efficiency]
        counts, values = [run.num_ranks for run in runs], [run.efficiency[scaling] for run in runs]
        axes.plot(counts, values, "o", color="#222222", markersize=5, label="measured")
        axes.set_xscale("log", base=2)
        ticks = sorted({2**power for power in range(0, 13, 2)} | set(counts))
        most = max([p.result.num_ranks for c in report.curves if c.scaling == scaling for p in c.points] + counts)
        axes.set_xticks([tick for tick in ticks if tick <= most], [f"{tick:,}" for tick in ticks if tick <= most])
        axes.minorticks_off()
        axes.set_ylim(0, max([1.05, *(value * 1.05 for value in values)]))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_xlabel("ranks")
        axes.set_ylabel("efficiency")
        legend_above(axes)
        return to_svg(drawn, f"{scaling} scaling efficiency over ranks")
