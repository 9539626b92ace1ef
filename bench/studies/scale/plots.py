"""The plots of a scaling report."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from fuelrail.bench.planner.scaling import Scaling
from fuelrail.bench.report.plots import efficiency_plot

if TYPE_CHECKING:
    from fuelrail.bench.studies.scale.report import ScaleReport


def plots(report: ScaleReport) -> dict[str, str]:
    """Return a plot of each kind of scaling that was measured, each an ``<svg>`` element."""
    drawn: dict[str, str] = {}
    scalings: tuple[Scaling, ...] = get_args(Scaling)
    for scaling in scalings:
        measured = [(run.num_ranks, run.efficiency[scaling]) for run in report.measured if scaling in run.efficiency]
        if measured:
            curves = {curve.name: curve.line for curve in report.curves if curve.scaling == scaling}
            drawn[scaling] = efficiency_plot(curves, "ranks", f"{scaling} scaling efficiency over ranks", measured)
    return drawn
