"""Decode backends behind one protocol (`ImageDecoder`), chosen by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from fuelrail.loaders.decode.protocol import (
    INTERPOLATIONS,
    BatchDecoder,
    DaliOptions,
    ImageDecoder,
    ImageFacts,
    ImagesDecoder,
    Interpolation,
    ViewsDecoder,
)
from fuelrail.pipeline.errors import ConfigError, ImageError
from fuelrail.pipeline.sample.image_header import ImageInfo, probe

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.pipeline.transforms.image_map import ImageMap

__all__ = [
    "BACKENDS",
    "INTERPOLATIONS",
    "BatchDecoder",
    "ImageDecoder",
    "ImageInfo",
    "ImagesDecoder",
    "Interpolation",
    "ViewsDecoder",
    "decode_images",
    "decode_views",
    "decodes_on_device",
    "make_decoder",
    "probe",
]

BACKENDS = {
    "turbo": "fuelrail.loaders.decode.turbo:TurboDecoder",
    "pillow": "fuelrail.loaders.decode.pillow:PillowDecoder",
    "dali": "fuelrail.loaders.decode.dali:DaliDecoder",
}
"""Backend name to the class that is imported when it is chosen."""

_ON_DEVICES = frozenset({"dali"})


def make_decoder(
    name: str = "auto",
    device: torch.device | str | None = None,
    facts: Callable[[], ImageFacts] | None = None,
    num_threads: int = 2,
    dali: DaliOptions | None = None,
) -> ImageDecoder:
    """Return the decode backend of that name; ``"auto"`` picks the fastest that is always installed, ``"turbo"``.

    ``device`` is for those that know devices, which are `BatchDecoder` too ("dali"); None is the CPU. ``facts`` is
    called where the images' sizes and coding help: for a GPU. ``num_threads`` is for those with threads of their own,
    which again is "dali"; ``dali`` are its options.

    Raises ConfigError for an unknown name, or with what to install for a backend whose package is missing.
    """
    target = BACKENDS.get("turbo" if name == "auto" else name)
    if target is None:
        raise ConfigError(f"decoder={name!r} must be one of auto, {', '.join(BACKENDS)}")
    module, _, attribute = target.partition(":")
    backend = getattr(import_module(module), attribute)
    if name not in _ON_DEVICES:
        return cast("ImageDecoder", backend())
    options: dict[str, Any] = {} if dali is None else {"options": dali}
    if facts is not None and device is not None and str(device) != "cpu":
        options["facts"] = facts()
    return cast("ImageDecoder", backend(device or "cpu", num_threads=num_threads, **options))


def decode_images(
    decoder: ImageDecoder, encoded: Sequence[Buffer], image_maps: Sequence[ImageMap], outs: Sequence[NDArray[np.uint8]]
) -> Iterator[ImageError | None]:
    """Decode each image under its map: in one call where the decoder can, else one after another.

    Arguments as in `ImageDecoder.decode_into`. Yields for each image None, or the error for which its ``out`` is
    untouched.
    """
    if isinstance(decoder, ImagesDecoder):
        yield from decoder.decode_images(encoded, image_maps, outs)
        return
    for image in zip(encoded, image_maps, outs, strict=True):
        try:
            decoder.decode_into(*image)
        except ImageError as error:
            yield error
        else:
            yield None


def decode_views(
    decoder: ImageDecoder, encoded: Buffer, image_maps: Sequence[ImageMap], outs: Sequence[NDArray[np.uint8]]
) -> None:
    """Write one image under several maps: from one decode where the decoder can, else from one for each.

    ``image_maps`` and ``outs`` as in `ImageDecoder.decode_into`, which says what is raised.
    """
    if isinstance(decoder, ViewsDecoder):
        decoder.decode_views(encoded, image_maps, outs)
        return
    for image_map, out in zip(image_maps, outs, strict=True):
        decoder.decode_into(encoded, image_map, out)


def decodes_on_device(decoder: ImageDecoder | BatchDecoder) -> TypeGuard[BatchDecoder]:
    """Whether a backend decodes into memory of a device, which it takes itself; not into host memory."""
    return isinstance(decoder, BatchDecoder) and decoder.device.type != "cpu"
