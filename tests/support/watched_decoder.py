"""A decoder as another package would bring it: it remembers for what it was made."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fuelrail.loaders.decode.pillow import PillowDecoder

if TYPE_CHECKING:
    from fuelrail.loaders.decode.protocol import Place


class Watched(PillowDecoder):
    """Pillow's pixels under another name."""

    name = "watched"
    places: ClassVar[list[Place]] = []


def make(place: Place) -> Watched:
    """Return the decoder; what its entry point names."""
    Watched.places.append(place)
    return Watched()
