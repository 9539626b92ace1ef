"""The document of measured collectives."""

from __future__ import annotations

from collections.abc import Mapping

from fuelrail.bench.report.page import (
    Document,
    Hero,
    Section,
    document,
    table_of,
)
from fuelrail.bench.studies.comm.report import CommReport, link_of
from fuelrail.pipeline.cli import counted


def describe(report: CommReport, _: Mapping[str, str]) -> Document:
    """Return the report as a document, without plots."""
    rate, latency = link_of(report.timed)
    ranks = counted(report.ranks, "rank")
    nodes = counted(report.nodes, "node")
    return document(
        report,
        brand="Fuelrail bench comm",
        title="How fast do ranks communicate?",
        subtitle=f"{ranks} on {nodes}, {report.backend} on {report.device}",
        parts=[
            Hero(
                f"{rate:.2f}",
                "GB/s, bus bandwidth of the largest all-reduce",
                f"The smallest all-reduce takes {latency:,.1f} us. Bandwidths are nccl-tests'.",
            ),
            Section("All sizes", [table_of(report.timed)]),
        ],
    )
