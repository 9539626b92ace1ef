"""The exact backend: full decode and Pillow's antialiased filters.

Pillow, or pillow-simd, which is faster.

Axis-aligned maps are one `resize(box=...)` of the source. A rotation is an antialiased resize to
the output's scale and then one interpolated affine transform, which is what the PIL pipelines of
the BEV code bases do.
"""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING

import cv2
import numpy as np

from fuelrail.loaders.decode.jpeg import UnusualSamplingError, decode_jpeg
from fuelrail.loaders.decode.lens import largest_scale, sampling, source_rows
from fuelrail.loaders.decode.protocol import (
    Interpolation,
    black_out_unseen,
    check_output,
    check_source,
)
from fuelrail.loaders.decode.resample import two_steps
from fuelrail.loaders.decode.splice import splice_rows, splice_views
from fuelrail.pipeline.errors import ImageError, needs
from fuelrail.pipeline.native import Picture, Scratch
from fuelrail.pipeline.sample.image_header import ImageInfo, probe, unpack_png

with needs("decoder='pillow'", "pillow"):
    from PIL import Image, JpegImagePlugin, PngImagePlugin

from collections.abc import Sequence

if TYPE_CHECKING:
    from PIL import ImageFile

    from fuelrail.pipeline.dtypes import U8
    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.pipeline.transforms.image_map import ImageMap

_FILTERS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}
_REACH = {"bilinear": 1.0, "bicubic": 2.0}


class PillowDecoder:
    """Resamples with Pillow; see `fuelrail.loaders.decode.protocol.ImageDecoder`.

    Pixels go from the JPEG decoder to Pillow and from there to ``out`` without a copy in between:
    Pillow's own decoder would write to fresh memory, and its arrays interleave three channels.
    """

    name = "pillow"

    def __init__(self) -> None:
        self._scratch = Scratch()

    def decode_into(
        self,
        encoded: Buffer,
        image_map: ImageMap,
        out: U8,
        interpolation: Interpolation = "bilinear",
    ) -> None:
        """Decode into ``out``; see the protocol."""
        self.decode_views(encoded, [image_map], [out], interpolation)

    def decode_views(
        self,
        encoded: Buffer,
        image_maps: Sequence[ImageMap],
        outs: Sequence[U8],
        interpolation: Interpolation = "bilinear",
    ) -> None:
        """Decode once into several ``outs``, each as `decode_into` makes it."""
        for image_map, out in zip(image_maps, outs, strict=True):
            check_output(image_map, out, interpolation)
        info = probe(encoded)
        for image_map in image_maps:
            check_source(info, image_map)
        if image_maps[0].lens is not None:
            self._rectify(
                encoded,
                info=info,
                image_maps=image_maps,
                outs=outs,
                interpolation=interpolation,
            )
            return
        if info.restart_interval:
            reach = [
                (_REACH[interpolation] + 1.0) / min(1.0, image_map.max_scale)
                for image_map in image_maps
            ]
            rois = [
                image_map.source_roi(far) for image_map, far in zip(image_maps, reach, strict=True)
            ]
            top = min(roi[1] for roi in rois)
            bottom = max(roi[3] for roi in rois)
            spliced = splice_rows(encoded, info, top, bottom, scratch=self._scratch)
            if spliced is not None:
                encoded = spliced.encoded
                info = info._replace(height=spliced.height)
                image_maps = [
                    image_map.of_rows(spliced.top, spliced.height) for image_map in image_maps
                ]
        source = self._decode(encoded, info)
        for image_map, out in zip(image_maps, outs, strict=True):
            (_resize if image_map.is_axis_aligned else _rotate)(
                source, image_map, out, interpolation
            )

    def _rectify(
        self,
        encoded: Buffer,
        info: ImageInfo,
        image_maps: Sequence[ImageMap],
        outs: Sequence[U8],
        interpolation: str,
    ) -> None:
        """Resize with antialiasing to the output's scale, then undo lens and map by one
        interpolation, as `_rotate`.
        """
        lenses = [image_map.lens for image_map in image_maps if image_map.lens is not None]
        scales = [min(1.0, largest_scale(*view)) for view in zip(image_maps, lenses, strict=True)]
        reach = [(_REACH[interpolation] + 1.0) / scale for scale in scales]
        rows = [source_rows(*view) for view in zip(image_maps, lenses, reach, strict=True)]
        top = 0
        parts = ((0, info.height),) * len(rows)
        if info.restart_interval:
            encoded, top, height, parts = splice_views(
                encoded,
                info=info,
                rows=rows,
                factor=1,
                scratch=self._scratch,
            )
            info = info._replace(height=height)
        full_image = self._decode(encoded, info)
        for image_map, lens, scale, (begin, end), out in zip(
            image_maps,
            lenses,
            scales,
            parts,
            outs,
            strict=True,
        ):
            image = (
                full_image
                if (begin, end) == (0, info.height)
                else full_image.crop((0, begin, info.width, end))
            )
            size = (
                max(1, math.ceil(image.width * scale)),
                max(1, math.ceil(image.height * scale)),
            )
            scaled = (size[0] / image.width, size[1] / image.height)
            if size != image.size:
                image = image.resize(size, _FILTERS[interpolation])
            places = sampling(
                image_map,
                lens=lens,
                scale=scaled,
                size=size,
                top=top + begin,
            )
            remapped = cv2.remap(
                np.asarray(image),
                places.x,
                places.y,
                cv2.INTER_LINEAR,
                borderMode=cv2.BORDER_REPLICATE,
            )
            _split(remapped, out)
            if places.unseen is not None:
                out[:, places.unseen] = 0

    def _decode(self, encoded: Buffer, info: ImageInfo) -> Image.Image:
        """Return an image of mode RGBX, or RGB where Pillow or CMYK conversion made it.

        Valid until the next call.
        """
        if info.format == "png":
            return _decode_by_pillow(PngImagePlugin.PngImageFile, unpack_png(encoded), info)
        try:
            picture = decode_jpeg(encoded, info, 1, self._scratch)
        except UnusualSamplingError:
            return _decode_by_pillow(JpegImagePlugin.JpegImageFile, encoded, info)
        if picture.shape[2] == 3:
            return Image.fromarray(picture)
        return Image.frombuffer("RGBX", (info.width, info.height), picture, "raw", "RGBX", 0, 1)


