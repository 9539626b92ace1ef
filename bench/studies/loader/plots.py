"""The plots of a loader report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuelrail.bench.report.plots import BLUE, GREY, new_figure, stage_bars, style, to_svg

if TYPE_CHECKING:
    from fuelrail.bench.studies.loader.report import LoaderReport


def plots(report: LoaderReport) -> dict[str, str]:
    """Return all plots that the report has data for, by name, each an ``<svg>`` element."""
    with style():
        return {"cpu": _cpu(report), "stages": _stages(report)}


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
