"""The page of a plan."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from fuelrail.bench.planner.hardware import GIB
from fuelrail.bench.report.markdown import as_text
from fuelrail.bench.report.page import figure, hero, note, page, table, tiles, when
from fuelrail.bench.report.plots import PercentFormatter, legend_above, new_figure, style, to_svg
from fuelrail.bench.studies.plan.markdown import (
    SCALING_HEADER,
    STAGE_HEADER,
    SWEEP_HEADER,
    TRIED_HEADER,
    figures,
    scaling_rows,
    stage_rows,
    sweep_rows,
    tried_rows,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fuelrail.bench.studies.plan.report import PlanReport

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442", "#999999")


def render_page(found: PlanReport) -> str:
    """Return the page as one string; it refers to nothing outside itself."""
    asked = found.scenario
    about = f"{escape(asked.model)} on {found.devices} devices (<b>{escape(found.cluster)}</b>)"
    parts = [
        '<div class="brand">Fuelrail plan</div>', f"<h1>{escape(asked.name)}</h1>",
        f'<p class="sub">{about}. {when(found.created)}.</p>',
        hero(
            f"{found.samples_per_s:,.1f}", "samples/s, predicted",
            f"{found.strategy}: {found.peak_gib:.1f} of {found.usable_gib:.1f} GiB, a step in {found.step_s:.3f} s. "
            f"The bottleneck: {found.bottleneck}.",
        ),
        tiles([(f"{found.mfu:.1%}", "MFU"), (f"{found.occupancy:.1%}", "occupancy"), (f"{found.bubble:.1%}", "bubble"),
               (f"{found.device_hours_per_million:,.1f}", "device-hours a million samples")]),
        _table(("figure", ""), [[name, text] for name, text in figures(found)], texts=True),
        "<h2>What was tried</h2>", _table(TRIED_HEADER, tried_rows(found), texts=True),
        "<h2>Memory and work of each stage</h2>", figure(_memory(found), "Bytes at the peak of a step, by kind."),
        _table(STAGE_HEADER, stage_rows(found), texts=True),
    ]  # fmt: skip
    if found.sweep:
        caption = "Each dot is a plan that fits: memory of a device, and samples/s with the data's limits."
        parts += ["<h2>Sweep</h2>", figure(_sweep(found), caption), _table(SWEEP_HEADER, sweep_rows(found), texts=True)]
    if any(curve.points for curve in found.scaling):
        parts += ["<h2>Scaling</h2>", figure(_scaling(found), "Samples/s a device over those of the smallest number.")]
        parts += [_table(SCALING_HEADER, scaling_rows(found))]
    if found.explained:
        rows = [[name, one.formula, as_text(one.inputs), one.source] for name, one in found.explained.items()]
        parts += [
            "<h2>Where the figures are from</h2>",
            _table(("figure", "formula", "inputs", "source"), rows, texts=True),
        ]
    parts += [note(f"Assumed: {text}") for text in found.assumed]
    parts += [note(f"Not said: {text}") for text in found.questions]
    return page(f"Plan: {asked.name}", parts)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], *, texts: bool = False) -> str:
    return table([*map(escape, header)], [[*map(escape, row)] for row in rows], texts=texts)


def _memory(found: PlanReport) -> str:
    kinds = list(dict.fromkeys(kind for stage in found.memory_by_stage for kind, size in stage.items() if size))
    with style():
        drawn, axes = new_figure(1.2 + 0.3 * len(found.stages))
        names = [f"stage {shape.stage}" for shape in found.stages]
        left = [0.0] * len(names)
        for number, kind in enumerate(kinds):
            sizes = [stage.get(kind, 0) / GIB for stage in found.memory_by_stage]
            axes.barh(names, sizes, 0.66, left=left, color=_COLOURS[number % len(_COLOURS)], label=kind)
            left = [before + size for before, size in zip(left, sizes, strict=True)]
        axes.axvline(found.usable_gib, color="#222222", linewidth=1, linestyle="--")
        axes.invert_yaxis()
        axes.set_xlabel("GiB; dashed: usable")
        legend_above(axes)
        return to_svg(drawn, "Memory by stage and kind")


def _sweep(found: PlanReport) -> str:
    with style():
        drawn, axes = new_figure(3.2)
        fits = [one for one in found.sweep if one.peak_gib is not None and one.samples_per_s is not None]
        sizes = sorted({one.micro_batch for one in fits})
        for number, size in enumerate(sizes):
            mine = [one for one in fits if one.micro_batch == size]
            axes.plot(
                [one.peak_gib or 0.0 for one in mine], [one.samples_per_s or 0.0 for one in mine], "o", markersize=4,
                color=_COLOURS[number % len(_COLOURS)], label=f"micro-batch {size}",
            )  # fmt: skip
        axes.set_xlabel("peak GiB of a device")
        axes.set_ylabel("samples/s")
        legend_above(axes)
        return to_svg(drawn, "Plans of the sweep")


def _scaling(found: PlanReport) -> str:
    with style():
        drawn, axes = new_figure(2.9)
        for number, curve in enumerate(found.scaling):
            if curve.points:
                axes.plot(
                    [point.devices for point in curve.points], [point.efficiency for point in curve.points], "o-",
                    markersize=3, color=_COLOURS[number % len(_COLOURS)], label=f"{curve.scaling}, {curve.name}",
                )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_xlabel("devices")
        axes.set_ylabel("efficiency")
        legend_above(axes)
        return to_svg(drawn, "Scaling efficiency")
