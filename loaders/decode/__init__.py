"""Decode backends behind one protocol (`ImageDecoder`), chosen by name."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from fuelrail.loaders.decode.probe import ImageInfo, probe
from fuelrail.loaders.decode.protocol import INTERPOLATIONS, ImageDecoder, Interpolation
from fuelrail.pipeline.errors import ConfigError

__all__ = ["BACKENDS", "INTERPOLATIONS", "ImageDecoder", "ImageInfo", "Interpolation", "make_decoder", "probe"]

BACKENDS = {
    "turbo": "fuelrail.loaders.decode.turbo:TurboDecoder",
    "pillow": "fuelrail.loaders.decode.pillow:PillowDecoder",
    "dali": "fuelrail.loaders.decode.dali:DaliDecoder",
}
"""Backend name to the class that is imported when it is chosen."""


def make_decoder(name: str = "auto") -> ImageDecoder:
    """Return the decode backend of that name; ``"auto"`` picks the fastest that is always installed, ``"turbo"``.

    Raises ConfigError for an unknown name, or with what to install for a backend whose package is missing.
    """
    target = BACKENDS.get("turbo" if name == "auto" else name)
    if target is None:
        raise ConfigError(f"decoder={name!r} must be one of auto, {', '.join(BACKENDS)}")
    module, _, attribute = target.partition(":")
    return cast("ImageDecoder", getattr(import_module(module), attribute)())
