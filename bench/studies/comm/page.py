"""The page of measured collectives."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from fuelrail.bench.report.page import figure, hero, note, page, table, when
from fuelrail.bench.report.plots import legend_above, new_figure, style, to_svg
from fuelrail.bench.studies.comm.markdown import HEADER, about, rows
from fuelrail.bench.studies.comm.report import KINDS, link_of

if TYPE_CHECKING:
    from fuelrail.bench.studies.comm.report import CommReport

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # of the kinds


def render_page(report: CommReport) -> str:
    """Return the page as one string; it refers to nothing outside itself."""
    rate, latency = link_of(report.timed)
    parts = [
        '<div class="brand">Fuelrail bench comm</div>', "<h1>How fast do ranks communicate?</h1>",
        f'<p class="sub">{escape(about(report))}. {when(report.created)}.</p>',
        hero(f"{rate:.2f}", "GB/s, bus bandwidth of the largest all-reduce",
             f"The smallest all-reduce takes {latency:,.1f} us. Bandwidths are nccl-tests'."),
        *map(note, report.warnings),
    ]  # fmt: skip
    for axis in dict.fromkeys(one.axis for one in report.timed):
        parts += [f"<h2>Axis {escape(axis)}</h2>", figure(_plot(report, axis), "Bus bandwidth over the whole tensor.")]
    shown = [[*map(escape, row)] for row in rows(report)]
    return page("Fuelrail bench comm", [*parts, "<h2>All sizes</h2>", table(HEADER, shown)])


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
