"""``fuelrail order describe``: arguments, and the figures of an order as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fuelrail.bench.report.console import print_table, report_console
from fuelrail.bench.report.options import add_dataset
from fuelrail.bench.studies.order.describe import DescribeOptions, Description, describe_order
from fuelrail.pipeline.cli import Command, PrintOptions, add_flags, from_flags, given_flags, print_json
from fuelrail.pipeline.order.spec import OrderSpec

if TYPE_CHECKING:
    import argparse

    from fuelrail.bench.studies.order.report import OrderFigures

DESCRIPTION = (
    "Shows which samples an order selects from a dataset, how long an epoch is, and how random the order is compared "
    "with webdataset's shuffle buffer on the same shards and with a true shuffle. A z is in standard deviations from "
    "the mean of true shuffles: within about 4 is as good as random."
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fuelrail order``."""
    words = parser.add_subparsers(dest="word", required=True, metavar="WORD")
    describe = words.add_parser("describe", help="figures and a plot of one epoch", description=DESCRIPTION)
    add_dataset(describe)
    for kind in (DescribeOptions, OrderSpec, PrintOptions):
        add_flags(describe, kind)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print and draw."""
    options = from_flags(arguments, DescribeOptions)
    spec = from_flags(arguments, OrderSpec) if given_flags(arguments, OrderSpec) else None
    description = describe_order(arguments.dataset, spec, options)
    if from_flags(arguments, PrintOptions).json:
        print_json(description)
        return 0
    _print(description)
    if options.plot is not None:
        print(f"plot: {options.plot}")  # noqa: T201
    return 0


_CHANCE_Z = 4
_ROWS = (
    ("rank correlation", "rank_correlation", "+.4f"),
    ("  z", "rank_correlation_z", "+.1f"),
    ("neighbours' correlation", "serial_correlation", "+.4f"),
    ("  z", "serial_correlation_z", "+.1f"),
    ("buckets' chi-square, z", "bucket_chi_square_z", "+.1f"),
    ("displacement, ratio", "displacement_ratio", ".3f"),
    ("neighbours' distance, ratio", "neighbour_distance_ratio", ".3f"),
    ("separation, ratio", "separation_ratio", ".3f"),
)
_LEGEND = (
    "z: standard deviations from a true shuffle's mean. ratio: of what a true shuffle has on average. neighbours: "
    "samples next to each other in the order. buckets: is each part of the data spread over the whole epoch? "
    "displacement: how far samples are from where they are stored. separation: how far apart stored neighbours come. "
    "chances: over many epochs, has every part of the data its chance at the first, middle and last position?"
)


def _print(description: Description) -> None:
    console = report_console()
    selected = "" if description.num_selected == description.num_samples else f" of {description.num_samples:,}"
    padding = f", {description.num_padding:,} of them padding" if description.num_padding else ""
    console.print(
        f"{description.dataset}, split {description.split}: {description.num_selected:,}{selected} samples selected; "
        f"an epoch has {description.epoch_length:,} positions{padding}, "
        f"{description.num_steps:,} steps of {description.global_batch}"
    )
    console.print(verdict(description.figures[0]), style="bold")
    header = [f"epoch {description.epoch}", *(figures.name for figures in description.figures)]
    print_table(console, header, rows(description.figures))
    console.print(_LEGEND, style="dim")


def verdict(order: OrderFigures) -> str:
    """Return in a sentence whether an order is as random as a true shuffle."""
    quality = order.quality
    known = {
        "rank correlation": quality.rank_correlation_z,
        "neighbours' correlation": quality.serial_correlation_z,
        "buckets": quality.bucket_chi_square_z,
        "chances over epochs": order.equal_chance_z,
    }
    name, worst = max(((name, z) for name, z in known.items() if not math.isnan(z)), key=lambda entry: abs(entry[1]))
    if abs(worst) <= _CHANCE_Z:
        return f"As random as a true shuffle: the largest |z| is {abs(worst):.1f}, and up to {_CHANCE_Z} is chance."
    return f"Less random than a true shuffle: z of {name} is {worst:+.1f}, and only up to {_CHANCE_Z} is chance."


def rows(figures: Sequence[OrderFigures]) -> list[tuple[str, ...]]:
    """Return the table's rows: what, then each order's figure."""
    found = [(text, *(_shown(getattr(each.quality, name), spec) for each in figures)) for text, name, spec in _ROWS]
    found.append(("chances over epochs, z", *(_shown(each.equal_chance_z, "+.1f") for each in figures)))
    found.append(("same-clip pairs in a batch", *(_shown(each.same_clip_pairs, ".3%") for each in figures)))
    found.append(("shards read by a batch", *(_shown(each.shards_per_batch, ".1f") for each in figures)))
    return found


def _shown(figure: float, spec: str) -> str:
    """Return the figure, or a dash where there are too few samples for one."""
    return "-" if math.isnan(figure) else format(figure, spec)


COMMANDS = {"order": Command("show what an order does to a dataset, and how well it shuffles", configure, run)}
