"""A description of an order: from options to figures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from fuelrail.bench.studies.order.report import (
    WEBDATASET_SAMPLE_BUFFER,
    OrderFigures,
    Placed,
    describe,
    true_shuffle,
    webdataset_order,
)
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.order.compile import compile_order
from fuelrail.pipeline.order.spec import Layout, OrderSpec
from fuelrail.pipeline.settings import CheckedSettings, flag, make_options
from fuelrail.pipeline.text import shown

if TYPE_CHECKING:
    from fuelrail.pipeline.order.epoch import EndlessOrder

_MAX: Final = 1_000_000_000
_EPOCHS = 1000
"""Epochs over which equal chance is measured; fewer where others would shuffle more than _SHUFFLED_IN_ALL samples."""
_SHUFFLED_IN_ALL = 2_000_000


class DescribeOptions(CheckedSettings, frozen=True, kw_only=True):
    """Options of `fuelrail.describe_order`, and flags of ``fuelrail order describe``."""

    split: Annotated[str, flag("split to describe")] = "train"
    epoch: Annotated[int, msgspec.Meta(ge=0), flag("epoch to describe")] = 0
    global_batch: Annotated[int, msgspec.Meta(ge=1, le=_MAX), flag("samples per step over all ranks")] = 64
    buffer: Annotated[int, msgspec.Meta(ge=1, le=_MAX), flag("size of webdataset's shuffle buffer")] = (
        WEBDATASET_SAMPLE_BUFFER
    )
    config: Annotated[OrderSpec | None, flag("file with a whole order, in place of --kind, --seed, --window, ...")] = (
        None
    )
    plot: Annotated[str | None, flag("draw the orders: .png, .svg or .pdf", metavar="FILE")] = None


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
    figures: list[OrderFigures]


def describe_order(
    dataset: str | os.PathLike[str],
    order: OrderSpec | None = None,
    options: DescribeOptions | None = None,
    **changes: Any,  # noqa: ANN401 - fields of DescribeOptions
) -> Description:
    """Measure which samples an order selects and how random it is; without ``order`` and ``config`` a seeded shuffle.

    ``fuelrail.describe_order("DATASET", epoch=2)`` takes the fields of :class:`DescribeOptions` as keywords. Raises
    ConfigError, DatasetErrors and OrderError.
    """
    options = make_options(DescribeOptions, options, changes)
    if order is not None and options.config is not None:
        raise ConfigError("config is a whole order: give it, or the fields of an order such as kind and seed, not both")
    spec = order or options.config or OrderSpec()
    opened = open_dataset(dataset)
    compiled = compile_order(spec, opened, options.split, global_batch=options.global_batch)
    entry = opened.split(options.split)
    first, end = entry.first_sample, entry.first_sample + entry.num_samples
    clips, shards = opened.index.clip_numbers(first, end), opened.index.column("shard", first, end)
    lengths = Layout.of_split(opened, options.split).shard_lengths
    placed = _placed(compiled, spec, lengths, options)
    figures = [describe(each, clips, shards, options.global_batch) for each in placed]
    description = Description(
        dataset=shown(opened.manifest.name),
        split=options.split,
        epoch=options.epoch,
        global_batch=options.global_batch,
        num_samples=entry.num_samples,
        num_selected=compiled.num_selected,
        epoch_length=compiled.epoch_length,
        num_steps=compiled.epoch_length // options.global_batch,
        num_padding=compiled.epoch_length - len(placed[0].samples),
        identity=compiled.identity,
        figures=figures,
    )
    if options.plot is not None:
        from fuelrail.bench.studies.order.plot import plot_orders  # imports matplotlib

        title = f"{description.dataset}, {description.split}, epoch {description.epoch}"
        plot_orders(Path(options.plot), placed, figures, title)
    return description


def _placed(order: EndlessOrder, spec: OrderSpec, lengths: Any, options: DescribeOptions) -> list[Placed]:  # noqa: ANN401
    """Return one epoch of the order, of webdataset's and of a true shuffle, over the same samples."""
    samples = _epoch(order, options.epoch)
    selected = np.unique(samples)
    num_samples = sum(lengths)
    chances, equal = np.zeros(num_samples), np.zeros(num_samples)
    chances[order.selected()], equal[selected] = order.expected_counts(), 1.0
    num_epochs = min(_EPOCHS, _SHUFFLED_IN_ALL // len(selected))
    at = [0, len(selected) // 2, -1]

    def webdataset(epoch: int) -> NDArray[np.int64]:
        return webdataset_order(lengths, selected, seed=spec.seed + epoch, sample_buffer=options.buffer)

    def true(epoch: int) -> NDArray[np.int64]:
        return true_shuffle(selected, seed=(spec.seed, epoch))

    return [
        Placed(name=f"fuelrail {spec.kind}", samples=samples, over_epochs=_over_epochs(order), chances=chances),
        *(
            Placed(
                name=name,
                samples=shuffle(options.epoch),
                over_epochs=np.array([shuffle(epoch)[at] for epoch in range(num_epochs)]).reshape(-1, len(at)),
                chances=equal,
            )
            for name, shuffle in ((f"webdataset {options.buffer:,}", webdataset), ("true shuffle", true))
        ),
    ]


def _epoch(order: EndlessOrder, epoch: int) -> NDArray[np.int64]:
    """Return the samples of one epoch, padding of lanes left out."""
    entries = order.epoch(epoch).entries(np.arange(order.epoch_length))
    return entries.samples[entries.valid]


def _over_epochs(order: EndlessOrder) -> NDArray[np.int64]:
    """Return the samples at the first, middle and last position of many epochs; for lanes, where always valid."""
    at = np.array([0, order.epoch_length // 2, order.epoch_length - 1])
    entries = [order.epoch(epoch).entries(at) for epoch in range(_EPOCHS)]
    always = np.all([each.valid for each in entries], axis=0)
    return np.array([each.samples[always] for each in entries])
