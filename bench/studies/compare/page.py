"""The page of a comparison."""

from __future__ import annotations

import re
import sys
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from fuelrail.bench.peers.peer import OURS, PEERS
from fuelrail.bench.report.files import load_report_of
from fuelrail.bench.report.page import facts, figure, head, hero, note, page, table
from fuelrail.bench.report.plots import BLUE, new_figure, style, to_svg
from fuelrail.bench.studies.compare.markdown import HEADER, describe, rows
from fuelrail.bench.studies.compare.report import REFERENCE, SCHEMA, VERSION, CompareReport, ranking

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fuelrail.bench.studies.compare.report import Contestant

_GREEN = "#009e73"
_BARS = "Images a second of each loader"


_METHOD = (
    "Every loader runs in a process of its own, all pinned to the same CPUs, with its data in the page cache (up to 4 "
    f"GiB). {REFERENCE} runs during the whole round. Every other loader is started once per round and runs four laps, "
    "after its first batch and a warm-up lap. The two loaders alternate: the waiting loader is paused with all its "
    "workers, and the one that starts changes from lap to lap. A rate is the slope of the line through the arrival "
    "times of the batches in all laps. A ratio compares laps in turns, one ratio a round, so that a machine whose "
    "speed changes within seconds disturbs both alike. The interval is Student's t on the logarithms over the rounds. "
    "Every run is included unless listed otherwise. Before the timing, the images of every loader are checked against "
    "the reference (decode at full size, shrink by area, crop), and the samples of an epoch are counted. The consumer "
    "takes batches and does nothing with them. Memory counts shared pages once, and pages of mapped files, from which "
    "Fuelrail and SPDL read their shards. Fuelrail's batches contain matrices and boxes as well as images; those of "
    "the others contain images only."
)


def render_page(report: CompareReport) -> str:
    """Return the page as one string; it refers to nothing outside itself."""
    about = f"{escape(describe(report.work))}, {report.num_rounds} rounds"
    parts = head(report, "Fuelrail comparison", "The same images through every loader", about)
    timed = ranking(report)
    others = [entry for entry in timed if entry.peer != OURS]
    best = next((entry for entry in others if entry.figures and entry.figures.ours_times_as_fast), None)
    if best is not None and best.figures is not None and best.figures.ours_times_as_fast is not None:
        times = best.figures.ours_times_as_fast
        interval = f" (95 % interval {times.low:.2f} to {times.high:.2f})" if times.has_interval else ""
        holds_one = times.has_interval and times.low <= 1 <= times.high
        undecided = " The interval contains 1: these rounds do not show which is faster." if holds_one else ""
        parts.append(
            hero(
                f"{times.median:.2f} x",
                f"{REFERENCE} against {best.name}, the fastest of the others",
                f"{REFERENCE} delivers images {times.median:.2f} times as fast as {best.name}{interval}, on the same "
                f"CPUs and files.{undecided} {len(others)} other ways to load were timed.",
            )
        )
    parts += map(note, report.warnings)
    if timed:
        caption = "Median of the rounds; the line is lowest to highest. Green: Fuelrail."
        parts += ["<h2>Images a second</h2>", figure(_bars(timed, [entry.name for entry in timed]), caption)]
        parts.append(table(list(map(escape, HEADER)), ([*map(escape, row)] for row in rows(report))))
    out = [entry for entry in report.contestants if entry.left_out is not None]
    if out:
        items = "".join(f"<li>{escape(entry.name)}: {escape(entry.left_out or '')}</li>" for entry in out)
        parts += ["<h2>Left out</h2>", f"<ul>{items}</ul>"]
    parts += ["<h2>How these figures are made</h2>", f"<p>{escape(_METHOD)}</p>"]
    packages = {**report.machine.packages, **report.packages}
    parts += facts(report.machine, report.dataset, report.options, packages)
    return page("Fuelrail comparison", parts)


def picture(report: CompareReport) -> str:
    """Return the recipe of each loader that was run most often, the fastest of those, as an SVG file of its own."""
    chosen: dict[str, Contestant] = {}
    for entry in ranking(report):
        best = chosen.setdefault(entry.peer, entry)
        if len(entry.runs) > len(best.runs):
            chosen[entry.peer] = entry
    shown = [entry for entry in ranking(report) if entry is chosen[entry.peer]]
    svg = _bars(shown, ["Fuelrail" if entry.peer == OURS else PEERS[entry.peer].packages[0] for entry in shown])
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    ground = f'<title>{_BARS}</title><rect width="100%" height="100%" fill="#ffffff"/>'
    return re.sub(r"<svg ([^>]*)>", rf"<svg {spaces} \1>{ground}", svg, count=1)


def _bars(timed: Sequence[Contestant], names: Sequence[str]) -> str:
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
        axes.set_yticks(range(len(timed)), names)
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("images/s")
        return to_svg(drawn, _BARS)


if __name__ == "__main__":  # `make pictures`: REPORT.json PICTURE.svg
    given, written = map(Path, sys.argv[1:])
    written.write_text(picture(load_report_of(given, CompareReport, SCHEMA, VERSION)), encoding="utf-8")
