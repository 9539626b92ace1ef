"""The plot of a diagnosis."""

from __future__ import annotations

from fuelrail.bench.report.plots import (
    BLUE,
    GREY,
    PercentFormatter,
    new_figure,
    style,
    to_svg,
)
from fuelrail.bench.studies.diagnose.report import DiagnoseReport, title_of


def plots(report: DiagnoseReport) -> dict[str, str]:
    """Return the gains of a whole diagnosis as an ``<svg>`` element."""
    diagnosis = report.diagnosis
    if diagnosis is None:
        return {}
    entries = diagnosis.counterfactuals
    with style():
        drawn, axes = new_figure(0.6 + 0.3 * len(entries))
        for row, entry in enumerate(entries):
            colour = BLUE if entry.name != "again" and entry.is_above(diagnosis.noise) else GREY
            axes.barh(row, entry.gain, 0.62, color=colour, linewidth=0)
            axes.plot(
                [entry.gain_low, entry.gain_high],
                [row, row],
                color="#222222",
                linewidth=1.0,
            )
        axes.axvspan(
            -diagnosis.noise,
            diagnosis.noise,
            color=GREY,
            alpha=0.2,
            linewidth=0,
        )
        axes.axvline(0, color="#777777", linewidth=0.8)
        axes.set_yticks(range(len(entries)), [title_of(entry) for entry in entries])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_xlabel("more samples/s than the baseline")
        return {"gains": to_svg(drawn, "Gain of each run without something")}
