"""``fuelrail bench WORD``: the harness on the command line; and ``inspect``, which may need a
loader.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Annotated, Final

from fuelrail.pipeline.cli import Command, add_flags, from_flags
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.runtime.workers import sigterm_interrupts
from fuelrail.pipeline.settings import Settings, flag
from fuelrail.pipeline.transforms.image import ImageAugment
from fuelrail.sharding.commands import COMMANDS as OFFLINE

if TYPE_CHECKING:
    import argparse


INSPECT = OFFLINE["inspect"]


def _configure(parser: argparse.ArgumentParser) -> None:
    # Not before: studies take a second to import, and `inspect` needs none.
    from fuelrail.bench.report.options import command_of_words
    from fuelrail.bench.studies.commands import STUDIES
    from fuelrail.bench.studies.diff import COMPARE_ROOM, DIFF, FROM_CHECKOUT

    words = dict(STUDIES)
    words["diff"] = DIFF
    if importlib.util.find_spec(COMPARE_ROOM) is not None:
        from fuelrail.bench.studies.compare.session import COMPARE
        from fuelrail.bench.studies.resume.session import RESUME

        words["compare"] = COMPARE
        words["resume"] = RESUME
    else:

        def take_any_arguments(refused: argparse.ArgumentParser) -> None:
            refused.prefix_chars = "+"
            refused.add_argument("arguments", nargs="*")

        def refuse(_: argparse.Namespace) -> int:
            raise ConfigError(FROM_CHECKOUT)

        words["compare"] = Command(
            "compare loaders: runs from a checkout", take_any_arguments, refuse
        )
        words["resume"] = Command(
            "kill and resume stacks: runs from a checkout", take_any_arguments, refuse
        )
    command_of_words("", words).configure(parser)


def _run(arguments: argparse.Namespace) -> int:
    with sigterm_interrupts():
        code: int = arguments.run_word(arguments)
    return code


_SHOWN_IMAGE: Final = ImageAugment(height=64, width=64)
"""Of the batch that ``inspect --batch`` shows, where stored images differ in size."""


class BatchOption(Settings, frozen=True, kw_only=True):
    """The flag of ``inspect`` that needs a loader."""

    batch: Annotated[
        bool,
        flag("show what a loader's batch of 2 samples holds: name, shape, dtype, meaning"),
    ] = False


def configure_inspect(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``inspect``, with the one that needs a loader."""
    INSPECT.configure(parser)
    add_flags(parser, BatchOption)


def run_inspect(arguments: argparse.Namespace) -> int:
    """Show a dataset or a sample, or with ``--batch`` what a batch of a loader holds."""
    if not from_flags(arguments, BatchOption).batch:
        return INSPECT.run(arguments)
    split = next(
        name for name, entry in open_dataset(arguments.dataset).splits.items() if entry.num_samples
    )
    from fuelrail.loaders.config import Transforms
    from fuelrail.loaders.loader import DataLoader  # takes seconds: torch
    from fuelrail.loaders.schedule.selection import stored_image

    dataset = open_dataset(arguments.dataset)
    note = ""
    try:
        image = stored_image({dataset.manifest.name: dataset})
    except ConfigError as error:
        image = _SHOWN_IMAGE
        note = f"\nimg is 64 x 64 here: {error}\n"
    loader = DataLoader(
        dataset,
        2,
        split=split,
        num_workers=1,
        transforms=Transforms(image=image),
    )
    sys.stdout.write(f"{loader.describe()}\n{note}")
    return 0


COMMANDS = {
    "bench": Command("measure loaders and training runs", _configure, _run),
    "inspect": Command(INSPECT.help, configure_inspect, run_inspect),
}
