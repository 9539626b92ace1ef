"""Data of the GPU checks, made by them: JPEGs of every kind that a decoder treats in another way, and datasets."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import cv2
import numpy as np
import simplejpeg

from fuelrail.bench.gpu.cameras import SOURCE_WH, made_image, write_cameras

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from fuelrail.bench.gpu.base import Bench

_MCU_PX = 16
_QUALITY = 85
_OPTIONS: dict[str, list[int]] = {
    "plain": [],
    "restart": [cv2.IMWRITE_JPEG_RST_INTERVAL, SOURCE_WH[0] // _MCU_PX],
    "4:2:2": [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_422],
    "4:4:4": [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444],
    "gray": [],
    "progressive": [cv2.IMWRITE_JPEG_PROGRESSIVE, 1],
}
KINDS = tuple(_OPTIONS)
"""Kinds of JPEG; ``plain`` is baseline 4:2:0, ``restart`` its twin with a marker at each row of MCUs."""


@functools.cache
def jpeg(kind: str, number: int = 0) -> bytes:
    """Return a JPEG of 1600x900 pixels of that kind; each number is another picture, moved against the others."""
    picture = np.roll(_picture(), (37 * number, 211 * number), axis=(0, 1))
    if kind == "gray":
        picture = np.asarray(cv2.cvtColor(picture, cv2.COLOR_BGR2GRAY), np.uint8)
    done, data = cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, _QUALITY, *_OPTIONS[kind]])
    assert done, "OpenCV encodes JPEG"
    return bytes(data)


def bad_jpegs() -> list[bytes]:
    """Return files that no decoder takes: one cut off, one whose header is that of another format, one empty."""
    whole = jpeg("plain")
    return [whole[: len(whole) // 2], b"\x89PNG" + whole[4:], b""]


@functools.cache
def _picture() -> NDArray[np.uint8]:
    decoded: NDArray[np.uint8] = simplejpeg.decode_jpeg(made_image(), colorspace="BGR")
    return decoded


def cameras(bench: Bench, kind: str = "plain", *, one_camera: bool = False) -> Path:
    """Return the folder of shards of 1600x900 images, six cameras a sample or one; made once."""
    folder = bench.work / f"cameras-{kind.replace(':', '')}{'-one' if one_camera else ''}"
    if not folder.exists():
        count = bench.pick(192, 16)
        if one_camera:
            write_cameras(folder, count * 6, image=jpeg(kind), channels=("cam_front",))
        else:
            write_cameras(folder, count, image=jpeg(kind))
    return folder