def _decode_by_pillow(
    plugin: type[ImageFile.ImageFile],
    encoded: Buffer,
    info: ImageInfo,
) -> Image.Image:
    # The plugins are called by name: Image.open would try other formats, and warn about limits that
    # probe has checked.
    try:
        image = plugin(io.BytesIO(encoded)).convert("RGB")
    except Exception as error:  # hostile bytes make the plugins raise any error
        raise ImageError(f"image cannot be decoded: {error}") from error
    if image.size != (info.width, info.height):
        raise ImageError(
            f"image decoded to {image.size[0]}x{image.size[1]}, header says "
            f"{info.width}x{info.height}"
        )
    return image


def _resize(
    source: Image.Image,
    image_map: ImageMap,
    out: U8,
    interpolation: str,
) -> None:
    a, _, tx, _, d, ty = image_map.coefficients
    left, top, right, bottom = image_map.covered_output()
    if left >= right or top >= bottom:
        out[:] = 0
        return
    x0, x1 = sorted(((left - tx) / a, (right - tx) / a))
    y0, y1 = sorted(((top - ty) / d, (bottom - ty) / d))
    width, height = source.size
    # A map may end within half an output pixel outside of the image, where the edge pixel
    # continues. Pillow's box may not, so the image gets that much of a border.
    overhang = max(0.0, -x0, x1 - width, -y0, y1 - height)
    pad = math.ceil(overhang - 1e-6)
    if pad:
        edged = np.pad(
            np.asarray(source)[..., :3],
            ((pad, pad), (pad, pad), (0, 0)),
            mode="edge",
        )
        source = Image.fromarray(edged)
        x0 = x0 + pad
        x1 = x1 + pad
        y0 = y0 + pad
        y1 = y1 + pad
    box = (
        max(0.0, x0),
        max(0.0, y0),
        min(x1, float(source.size[0])),
        min(y1, float(source.size[1])),
    )
    size = (right - left, bottom - top)
    image = source.resize(size, _FILTERS[interpolation], box=box)
    if a < 0:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if d < 0:
        image = image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    if (left, top, right, bottom) != (0, 0, *image_map.out_wh):
        out[:] = 0
    _split(image, out[:, top:bottom, left:right])


def _rotate(
    source: Image.Image,
    image_map: ImageMap,
    out: U8,
    interpolation: str,
) -> None:
    steps = two_steps(image_map, _REACH[interpolation] + 1.0)
    if steps is None:
        out[:] = 0
        return
    image = source.resize(steps.size_wh, _FILTERS[interpolation], box=steps.box)
    # Pillow evaluates the affine map at pixel centres (x + 0.5), on edge-origin coordinates, as
    # ours is. Bilinear always: the bicubic kernel of its transforms (a = -1) does not reproduce a
    # ramp and shifts by up to 0.1 pixels. In floating point: the transform of 8-bit pixels
    # truncates, which darkens them by half a level.
    for band, plane in zip(image.split(), out, strict=False):
        turned = band.convert("F").transform(
            image_map.out_wh,
            Image.Transform.AFFINE,
            steps.to_resized,
            Image.Resampling.BILINEAR,
        )
        np.add(np.asarray(turned), 0.5, out=plane, casting="unsafe")
    black_out_unseen(image_map, out)


def _split(image: Image.Image | Picture, out: U8) -> None:
    """Write the first three channels to the planes ``out`` (3, h, w)."""
    pixels = np.asarray(image)
    planes = list(out)
    if pixels.shape[2] == 4:
        planes.append(np.empty(pixels.shape[:2], np.uint8))
    cv2.split(pixels, planes)
