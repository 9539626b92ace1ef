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

PLANNED_HEADER = (
    "strategy",
    "micro-batch",
    "peak GiB",
    "samples/s",
    "MFU",
    "why not",
)
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


def figures(report: PlanReport) -> list[tuple[str, str]]:
    """Name and text of each figure."""
    cluster = report.cluster
    taught = report.teacher
    read = report.read_gb_per_s
    is_bound = report.basis == "bound"
    upper_prefix, lower_prefix = ("at most ", "at least ") if is_bound else ("", "")
    often = (
        ""
        if report.checkpoint_interval_s is None
        else f", every {report.checkpoint_interval_s:,.0f} s"
    )
    images = report.images_per_node_s
    decoding = "none: a sample is tokens"
    if images is not None:
        limit = cluster.images_per_node_s
        decoding = f"{upper_prefix}{images:,.0f} of {limit:,.0f} images/s on a node"
    elif report.scenario.is_own:
        decoding = "none: no images are known of a sample (--cameras, --height, --width)"
    epoch = "not known: the samples of an epoch are not given"
    if report.device_hours_per_epoch is not None:
        epoch = lower_prefix + _cost(report.device_hours_per_epoch, report.usd_per_epoch)
    lines = {
        "strategy": report.strategy,
        "memory": f"{report.peak_gib:.1f} of {report.usable_gib:.1f} GiB usable on a device",
        "step": f"{step_in_words(report)}: {parts_in_words(report.step)}",
        "bottleneck": report.bottleneck
        + (", where the devices reach their bound" if is_bound else ""),
        "rate": (
            f"{upper_prefix}{_rounded(report.samples_per_s)} samples/s; MFU "
            f"{upper_prefix}{report.mfu:.1%}, occupancy {lower_prefix}{report.occupancy:.1%}, "
            f"bubble {report.bubble:.1%}"
        ),
        "decoding": decoding,
        "storage": "not known"
        if read is None
        else f"{upper_prefix}{_rounded(read, 2)} of {cluster.storage_gb_per_s.value:g} GB/s",
    }
    if taught is not None:
        pays = "never, for reading it takes longer"
        if is_bound and taught.pays_after_epochs is None:
            pays = "after a number of epochs that a bound does not say"
        elif taught.pays_after_epochs is not None:
            epochs = f"{upper_prefix}{taught.pays_after_epochs:.3g}"
            pays = f"after {epochs} epochs of all students together"
        of_token = ""
        if taught.bytes_per_token != taught.layer_bytes:
            of_token = f" ({taught.bytes_per_token:,.0f} a token)"
        lines["teacher"] = (
            f"{taught.model}, from its {report.scenario.teacher_from}: beside the student "
            f"{taught.flop_share:.0%} of all FLOP and {taught.memory_gib:.1f} GiB while it "
            f"predicts; as a layer {taught.layer_bytes:,} bytes a sample{of_token}, made "
            f"once in {lower_prefix}{_cost(taught.layer_device_hours_per_million)} a million "
            f"samples, which pays {pays}"
        )
    lines["cost of a million samples"] = lower_prefix + _cost(
        report.device_hours_per_million, report.usd_per_million
    )
    lines["cost of an epoch"] = epoch
    lines["checkpoint"] = (
        f"{_rounded(report.checkpoint_gb)} GB in {duration(report.checkpoint_s)}{often}"
    )
    if report.kept_by_restarts is not None and report.kept_by_reshape is not None:
        lines["failures"] = (
            f"cost {1 - report.kept_by_restarts:.2%} of the time with restarts, "
            f"{1 - report.kept_by_reshape:.2%} where the ranks that are left go on"
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


def step_in_words(plan: PlanReport) -> str:
    """Return what a plan says of the time of a step: a range, a bound, or what a profile says."""
    if plan.basis == "profile":
        by = f"by the profile '{plan.scenario.accelerator}', whose error is not known"
        return f"{duration(plan.step_s)} {by}"
    assert plan.step_range_s is not None, "a range and a bound have a lower end"
    low, high = plan.step_range_s
    if high is None:
        return f"not faster than {duration(low)}; the time itself is not known, --measure says it"
    if low == high:
        return f"{duration(low)}, which {plan.bottleneck} takes, however fast the devices are"
    text = f"{duration(low)} to {duration(high)}"
    return f"{duration(plan.step_s)}, 4 of 5 such steps within {text}"


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


def _cost(hours: float, usd: float | None = None) -> str:
    return f"{_rounded(hours)} device-hours" + ("" if usd is None else f", {_rounded(usd, 0)} USD")


def _rounded(value: float, digits: int = 1) -> str:
    """Return a number with those decimals, or with two digits where decimals would say nothing."""
    return f"{value:,.{digits}f}" if value >= 10 ** (1 - digits) else f"{value:.2g}"


def planned_rows(plans: Sequence[Planned]) -> list[list[str]]:
    """Return one row for each plan."""
    return [
        [
            entry.strategy,
            str(entry.micro_batch),
            "" if entry.peak_gib is None else f"{entry.peak_gib:.1f}",
            "" if entry.samples_per_s is None else _up_to(entry) + _rounded(entry.samples_per_s),
            "" if entry.mfu is None else f"{_up_to(entry)}{entry.mfu:.1%}",
            entry.fails or "",
        ]
        for entry in plans
    ]


def _up_to(entry: Planned | Curve) -> str:
    return "\u2264 " if entry.is_bound else ""


def _from(curve: Curve) -> str:
    return "\u2265 " if curve.is_bound else ""


def scaling_rows(report: PlanReport) -> list[list[str]]:
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
        for curve in report.scaling
        for point in curve.points
    ]


