"""The default CPU backend: libjpeg-turbo with DCT-scaled decoding, then one interpolation into the
batch.

A JPEG is decoded at 1/1, 1/2, 1/4 or 1/8, the smallest that is not below the resolution that the
map asks for (the other eighths that libjpeg-turbo knows have no SIMD code and are slower than the
full size). The rest of the map is one `cv2.resize` of the region that is seen, where rows stay
rows, else one `cv2.warpAffine`. Pictures have a fourth, unused channel: decoding to it is free, and
OpenCV warps four channels in half the time of three. simplejpeg and OpenCV release the GIL, so
threads scale.

Where `fuelrail.pipeline.native` is built, it decodes what cameras usually write, and does the
resize in the same pass. It declines what is unusual or damaged, and the way above is taken.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import cv2
import numpy as np

from fuelrail.loaders.decode.jpeg import decode_jpeg
from fuelrail.loaders.decode.lens import largest_scale, sampling, source_rows
from fuelrail.loaders.decode.protocol import (
    Interpolation,
    black_out_unseen,
    check_output,
    check_source,
)
from fuelrail.loaders.decode.resample import (
    REACH,
    ResizeGrid,
    bilinear_rows,
    resize_grid,
)
from fuelrail.loaders.decode.splice import (
    SplicedViews,
    splice_rows,
    splice_views,
)
from fuelrail.pipeline.errors import ImageError
from fuelrail.pipeline.native import CameraJpeg, Picture, ScaledImage, Scratch
from fuelrail.pipeline.native import load as load_native
from fuelrail.pipeline.sample.image_header import ImageInfo, probe, unpack_png
from fuelrail.pipeline.transforms.image_map import ImageMap, scaled_size

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import U8
    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.pipeline.transforms.lens import Lens

_FILTERS = {"bilinear": cv2.INTER_LINEAR, "bicubic": cv2.INTER_CUBIC}
_WARP_REACH = 4
"""Source pixels kept about the region of a warp: more than any filter reads, so that its border
is never seen.
"""

_MIN_SCALABLE_PX = 16
"""Smallest image side for DCT-scaled decoding.

Below 8 pixels, different scales give the same size.
"""

# Re-entrant: a finalizer may run on any allocation, also inside the other function in the same
# thread.
_opencv_lock = threading.RLock()
_opencv_holds: list[int] = []
"""OpenCV's thread count before each hold."""


class _Straightened(NamedTuple):
    """One view of a distorted image: its map, and the pixel rows of the stored image that it
    samples.
    """

    image_map: ImageMap
    lens: Lens
    max_scale: float
    rows: tuple[int, int]
    out: Picture


