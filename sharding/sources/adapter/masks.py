"""Masks of cameras as channels: class or instance numbers of pixels in PNGs, which move with their
camera's image.

A PNG with a palette, or of fewer than 8 bits, is stored as one of 8 bits with the same numbers:
those are what it means, and the colours of the palette are for people.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from fuelrail.pipeline.channels.table import Channel, Law
from fuelrail.pipeline.errors import ImageError, SourceError, needs
from fuelrail.pipeline.sample.image_header import gray_of_palette
from fuelrail.sharding.sources.adapter.frame import FileMember
from fuelrail.sharding.sources.adapter.members import MASK, Part

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.arrays import Buffer

_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
_BITS_AT: Final = 24
_COLOUR_AT: Final = 25
_GRAY = 0
_PALETTE = 3


def mask_channel(camera: str, name: str = "mask", dtype: str = "uint8") -> Channel:
    """Return the entry ``NAME_CAMERA`` of the table for masks [H, W] of a camera, of uint8 or
    uint16.

    Augmentation moves them as it moves the camera's image, to the nearest pixel; 0 is where nothing
    was.
    """
    return Channel(
        name=f"{name}_{camera}",
        kind="image",
        field=f"{name}_{camera}.png",
        law=Law("image", camera=camera),
        dtype=dtype,
        axes=("height", "width"),
        shape=(None, None),
        frame=f"image:{camera}",
        optional=True,
    )


def mask_member(channel: Channel, ref: str, hint: str = "") -> FileMember:
    """Return the member of a frame (``Frame.members``) that is a mask of a channel.

    ``ref`` is a PNG below the root, ``NAME`` or ``NAME#OFFSET+LENGTH``. ``hint`` ends the error for
    a file that is not there; empty: the frame has no mask then.
    """
    part = Part.parse(ref)
    return FileMember(
        channel.field,
        f"{MASK}{ref}",
        (part.name,),
        hint=hint,
        num_bytes=part.length or 0,
    )


def mask_dtype(head: Buffer, where: str) -> str:
    """Return the dtype of the numbers of a mask by its first 26 bytes; raise SourceError where
    it can be none.
    """
    if bytes(head[:8]) != _SIGNATURE or len(head) <= _COLOUR_AT:
        raise SourceError(f"{where} is no PNG: other formats change the numbers of a mask")
    bits = head[_BITS_AT]
    colour = head[_COLOUR_AT]
    if colour not in (_GRAY, _PALETTE):
        raise SourceError(
            f"{where} has colours: a mask has one number a pixel, in a PNG that is gray or "
            "has a palette"
        )
    return "uint16" if bits == 16 else "uint8"


def mask_png(data: Buffer, where: str) -> Buffer:
    """Return a mask as a gray PNG of 8 or 16 bits; those that are one are returned as they are.

    Raises SourceError for a damaged one.
    """
    mask_dtype(data, where)
    bits = data[_BITS_AT]
    colour = data[_COLOUR_AT]
    if colour == _GRAY and bits >= 8:
        return data
    try:
        gray = gray_of_palette(data)
    except ImageError as error:
        raise SourceError(f"{where}: {error.message}") from error
    if bits == 8:
        return gray

    import numpy as np

    with needs("a mask of fewer than 8 bits"):
        import cv2

    pixels = cv2.imdecode(np.frombuffer(gray, np.uint8), cv2.IMREAD_UNCHANGED)
    if pixels is None:
        raise SourceError(f"{where} cannot be decoded: its pixel data are broken")
    numbers = pixels // (255 // (2**bits - 1))  # decoders spread the numbers over 0 to 255
    return bytes(cv2.imencode(".png", numbers)[1])
