"""The plot of a comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuelrail.bench.peers.peer import OURS
from fuelrail.bench.report.plots import BLUE, new_figure, style, to_svg
from fuelrail.bench.studies.compare.report import ranking

if TYPE_CHECKING:
    from fuelrail.bench.studies.compare.report import CompareReport

_GREEN = "#009e73"


def plots(report: CompareReport) -> dict[str, str]:
    """Return the rates of all that were timed as an ``<svg>`` element."""
    return {"rates": _bars(report)} if ranking(report) else {}


def _bars(report: CompareReport) -> str:
    timed = ranking(report)
    gap = 0.01 * max(entry.figures.images_per_s.high for entry in timed if entry.figures is not None)
    with style():
        drawn, axes = new_figure(0.6 + 0.25 * len(timed))
        for row, entry in enumerate(timed):
            assert entry.figures is not None
            rate = entry.figures.images_per_s
            axes.barh(row, rate.median, 0.68, color=_GREEN if entry.peer == OURS else BLUE, linewidth=0)
            if rate.has_interval:
                axes.plot([rate.low, rate.high], [row, row], color="#222222", linewidth=1.0)
            axes.text(rate.high + gap, row, f"{rate.median:.0f}", va="center", fontsize=8, color="#333333")
        axes.set_yticks(range(len(timed)), [entry.name for entry in timed])
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("images/s")
        return to_svg(drawn, "Images a second of each loader")
