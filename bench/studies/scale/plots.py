"""The plots of a scaling report."""

from __future__ import annotations

from typing import get_args

from fuelrail.bench.report.plots import PercentFormatter, legend_above, new_figure, style, to_svg
from fuelrail.bench.studies.scale.report import ScaleReport, Scaling

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")


def plots(report: ScaleReport) -> dict[str, str]:
    """Return a plot of each kind of scaling that was measured, each an ``<svg>`` element."""
    scalings: tuple[Scaling, ...] = get_args(Scaling)
    return {one: _plot(report, one) for one in scalings if any(one in run.efficiency for run in report.measured)}


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
