"""The plots of a training report."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from fuelrail.bench.report.plots import (
    COLOURS,
    MaxNLocator,
    PercentFormatter,
    legend_above,
    new_figure,
    stage_bars,
    style,
    to_svg,
)
from fuelrail.bench.studies.train.page import PHASE_COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fuelrail.bench.studies.train.report import Report

_MAX_BARS = 120
_MAX_RANK_LINES = 8


def plots(report: Report) -> dict[str, str]:
    """Return all plots that the report has data for, by name, each an ``<svg>`` element."""
    drawn: dict[str, str] = {}
    # A rank that died before its first step has nothing to draw, and must not cut the others short.
    report = msgspec.structs.replace(
        report, series=[series for series in report.series if series.end_s]
    )
    if not report.series:
        return drawn
    with style():
        figure, axes = new_figure(2.7)
        for number, series in enumerate(report.series[:_MAX_RANK_LINES]):
            colour = COLOURS[number % len(COLOURS)]
            axes.plot(
                series.end_s,
                series.occupancy,
                color=colour,
                linewidth=1.4,
                label=f"rank {series.rank}",
            )
        _shade_warmup(axes, report, "end_s")
        if report.figures is not None:
            mean = report.figures.occupancy.mean
            axes.axhline(
                mean,
                color="#333333",
                linewidth=0.9,
                linestyle=(0, (5, 3)),
                label=f"mean {mean:.1%}",
            )
        axes.set_ylim(0, 1.05)
        axes.set_xlim(left=0)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_xlabel("time since the start of the first step [s]")
        axes.set_ylabel("occupancy")
        legend_above(axes)
        drawn["occupancy"] = to_svg(figure, "Occupancy over time, one line a rank")
        # Draw stacked bars over steps, the mean over ranks; neighbouring steps are averaged
        # when there are many.
        count = min(len(series.wall_ms) for series in report.series)
        figure, axes = new_figure(2.9)
        width = max(1, -(-count // _MAX_BARS))
        starts = range(0, count, width)
        middles = np.array([(start + min(start + width, count) - 1) / 2 for start in starts])
        base = np.zeros(len(starts))
        for phase, colour in PHASE_COLOURS.items():
            values = np.mean(
                [series.phases_ms[phase][:count] for series in report.series],
                axis=0,
            )
            heights = np.array([values[start : start + width].mean() for start in starts])
            axes.bar(
                middles,
                heights,
                width * 0.92,
                bottom=base,
                color=colour,
                linewidth=0,
            )
            base = base + heights
        _shade_warmup(axes, report, "step")
        axes.set_xlim(-0.5 * width, max(count, 1) - 0.5 + 0.5 * width)
        # The first steps fill queues and caches; they may tower over the rest, which is what the
        # plot is for.
        usual = base[min(len(base) - 1, report.window.num_warmup_steps // width) :].max()
        if base.max() > 2 * usual:
            axes.set_ylim(0, 1.6 * usual)
            tallest = int(base.argmax())
            beside = middles[tallest] + 0.6 * width
            axes.text(
                beside,
                1.53 * usual,
                f"to {base[tallest]:,.0f} ms",
                va="top",
                fontsize=8,
                zorder=4,
            )
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("step" if width == 1 else f"step (each bar is the mean of {width})")
        axes.set_ylabel("time [ms]")
        axes.grid(visible=False, axis="x")
        drawn["breakdown"] = to_svg(figure, "Step time by phase")
        if report.figures is not None and report.figures.stages:
            drawn["stages"] = stage_bars(
                [
                    (
                        f"{stage.name} x{stage.num_threads}",
                        stage.busy,
                        stage.starved,
                        stage.blocked,
                    )
                    for stage in report.figures.stages
                ]
            )
        figure, axes = new_figure(2.4)
        count = min(len(series.loss) for series in report.series)
        losses = np.array(
            [series.loss[:count] for series in report.series], dtype=np.float64
        )  # None becomes NaN
        mean = losses.mean(axis=0)
        axes.plot(np.arange(count), mean, color="#009e73", linewidth=1.4)
        axes.set_xlabel("step")
        axes.set_ylabel("loss (mean of ranks)")
        axes.set_ylim(bottom=0)
        drawn["loss"] = to_svg(figure, "Training loss")
    return drawn


def _shade_warmup(axes: Axes, report: Report, unit: str) -> None:
    warmup = report.window.num_warmup_steps
    longest = max(report.series, key=lambda series: len(series.end_s))
    if not warmup or not longest.end_s:
        return
    end = (
        longest.end_s[min(warmup, len(longest.end_s)) - 1]
        if unit == "end_s"
        else min(warmup, len(longest.end_s)) - 0.5
    )
    start = 0 if unit == "end_s" else -0.5
    axes.axvspan(
        start,
        end,
        color="#000000",
        alpha=0.07,
        linewidth=0,
        label="warm-up",
        zorder=3 if unit == "step" else 0,
    )
