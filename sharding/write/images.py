"""Images on their way into a shard: scale, add restart markers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from fuelrail.pipeline.channels.kinds import KINDS
from fuelrail.pipeline.channels.laws import LAWS, Motion
from fuelrail.pipeline.errors import ConfigError, ImageError, SchemaError, needs
from fuelrail.pipeline.native import RESTART_WRITER, CameraJpeg, Scratch, load
from fuelrail.pipeline.sample.image_header import unpack_png
from fuelrail.pipeline.transforms.image_map import ImageMap, apply_to_intrinsics

if TYPE_CHECKING:
    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.pipeline.sample.schema import Geometry, Meta
    from fuelrail.sharding.planning.recipe import ImageRecipe
    from fuelrail.sharding.sources.shared.scan_table import Reference

_scratch = Scratch()


def stored_size(recipe: ImageRecipe, source_wh: tuple[int, int]) -> tuple[int, int]:
    """Return the width and height [px] that an image is stored with; raise ImageError where it
    would grow or vanish.
    """
    width, height = source_wh
    if recipe.size is not None:
        size = recipe.size
    else:
        factor = 1.0 if recipe.resize is None else recipe.resize
        size = round(width * factor), round(height * factor)
    if size[0] > width or size[1] > height or min(size) < 1:
        raise ImageError(
            f"{width} x {height} pixels cannot be stored as {size[0]} x {size[1]}: images "
            "only shrink"
        )
    return size


def stored_field(name: str, recipe: ImageRecipe | None) -> str:
    """Return the field name of a stored member: transcoded images are JPEGs."""
    return (
        f"{name.removesuffix('.png')}.jpg" if recipe is not None and name.endswith(".png") else name
    )


def stored_share(recipe: ImageRecipe | None, members: tuple[Reference, ...]) -> float:
    """Return the approximate share of a sample's bytes that is left: that of the pixels of its
    first image.

    Raises ImageError for an image that would grow.
    """
    image = next((member for member in members if member.width), None)
    if recipe is None or image is None:
        return 1.0
    width, height = stored_size(recipe, (image.width, image.height))
    return width * height / (image.width * image.height)


def transcode(data: Buffer, extension: str, recipe: ImageRecipe) -> bytes:
    """Decode, scale, encode; raises ImageError for an image that cannot be decoded whole."""
    import simplejpeg

    with needs("images that are scaled or encoded anew"):
        import cv2

    try:
        if extension == "png":
            pixels = cv2.imdecode(
                np.frombuffer(unpack_png(data), np.uint8),
                cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION,
            )
            colours = "BGR"
        else:
            pixels = simplejpeg.decode_jpeg(data, "RGB", strict=True)
            colours = "RGB"
    except (ValueError, cv2.error) as error:
        raise ImageError(f"a damaged {'PNG' if extension == 'png' else 'JPEG'}: {error}") from error
    if pixels is None:
        raise ImageError("a damaged PNG: it cannot be decoded")
    height, width = pixels.shape[:2]
    size = stored_size(recipe, (width, height))
    if size != (width, height):
        pixels = np.ascontiguousarray(cv2.resize(pixels, size, interpolation=cv2.INTER_AREA))
    encoded: bytes = simplejpeg.encode_jpeg(pixels, recipe.quality, colours, "420")
    return encoded


def stored_channel(
    channel: Channel,
    recipe: ImageRecipe | None,
    sizes: Collection[tuple[int, int]] | None = None,
) -> Channel:
    """Return the entry of a channel as it is stored: a raster is scaled with the image that it lies
    on.

    ``sizes`` are width and height [px] of the stored images of its camera; None leaves the sides of
    the raster open. Raises ImageError for a raster that would grow, and for an array that would
    have several shapes.
    """
    if recipe is None or channel.law.name != "image":
        return channel
    fraction = channel.law.fraction or 1
    (height, width) = channel.shape[:2]
    sides: tuple[int | None, int | None] = None, None
    if channel.kind != "image" and height is not None and width is not None:
        image_wh = stored_size(recipe, (width * fraction, height * fraction))
        shapes = {_compute_raster_size(size, fraction)[::-1] for size in sizes or [image_wh]}
        if len(shapes) > 1:
            raise ImageError(
                f"channel '{channel.name}' has one shape in the source, and would have "
                f"{sorted(shapes)} on the stored images: store them in one size (--images "
                "size=WIDTHxHEIGHT)"
            )
        sides = sides if sizes is None else shapes.pop()
    return msgspec.structs.replace(channel, shape=(*sides, *channel.shape[2:]))


def scale_value(
    data: Buffer,
    channel: Channel,
    stored: Channel,
    sizes: Mapping[str, tuple[int, int]],
    recipe: ImageRecipe,
) -> bytes:
    """Scale what lies on a camera's image with the image, by the channel's law; ``sizes`` are the
    source's (w, h) [px].

    Raises MemberError for bytes that are not as the table says, and where the sample lacks the
    image.
    """
    camera = channel.law.camera or ""
    if camera not in sizes:
        raise SchemaError(
            f"channel '{channel.name}' lies on the image of '{camera}', which the sample lacks"
        )
    image_map = ImageMap.identity(sizes[camera]).resize(*stored_size(recipe, sizes[camera]))
    if channel.law.name == "image":
        # Raster pixels: the last of them may end outside of the image.
        fraction = channel.law.fraction or 1
        a, b, tx, c, d, ty = (number / fraction for number in image_map.coefficients)
        image_map = dataclasses.replace(
            image_map,
            coefficients=(a, b, tx, c, d, ty),
            out_wh=_compute_raster_size(image_map.out_wh, fraction),
            visible=(0.0, 0.0, math.inf, math.inf),
        )
    kind = KINDS[channel.kind]
    moved = LAWS[channel.law.name].move(
        kind.decode(data, channel), channel, Motion({camera: image_map})
    )
    return kind.encode(moved, stored)


def _compute_raster_size(image_wh: tuple[int, int], fraction: int) -> tuple[int, int]:
    return -(-image_wh[0] // fraction), -(-image_wh[1] // fraction)


def scale_geometry(geometry: Geometry, recipe: ImageRecipe) -> Geometry:
    """Return the geometry with ``img_wh`` and ``intrinsics`` of the stored images; unknown sizes
    stay unknown.
    """
    img_wh = geometry.img_wh.copy()
    intrinsics = geometry.intrinsics.copy()
    for camera, (width, height) in enumerate(geometry.img_wh.tolist()):
        if width > 0 and height > 0:
            image_map = ImageMap.identity((width, height)).resize(
                *stored_size(recipe, (width, height))
            )
            img_wh[camera] = image_map.out_wh
            intrinsics[camera] = apply_to_intrinsics(image_map.ida_mat(), intrinsics[camera])
    return dataclasses.replace(geometry, img_wh=img_wh, intrinsics=intrinsics)


def scale_meta(meta: Meta, recipe: ImageRecipe) -> Meta:
    """Return the metadata with the sizes of the stored images."""
    cameras = {}
    for channel, camera in meta.cameras.items():
        width, height = stored_size(recipe, (camera.width, camera.height))
        cameras[channel] = msgspec.structs.replace(camera, width=width, height=height)
    return msgspec.structs.replace(meta, cameras=cameras)


def restart_writer() -> str:
    """Return the name of the code that adds restart markers, on which bytes depend; raises
    ConfigError where it is not built.
    """
    _load_restart_writer()
    return RESTART_WRITER


def _load_restart_writer() -> CameraJpeg:
    library = load()
    if isinstance(library, str):
        raise ConfigError(f"jpeg=restart needs the compiled code of Fuelrail: {library}")
    return library


def with_restart_rows(data: Buffer) -> Buffer:
    """Return the baseline JPEG with restart markers at its rows of MCUs, with the same pixels and
    metadata.

    One of several scans, such as a progressive one, is returned as it is; what else is, says
    `CameraJpeg.add_restarts`. Raises ImageError for a damaged file.
    """
    rewritten = _load_restart_writer().add_restarts(data, _scratch)
    return data if rewritten is None else rewritten
