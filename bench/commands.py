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
    from fuelrail.bench.studies.commands import STUDIES, command
    from fuelrail.bench.studies.diff import COMPARE_ROOM, DIFF

    entries = {word: command(word, study) for word, study in STUDIES.items()} | {"diff": DIFF}
    words = parser.add_subparsers(dest="word", required=True, metavar="WORD")
    if importlib.util.find_spec(COMPARE_ROOM) is not None:
        from fuelrail.bench.studies.compare.session import COMPARE

        entries["compare"] = COMPARE
    else:  # whatever its arguments are
        refused = words.add_parser(
            "compare", help="compare loaders: runs from a checkout", prefix_chars="+"
        )
        refused.add_argument("arguments", nargs="*")
        refused.set_defaults(run_word=_refuse_compare)
    for word, entry in entries.items():
        parser_of_word = words.add_parser(word, help=entry.help)
        entry.configure(parser_of_word)
        parser_of_word.set_defaults(run_word=entry.run)


def _refuse_compare(_: argparse.Namespace) -> int:
    from fuelrail.bench.studies.diff import FROM_CHECKOUT

    raise ConfigError(FROM_CHECKOUT)


def _run(arguments: argparse.Namespace) -> int:
    with sigterm_interrupts():
        code: int = arguments.run_word(arguments)
    return code


_SHOWN_IMAGE: Final = ImageAugment(height=64, width=64)
"""Of the batch that ``inspect --batch`` shows, where stored images differ in size."""


class BatchOption(Settings, frozen=True, kw_only=True):
    """The flag of ``inspect`` that needs a loader."""

    batch: Annotated[
        bool, flag("show what a loader's batch of 2 samples holds: name, shape, dtype, meaning")
    ] = False


def _configure_inspect(parser: argparse.ArgumentParser) -> None:
    INSPECT.configure(parser)
    add_flags(parser, BatchOption)


def _run_inspect(arguments: argparse.Namespace) -> int:
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
    loader = DataLoader(dataset, 2, split=split, num_workers=1, transforms=Transforms(image=image))
    sys.stdout.write(f"{loader.describe()}\n{note}")
    return 0


COMMANDS = {
    "bench": Command("measure loaders and training runs", _configure, _run),
    "inspect": Command(INSPECT.help, _configure_inspect, _run_inspect),
}
