"""The document of a plan, and the figures that all of its forms show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fuelrail.bench.planner.hardware import GIB
from fuelrail.bench.report.page import (
    Block,
    Document,
    Figure,
    Hero,
    Note,
    Section,
    Table,
    Text,
    as_text,
    marked,
    when,
)

if TYPE_CHECKING:
    from fuelrail.bench.studies.plan.report import PlanReport
    from fuelrail.bench.studies.plan.variants import Planned

PLANNED_HEADER = ("strategy", "micro-batch", "peak GiB", "samples/s", "MFU", "why not")
SCALING_HEADER = (
    "scaling",
    "devices",
    "global batch",
    "step s",
    "samples/s",
    "efficiency",
    "occupancy",
)
STAGE_HEADER = (
    "stage",
    "parameters",
    "in flight",
    "GFLOP a micro-batch",
    "memory GiB by kind",
    "collectives of a step",
)
SHOWN_OF_SWEEP = 20


def figures(found: PlanReport) -> list[tuple[str, str]]:
    """Name and text of each figure."""
    step, cluster, taught = found.step, found.cluster, found.teacher
    images, read = found.images_per_node_s, found.read_gb_per_s
    low, high = found.step_range_s
    overlap = (
        f", {1 - step.data_exposed / step.data_total:.0%} of it hidden" if step.data_total else ""
    )
    often = (
        ""
        if found.checkpoint_interval_s is None
        else f", every {found.checkpoint_interval_s:,.0f} s"
    )
    epoch = "not known: the samples of an epoch are not given"
    if found.device_hours_per_epoch is not None:
        epoch = _cost(found.device_hours_per_epoch, found.usd_per_epoch)
    lines = {
        "strategy": found.strategy,
        "memory": f"{found.peak_gib:.1f} of {found.usable_gib:.1f} GiB usable on a device",
        "step": (
            f"{found.step_s:.3g} s, 4 of 5 such steps within {low:.3g} to {high:.3g} s: computing {step.compute:.3f}, "
            f"memory {step.memory:.3f}, tensor {step.tensor:.3f}, pipeline {step.pipeline:.3f}, bubble "
            f"{step.bubble:.3f}, gradients and weights {step.data_exposed:.3f} exposed of {step.data_total:.3f}"
            f"{overlap}, optimiser {step.optimiser:.3f}"
        ),
        "bottleneck": found.bottleneck,
        "rate": (
            f"{found.samples_per_s:,.1f} samples/s; MFU {found.mfu:.1%}, occupancy {found.occupancy:.1%}, "
            f"bubble {found.bubble:.1%}"
        ),
        "decoding": (
            "none"
            if images is None
            else f"{images:,.0f} of {cluster.images_per_node_s:,.0f} images/s on a node"
        ),
        "storage": "not known"
        if read is None
        else f"{read:.2f} of {cluster.storage_gb_per_s.value:g} GB/s",
    }
    if taught is not None:
        pays = "never, for reading it takes longer"
        if taught.pays_after_epochs is not None:
            pays = f"after {taught.pays_after_epochs:.3g} epochs of all students together"
        of_token = ""
        if taught.bytes_per_token != taught.layer_bytes:
            of_token = f" ({taught.bytes_per_token:,.0f} a token)"
        lines["teacher"] = (
            f"{taught.model}, from its {found.scenario.teacher_from}: beside the student {taught.flop_share:.0%} of "
            f"all FLOP and {taught.memory_gib:.1f} GiB while it predicts; as a layer {taught.layer_bytes:,} bytes a "
            f"sample{of_token}, made once in {_cost(taught.layer_device_hours_per_million)} a million samples, which "
            f"pays {pays}"
        )
    lines["cost of a million samples"] = _cost(
        found.device_hours_per_million, found.usd_per_million
    )
    lines["cost of an epoch"] = epoch
    lines["checkpoint"] = f"{found.checkpoint_gb:,.1f} GB in {found.checkpoint_s:,.1f} s{often}"
    return list(lines.items())


def _cost(hours: float, usd: float | None = None) -> str:
    return f"{_rounded(hours)} device-hours" + ("" if usd is None else f", {_rounded(usd, 0)} USD")


def _rounded(value: float, digits: int = 1) -> str:
    """Return a number with those decimals, or with two digits where decimals would say nothing."""
    return f"{value:,.{digits}f}" if value >= 10 ** (1 - digits) else f"{value:.2g}"


def planned_rows(found: Sequence[Planned]) -> list[list[str]]:
    """Return one row for each plan."""
    return [
        [
            one.strategy,
            str(one.micro_batch),
            "" if one.peak_gib is None else f"{one.peak_gib:.1f}",
            "" if one.samples_per_s is None else f"{one.samples_per_s:,.1f}",
            "" if one.mfu is None else f"{one.mfu:.1%}",
            one.fails or "",
        ]
        for one in found
    ]


def scaling_rows(found: PlanReport) -> list[list[str]]:
    """Return one row for each point."""
    return [
        [
            curve.scaling,
            f"{point.num_ranks:,}",
            f"{point.global_batch:,}",
            f"{point.step_ms / 1e3:.3f}",
            f"{point.samples_per_s:,.1f}",
            f"{point.efficiency:.1%}",
            f"{point.occupancy:.1%}",
        ]
        for curve in found.scaling
        for point in curve.points
    ]


def stage_rows(found: PlanReport) -> list[list[str]]:
    """Return one row for each stage: what it holds, computes and sends."""
    return [
        [
            str(shape.stage),
            f"{shape.parameters:,}",
            str(shape.in_flight),
            f"{shape.flop / 1e9:,.1f}",
            ", ".join(f"{kind} {size / GIB:.2f}" for kind, size in shape.memory.items() if size),
            "; ".join(
                f"{one.count} {one.kind} on {one.axis}: {one.bytes / 1e6:,.1f} MB"
                for one in shape.collectives
            ),
        ]
        for shape in found.stages
    ]


def describe(found: PlanReport, plots: Mapping[str, str]) -> Document:
    """Return the plan as a document with these plots: first what was tried, and what the choice costs."""
    low, high = found.step_range_s
    parts: list[Block | Section] = [
        Hero(
            f"{found.samples_per_s:,.3g}"
            if found.samples_per_s < 1000
            else f"{found.samples_per_s:,.0f}",
            "samples/s, predicted",
            f"{found.strategy}: {found.peak_gib:.1f} of {found.usable_gib:.1f} GiB, a step in "
            f"{low:.3g} to {high:.3g} s. The bottleneck: {found.bottleneck}.",
        ),
        Section("What was tried", [Table(PLANNED_HEADER, planned_rows(found.tried), texts=True)]),
        Section("The plan", [Table(("figure", ""), figures(found), texts=True)]),
        *(Note(f"Assumed: {text}") for text in found.assumed),
        Section(
            "Memory and work of each stage",
            [
                Figure(plots.get("memory", ""), "Bytes at the peak of a step, by kind."),
                Table(STAGE_HEADER, stage_rows(found), texts=True),
            ],
        ),
    ]
    if found.sweep:
        ranked = sorted(
            found.sweep, key=lambda one: -(one.samples_per_s or 0.0)
        )  # the JSON has them as they are
        fits = sum(one.fails is None for one in found.sweep)
        text = Text(f"{len(found.sweep)} plans, {fits} of them fit; the fastest:")
        table = Table(PLANNED_HEADER, planned_rows(ranked[:SHOWN_OF_SWEEP]), texts=True)
        parts.append(Section("Sweep", [text, table]))
    if any(curve.points for curve in found.scaling):
        figure = Figure(
            plots.get("scaling", ""), "Samples/s a device over those of the smallest number."
        )
        parts.append(Section("Scaling", [figure, Table(SCALING_HEADER, scaling_rows(found))]))
    if found.explained:
        rows = [
            [name, one.formula, as_text(one.inputs), one.source]
            for name, one in found.explained.items()
        ]
        parts.append(
            Section(
                "Where the figures are from",
                [Table(("figure", "formula", "inputs", "source"), rows, texts=True)],
            )
        )
    if found.remedies:
        rows = [
            [change, f"{rate:,.1f}", f"{rate / found.samples_per_s - 1:+.0%}"]
            for change, rate in found.remedies.items()
        ]
        parts.append(
            Section(
                "What to change first", [Table(("change", "samples/s", "gain"), rows, texts=True)]
            )
        )
    if found.recipe is not None:
        parts.append(
            Section(
                "Launch",
                [Text(f"Written: the {found.options['recipe']} file, in the field recipe too.")],
            )
        )
    parts += [Note(f"Not given: {text}") for text in found.questions]
    parts.append(Text(f"Planned {when(found.created)}.", small=True))
    asked = found.scenario
    batch = f"{asked.global_batch} samples a step, {asked.micro_batch} at once on a rank, {asked.precision}"
    about = marked(
        "{model} on {devices} devices (**{cluster}**): {batch}",
        model=asked.named,
        devices=found.cluster.num_devices,
        cluster=found.cluster.name,
        batch=batch,
    )
    return Document("Fuelrail plan", asked.name, about, "", [], parts, {})
