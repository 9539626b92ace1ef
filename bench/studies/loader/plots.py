"""The plots of a loader report."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fuelrail.bench.report.plots import BLUE, GREY, new_figure, stage_bars, style, to_svg

if TYPE_CHECKING:
    from fuelrail.bench.studies.loader.report import LoaderReport


def plots(report: LoaderReport) -> dict[str, str]:
    """Return all plots that the report has data for, by name, each an ``<svg>`` element."""
    with style():
        return {"batches": _batches(report), "cpu": _cpu(report), "stages": _stages(report)}


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
