"""The plot of a comparison."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from fuelrail.bench.peers.peer import OURS, PEERS
from fuelrail.bench.report.plots import BLUE, new_figure, style, to_svg
from fuelrail.bench.studies.compare.report import (
    CompareReport,
    ContestantResult,
    load_compare_report,
    ranking,
)

_GREEN = "#009e73"
_BARS = "Images a second of each loader"


def plots(report: CompareReport) -> dict[str, str]:
    """Return the rates of all that were timed as an ``<svg>`` element."""
    timed = ranking(report)
    return {"rates": _bars(timed, [entry.name for entry in timed])} if timed else {}


def picture(report: CompareReport) -> str:
    """Return the recipe of each loader that was run most often, the fastest of those, as an SVG
    file of its own.
    """
    chosen: dict[str, ContestantResult] = {}
    for entry in ranking(report):
        best = chosen.setdefault(entry.peer, entry)
        if len(entry.runs) > len(best.runs):
            chosen[entry.peer] = entry
    entries = [entry for entry in ranking(report) if entry is chosen[entry.peer]]
    svg = _bars(
        entries,
        ["Fuelrail" if entry.peer == OURS else PEERS[entry.peer].packages[0] for entry in entries],
    )
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    ground = f'<title>{_BARS}</title><rect width="100%" height="100%" fill="#ffffff"/>'
    return re.sub(r"<svg ([^>]*)>", rf"<svg {spaces} \1>{ground}", svg, count=1)


def _bars(timed: Sequence[ContestantResult], names: Sequence[str]) -> str:
    gap = 0.01 * max(
        entry.figures.images_per_s.high for entry in timed if entry.figures is not None
    )
    with style():
        drawn, axes = new_figure(0.6 + 0.25 * len(timed))
        for row, entry in enumerate(timed):
            assert entry.figures is not None
            rate = entry.figures.images_per_s
            axes.barh(
                row,
                rate.median,
                0.68,
                color=_GREEN if entry.peer == OURS else BLUE,
                linewidth=0,
            )
            if rate.has_interval:
                axes.plot(
                    [rate.low, rate.high],
                    [row, row],
                    color="#222222",
                    linewidth=1.0,
                )
            axes.text(
                rate.high + gap,
                row,
                f"{rate.median:.0f}",
                va="center",
                fontsize=8,
                color="#333333",
            )
        axes.set_yticks(range(len(timed)), names)
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("images/s")
        return to_svg(drawn, _BARS)


if __name__ == "__main__":  # `make pictures`: REPORT.json PICTURE.svg
    report_path, written = map(Path, sys.argv[1:])
    written.write_text(picture(load_compare_report(report_path)), encoding="utf-8")
