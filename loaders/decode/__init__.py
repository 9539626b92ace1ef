"""Decode backends behind one protocol (`ImageDecoder`), chosen by name: Fuelrail's, and plug-ins.

A plug-in's package names a function that makes a decoder for a `Place` in the entry points
``fuelrail.decoders``::

    [project.entry-points."fuelrail.decoders"]
    nvdec = "my_package.nvdec:make"
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Final, TypeGuard, cast

from fuelrail.loaders.decode.protocol import (
    UNKNOWN,
    BatchDecoder,
    DaliOptions,
    ImageDecoder,
    ImageFacts,
    ImagesDecoder,
    Place,
    ViewsDecoder,
)
from fuelrail.pipeline.errors import ConfigError, ImageError
from fuelrail.pipeline.settings import did_you_mean

if TYPE_CHECKING:
    import torch

    from fuelrail.pipeline.dtypes import U8
    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.pipeline.transforms.image_map import ImageMap

GROUP: Final = "fuelrail.decoders"


def _turbo(_: Place) -> ImageDecoder:
    from fuelrail.loaders.decode.turbo import TurboDecoder

    return TurboDecoder()


def _pillow(_: Place) -> ImageDecoder:
    from fuelrail.loaders.decode.pillow import PillowDecoder

    return PillowDecoder()


def _dali(place: Place) -> ImageDecoder:
    from fuelrail.loaders.decode.dali import DEFAULT_OPTIONS, DaliDecoder

    facts = UNKNOWN if place.facts is None or place.device == "cpu" else place.facts()
    return DaliDecoder(
        place.device,
        num_threads=place.num_threads,
        facts=facts,
        options=place.dali or DEFAULT_OPTIONS,
    )


BACKENDS: dict[str, Callable[[Place], ImageDecoder]] = {
    "turbo": _turbo,
    "pillow": _pillow,
    "dali": _dali,
}
"""Name of a built-in backend to the function that imports and makes it."""


def plugin_decoders() -> dict[str, EntryPoint]:
    """Return the entry points of installed plug-ins by name, without loading any; none replaces
    a built-in backend.
    """
    return {
        entry_point.name: entry_point
        for entry_point in entry_points(group=GROUP)
        if entry_point.name not in BACKENDS
    }


def make_decoder(
    name: str = "auto",
    device: torch.device | str | None = None,
    facts: Callable[[], ImageFacts] | None = None,
    num_threads: int = 2,
    dali: DaliOptions | None = None,
) -> ImageDecoder:
    """Return the decode backend of that name; ``"auto"`` picks the fastest that is always
    installed, ``"turbo"``.

    ``device`` is for backends that know devices, which are `BatchDecoder` too (such as "dali");
    None is the CPU. ``facts`` is called where the images' sizes and coding help: for a GPU.
    ``num_threads`` is for those with threads of their own; ``dali`` are the options of "dali".

    Raises ConfigError for an unknown name, with what to install for a backend whose package is
    missing, and for a plug-in that makes no decoder.
    """
    place = Place("cpu" if device is None else str(device), num_threads, facts, dali)
    built_in = BACKENDS.get("turbo" if name == "auto" else name)
    if built_in is not None:
        return built_in(place)
    plugins = plugin_decoders()
    if name not in plugins:
        names = [*BACKENDS, *plugins]
        raise ConfigError(
            f"decoder={name!r} must be one of auto, {', '.join(names)}{did_you_mean(name, names)}; "
            f"a plug-in's package names its decoders in the entry points '{GROUP}'"
        )
    entry = plugins[name]
    package = "" if entry.dist is None else f" of package '{entry.dist.name}'"
    try:
        decoder = entry.load()(place)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"decoder '{name}'{package} cannot be imported: {error}") from error
    if not isinstance(decoder, ImageDecoder):
        raise ConfigError(
            f"decoder '{name}'{package}: '{entry.value}' made {type(decoder).__name__}, "
            "which is not an ImageDecoder of fuelrail.loaders.decode.protocol; give it the "
            "attribute `name` and the method `decode_into`"
        )
    return decoder


def decode_images(
    decoder: ImageDecoder,
    encoded: Sequence[Buffer],
    image_maps: Sequence[ImageMap],
    outs: Sequence[U8],
) -> Iterator[ImageError | None]:
    """Decode each image under its map: in one call where the decoder can, else one after another.

    Arguments as in `ImageDecoder.decode_into`. Yields for each image None, or the error for which
    its ``out`` is untouched.
    """
    if _takes_several(type(decoder)):
        yield from cast("ImagesDecoder", decoder).decode_images(encoded, image_maps, outs)
        return
    for image in zip(encoded, image_maps, outs, strict=True):
        try:
            decoder.decode_into(*image)
        except ImageError as error:
            yield error
        else:
            yield None


@functools.cache
def _takes_several(kind: type) -> bool:
    # Python 3.11 asks a protocol for its attributes each time, at 15 microseconds a sample.
    return issubclass(kind, ImagesDecoder)


def decode_views(
    decoder: ImageDecoder,
    encoded: Buffer,
    image_maps: Sequence[ImageMap],
    outs: Sequence[U8],
) -> None:
    """Write one image under several maps: from one decode where the decoder can, else from one for
    each.

    ``image_maps`` and ``outs`` as in `ImageDecoder.decode_into`, which says what is raised.
    """
    if isinstance(decoder, ViewsDecoder):
        decoder.decode_views(encoded, image_maps, outs)
        return
    for image_map, out in zip(image_maps, outs, strict=True):
        decoder.decode_into(encoded, image_map, out)


def decodes_on_device(
    decoder: ImageDecoder | BatchDecoder,
) -> TypeGuard[BatchDecoder]:
    """Return whether a backend decodes into device memory, which it allocates itself; not into
    host memory.
    """
    return isinstance(decoder, BatchDecoder) and decoder.device.type != "cpu"
