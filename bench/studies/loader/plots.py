"""The plots of a loader report."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fuelrail.bench.report.plots import (
    BLUE,
    GREY,
    ORANGE,
    PercentFormatter,
    legend_above,
    new_figure,
    stage_bars,
    style,
    to_svg,
)

if TYPE_CHECKING:
    from fuelrail.bench.studies.loader.report import LoaderReport

_GREEN = "#009e73"
STAGE_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def plots(report: LoaderReport) -> dict[str, str]:
    """Return all plots that the report has data for, by name, each an ``<svg>`` element."""
    with style():
        drawn = {"batches": _batches(report), "cpu": _cpu(report), "stages": _stages(report), "queues": _queues(report)}
        if report.figures is not None and not report.figures.is_waterfall_noise:
            drawn["waterfall"] = _waterfall(report)
    return drawn


def _waterfall(report: LoaderReport) -> str:
    """Draw bars from the library's limit to the whole loader; the loss of each step is pale."""
    assert report.figures is not None
    steps = report.figures.waterfall
    cameras = len(report.dataset.cameras)
    figure, axes = new_figure(0.75 + 0.42 * len(steps))
    before = 0.0
    for row, step in enumerate(steps):
        if step.samples_per_s is None:  # what this machine doesn't have
            continue
        rate = step.samples_per_s * cameras
        if rate < before:
            axes.barh(row, before - rate, 0.62, left=rate, color=ORANGE, alpha=0.35, linewidth=0)
        axes.barh(row, rate, 0.62, color=_GREEN if step.name.startswith("whole") else BLUE, linewidth=0)
        axes.text(rate * 0.99, row, f"{rate:.0f}", ha="right", va="center", color="white", fontsize=9)
        before = rate
    axes.set_yticks(range(len(steps)), [step.name for step in steps])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("images/s, all threads")
    return to_svg(figure, "From the limit to the loader")


def _batches(report: LoaderReport) -> str:
    """Draw the rate of each batch over the time of its run, one line a run; the part that counts is strong."""
    figure, axes = new_figure(2.5)
    batch_size = report.options["batch_size"]
    rates_of_runs = [batch_size / np.maximum(np.array(run.batch_s), 1e-9) for run in report.runs]
    for run, rates in zip(report.runs, rates_of_runs, strict=True):
        at_s = np.cumsum(run.batch_s)
        cut = run.num_warm_up_batches
        axes.plot(at_s[: cut + 1], rates[: cut + 1], color=GREY, linewidth=0.9)
        axes.plot(at_s[cut:], rates[cut:], color=BLUE, linewidth=1.0, alpha=0.7)
    if report.figures is not None:
        axes.axhline(report.figures.samples_per_s.median, color="#333333", linewidth=0.9, linestyle=(0, (5, 3)))
    axes.set_xlim(left=0)
    # The second of two batches that were ready together takes microseconds: drawn whole, it would flatten the rest.
    every = np.concatenate(rates_of_runs)
    axes.set_ylim(0, min(1.05 * every.max(), 3 * float(np.median(every))))
    axes.set_xlabel("time since the loader was made [s]")
    axes.set_ylabel("samples/s, batch by batch")
    return to_svg(figure, "Rate over time, one line a run")


def _queues(report: LoaderReport) -> str:
    """Plot the fill of each stage's queue over the last run."""
    run = report.runs[-1]
    figure, axes = new_figure(2.5)
    at_s = [depths.at_s for depths in run.queues]
    for number, (stage, colour) in enumerate(zip(run.stages, STAGE_COLOURS, strict=False)):
        filled = [depths.waiting[number] / stage.capacity for depths in run.queues]
        axes.step(at_s, filled, where="post", color=colour, linewidth=1.0, label=f"{stage.name} (of {stage.capacity})")
    axes.set_xlim(left=0)
    axes.set_ylim(-0.02, 1.05)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("time since the loader was made [s]")
    axes.set_ylabel("queue filled")
    legend_above(axes)
    return to_svg(figure, "Queue depths over time")


def _cpu(report: LoaderReport) -> str:
    """Draw a sample's CPU time by stage, beside what the libraries alone would take for the same bytes."""
    rates = [*report.stages, *report.limits]
    figure, axes = new_figure(0.8 + 0.27 * len(rates))
    colours = [BLUE] * len(report.stages) + [GREY] * len(report.limits)
    rows = list(range(len(report.stages))) + [len(report.stages) + 0.5 + row for row in range(len(report.limits))]
    values = [rate.cpu_ms_per_sample for rate in rates]
    axes.barh(rows, values, 0.66, color=colours, linewidth=0)
    for row, value in zip(rows, values, strict=True):
        axes.text(value + max(values) * 0.008, row, f"{value:.2f}", va="center", fontsize=8, color="#333333")
    axes.set_yticks(rows, [rate.name for rate in rates])
    axes.invert_yaxis()
    axes.set_xlim(0, max(values) * 1.08)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("CPU time of one sample [ms]")
    return to_svg(figure, "CPU time of one sample")


def _stages(report: LoaderReport) -> str:
    """Return the stages' clocks, summed over all runs."""
    rows = []
    for clocks in zip(*(run.stages for run in report.runs), strict=True):
        parts = [sum(getattr(clock, name) for clock in clocks) for name in ("busy_s", "starved_s", "blocked_s")]
        busy, starved, blocked = (part / (sum(parts) or 1.0) for part in parts)
        rows.append((f"{clocks[0].name} x{clocks[0].num_threads}", busy, starved, blocked))
    return stage_bars(rows)
