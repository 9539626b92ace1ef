"""The plots of measured collectives."""

from __future__ import annotations

from fuelrail.bench.report.plots import legend_above, new_figure, style, to_svg
from fuelrail.bench.studies.comm.report import KINDS, CommReport

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # of the kinds


def plots(report: CommReport) -> dict[str, str]:
    """Return the bus bandwidths by size on each axis of the mesh, each an ``<svg>`` element."""
    return {axis: _plot(report, axis) for axis in dict.fromkeys(one.axis for one in report.timed)}


def _plot(report: CommReport, axis: str) -> str:
    with style():
        drawn, axes = new_figure(2.9)
        for kind, colour in zip(KINDS, _COLOURS, strict=True):
            mine = [one for one in report.timed if (one.kind, one.axis) == (kind, axis)]
            sizes, rates = [one.num_bytes for one in mine], [one.bus_gb_per_s for one in mine]
            axes.plot(sizes, rates, "o-", markersize=3, color=colour, label=kind)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("bytes")
        axes.set_ylabel("GB/s")
        legend_above(axes)
        return to_svg(drawn, f"Bus bandwidth on axis {axis}")
