"""The document of a watch."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import TYPE_CHECKING

from fuelrail.bench.report.page import (
    Block,
    Document,
    Hero,
    Items,
    Note,
    Section,
    Table,
    Text,
    document,
    marked,
    table_of,
)
from fuelrail.bench.studies.train.page import PHASE_COLOURS
from fuelrail.bench.studies.watch.judge import LABELS, PARTS
from fuelrail.pipeline.cli import counted

if TYPE_CHECKING:
    from fuelrail.bench.studies.watch.report import WatchReport

_COLOURS = PHASE_COLOURS | {"evaluation": "#f0e442", "checkpoint": "#666666", "logging": "#332288"}

_METHOD = marked(
    "A step ends with the last update of an optimiser. **Wait for data** is from asking the loader "
    "for a batch to getting it, **forward** includes the loss, **optimiser** the clipping of "
    "gradients, and **collectives** what the loop waits in them. Ranks leave a collective together: "
    "what the others waited longer than the last to come is charged to that rank, and to the phase "
    "in which it took longer than they. On a GPU all times are the device’s own, by events: a wait "
    "that its queue hides takes no time. Intervals are 95 % intervals over blocks of steps. What is "
    "not certainly above 5 % of the time is not named."
)


def describe(report: WatchReport, plots: Mapping[str, str]) -> Document:  # noqa: ARG001 - no plots
    """Return the report as a document."""
    parts: list[Block | Section] = []
    if report.occupancy is None:
        parts.append(Note(report.verdict()))
    else:
        shares = {part: fmean(rank.shares[part] for rank in report.ranks) for part in PARTS}
        bar = [(LABELS[part], _COLOURS[part], share) for part, share in shares.items()]
        lowest = f"{report.occupancy.lowest:.1%}"
        meaning = f"of the time in forward, backward and optimiser, mean of ranks; lowest {lowest}"
        parts.append(Hero(f"{report.occupancy.mean:.1%}", meaning, report.verdict(), bar))
        further = [f"{finding.text} {finding.advice}" for finding in report.findings[1:]]
        if further:
            parts.append(Section("Further losses", [Items(further)]))
        if report.remedies:
            parts.append(Section("Remedies that were tried", [table_of(report.remedies)]))
        header, *rows = report.rank_table()
        legend = "Last: the share of steps in which the other ranks waited for this one."
        parts.append(Section("Ranks", [Table(header, rows), Text(legend, small=True)]))
    parts.append(Section("How these figures are made", [Text(_METHOD)]))
    steps = counted(report.window.num_measured_steps, "measured step")
    return document(
        report,
        brand="Fuelrail watch",
        title="What holds the accelerators up?",
        subtitle=f"{steps} on {counted(report.num_ranks, 'rank')}",
        parts=parts,
    )
