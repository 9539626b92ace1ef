"""The plots of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuelrail.bench.planner.hardware import GIB
from fuelrail.bench.report.plots import (
    efficiency_plot,
    legend_above,
    new_figure,
    style,
    to_svg,
)

if TYPE_CHECKING:
    from fuelrail.bench.studies.plan.report import PlanReport

_COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#f0e442",
    "#999999",
)


def plots(report: PlanReport) -> dict[str, str]:
    """Return all plots that the plan has data for, each an ``<svg>`` element."""
    drawn = {"memory": _memory(report)}
    curves = {str(curve.scaling): curve.line for curve in report.scaling if curve.points}
    if curves:
        drawn["scaling"] = efficiency_plot(curves, "devices", "Scaling efficiency")
    return drawn


def _memory(report: PlanReport) -> str:
    kinds = list(
        dict.fromkeys(
            kind for shape in report.stages for kind, size in shape.memory.items() if size
        )
    )
    with style():
        drawn, axes = new_figure(1.2 + 0.3 * len(report.stages))
        names = [f"stage {shape.stage}" for shape in report.stages]
        offsets = [0.0] * len(names)
        for number, kind in enumerate(kinds):
            sizes = [shape.memory.get(kind, 0) / GIB for shape in report.stages]
            axes.barh(
                names,
                sizes,
                0.66,
                left=offsets,
                color=_COLOURS[number % len(_COLOURS)],
                label=kind,
            )
            offsets = [before + size for before, size in zip(offsets, sizes, strict=True)]
        axes.axvline(report.usable_gib, color="#222222", linewidth=1, linestyle="--")
        axes.invert_yaxis()
        axes.set_xlabel("GiB; dashed: usable")
        legend_above(axes)
        return to_svg(drawn, "Memory by stage and kind")
