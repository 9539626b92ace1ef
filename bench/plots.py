"""The report's plots as inline SVG. The only module of the harness that imports matplotlib."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from fuelrail.pipeline.errors import ConfigError

try:
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, PercentFormatter
except ImportError as error:
    raise ConfigError(
        "report.html needs matplotlib, which is not installed: pip install 'fuelrail[view]', or run with --no-html"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from fuelrail.bench.report import Report

# Okabe and Ito's colours, which colour-blind readers can tell apart: work in blues and greens, waiting in orange.
PHASE_COLOURS = {
    "data_wait": "#d55e00",
    "host_to_device": "#e69f00",
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "all_reduce": "#cc79a7",
    "optimiser": "#009e73",
    "other": "#999999",
}
PHASE_LABELS = {
    "data_wait": "data wait",
    "host_to_device": "host to device",
    "forward": "forward",
    "backward": "backward",
    "all_reduce": "exposed all-reduce",
    "optimiser": "optimiser",
    "other": "other",
}
_RANK_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: sharp, selectable, and in the page's own font
    "svg.hashsalt": "fuelrail",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#777777",
    "axes.labelcolor": "#333333",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.7,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}
_MAX_BARS = 120
_MAX_RANK_LINES = 8
_MAX_TIMELINE_RANKS = 8
_TIMELINE_STEPS = 6
_SHORTEST_MS = 0.01


def plots(report: Report) -> dict[str, str]:
    """All plots that the report has data for, by name, each an ``<svg>`` element."""
    drawn: dict[str, str] = {}
    # A rank that died before its first step has nothing to draw, and must not cut the others short.
    report = msgspec.structs.replace(report, series=[series for series in report.series if series.end_s])
    if not report.series:
        return drawn
    with mpl.rc_context(_STYLE):
        drawn["occupancy"] = _occupancy(report)
        drawn["breakdown"] = _breakdown(report)
        if report.figures is not None:
            if report.options["accumulation"] == 1:  # else phases take turns, which a step's sums don't tell
                drawn["timeline"] = _timeline(report)
            drawn["waits"] = _waits(report)
            drawn["histogram"] = _histogram(report)
            if report.figures.stages:
                drawn["stages"] = _stages(report)
        drawn["loss"] = _loss(report)
    return drawn


def _occupancy(report: Report) -> str:
    figure, axes = _figure(2.7)
    for series, colour in _ranks(report):
        axes.plot(series.end_s, series.occupancy, color=colour, linewidth=1.4, label=f"rank {series.rank}")
    _shade_warmup(axes, report, "end_s")
    if report.figures is not None:
        mean = report.figures.occupancy.mean
        axes.axhline(mean, color="#333333", linewidth=0.9, linestyle=(0, (5, 3)), label=f"mean {mean:.1%}")
    axes.set_ylim(0, 1.05)
    axes.set_xlim(left=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("time since the first step began [s]")
    axes.set_ylabel("occupancy")
    _legend_above(axes)
    return _svg(figure, "Occupancy over time, one line a rank")


def _timeline(report: Report) -> str:
    """What each rank did when, over the first steps of the measured window; nothing is averaged."""
    first = report.window.num_warmup_steps
    shown = report.series[:_MAX_TIMELINE_RANKS]
    origin = min(series.end_s[first] - series.wall_ms[first] / 1e3 for series in shown)
    figure, axes = _figure(0.95 + 0.34 * len(shown))
    for row, series in enumerate(shown):
        for step in range(first, min(first + _TIMELINE_STEPS, len(series.end_s))):
            at_ms = (series.end_s[step] - origin) * 1e3 - series.wall_ms[step]
            for phase, colour in PHASE_COLOURS.items():
                length = series.phases_ms[phase][step]
                axes.broken_barh([(at_ms, length)], (row - 0.36, 0.72), facecolor=colour, linewidth=0)
                at_ms += length
            axes.plot([at_ms, at_ms], [row - 0.44, row + 0.44], color="#333333", linewidth=0.7)
    axes.set_yticks(range(len(shown)), [f"rank {series.rank}" for series in shown])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(f"time from the start of step {first} [ms]")
    return _svg(figure, "Timeline of a few steps")


def _breakdown(report: Report) -> str:
    """Stacked bars over steps, the mean over ranks; neighbouring steps are averaged when there are many."""
    count = min(len(series.wall_ms) for series in report.series)
    figure, axes = _figure(2.9)
    width = max(1, -(-count // _MAX_BARS))
    starts = range(0, count, width)
    middles = np.array([(start + min(start + width, count) - 1) / 2 for start in starts])
    base = np.zeros(len(starts))
    for phase, colour in PHASE_COLOURS.items():
        values = np.mean([series.phases_ms[phase][:count] for series in report.series], axis=0)
        heights = np.array([values[start : start + width].mean() for start in starts])
        axes.bar(middles, heights, width * 0.92, bottom=base, color=colour, linewidth=0)
        base = base + heights
    _shade_warmup(axes, report, "step")
    axes.set_xlim(-0.5 * width, max(count, 1) - 0.5 + 0.5 * width)
    # The first steps fill queues and caches; they may tower over the rest, which is what the plot is for.
    usual = base[min(len(base) - 1, report.window.num_warmup_steps // width) :].max()
    if base.max() > 2 * usual:
        axes.set_ylim(0, 1.6 * usual)
    axes.set_xlabel("step" if width == 1 else f"step (each bar is the mean of {width})")
    axes.set_ylabel("time [ms]")
    axes.grid(visible=False, axis="x")
    return _svg(figure, "Step time by phase")


def _measured(report: Report, columns: Sequence[list[float]]) -> NDArray[np.float64]:
    """The measured window of one column a rank, joined."""
    first = report.window.num_warmup_steps
    return np.concatenate([column[first : first + report.window.num_measured_steps] for column in columns])


def _waits(report: Report) -> str:
    """How many steps waited how long for data, on a logarithmic axis from 10 us: most waits are tiny, some are not."""
    assert report.figures is not None
    values = np.maximum(_measured(report, [series.phases_ms["data_wait"] for series in report.series]), _SHORTEST_MS)
    longest = max(float(values.max()), 10 * _SHORTEST_MS)
    figure, axes = _figure(2.4, 3.6)
    axes.hist(values, bins=np.geomspace(_SHORTEST_MS, longest * 1.01, 25).tolist(), color=PHASE_COLOURS["data_wait"])
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("data wait of a step [ms]")
    axes.set_ylabel("steps (all ranks)")
    return _svg(figure, "Histogram of data waits")


def _histogram(report: Report) -> str:
    assert report.figures is not None
    values = _measured(report, [series.wall_ms for series in report.series])
    figure, axes = _figure(2.4, 3.6)
    axes.hist(values, bins=min(40, max(8, round(2 * len(values) ** 0.5))), color="#0072b2", alpha=0.85)
    summary = report.figures.step_time
    for name, value, style in (("p50", summary.p50_ms, "-"), ("p99", summary.p99_ms, (0, (4, 2)))):
        axes.axvline(value, color="#d55e00", linewidth=1.2, linestyle=style, label=f"{name} {value:.1f} ms")
    axes.set_xlabel("step time [ms]")
    axes.set_ylabel("steps (all ranks)")
    _legend_above(axes)
    return _svg(figure, "Histogram of step times")


def _stages(report: Report) -> str:
    assert report.figures is not None
    stages = report.figures.stages
    figure, axes = _figure(0.9 + 0.32 * len(stages))
    rows = np.arange(len(stages))
    base = np.zeros(len(stages))
    for name, colour in (("busy", "#0072b2"), ("starved", "#e69f00"), ("blocked", "#bbbbbb")):
        values = np.array([getattr(stage, name) for stage in stages])
        axes.barh(rows, values, 0.66, left=base, color=colour, label=name, linewidth=0)
        for row, value, left in zip(rows, values, base, strict=True):
            if value > 0.06:  # narrower bars have no room for their figure
                ink = "white" if name == "busy" else "#333333"
                axes.text(
                    float(left + value / 2), float(row), f"{value:.0%}", ha="center", va="center", color=ink, fontsize=8
                )
        base = base + values
    axes.set_yticks(rows, [f"{stage.name} x{stage.num_threads}" for stage in stages])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("share of the stage's thread time")
    _legend_above(axes)
    return _svg(figure, "Loader stages: busy, starved, blocked")


def _loss(report: Report) -> str:
    figure, axes = _figure(2.4, 3.6)
    count = min(len(series.loss) for series in report.series)
    losses = np.array([series.loss[:count] for series in report.series], dtype=np.float64)  # None becomes NaN
    mean = losses.mean(axis=0)
    axes.plot(np.arange(count), mean, color="#009e73", linewidth=1.4)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (mean of ranks)")
    axes.set_ylim(bottom=0)
    return _svg(figure, "Training loss")


def _ranks(report: Report) -> list[tuple[Any, str]]:
    shown = report.series[:_MAX_RANK_LINES]
    return [(series, _RANK_COLOURS[number % len(_RANK_COLOURS)]) for number, series in enumerate(shown)]


def _shade_warmup(axes: Axes, report: Report, unit: str) -> None:
    warmup = report.window.num_warmup_steps
    longest = max(report.series, key=lambda series: len(series.end_s))
    if not warmup or not longest.end_s:
        return
    end = (
        longest.end_s[min(warmup, len(longest.end_s)) - 1] if unit == "end_s" else min(warmup, len(longest.end_s)) - 0.5
    )
    start = 0 if unit == "end_s" else -0.5
    axes.axvspan(
        start, end, color="#000000", alpha=0.07, linewidth=0, label="warm-up", zorder=3 if unit == "step" else 0
    )


def _figure(height_in: float, width_in: float = 7.4) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    return figure, figure.subplots()


def _legend_above(axes: Axes) -> None:
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1.0), ncols=9, borderaxespad=0.2, handlelength=1.2, columnspacing=1.2
    )


def _svg(figure: Figure, title: str) -> str:
    """Render to an ``<svg>`` for inlining: no prologue, metadata or namespace addresses; scales with the page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)
    # Several plots share one page: names defined in one must not be found from another.
    prefix = re.sub(r"\W+", "-", title.lower()).strip("-")
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{prefix}-", text)
    return re.sub(
        r'<svg\s[^>]*?viewBox="([^"]+)"[^>]*>', rf'<svg viewBox="\1" role="img" aria-label="{title}">', text, count=1
    )
