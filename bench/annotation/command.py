"""``fuelrail annotate``: flags in, a line for each rank out."""

from __future__ import annotations

from typing import Annotated

from fuelrail.bench.annotation.run import AnnotateOptions, annotate
from fuelrail.bench.report.options import DATASET, command, print_text
from fuelrail.pipeline.cli import PrintOptions
from fuelrail.pipeline.settings import Settings, flag

_DESCRIPTION = (
    "Run a model over a dataset, in order, and store what it returns as a layer. The "
    "function gets a batch and returns a dict of channel name to a tensor [B, ...] or a "
    "list. Under torchrun all ranks share the work. An interrupted run is resumed by the "
    "same command."
)


class ModelOption(Settings, frozen=True, kw_only=True):
    """The model, which the function `fuelrail.bench.annotate` takes as an argument of its own."""

    model: Annotated[
        str,
        flag("the function, or a class that makes it", metavar="MODULE:FUNCTION"),
    ]


def print_annotated(
    dataset: str,
    layer: str,
    model: ModelOption,
    options: AnnotateOptions,
    printing: PrintOptions,
) -> int:
    """Run the model, and print what was written."""
    print_text(annotate(dataset, layer, model.model, options), printing)
    return 0


COMMANDS = {
    "annotate": command(
        "run a model over a dataset and store a layer",
        print_annotated,
        arguments={
            "dataset": DATASET,
            "layer": {
                "metavar": "LAYER",
                "help": "folder of the layer; must be new, empty, or hold a partial layer",
            },
        },
        options=(ModelOption, AnnotateOptions, PrintOptions),
        description=_DESCRIPTION,
    )
}
