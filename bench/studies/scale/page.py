"""The document of a scaling report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fuelrail.bench.report.page import (
    Block,
    Document,
    Hero,
    Section,
    Text,
    document,
    format_number,
    marked,
    table_of,
)
from fuelrail.pipeline.cli import counted

if TYPE_CHECKING:
    from fuelrail.bench.studies.scale.report import ScaleReport

_METHOD = (
    "Weak scaling keeps each rank's batch, strong scaling shares one batch among the ranks. "
    "Efficiency is samples/s over those of one rank times the ranks. Loading, decoding and "
    "all-reduce are this host's, whose CPUs all ranks share; the accelerators are emulated. "
    "`fuelrail plan` predicts how training scales over a cluster."
)


def describe(report: ScaleReport, _: Mapping[str, str]) -> Document:
    """Return the report as a document, without plots."""
    device = str(report.accelerator.get("name", "cuda"))
    parts: list[Block | Section] = []
    weak = {run.num_ranks: run for run in report.measured if run.weak is not None}
    if weak:
        last = weak[max(weak)]
        ranks = counted(last.num_ranks, "rank")
        parts.append(
            Hero(
                f"{last.weak:.1%}",
                f"weak scaling efficiency at {ranks}, measured",
                f"{ranks} {'makes' if last.num_ranks == 1 else 'make'} "
                f"{format_number(last.samples_per_s)} samples/s, each {last.occupancy:.1%} "
                "occupied.",
            )
        )
    if report.measured:
        parts.append(Section("Measured", [table_of(report.measured)]))
    parts.append(Section("How these figures are made", [Text(_METHOD)]))
    subtitle = marked(
        "Emulated **{device}**, dataset {name}",
        device=device,
        name=report.dataset.name,
    )
    return document(
        report,
        brand="Fuelrail scaling report",
        title="How does training scale?",
        subtitle=subtitle,
        parts=parts,
    )
