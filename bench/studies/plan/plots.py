"""The plots of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuelrail.bench.planner.hardware import GIB
from fuelrail.bench.report.plots import (
    COLOURS,
    PercentFormatter,
    legend_above,
    new_figure,
    style,
    to_svg,
)

if TYPE_CHECKING:
    from fuelrail.bench.studies.plan.report import PlanReport


def plots(report: PlanReport) -> dict[str, str]:
    """Return all plots that the plan has data for, each an ``<svg>`` element."""
    kinds: list[str] = []
    for shape in report.stages:
        for kind, size in shape.memory.items():
            if size and kind not in kinds:
                kinds.append(kind)
    with style():
        figure, axes = new_figure(1.2 + 0.3 * len(report.stages))
        names = [f"stage {shape.stage}" for shape in report.stages]
        offsets = [0.0] * len(names)
        for number, kind in enumerate(kinds):
            sizes = [shape.memory.get(kind, 0) / GIB for shape in report.stages]
            axes.barh(
                names,
                sizes,
                0.66,
                left=offsets,
                color=COLOURS[number % len(COLOURS)],
                label=kind,
            )
            offsets = [before + size for before, size in zip(offsets, sizes, strict=True)]
        axes.axvline(report.usable_gib, color="#222222", linewidth=1, linestyle="--")
        axes.invert_yaxis()
        axes.set_xlabel("GiB; dashed: usable")
        legend_above(axes)
        drawn = {"memory": to_svg(figure, "Memory by stage and kind")}
        curves = [curve for curve in report.scaling if curve.points]
        if not curves:
            return drawn
        figure, axes = new_figure(2.9)
        for curve, colour in zip(curves, COLOURS, strict=False):
            axes.plot(
                [point.num_ranks for point in curve.points],
                [point.efficiency for point in curve.points],
                color=colour,
                linewidth=1.6,
                label=curve.scaling,
            )
        largest = max(point.num_ranks for curve in curves for point in curve.points)
        powers = [4**exponent for exponent in range(7)]
        ticks = [tick for tick in powers if tick <= largest]
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
        axes.set_ylim(0, 1.05)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_xlabel("devices")
        axes.set_ylabel("efficiency")
        legend_above(axes)
        drawn["scaling"] = to_svg(figure, "Scaling efficiency")
    return drawn