def stage_rows(report: PlanReport) -> list[list[str]]:
    """Return one row for each stage: what it holds, computes and sends."""
    return [
        [
            str(shape.stage),
            f"{shape.parameters:,}",
            str(shape.in_flight),
            f"{shape.flop / 1e9:,.1f}",
            ", ".join(f"{kind} {size / GIB:.2f}" for kind, size in shape.memory.items() if size),
            "; ".join(
                (
                    f"{collective.count} {collective.kind} on {collective.axis}: "
                    f"{collective.bytes / 1e6:,.1f} MB"
                )
                for collective in shape.collectives
            ),
        ]
        for shape in report.stages
    ]


def describe(report: PlanReport, plots: Mapping[str, str]) -> Document:
    """Return the plan as a document with these plots: first what was tried, and what the choice
    costs.
    """
    is_bound = report.basis == "bound"
    titles = {
        "range": "samples/s, predicted",
        "bound": "samples/s at most: a bound, no prediction",
        "profile": "samples/s, as the profile says",
    }
    parts: list[Block | Section] = [
        Hero(
            f"{report.samples_per_s:,.3g}"
            if report.samples_per_s < 1000
            else f"{report.samples_per_s:,.0f}",
            titles[report.basis],
            f"{report.strategy}: {report.peak_gib:.1f} of {report.usable_gib:.1f} GiB; a "
            f"step: {step_in_words(report)}. The bottleneck: "
            f"{report.bottleneck}{', where the devices reach their bound' if is_bound else ''}.",
        ),
        Section(
            "What was tried",
            [Table(PLANNED_HEADER, planned_rows(report.tried), texts=True)],
        ),
        Section("The plan", [Table(("figure", ""), figures(report), texts=True)]),
        *(Note(f"Assumed: {text}") for text in report.assumed),
        Section(
            "Memory and work of each stage",
            [
                Figure(
                    plots.get("memory", ""),
                    "Bytes at the peak of a step, by kind.",
                ),
                Table(STAGE_HEADER, stage_rows(report), texts=True),
            ],
        ),
    ]
    if report.sweep:
        ranked = sorted(
            report.sweep, key=lambda entry: -(entry.samples_per_s or 0.0)
        )  # the JSON has them as they are
        fits = sum(entry.fails is None for entry in report.sweep)
        best = "the highest bounds, which are no ranking" if is_bound else "the fastest"
        text = Text(f"{len(report.sweep)} plans, {fits} of them fit; {best}:")
        table = Table(PLANNED_HEADER, planned_rows(ranked[:SHOWN_OF_SWEEP]), texts=True)
        parts.append(Section("Sweep", [text, table]))
    if any(curve.points for curve in report.scaling):
        figure = Figure(
            plots.get("scaling", ""),
            "Samples/s a device over those of the smallest number"
            + (", of bounds: slower steps scale better." if is_bound else "."),
        )
        parts.append(Section("Scaling", [figure, Table(SCALING_HEADER, scaling_rows(report))]))
    if report.explained:
        rows = [
            [name, entry.formula, as_text(entry.inputs), entry.source]
            for name, entry in report.explained.items()
        ]
        parts.append(
            Section(
                "Where the figures are from",
                [
                    Table(
                        ("figure", "formula", "inputs", "source"),
                        rows,
                        texts=True,
                    )
                ],
            )
        )
    if report.remedies:
        rows = [
            [change, _rounded(rate), f"{rate / report.samples_per_s - 1:+.0%}"]
            for change, rate in report.remedies.items()
        ]
        parts.append(
            Section(
                "What to change first",
                [Table(("change", "samples/s", "gain"), rows, texts=True)],
            )
        )
    if report.recipe is not None:
        parts.append(
            Section(
                "Launch",
                [Text(f"Written: the {report.options['recipe']} file, in the field recipe too.")],
            )
        )
    parts += [Note(f"Not given: {text}") for text in report.questions]
    parts.append(Text(f"Planned {when(report.created)}.", small=True))
    scenario = report.scenario
    batch = (
        f"{scenario.global_batch} samples a step, {scenario.micro_batch} at once on a rank, "
        f"{scenario.precision}"
    )
    subtitle = marked(
        "{model} on {devices} devices (**{cluster}**): {batch}",
        model=scenario.named,
        devices=report.cluster.num_devices,
        cluster=report.cluster.name,
        batch=batch,
    )
    return Document(
        brand="Fuelrail plan",
        title=scenario.name,
        subtitle=subtitle,
        origin="",
        doubts=[],
        parts=parts,
        facts={},
    )
