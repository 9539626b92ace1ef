"""The page of a comparison."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from fuelrail.bench.peers.peer import OURS
from fuelrail.bench.report.page import facts, figure, head, hero, note, page, table
from fuelrail.bench.report.plots import BLUE, new_figure, style, to_svg
from fuelrail.bench.studies.compare.markdown import HEADER, describe, rows
from fuelrail.bench.studies.compare.report import REFERENCE, ranking

if TYPE_CHECKING:
    from fuelrail.bench.studies.compare.report import CompareReport

_GREEN = "#009e73"


_METHOD = (
    "Every loader runs in a process of its own, all pinned to the same CPUs, with its data in the page cache (up to"
    f" 4 GiB). {REFERENCE} runs all along in a round; every other one is started anew, and runs four laps behind its"
    " first batch and a lap that does not count. Between its laps the reference runs its own: whose turn it is not "
    "is stopped with all its workers and keeps its place, and who is first changes from lap to lap. A rate is the "
    "slope of the line through the batches' arrivals in all laps. Ratios are of laps in turns, one a round, so that"
    " a machine whose speed changes within seconds disturbs both alike; the interval is Student's t on their "
    "logarithms over the rounds. No run is left out but those that are named. Before anything is timed, every "
    "loader's images are held against the definition (decode at full size, shrink by area, crop), and an epoch's "
    "samples are counted. The consumer takes batches and does nothing with them. Memory counts pages that processes"
    " share once, and those of mapped files, which Fuelrail and SPDL read their shards from. Fuelrail's batches "
    "hold matrices and boxes besides the images, the others' the images alone."
)


def render_page(report: CompareReport) -> str:
    """The page as one string; it refers to nothing outside itself."""
    about = f"{escape(describe(report.work))}, {report.num_rounds} rounds"
    parts = head(report, "Fuelrail comparison", "The same images through every loader", about)
    timed = ranking(report)
    others = [entry for entry in timed if entry.peer != OURS]
    best = next((entry for entry in others if entry.figures and entry.figures.ours_times_as_fast), None)
    if best is not None and best.figures is not None and best.figures.ours_times_as_fast is not None:
        times = best.figures.ours_times_as_fast
        interval = f" (95 % interval {times.low:.2f} to {times.high:.2f})" if times.is_told else ""
        holds_one = times.is_told and times.low <= 1 <= times.high
        undecided = " The interval holds 1: these rounds don't show which is faster." if holds_one else ""
        parts.append(
            hero(
                f"{times.median:.2f} x",
                f"{REFERENCE} against {best.name}, the fastest of the others",
                f"{REFERENCE} hands out images {times.median:.2f} times as fast as {best.name}{interval}, on the same "
                f"CPUs, of the same files.{undecided} {len(others)} other ways to load were timed.",
            )
        )
    parts += map(note, report.warnings)
    if timed:
        caption = "Median of the rounds; the line is lowest to highest. Green: Fuelrail."
        parts += ["<h2>Images a second</h2>", figure(_bars(report), caption)]
        parts.append(table(list(map(escape, HEADER)), ([*map(escape, row)] for row in rows(report))))
    out = [entry for entry in report.contestants if entry.left_out is not None]
    if out:
        items = "".join(f"<li>{escape(entry.name)}: {escape(entry.left_out or '')}</li>" for entry in out)
        parts += ["<h2>Left out</h2>", f"<ul>{items}</ul>"]
    parts += ["<h2>How these figures are made</h2>", f"<p>{escape(_METHOD)}</p>"]
    packages = {**report.machine.packages, **report.packages}
    parts += facts(report.machine, report.dataset, report.options, packages)
    return page("Fuelrail comparison", parts)


def _bars(report: CompareReport) -> str:
    timed = ranking(report)
    gap = 0.01 * max(entry.figures.images_per_s.high for entry in timed if entry.figures is not None)
    with style():
        drawn, axes = new_figure(0.6 + 0.25 * len(timed))
        for row, entry in enumerate(timed):
            assert entry.figures is not None
            rate = entry.figures.images_per_s
            axes.barh(row, rate.median, 0.68, color=_GREEN if entry.peer == OURS else BLUE, linewidth=0)
            if rate.is_told:
                axes.plot([rate.low, rate.high], [row, row], color="#222222", linewidth=1.0)
            axes.text(rate.high + gap, row, f"{rate.median:.0f}", va="center", fontsize=8, color="#333333")
        axes.set_yticks(range(len(timed)), [entry.name for entry in timed])
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("images/s")
        return to_svg(drawn, "Images a second of each loader")
