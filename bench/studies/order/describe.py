"""``fuelrail order describe``: which samples an order selects, and how random it is."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from fuelrail.bench.report.console import print_table, report_console
from fuelrail.bench.report.options import DATASET, command, command_of_words
from fuelrail.bench.studies.order.packs import CostFigures, measure_costs
from fuelrail.bench.studies.order.quality import OrderFigures, describe
from fuelrail.pipeline.cli import PrintOptions, print_json
from fuelrail.pipeline.errors import ConfigError, needs
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.order.compile import compile_order, split_lengths
from fuelrail.pipeline.order.spec import OrderSpec
from fuelrail.pipeline.settings import CheckedSettings, flag, make_options
from fuelrail.pipeline.text import shortened

_MAX: Final = 1_000_000_000
_SHARD_BUFFER: Final = 100  # what WebDataset(..., shardshuffle=True) means
_CHANCE_Z: Final = 4
_LEGEND = (
    "z: standard deviations from the mean of true shuffles. neighbours: samples next to each "
    "other in the order."
)


class DescribeOptions(CheckedSettings, frozen=True, kw_only=True):
    """Options of `fuelrail.bench.describe_order`, and flags of ``fuelrail order describe``."""

    split: Annotated[str, flag("split to describe")] = "train"
    epoch: Annotated[int, msgspec.Meta(ge=0), flag("epoch to describe")] = 0
    global_batch: Annotated[
        int,
        msgspec.Meta(ge=1, le=_MAX),
        flag("samples per step over all ranks"),
    ] = 64
    ranks: Annotated[
        int,
        msgspec.Meta(ge=1, le=_MAX),
        flag("ranks of an order in packs, in buckets or balanced"),
    ] = 1
    buffer: Annotated[
        int,
        msgspec.Meta(ge=1, le=_MAX),
        flag("size of webdataset's shuffle buffer"),
    ] = 1000
    config: Annotated[
        OrderSpec | None,
        flag("file with a whole order, in place of --kind, --seed, --window, ..."),
    ] = None


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """An order, and how well it shuffles compared with a shuffle buffer and a full shuffle."""

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
    costs: CostFigures | None
    """What packs, buckets and ranks cost; None for an order without these."""
    figures: list[OrderFigures]


def describe_order(
    dataset: str | os.PathLike[str],
    order: OrderSpec | None = None,
    options: DescribeOptions | None = None,
    **changes: Any,  # fields of DescribeOptions
) -> Description:
    """Measure which samples an order selects and how random it is; without ``order`` and ``config``
    a seeded shuffle.

    ``fuelrail.bench.describe_order("DATASET", epoch=2)`` takes the fields of
    :class:`DescribeOptions` as keywords.

    Raises ConfigError, DatasetErrors and OrderError.
    """
    options = make_options(DescribeOptions, options, changes)
    if order is not None and options.config is not None:
        raise ConfigError(
            "config is a whole order: give it, or the fields of an order such as kind and "
            "seed, not both"
        )
    spec = (order or options.config or OrderSpec()).resolved()
    opened = open_dataset(dataset)
    compiled = compile_order(spec, opened, options.split, global_batch=options.global_batch)
    entry = opened.split(options.split)
    first = entry.first_sample
    end = entry.first_sample + entry.num_samples
    clips = opened.index.clip_numbers(first, end)
    lengths = split_lengths(opened, options.split)
    in_order = compiled.epoch(options.epoch)
    entries = in_order.entries(np.arange(len(in_order)))
    costs = None
    if spec.pack or spec.bucket or spec.balance:
        costs = measure_costs(
            compiled,
            epoch=options.epoch,
            in_order=in_order,
            entries=entries,
            global_batch=options.global_batch,
            ranks=options.ranks,
        )
    batch = options.global_batch
    if costs is not None:
        batch = round(options.global_batch * costs.samples_per_pack)
    samples = entries.samples[entries.valid]  # without the padding of lanes
    selected = np.unique(samples)
    seed = spec.seed + options.epoch
    rng = np.random.default_rng((spec.seed, options.epoch))
    orders = {
        f"fuelrail {spec.kind}": samples,
        f"webdataset {options.buffer:,}": webdataset_order(
            lengths,
            selected,
            seed=seed,
            sample_buffer=options.buffer,
        ),
        "true shuffle": rng.permutation(selected),
    }
    figures = []
    for name, order_samples in orders.items():
        order_figures = describe(name, order_samples, clips, batch)
        figures.append(order_figures)
    return Description(
        dataset=shortened(opened.manifest.name),
        split=options.split,
        epoch=options.epoch,
        global_batch=options.global_batch,
        num_samples=entry.num_samples,
        num_selected=compiled.num_selected,
        epoch_length=len(in_order),
        num_steps=len(in_order) // options.global_batch,
        num_padding=len(entries.valid) - len(samples),
        identity=compiled.identity,
        costs=costs,
        figures=figures,
    )


def webdataset_order(
    shard_lengths: Sequence[int],
    selected: NDArray[np.int64],
    *,
    seed: int,
    sample_buffer: int,
) -> NDArray[np.int64]:
    """Return the order of webdataset's own shuffles for ``selected`` samples (ascending): shards,
    then samples.

    One reader, seeded, with both through a buffer; several workers and ranks read their parts of
    the shards alike.
    """
    with needs("the order of webdataset"):
        from webdataset.filters import detshuffle

    first_samples = np.cumsum([0, *shard_lengths])
    starts = np.searchsorted(selected, first_samples).tolist()
    shard_shuffle = detshuffle(bufsize=_SHARD_BUFFER, seed=seed)
    sample_shuffle = detshuffle(bufsize=sample_buffer, seed=seed)
    shards: Iterator[int] = shard_shuffle.run(iter(range(len(shard_lengths))))

    def stored() -> Iterator[int]:
        for shard in shards:
            yield from selected[starts[shard] : starts[shard + 1]].tolist()

    return np.fromiter(sample_shuffle.run(stored()), dtype=np.int64, count=len(selected))


def print_description(
    dataset: str,
    options: DescribeOptions,
    spec: OrderSpec | None,
    printing: PrintOptions,
) -> int:
    """Print what an order selects, and how random it is."""
    description = describe_order(dataset, spec, options)
    if printing.json:
        print_json(description)
        return 0
    console = report_console()
    selected = (
        ""
        if description.num_selected == description.num_samples
        else f" of {description.num_samples:,}"
    )
    padding = f", {description.num_padding:,} of them padding" if description.num_padding else ""
    console.print(
        f"{description.dataset}, split {description.split}: {description.num_selected:,}{selected} "
        f"samples selected; an epoch has {description.epoch_length:,} positions{padding}, "
        f"{description.num_steps:,} steps of {description.global_batch}"
    )
    name, z = description.figures[0].quality.worst
    verdict = (
        f"As random as a true shuffle: the largest |z| is {abs(z):.1f}, and up to {_CHANCE_Z} "
        "is chance."
    )
    if abs(z) > _CHANCE_Z:
        verdict = (
            f"Less random than a true shuffle: z of {name} is {z:+.1f}, and only up to "
            f"{_CHANCE_Z} is chance."
        )
    console.print(verdict, style="bold")
    figures = description.figures
    rows = [
        (
            "rank correlation",
            *(f"{entry.quality.rank_correlation:+.4f}" for entry in figures),
        ),
        (
            "neighbours' correlation",
            *(f"{entry.quality.serial_correlation:+.4f}" for entry in figures),
        ),
        (
            "same-clip pairs in a batch",
            *(f"{entry.same_clip_pairs:.3%}".replace("nan%", "-") for entry in figures),
        ),
    ]
    costs = description.costs
    if costs is not None:
        lost = f"randomness lost {costs.randomness_lost or 0:+.4f} (correlation of costs in a"
        if costs.fill is not None and costs.waste is not None:
            console.print(
                f"packs of {costs.samples_per_pack:.1f} samples: fill {costs.fill:.2%}, "
                f"waste {costs.waste:.2%}, {lost} pack; a full shuffle has 0)"
            )
        if costs.num_buckets is not None:
            padding = ""
            if costs.padding is not None:
                padding = (
                    f"padding {costs.padding_before:.2%} without, {costs.padding:.2%} with them, "
                )
            console.print(
                f"{costs.num_buckets} buckets: {padding}{lost} global batch; a full shuffle has 0)"
            )
        if costs.dearest_rank is not None:
            console.print(
                f"the dearest of {costs.ranks} ranks costs {costs.dearest_rank:.3f} of the mean"
            )
    print_table(
        console,
        [f"epoch {description.epoch}", *(entry.name for entry in figures)],
        rows,
    )
    console.print(_LEGEND, style="dim")
    return 0


_WORDS = {
    "describe": command(
        "figures of one epoch",
        print_description,
        arguments={"dataset": DATASET},
        options=(DescribeOptions, OrderSpec, PrintOptions),
        if_given=(OrderSpec,),
        description="Shows which samples an order selects from a dataset, how long an epoch is, "
        "and how random the order is compared with webdataset's shuffle buffer on the same shards "
        "and with a true shuffle. A z is in standard deviations from the mean of true "
        "shuffles: within about 4 is as good as random.",
    )
}
COMMANDS = {
    "order": command_of_words(
        "show what an order does to a dataset, and how well it shuffles", _WORDS
    )
}
