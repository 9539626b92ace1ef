"""``fuelrail plan SCENARIO.yaml``: arguments, and the plan as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from fuelrail.bench.planner.plan import PlanOptions, plan
from fuelrail.pipeline.cli import Command, PrintOptions, add_flags, from_flags, print_json

if TYPE_CHECKING:
    import argparse

    from fuelrail.bench.planner.plan import Plan

HELP = "say what fits, how fast it trains, what it costs, and whether the data keeps up"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fuelrail plan``."""
    parser.add_argument("scenario", metavar="SCENARIO.yaml", help="model, cluster and batch: see configs/scenarios")
    for kind in (PlanOptions, PrintOptions):
        add_flags(parser, kind)


def run(arguments: argparse.Namespace) -> int:
    """Plan and print."""
    found = plan(arguments.scenario, from_flags(arguments, PlanOptions))
    if from_flags(arguments, PrintOptions).json:
        print_json(found)
    else:
        _print(found, Console())
    return 0


def _print(found: Plan, console: Console) -> None:
    asked, step = found.scenario, found.step
    console.print(f"{asked.name}: {asked.model} on {found.devices} devices ({found.cluster})", highlight=False)
    rows = Table("strategy", "peak GiB", "samples/s", "why not", box=None, pad_edge=False)
    for one in found.tried:
        fits = one.fails is None and one.peak_gib is not None and one.samples_per_s is not None
        shown = (f"{one.peak_gib:.1f}", f"{one.samples_per_s:,.1f}") if fits else ("", "")
        rows.add_row(one.strategy, *shown, one.fails or "")
    console.print(rows)
    figures = {
        "strategy": found.strategy,
        "memory": f"{found.peak_gib:.1f} of {found.usable_gib:.1f} GiB usable on a device",
        "step": f"{found.step_s:.3f} s: computing {step.compute:.3f}, memory {step.memory:.3f}, tensor "
        f"{step.tensor:.3f}, pipeline {step.pipeline:.3f}, bubble {step.bubble:.3f}, gradients and weights "
        f"{step.data_exposed:.3f} exposed of {step.data_total:.3f}, optimiser {step.optimiser:.3f}",
        "bottleneck": found.bottleneck,
        "rate": f"{found.samples_per_s:,.1f} samples/s; MFU {found.mfu:.1%}, occupancy {found.occupancy:.1%}",
        "decoding": "none"
        if found.images_per_node_s is None
        else f"{found.images_per_node_s:,.0f} of {found.decode_images_per_node_s:,.0f} images/s on a node",
        "storage": "not known"
        if found.read_gb_per_s is None
        else f"{found.read_gb_per_s:.2f} of {found.storage_gb_per_s:g} GB/s",
        "cost of a million samples": f"{found.device_hours_per_million:,.1f} device-hours"
        + ("" if found.usd_per_million is None else f", {found.usd_per_million:,.0f} USD"),
        "checkpoint": f"{found.checkpoint_gb:,.1f} GB in {found.checkpoint_s:,.1f} s"
        + ("" if found.checkpoint_interval_s is None else f", each {found.checkpoint_interval_s:,.0f} s"),
    }
    for name, text in (*figures.items(), *found.explained.items()):
        console.print(f"{name}: {text}", highlight=False, soft_wrap=True)
    for text in found.assumed:
        console.print(f"assumed: {text}", style="dim", highlight=False, soft_wrap=True)


COMMANDS = {"plan": Command(HELP, configure, run)}
