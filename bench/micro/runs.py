"""Arguments of `fuelrail bench train` as benchmarks give them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fuelrail.bench.train_command import configure

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def arguments_for(
    dataset: Path | str, *, command: Callable[[argparse.ArgumentParser], None] = configure, **options: object
) -> argparse.Namespace:
    """What the command line's parser makes of a dataset and no options, with these in the place of the defaults.

    ``command`` declares the arguments; those of `bench train` unless another command's are given.
    """
    parser = argparse.ArgumentParser()
    command(parser)
    arguments = parser.parse_args([str(dataset)])
    for name, value in options.items():
        assert hasattr(arguments, name), f"there is no option {name}"
        setattr(arguments, name, value)
    return arguments
