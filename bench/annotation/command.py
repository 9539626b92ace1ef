"""``fuelrail annotate``: flags in, a line for each rank out."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from fuelrail.bench.report.options import add_dataset
from fuelrail.pipeline.cli import Command, PrintOptions, add_flags, from_flags, print_json
from fuelrail.pipeline.settings import Settings, flag

if TYPE_CHECKING:
    import argparse

_DESCRIPTION = (
    "Run a model over a dataset, in order, and store what it returns as a layer. The "
    "function gets a batch and returns a dict of channel name to a tensor [B, ...] or a "
    "list. Under torchrun all ranks share the work. An interrupted run is resumed by the "
    "same command."
)


class ModelOption(Settings, frozen=True, kw_only=True):
    """The model, which the function `fuelrail.bench.annotate` takes as an argument of its own."""

    model: Annotated[str, flag("the function, or a class that makes it", metavar="MODULE:FUNCTION")]


def _configure(parser: argparse.ArgumentParser) -> None:
    from fuelrail.bench.annotation.run import AnnotateOptions

    parser.description = _DESCRIPTION
    add_dataset(parser)
    parser.add_argument(
        "layer",
        metavar="LAYER",
        help="folder of the layer; must be new, empty, or hold a partial layer",
    )
    add_flags(parser, ModelOption)
    add_flags(parser, AnnotateOptions)
    add_flags(parser, PrintOptions)


def _run(args: argparse.Namespace) -> int:
    from fuelrail.bench.annotation.run import AnnotateOptions, annotate

    report = annotate(
        args.dataset,
        args.layer,
        from_flags(args, ModelOption).model,
        from_flags(args, AnnotateOptions),
    )
    print_json(report) if from_flags(args, PrintOptions).json else sys.stdout.write(
        report.as_text()
    )
    return 0


COMMANDS = {"annotate": Command("run a model over a dataset and store a layer", _configure, _run)}
