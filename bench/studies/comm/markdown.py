"""Measured collectives as Markdown, and the rows that all forms show."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuelrail.bench.report.markdown import table

if TYPE_CHECKING:
    from fuelrail.bench.studies.comm.report import CommReport

HEADER = ("collective", "axis", "ranks", "bytes", "us", "algorithm GB/s", "bus GB/s")


def rows(report: CommReport) -> list[list[str]]:
    """One row a size."""
    return [
        [
            one.kind, one.axis, str(one.ranks), f"{one.num_bytes:,}", f"{one.microseconds:,.1f}",
            f"{one.algorithm_gb_per_s:.3f}", f"{one.bus_gb_per_s:.3f}",
        ]
        for one in report.timed
    ]  # fmt: skip


def about(report: CommReport) -> str:
    """Where it was measured."""
    return f"{report.ranks} ranks on {report.nodes} nodes, {report.backend} on {report.device}"


def render_markdown(report: CommReport) -> str:
    """Return the whole report as one text."""
    lines = ["# Collectives", "", f"{about(report)}. {report.created}.", "", *table(HEADER, rows(report)), ""]
    return "\n".join([*lines, *(f"> {text}" for text in report.warnings)]) + "\n"
