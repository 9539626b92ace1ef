"""What a decoder on a GPU wants to know of a dataset's images before the first one comes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fuelrail.pipeline.errors import FuelrailError
from fuelrail.pipeline.image_header import probe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fuelrail.loaders.sources import Source

_NUM_LOOKED_AT = 4


class ImageFacts(NamedTuple):
    """Facts of a dataset's images.

    Attributes:
        largest_wh: width and height in pixels that no stored image exceeds.
        baseline_share: part of the images that is baseline JPEG, which is all that hardware decoders take; 0 to 1.
    """

    largest_wh: tuple[int, int]
    baseline_share: float


UNKNOWN = ImageFacts((0, 0), 1.0)


def image_facts(sources: Sequence[Source]) -> ImageFacts:
    """Sizes from the manifests, and how the images of a few samples, spread over the datasets, are coded."""
    sizes = [size for source in sources for camera in source.dataset.manifest.cameras for size in camera.sizes]
    is_baseline = []
    for source in sources:
        num_samples = len(source.dataset.index)
        for at in sorted({number * num_samples // _NUM_LOOKED_AT for number in range(_NUM_LOOKED_AT)}):
            try:
                images = source.reader.sample(at).images.values()
                is_baseline += [info.format == "jpeg" and not info.progressive for info in map(probe, images)]
            except FuelrailError:
                continue  # a bad sample is the loader's affair, when its turn comes
    share = sum(is_baseline) / len(is_baseline) if is_baseline else 1.0
    return ImageFacts((max((w for w, _ in sizes), default=0), max((h for _, h in sizes), default=0)), share)