class TurboDecoder:
    """Decodes with libjpeg-turbo (simplejpeg) and OpenCV; see
    `fuelrail.loaders.decode.protocol.ImageDecoder`.

    OpenCV would split each resize over its own pool of threads, against ours. Its thread count is a
    setting of the process: it is 1 while a `TurboDecoder` exists, and what it was before when the
    last one is gone.

    Args:
        native: use the native decoder for camera JPEGs, where it is built; or use this one.

    """

    name = "turbo"

    def __init__(self, *, native: bool | CameraJpeg = True) -> None:
        self._scratch = Scratch()
        library: CameraJpeg | str = ""
        if not isinstance(native, bool):
            library = native
        elif native:
            library = load_native()
        self._native: CameraJpeg | None = None if isinstance(library, str) else library
        with _opencv_lock:
            _opencv_holds.append(_opencv_holds[0] if _opencv_holds else cv2.getNumThreads())
            cv2.setNumThreads(1)
        weakref.finalize(self, _release_opencv_threads).atexit = False

    def decode_into(
        self,
        encoded: Buffer,
        image_map: ImageMap,
        out: U8,
        interpolation: Interpolation = "bilinear",
    ) -> None:
        """Decode into ``out``; see the protocol."""
        (error,) = self.decode_images([encoded], [image_map], [out], interpolation)
        if error is not None:
            raise error

    def decode_images(
        self,
        encoded: Sequence[Buffer],
        image_maps: Sequence[ImageMap],
        outs: Sequence[U8],
        interpolation: Interpolation = "bilinear",
    ) -> list[ImageError | None]:
        """Decode each image into its ``out``; see the protocol."""
        errors: list[ImageError | None] = [None] * len(encoded)
        numbers = []
        images = []
        for number, (data, image_map, out) in enumerate(
            zip(encoded, image_maps, outs, strict=True)
        ):
            check_output(image_map, out, interpolation)
            try:
                info = probe(data)
                check_source(info, image_map)
                if image_map.lens is not None:
                    self._rectify(
                        data,
                        info=info,
                        image_maps=[image_map],
                        outs=[out],
                        interpolation=interpolation,
                    )
                    continue
            except ImageError as error:
                # Its traceback would hold this frame, which holds the error.
                errors[number] = error.with_traceback(None)
                continue
            factor = _dct_factor(info, image_map.max_scale)
            numbers.append(number)
            images.append(
                ScaledImage(
                    encoded=data,
                    info=info,
                    factor=factor,
                    image_map=image_map.of_scaled(factor) if factor > 1 else image_map,
                    out=out,
                )
            )
        native = self._native if interpolation == "bilinear" else None
        done = [False] * len(images) if native is None else native.resize(images, self._scratch)
        for number, image, is_done in zip(numbers, images, done, strict=True):
            try:
                if not is_done:
                    self._decode_then_sample(image, interpolation)
            except ImageError as error:
                errors[number] = error.with_traceback(None)
        return errors

    def _decode_then_sample(self, scaled: ScaledImage, interpolation: Interpolation) -> None:
        """Decode an image that is not resampled while it is decoded."""
        encoded, info, factor, image_map, out = scaled
        native = (
            self._native if self._native is not None and self._native.takes(info, factor) else None
        )
        grid = resize_grid(image_map, interpolation)
        rows = _rows(image_map, grid, interpolation)
        image = (
            native.picture(
                encoded,
                info,
                factor,
                rows=rows,
                scratch=self._scratch,
            )
            if native is not None
            else None
        )
        if image is not None:
            top = 0
        elif info.format == "jpeg":
            top = lead = 0
            if info.restart_interval:
                spliced = splice_rows(
                    encoded,
                    info=info,
                    top=rows[0] * factor,
                    bottom=rows[1] * factor,
                    factor=factor,
                    scratch=self._scratch,
                )
                if spliced is not None:
                    encoded = spliced.encoded
                    info = info._replace(height=spliced.height)
                    top = spliced.top // factor  # rows of MCUs are whole in every DCT scaling
                    image_map = image_map.of_rows(top, scaled_size(spliced.height, 1, factor))
                    if grid is not None:
                        # Resizing may begin before the rows that are there: what it makes of them
                        # is dropped.
                        lead = max(0, top - grid.rows.start)
                        top -= lead
            image = decode_jpeg(
                encoded,
                info=info,
                factor=factor,
                scratch=self._scratch,
                lead=lead,
            )
        else:
            image = _decode_png(encoded, info)
            top = 0
            out = out[::-1]  # OpenCV decodes to BGR
        self._sample(
            image,
            top=top,
            image_map=image_map,
            grid=grid,
            out=out,
            interpolation=interpolation,
        )

    def decode_views(
        self,
        encoded: Buffer,
        image_maps: Sequence[ImageMap],
        outs: Sequence[U8],
        interpolation: Interpolation = "bilinear",
    ) -> None:
        """Decode once into several ``outs``; see the protocol."""
        info = probe(encoded)
        for image_map, out in zip(image_maps, outs, strict=True):
            check_output(image_map, out, interpolation)
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
        factor = min(_dct_factor(info, image_map.max_scale) for image_map in image_maps)
        if factor > 1:
            image_maps = [image_map.of_scaled(factor) for image_map in image_maps]
        grids = [resize_grid(image_map, interpolation) for image_map in image_maps]
        rows_of_views = [
            _rows(image_map, grid, interpolation)
            for image_map, grid in zip(image_maps, grids, strict=True)
        ]
        rows = (
            min(first for first, _ in rows_of_views),
            max(last for _, last in rows_of_views),
        )
        image = None
        if self._native is not None and self._native.takes(info, factor):
            image = self._native.picture(
                encoded,
                info,
                factor,
                rows=rows,
                scratch=self._scratch,
            )
        if image is None and info.format == "jpeg":
            image = decode_jpeg(encoded, info, factor, self._scratch)
        elif image is None:
            image = _decode_png(encoded, info)
            # OpenCV decodes to BGR: planes are filled in reverse.
            outs = [out[::-1] for out in outs]
        for image_map, grid, out in zip(image_maps, grids, outs, strict=True):
            self._sample(
                image,
                top=0,
                image_map=image_map,
                grid=grid,
                out=out,
                interpolation=interpolation,
            )

    def _sample(
        self,
        image: Picture,
        top: int,
        image_map: ImageMap,
        grid: ResizeGrid | None,
        out: U8,
        interpolation: str,
    ) -> None:
        """Sample a decoded picture, which starts at row ``top`` of what the grid speaks of."""
        try:
            if grid is not None:
                self._resize(
                    image,
                    top=top,
                    grid=grid,
                    out=out,
                    interpolation=interpolation,
                )
                return
            if image_map.max_scale <= 0.5:
                image, image_map = _shrink(image, image_map)
                grid = resize_grid(image_map, interpolation)
            if grid is not None:
                self._resize(
                    image,
                    top=0,
                    grid=grid,
                    out=out,
                    interpolation=interpolation,
                )
            else:
                self._warp(image, image_map, out, interpolation)
        except cv2.error as error:
            size = f"{image.shape[1]}x{image.shape[0]}"
            raise ImageError(
                f"image, decoded to {size} pixels, cannot be resampled: {error}"
            ) from error

    def _rectify(
        self,
        encoded: Buffer,
        info: ImageInfo,
        image_maps: Sequence[ImageMap],
        outs: Sequence[Picture],
        interpolation: str,
    ) -> None:
        """Decode a distorted image at the highest resolution that a view asks for, and sample it
        under each map.
        """
        views = []
        for image_map, out in zip(image_maps, outs, strict=True):
            assert image_map.lens is not None
            max_scale = largest_scale(image_map, image_map.lens)
            rows = source_rows(
                image_map,
                image_map.lens,
                (REACH[interpolation] + 1.0) / min(1.0, max_scale),
            )
            views.append(
                _Straightened(
                    image_map=image_map,
                    lens=image_map.lens,
                    max_scale=max_scale,
                    rows=rows,
                    out=out,
                )
            )
        factor = min(_dct_factor(info, view.max_scale) for view in views)
        image = None
        first = min(view.rows[0] for view in views)
        if self._native is not None and self._native.takes(info, factor):
            rows = (
                first // factor,
                -(-max(view.rows[1] for view in views) // factor),
            )
            image = self._native.picture(
                encoded,
                info,
                factor,
                rows=rows,
                scratch=self._scratch,
            )
        top = 0
        parts = ((0, info.height),) * len(views)
        if image is None and info.format == "jpeg":
            cut = SplicedViews(encoded, 0, info.height, parts)
            if info.restart_interval:
                cut = splice_views(
                    encoded,
                    info=info,
                    rows=[view.rows for view in views],
                    factor=factor,
                    scratch=self._scratch,
                )
            top = cut.top
            parts = cut.parts
            image = decode_jpeg(
                cut.encoded,
                info._replace(height=cut.height),
                factor,
                self._scratch,
            )
        elif image is None:
            image = _decode_png(encoded, info)
            # OpenCV decodes to BGR: planes are filled in reverse.
            views = [view._replace(out=view.out[::-1]) for view in views]
        for view, (begin, end) in zip(views, parts, strict=True):
            # Rows of MCUs are whole in every DCT scaling.
            part = image[begin // factor : scaled_size(end, 1, factor)]
            self._straighten(
                part,
                top=top + begin,
                factor=factor,
                view=view,
                interpolation=interpolation,
            )

    def _straighten(
        self,
        image: Picture,
        top: int,
        factor: int,
        view: _Straightened,
        interpolation: str,
    ) -> None:
        """Undo the lens and sample the map by one `cv2.remap`; ``image`` is at 1/factor, and
        starts at row ``top``.
        """
        image_map = view.image_map
        out = view.out
        blocks = math.floor(1.0 / (view.max_scale * factor) + 1e-9)
        if blocks > 1:
            image = _average_blocks(image, blocks)
            factor = factor * blocks
        size = (image.shape[1], image.shape[0])
        places = sampling(
            image_map,
            lens=view.lens,
            scale=(1.0 / factor, 1.0 / factor),
            size=size,
            top=top,
        )
        width, height = image_map.out_wh
        picture = self._scratch.take("resized", height, width, image.shape[2])
        try:
            cv2.remap(
                image,
                places.x,
                places.y,
                _FILTERS[interpolation],
                dst=picture,
                borderMode=cv2.BORDER_REPLICATE,
            )
        except cv2.error as error:
            stored_wh = image_map.source_wh
            raise ImageError(
                f"image of {stored_wh[0]}x{stored_wh[1]} pixels cannot be resampled: {error}"
            ) from error
        self._split(picture, out)
        if places.unseen is not None:
            out[:, places.unseen] = 0

    def _resize(
        self,
        image: Picture,
        top: int,
        grid: ResizeGrid,
        out: U8,
        interpolation: str,
    ) -> None:
        """Sample an axis-aligned map by `cv2.resize`; ``image`` starts at row ``top`` of what
        the grid speaks of.
        """
        x0, y0, x1, y1 = grid.covered
        if x0 < x1:
            columns = grid.columns
            rows = grid.rows
            region = image[rows.start - top : rows.stop - top, columns.start : columns.stop]
            resized: Picture = self._scratch.take(
                "resized", rows.num_lines, columns.num_lines, image.shape[2]
            )
            resized = cv2.resize(
                region,
                None,
                dst=resized,
                fx=grid.scale[0],
                fy=grid.scale[1],
                interpolation=_FILTERS[interpolation],
            )
            skip_x = columns.skip
            skip_y = rows.skip
            resized = resized[skip_y : skip_y + y1 - y0, skip_x : skip_x + x1 - x0]
            if grid.flip is not None:
                resized = cv2.flip(
                    resized,
                    grid.flip,
                    self._scratch.take("flipped", *resized.shape),
                )
        if grid.covered != (0, 0, out.shape[2], out.shape[1]):
            out[:] = 0
            out = out[:, y0:y1, x0:x1]
        if x0 < x1:
            self._split(resized, out)

    def _warp(
        self,
        image: Picture,
        image_map: ImageMap,
        out: U8,
        interpolation: str,
    ) -> None:
        """Sample any map by `cv2.warpAffine`."""
        left, top, right, bottom = image_map.source_roi(_WARP_REACH)
        if left >= right or top >= bottom:
            out[:] = 0
            return
        a, b, tx, c, d, ty = image_map.inverse_coefficients()
        to_region = np.array(
            (
                (a, b, (a + b) / 2 + tx - 0.5 - left),
                (c, d, (c + d) / 2 + ty - 0.5 - top),
            ),
            dtype=np.float64,
        )
        width, height = image_map.out_wh
        warped = cv2.warpAffine(
            image[top:bottom, left:right],
            to_region,
            (width, height),
            dst=self._scratch.take("resized", height, width, image.shape[2]),
            flags=_FILTERS[interpolation] | cv2.WARP_INVERSE_MAP,
            borderMode=cv2.BORDER_REPLICATE,
        )
        self._split(warped, out)
        black_out_unseen(image_map, out)

    def _split(self, image: Picture, out: U8) -> None:
        """Write the first three channels of the picture (h, w, 3 or 4) to the planes ``out`` (3,
        h, w).
        """
        planes = list(out)
        if image.shape[2] == 4:
            height, width, _ = image.shape
            spare = self._scratch.take("spare", height, width, 1)
            planes.append(spare[..., 0])
        cv2.split(image, planes)


def _rows(
    image_map: ImageMap,
    grid: ResizeGrid | None,
    interpolation: str,
) -> tuple[int, int]:
    """Return the rows [first, last) of the decoded picture that sampling reads."""
    if grid is not None:
        return grid.rows.source_lines
    if interpolation == "bilinear" and image_map.is_axis_aligned and image_map.max_scale > 0.5:
        return bilinear_rows(image_map)
    _, first, _, last = image_map.source_roi(max(_WARP_REACH, math.ceil(2.0 / image_map.max_scale)))
    return first, last


def _dct_factor(info: ImageInfo, max_scale: float) -> int:
    """Return the divisor 1, 2, 4 or 8 to decode a JPEG at: never below the resolution that the
    map asks for.
    """
    factor = 1
    if info.format == "jpeg" and min(info.width, info.height) >= _MIN_SCALABLE_PX:
        while factor < 8 and max_scale * factor * 2 <= 1.0 + 1e-9:
            factor *= 2
    return factor


def _shrink(image: Picture, image_map: ImageMap) -> tuple[Picture, ImageMap]:
    """Average blocks of whole pixels, for maps that shrink more than the decoder could:
    interpolation would alias.
    """
    factor = math.floor(1.0 / image_map.max_scale + 1e-9)
    left, top, right, bottom = image_map.source_roi(2.0 * factor)
    left = left // factor * factor
    top = top // factor * factor
    region = image[top : max(bottom, top + 1), left : max(right, left + 1)]
    small = _average_blocks(region, factor)
    a, b, tx, c, d, ty = image_map.coefficients
    tx = tx + a * left + b * top
    ty = ty + c * left + d * top
    first_x, first_y, last_x, last_y = image_map.visible
    visible = (
        (first_x - left) / factor,
        (first_y - top) / factor,
        (last_x - left) / factor,
        (last_y - top) / factor,
    )
    coefficients = (
        a * factor,
        b * factor,
        tx,
        c * factor,
        d * factor,
        ty,
    )
    return small, ImageMap(
        coefficients,
        (small.shape[1], small.shape[0]),
        image_map.out_wh,
        visible,
    )


def _average_blocks(image: Picture, factor: int) -> Picture:
    """Shrink by a whole factor; partial blocks at the far edges are filled up with the edge."""
    pad_y = -image.shape[0] % factor
    pad_x = -image.shape[1] % factor
    if pad_y or pad_x:
        image = cv2.copyMakeBorder(
            image,
            top=0,
            bottom=pad_y,
            left=0,
            right=pad_x,
            borderType=cv2.BORDER_REPLICATE,
        )
    return cv2.resize(
        image,
        (image.shape[1] // factor, image.shape[0] // factor),
        interpolation=cv2.INTER_AREA,
    )


def _decode_png(encoded: Buffer, info: ImageInfo) -> Picture:
    """Return the picture (h, w, 3) BGR; an alpha channel is dropped."""
    plain = np.frombuffer(unpack_png(encoded), np.uint8)
    flags = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION
    try:
        image: Picture | None = cv2.imdecode(plain, flags)
    except cv2.error as error:
        raise ImageError(f"PNG cannot be decoded: {error}") from error
    if image is None or image.shape != (info.height, info.width, 3):
        raise ImageError("PNG cannot be decoded: its pixel data are broken")
    return image


def _release_opencv_threads() -> None:
    with _opencv_lock:
        before = _opencv_holds.pop()
        if not _opencv_holds:
            cv2.setNumThreads(before)
