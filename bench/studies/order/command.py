"""``fuelrail order describe``: what an order does to a dataset, with figures that say how well it shuffles."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from fuelrail.bench.studies.order.report import (
    WEBDATASET_SAMPLE_BUFFER,
    OrderFigures,
    Placed,
    describe,
    true_shuffle,
    webdataset_order,
)
from fuelrail.pipeline.cli import Command
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.order.compile import compile_order
from fuelrail.pipeline.order.spec import Kind, Layout, OrderSpec
from fuelrail.pipeline.settings import load_yaml
from fuelrail.pipeline.text import shown

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fuelrail.pipeline.order.epoch import EndlessOrder

_MAX_GLOBAL_BATCH = 1_000_000_000
DESCRIPTION = (
    "Shows what an order selects from a dataset, how long an epoch is, and how well it is shuffled, beside what "
    "webdataset's buffer shuffle gives on the same shards and what a true shuffle gives. A z is in standard "
    "deviations from a true shuffle's mean: within about 4 is as good as random."
)


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What is printed, for ``--json``."""

    dataset: str
    split: str
    epoch: int
    global_batch: int
    num_samples: int
    num_selected: int
    epoch_length: int
    num_steps: int
    num_padding: int
    identity: dict[str, object]
    figures: list[OrderFigures]


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fuelrail order``."""
    words = parser.add_subparsers(dest="word", required=True, metavar="WORD")
    add = words.add_parser("describe", help="figures and a plot of one epoch", description=DESCRIPTION).add_argument
    add("dataset", metavar="OUT", help="folder of a Fuelrail dataset")
    add("--split", default="train", help="default: %(default)s")
    add("--config", metavar="YAML", help="the whole order specification; replaces all options of it below")
    add("--kind", choices=get_args(Kind), default="shuffled", help="default: %(default)s")
    add("--seed", type=int, default=0, help="default: %(default)s")
    add("--window", type=int, help="shards in a window, for --kind windowed")
    add("--pieces-per-clip", type=int, help="for --kind lanes")
    add("--filter", metavar="EXPRESSION", help='only samples for which it holds, such as "night and num_car >= 3"')
    add("--subset", metavar="FILE", help="only samples whose keys the file lists")
    add("--epoch", type=int, default=0, help="default: %(default)s")
    add("--global-batch", type=int, default=64, help="samples a step over all ranks (default: %(default)s)")
    add(
        "--buffer",
        type=int,
        default=WEBDATASET_SAMPLE_BUFFER,
        help="webdataset's shuffle buffer (default: %(default)s)",
    )
    add("--plot", type=Path, metavar="FILE", help="draw the orders: .png, .svg or .pdf")
    add("--json", action="store_true", help="print the figures as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, draw."""
    if arguments.buffer < 1 or arguments.global_batch < 1:
        raise ConfigError(
            f"--buffer and --global-batch must be 1 or more, got {arguments.buffer} and {arguments.global_batch}"
        )
    if arguments.global_batch > _MAX_GLOBAL_BATCH:
        raise ConfigError(f"--global-batch {arguments.global_batch} must be {_MAX_GLOBAL_BATCH:,} or less")
    if arguments.buffer > _MAX_GLOBAL_BATCH:
        raise ConfigError(f"--buffer {arguments.buffer} must be {_MAX_GLOBAL_BATCH:,} or less")
    spec = load_yaml(arguments.config, OrderSpec) if arguments.config else _spec(arguments)
    dataset = open_dataset(arguments.dataset)
    order = compile_order(spec, dataset, arguments.split, global_batch=arguments.global_batch)
    entry = dataset.split(arguments.split)
    first, end = entry.first_sample, entry.first_sample + entry.num_samples
    samples = _epoch(order, arguments.epoch)
    selected = np.unique(samples)
    clips, shards = dataset.index.clip_numbers(first, end), dataset.index.column("shard", first, end)
    lengths = Layout.of_split(dataset.manifest, arguments.split).shard_lengths
    chances, equal = np.zeros(entry.num_samples), np.zeros(entry.num_samples)
    chances[order.selected()], equal[selected] = order.expected_counts(), 1.0
    num_epochs = min(_EPOCHS, _SHUFFLED_IN_ALL // len(selected))
    at = [0, len(selected) // 2, -1]

    def webdataset(epoch: int) -> NDArray[np.int64]:
        return webdataset_order(lengths, selected, seed=spec.seed + epoch, sample_buffer=arguments.buffer)

    def true(epoch: int) -> NDArray[np.int64]:
        return true_shuffle(selected, seed=(spec.seed, epoch))

    placed = [
        Placed(name=f"fuelrail {spec.kind}", samples=samples, over_epochs=_over_epochs(order), chances=chances),
        *(
            Placed(
                name=name,
                samples=shuffle(arguments.epoch),
                over_epochs=np.array([shuffle(epoch)[at] for epoch in range(num_epochs)]).reshape(-1, len(at)),
                chances=equal,
            )
            for name, shuffle in ((f"webdataset {arguments.buffer:,}", webdataset), ("true shuffle", true))
        ),
    ]
    figures = [describe(each, clips, shards, arguments.global_batch) for each in placed]
    description = Description(
        dataset=shown(dataset.manifest.name),
        split=arguments.split,
        epoch=arguments.epoch,
        global_batch=arguments.global_batch,
        num_samples=entry.num_samples,
        num_selected=order.num_selected,
        epoch_length=order.epoch_length,
        num_steps=order.epoch_length // arguments.global_batch,
        num_padding=order.epoch_length - len(samples),
        identity=order.identity,
        figures=figures,
    )
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(description), indent=2).decode())  # noqa: T201
    else:
        _print(description)
    if arguments.plot is not None:
        from fuelrail.bench.studies.order.plot import plot_orders

        plot_orders(
            arguments.plot, placed, figures, f"{description.dataset}, {description.split}, epoch {description.epoch}"
        )
        if not arguments.json:
            print(f"plot: {arguments.plot}")  # noqa: T201
    return 0


