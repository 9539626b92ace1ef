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
    from fuelrail.bench.planner.scaling import Curve
    from fuelrail.bench.planner.step_time import StepTime
    from fuelrail.bench.studies.plan.report import PlanReport
    from fuelrail.bench.studies.plan.variants import Planned

PLANNED_HEADER = ("strategy", "micro-batch", "peak GiB", "samples/s", "MFU", "why not")
SCALING_HEADER = (
    "scaling",
    "devices",
    "global batch",
    "step",
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
    cluster = found.cluster
    taught = found.teacher
    read = found.read_gb_per_s
    is_bound = found.basis == "bound"
    most, least = ("at most ", "at least ") if is_bound else ("", "")
    often = (
        ""
        if found.checkpoint_interval_s is None
        else f", every {found.checkpoint_interval_s:,.0f} s"
    )
    epoch = "not known: the samples of an epoch are not given"
    if found.device_hours_per_epoch is not None:
        epoch = least + _cost(found.device_hours_per_epoch, found.usd_per_epoch)
    lines = {
        "strategy": found.strategy,
        "memory": f"{found.peak_gib:.1f} of {found.usable_gib:.1f} GiB usable on a device",
        "step": f"{step_in_words(found)}: {parts_in_words(found.step)}",
        "bottleneck": found.bottleneck
        + (", where the devices reach their bound" if is_bound else ""),
        "rate": (
            f"{most}{_rounded(found.samples_per_s)} samples/s; MFU {most}{found.mfu:.1%}, occupancy "
            f"{least}{found.occupancy:.1%}, bubble {found.bubble:.1%}"
        ),
        "decoding": _decoding(found, most),
        "storage": "not known"
        if read is None
        else f"{most}{_rounded(read, 2)} of {cluster.storage_gb_per_s.value:g} GB/s",
    }
    if taught is not None:
        pays = "never, for reading it takes longer"
        if is_bound and taught.pays_after_epochs is None:
            pays = "after a number of epochs that a bound does not say"
        elif taught.pays_after_epochs is not None:
            pays = f"after {most}{taught.pays_after_epochs:.3g} epochs of all students together"
        of_token = ""
        if taught.bytes_per_token != taught.layer_bytes:
            of_token = f" ({taught.bytes_per_token:,.0f} a token)"
        lines["teacher"] = (
            f"{taught.model}, from its {found.scenario.teacher_from}: beside the student {taught.flop_share:.0%} of "
            f"all FLOP and {taught.memory_gib:.1f} GiB while it predicts; as a layer {taught.layer_bytes:,} bytes a "
            f"sample{of_token}, made once in {least}{_cost(taught.layer_device_hours_per_million)} "
            f"a million samples, which pays {pays}"
        )
    lines["cost of a million samples"] = least + _cost(
        found.device_hours_per_million, found.usd_per_million
    )
    lines["cost of an epoch"] = epoch
    lines["checkpoint"] = (
        f"{_rounded(found.checkpoint_gb)} GB in {duration(found.checkpoint_s)}{often}"
    )
    return list(lines.items())


def duration(seconds: float) -> str:
    """Return seconds, milliseconds or microseconds with three digits."""
    value = 1e6 * seconds
    unit = "us"
    if seconds >= 1:
        value = seconds
        unit = "s"
    elif seconds >= 1e-3:
        value = 1e3 * seconds
        unit = "ms"
    return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}"


def step_in_words(found: PlanReport) -> str:
    """Return what a plan says of the time of a step: a range, a bound, or what a profile says."""
    if found.basis == "profile":
        by = f"by the profile '{found.scenario.accelerator}', whose error is not known"
        return f"{duration(found.step_s)} {by}"
    assert found.step_range_s is not None, "a range and a bound have a lower end"
    low, high = found.step_range_s
    if high is None:
        return f"not faster than {duration(low)}; the time itself is not known, --measure says it"
    if low == high:
        return f"{duration(low)}, which {found.bottleneck} takes, however fast the devices are"
    text = f"{duration(low)} to {duration(high)}"
    return f"{duration(found.step_s)}, 4 of 5 such steps within {text}"


def parts_in_words(step: StepTime) -> str:
    """Return the parts of a step that take time."""
    hidden = (
        f", {1 - step.data_exposed / step.data_total:.0%} of it hidden" if step.data_total else ""
    )
    parts = {
        "computing": step.compute,
        "memory": step.memory,
        "waiting for launches": step.launch,
        "tensor": step.tensor,
        "pipeline": step.pipeline,
        "bubble": step.bubble,
    }
    said = [f"{name} {duration(seconds)}" for name, seconds in parts.items() if seconds]
    if step.data_total:
        exposed = duration(step.data_exposed) if step.data_exposed else "nothing"
        total = duration(step.data_total)
        said.append(f"gradients and weights {exposed} exposed of {total}{hidden}")
    return ", ".join([*said, f"optimiser {duration(step.optimiser)}"])


def _decoding(found: PlanReport, most: str) -> str:
    images = found.images_per_node_s
    if images is not None:
        return f"{most}{images:,.0f} of {found.cluster.images_per_node_s:,.0f} images/s on a node"
    if found.scenario.is_own:
        return "none: no images are known of a sample (--cameras, --height, --width)"
    return "none: a sample is tokens"


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
            "" if one.samples_per_s is None else _up_to(one) + _rounded(one.samples_per_s),
            "" if one.mfu is None else f"{_up_to(one)}{one.mfu:.1%}",
            one.fails or "",
        ]
        for one in found
    ]


def _up_to(one: Planned | Curve) -> str:
    return "\u2264 " if one.is_bound else ""


def _from(curve: Curve) -> str:
    return "\u2265 " if curve.is_bound else ""


def scaling_rows(found: PlanReport) -> list[list[str]]:
    """Return one row for each point."""
    return [
        [
            curve.scaling,
            f"{point.num_ranks:,}",
            f"{point.global_batch:,}",
            _from(curve) + duration(point.step_ms / 1e3),
            _up_to(curve) + _rounded(point.samples_per_s),
            f"{_from(curve)}{point.efficiency:.1%}",
            f"{_from(curve)}{point.occupancy:.1%}",
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
    is_bound = found.basis == "bound"
    titles = {
        "range": "samples/s, predicted",
        "bound": "samples/s at most: a bound, no prediction",
        "profile": "samples/s, as the profile says",
    }
    parts: list[Block | Section] = [
        Hero(
            f"{found.samples_per_s:,.3g}"
            if found.samples_per_s < 1000
            else f"{found.samples_per_s:,.0f}",
            titles[found.basis],
            f"{found.strategy}: {found.peak_gib:.1f} of {found.usable_gib:.1f} GiB; a step: {step_in_words(found)}. "
            f"The bottleneck: {found.bottleneck}{', where the devices reach their bound' if is_bound else ''}.",
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
        best = "the highest bounds, which are no ranking" if is_bound else "the fastest"
        text = Text(f"{len(found.sweep)} plans, {fits} of them fit; {best}:")
        table = Table(PLANNED_HEADER, planned_rows(ranked[:SHOWN_OF_SWEEP]), texts=True)
        parts.append(Section("Sweep", [text, table]))
    if any(curve.points for curve in found.scaling):
        figure = Figure(
            plots.get("scaling", ""),
            "Samples/s a device over those of the smallest number"
            + (", of bounds: slower steps scale better." if is_bound else "."),
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
            [change, _rounded(rate), f"{rate / found.samples_per_s - 1:+.0%}"]
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
    return Document(
        brand="Fuelrail plan",
        title=asked.name,
        about=about,
        made="",
        doubts=[],
        parts=parts,
        facts={},
    )
