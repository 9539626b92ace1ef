"""Images stored smaller, or as smaller JPEGs, than the source has them: a lossy choice, made in plain sight.

Pixels go through libjpeg-turbo and an area filter, calibration through the same map, and the manifest's recipe says
what was done and by which versions.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import numpy as np

from fuelrail.pipeline.errors import ConfigError, ImageError
from fuelrail.pipeline.geometry import ImageMap, apply_to_intrinsics
from fuelrail.pipeline.image_header import unpack_png
from fuelrail.pipeline.settings import Settings, convert

if TYPE_CHECKING:
    from fuelrail.pipeline.buffers import Buffer
    from fuelrail.pipeline.schema import Geometry, Meta
    from fuelrail.sharding.table import Reference

DEFAULT_QUALITY: Final = 92
FORM: Final = "resize=FACTOR or size=WIDTHxHEIGHT, and quality=1..100, joined by a comma"
_PACKAGES: Final = ("simplejpeg", "opencv-python-headless")


def _versions() -> str:
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)


class ImageRecipe(Settings, frozen=True):
    """How images are stored: scaled by ``resize`` (0 to 1) or to ``size`` (w, h) [px], as JPEG 4:2:0 of ``quality``."""

    resize: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    size: tuple[Annotated[int, msgspec.Meta(ge=8)], Annotated[int, msgspec.Meta(ge=8)]] | None = None
    quality: Annotated[int, msgspec.Meta(ge=1, le=100)] = DEFAULT_QUALITY
    by: str = msgspec.field(default_factory=_versions)


def parse_images(text: str) -> ImageRecipe:
    """``resize=0.5,quality=92`` or ``size=800x450``; raises ConfigError."""
    values: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        size = re.fullmatch(r"([0-9]+)x([0-9]+)", value)
        number = re.fullmatch(r"[0-9]+(\.[0-9]+)?", value)
        if name in values or not (size if name == "size" else number) or name not in ("resize", "size", "quality"):
            raise ConfigError(f"--images {text!r}: {part.strip()!r} is not understood; write {FORM}")
        if size:
            values[name] = (int(size.group(1)), int(size.group(2)))
        else:
            values[name] = float(value) if name == "resize" else int(float(value))
    recipe = convert(values, ImageRecipe, f"--images {text!r}")
    if recipe.resize is not None and recipe.size is not None:
        raise ConfigError(f"--images {text!r} has both resize and size; write {FORM}")
    return recipe


def stored_size(recipe: ImageRecipe, source_wh: tuple[int, int]) -> tuple[int, int]:
    """Width and height [px] that an image is stored with; raises ImageError where it would grow or vanish."""
    width, height = source_wh
    if recipe.size is not None:
        wanted = recipe.size
    else:
        factor = 1.0 if recipe.resize is None else recipe.resize
        wanted = round(width * factor), round(height * factor)
    if wanted[0] > width or wanted[1] > height or min(wanted) < 1:
        raise ImageError(f"{width} x {height} pixels cannot be stored as {wanted[0]} x {wanted[1]}: images only shrink")
    return wanted


def stored_field(name: str, recipe: ImageRecipe | None) -> str:
    """The field name of a member: transcoded images are JPEGs."""
    return f"{name.removesuffix('.png')}.jpg" if recipe is not None and name.endswith(".png") else name


def stored_share(recipe: ImageRecipe | None, members: tuple[Reference, ...]) -> float:
    """Roughly what part of a sample's bytes is left, for the plan: the part of the pixels of its first image.

    Raises ImageError for an image that would grow.
    """
    image = next((member for member in members if member.width), None)
    if recipe is None or image is None:
        return 1.0
    width, height = stored_size(recipe, (image.width, image.height))
    return width * height / (image.width * image.height)


def transcode(data: Buffer, extension: str, recipe: ImageRecipe) -> bytes:
    """Decode, scale, encode; raises ImageError for an image that cannot be decoded whole."""
    import cv2
    import simplejpeg

    try:
        if extension == "png":
            pixels = cv2.imdecode(
                np.frombuffer(unpack_png(data), np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION
            )
            colours = "BGR"
        else:
            pixels, colours = simplejpeg.decode_jpeg(data, "RGB", strict=True), "RGB"
    except (ValueError, cv2.error) as error:
        raise ImageError(f"a damaged {'PNG' if extension == 'png' else 'JPEG'}: {error}") from error
    if pixels is None:
        raise ImageError("a damaged PNG: it cannot be decoded")
    height, width = pixels.shape[:2]
    wanted = stored_size(recipe, (width, height))
    if wanted != (width, height):
        pixels = np.ascontiguousarray(cv2.resize(pixels, wanted, interpolation=cv2.INTER_AREA))
    encoded: bytes = simplejpeg.encode_jpeg(pixels, recipe.quality, colours, "420")
    return encoded


def scale_geometry(geometry: Geometry, recipe: ImageRecipe) -> Geometry:
    """The geometry with ``img_wh`` and ``intrinsics`` of the stored images; unknown sizes stay unknown."""
    img_wh, intrinsics = geometry.img_wh.copy(), geometry.intrinsics.copy()
    for camera, (width, height) in enumerate(geometry.img_wh.tolist()):
        if width > 0 and height > 0:
            image_map = ImageMap.identity((width, height)).resize(*stored_size(recipe, (width, height)))
            img_wh[camera] = image_map.out_wh
            intrinsics[camera] = apply_to_intrinsics(image_map.ida_mat(), intrinsics[camera])
    return dataclasses.replace(geometry, img_wh=img_wh, intrinsics=intrinsics)


def scale_meta(meta: Meta, recipe: ImageRecipe) -> Meta:
    """The metadata with the sizes of the stored images."""
    cameras = {}
    for channel, camera in meta.cameras.items():
        width, height = stored_size(recipe, (camera.width, camera.height))
        cameras[channel] = msgspec.structs.replace(camera, width=width, height=height)
    return msgspec.structs.replace(meta, cameras=cameras)