def _spec(arguments: argparse.Namespace) -> OrderSpec:
    return OrderSpec(
        kind=arguments.kind,
        seed=arguments.seed,
        window=arguments.window,
        filter=arguments.filter,
        subset=arguments.subset,
        pieces_per_clip=arguments.pieces_per_clip,
    )


def _epoch(order: EndlessOrder, epoch: int) -> NDArray[np.int64]:
    """The samples of one epoch, padding of lanes left out."""
    positions = np.arange(order.epoch_length)
    entries = order.epoch(epoch).entries(positions)
    return entries.samples[entries.valid]


def _over_epochs(order: EndlessOrder) -> NDArray[np.int64]:
    """What stands at the first, middle and last position of many epochs; of lanes, where it is always valid."""
    at = np.array([0, order.epoch_length // 2, order.epoch_length - 1])
    entries = [order.epoch(epoch).entries(at) for epoch in range(_EPOCHS)]
    always = np.all([each.valid for each in entries], axis=0)
    return np.array([each.samples[always] for each in entries])


_EPOCHS = 1000
"""Epochs over which equal chance is measured, ..."""
_SHUFFLED_IN_ALL = 2_000_000
"""... or so many that others have to shuffle this many samples."""

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
    console = Console()
    selected = "" if description.num_selected == description.num_samples else f" of {description.num_samples:,}"
    padding = f", {description.num_padding:,} of them padding" if description.num_padding else ""
    console.print(
        f"{description.dataset}, split {description.split}: {description.num_selected:,}{selected} samples selected; "
        f"an epoch has {description.epoch_length:,} positions{padding}, "
        f"{description.num_steps:,} steps of {description.global_batch}",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False)
    table.add_column(f"epoch {description.epoch}")
    for figures in description.figures:
        table.add_column(figures.name, justify="right")
    for row in rows(description.figures):
        table.add_row(*row)
    console.print(table)
    console.print(_LEGEND, style="dim", highlight=False)


def rows(figures: Sequence[OrderFigures]) -> list[tuple[str, ...]]:
    """The table's rows: what, then each order's figure."""
    found = [(text, *(_shown(getattr(each.quality, name), spec) for each in figures)) for text, name, spec in _ROWS]
    found.append(("chances over epochs, z", *(_shown(each.equal_chance_z, "+.1f") for each in figures)))
    found.append(("same-clip pairs in a batch", *(_shown(each.same_clip_pairs, ".3%") for each in figures)))
    found.append(("shards read by a batch", *(_shown(each.shards_per_batch, ".1f") for each in figures)))
    return found


def _shown(figure: float, spec: str) -> str:
    """The figure, or a dash where there are too few samples for one."""
    return "-" if math.isnan(figure) else format(figure, spec)


COMMANDS = {"order": Command("show what an order does to a dataset, and how well it shuffles", configure, run)}
