"""The document of measured collectives."""

from __future__ import annotations

from collections.abc import Mapping

from fuelrail.bench.report.page import Block, Document, Hero, Note, Section, Table, doubts, when
from fuelrail.bench.studies.comm.report import CommReport, link_of
from fuelrail.pipeline.cli import counted

HEADER = ("collective", "axis", "ranks", "bytes", "us", "algorithm GB/s", "bus GB/s")


def describe(report: CommReport, _: Mapping[str, str]) -> Document:
    """Return the report as a document, without plots."""
    rate, latency = link_of(report.timed)
    rows = [
        [
            row.kind,
            row.axis,
            str(row.ranks),
            f"{row.num_bytes:,}",
            f"{row.microseconds:,.1f}",
            f"{row.algorithm_gb_per_s:.3f}",
            f"{row.bus_gb_per_s:.3f}",
        ]
        for row in report.timed
    ]
    parts: list[Block | Section] = [
        Hero(
            f"{rate:.2f}",
            "GB/s, bus bandwidth of the largest all-reduce",
            f"The smallest all-reduce takes {latency:,.1f} us. Bandwidths are nccl-tests'.",
        ),
        *(Note(text) for text in report.warnings),
        Section("All sizes", [Table(HEADER, rows)]),
    ]
    ranks = counted(report.ranks, "rank")
    nodes = counted(report.nodes, "node")
    subtitle = f"{ranks} on {nodes}, {report.backend} on {report.device}"
    title = "How fast do ranks communicate?"
    return Document(
        brand="Fuelrail bench comm",
        title=title,
        subtitle=subtitle,
        origin=when(report.created),
        doubts=doubts(None, report.disturbed),
        parts=parts,
        facts={},
    )
