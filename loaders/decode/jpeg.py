"""JPEG to pixels in memory that is reused: libjpeg-turbo through simplejpeg, for the backends that
resample on the CPU.

Every large array is scratch of the calling thread, reused from image to image: fresh megabytes
would cost as much in page faults as the decoding itself. Decoding is strict: a warning of libjpeg
is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import simplejpeg

from fuelrail.pipeline.errors import ImageError
from fuelrail.pipeline.transforms.image_map import scaled_size

if TYPE_CHECKING:
    from fuelrail.pipeline.native import Picture, Scratch
    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.pipeline.sample.image_header import ImageInfo


class UnusualSamplingError(ImageError):
    """A valid JPEG whose sampling factors libjpeg-turbo's own API has no name for."""


def decode_jpeg(
    encoded: Buffer,
    info: ImageInfo,
    factor: int,
    scratch: Scratch,
    lead: int = 0,
) -> Picture:
    """Return the picture, decoded at 1/factor: (h, w, 4) RGBX in the thread's scratch, or RGB (h,
    w, 3) of CMYK.

    ``lead`` rows without meaning come first, for who needs the picture to begin at a certain row.
    Not for CMYK. Raises ImageError.
    """
    width = scaled_size(info.width, 1, factor)
    height = scaled_size(info.height, 1, factor)
    room = scratch.take("decoded", lead + height, width, 4)
    image = room[lead:]
    read_pixels(encoded, "CMYK" if info.is_cmyk else "RGBX", image)
    if not info.is_cmyk:
        return room
    # Ink values are stored inverted (Adobe's convention, which Pillow assumes too): 255 means no
    # ink.
    weighted = image[..., :3].astype(np.uint16) * image[..., 3:]
    return ((weighted + 127) // 255).astype(np.uint8)


def read_pixels(encoded: Buffer, colours: str, out: Picture) -> None:
    """Decode a JPEG into ``out`` (height, width, channels), at the least scale that fills it.

    ``colours`` names the channels as simplejpeg does. Raises ImageError; ``out`` has no meaning
    then.
    """
    height, width = out.shape[:2]
    try:
        image: Picture = simplejpeg.decode_jpeg(
            encoded,
            colours,
            min_height=height,
            min_width=width,
            buffer=out,
        )
    except ValueError as error:
        if "subsampling" in str(error):
            raise UnusualSamplingError(
                "JPEG of unusual sampling factors is not supported by decoder='turbo': "
                "decoder='pillow' takes it, or re-encode it as 4:2:0, 4:2:2 or 4:4:4"
            ) from error
        raise ImageError(f"JPEG cannot be decoded: {error}") from error
    if image.shape != out.shape:
        raise ImageError(
            f"JPEG decoded to {image.shape[1]}x{image.shape[0]}, expected {width}x{height}"
        )
