"""Runs of `fuelrail bench train` as benchmarks make them: their arguments, and imaginary accelerators."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fuelrail.bench.measure.accelerator import AcceleratorProfile, ReferenceInput
from fuelrail.bench.studies.train.command import configure

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


def made_profile(
    name: str, device: str, *, forward_ms: float, backward_ms: float, optimiser_ms: float, derivation: str = "None."
) -> AcceleratorProfile:
    """An accelerator that takes these times for each sample of six cameras, and is alone on its network."""
    return AcceleratorProfile(
        name=name,
        device=device,
        network="none",
        per="sample",
        reference_input=ReferenceInput(cameras=6, height=256, width=704),
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        optimiser_ms=optimiser_ms,
        sources=["made for this measurement"],
        derivation=derivation,
    )
