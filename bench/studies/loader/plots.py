"""The plot of a loader report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuelrail.bench.report.plots import stage_bars, style

if TYPE_CHECKING:
    from fuelrail.bench.studies.loader.report import LoaderReport


def plots(report: LoaderReport) -> dict[str, str]:
    """Return the stages' clocks, summed over all runs, as an ``<svg>`` element."""
    rows = []
    for clocks in zip(*(run.stages for run in report.runs), strict=True):
        parts = [
            sum(getattr(clock, name) for clock in clocks)
            for name in ("busy_s", "starved_s", "blocked_s")
        ]
        busy, starved, blocked = (part / (sum(parts) or 1.0) for part in parts)
        rows.append(
            (
                f"{clocks[0].name} x{clocks[0].num_threads}",
                busy,
                starved,
                blocked,
            )
        )
    with style():
        return {"stages": stage_bars(rows)}
