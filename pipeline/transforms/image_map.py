"""Map source pixels to output pixels through resize, crop, flip and rotation: one affine map an
image, sub-pixel exact.

Two pixel conventions meet here and must not be mixed:

* *edge-origin*: 0 is the left (top) edge of the first pixel, its centre is at 0.5. Operations
  compose here, because resizing is a plain scaling only about an edge. `ImageMap` holds edge-origin
  coefficients.
* *centre-origin*: (0, 0) is the centre of the first pixel. Calibrations (`intrinsics`, `lidar2img`)
  of the schema are centre-origin. With H the translation by (1/2, 1/2), a map A becomes M = H^-1 A
  H (`ImageMap.centre_matrix`).

So intrinsics' = M @ intrinsics and ego2img' = M4 @ ego2img point at the very pixel features that
the decoder wrote.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import F64, I64
    from fuelrail.pipeline.transforms.lens import Lens

Coefficients: TypeAlias = tuple[float, float, float, float, float, float]
"""(a, b, tx, c, d, ty): x' = a x + b y + tx, y' = c x + d y + ty."""

Rectangle: TypeAlias = tuple[float, float, float, float]
"""(left, top, right, bottom) on edge-origin coordinates."""

_FUZZ = 1e-6
"""A border that meets a pixel's centre up to this many pixels of rounding error has it inside."""


def scaled_size(size_px: int, numerator: int, denominator: int) -> int:
    """Return ceil(size * numerator / denominator): what a JPEG decoder makes of ``size_px`` in
    DCT-scaled decoding.

    The geometry is scaled by exactly numerator/denominator all the same; the last partial pixel is
    encoder padding.
    """
    return -(-size_px * numerator // denominator)


@dataclass(frozen=True, slots=True)
class ImageMap:
    """The affine map from a stored image to the output image, and the part of the source that may
    be seen.

    Build one with `identity` and the operations, applied in order:
    ``ImageMap.identity((1600, 900)).resize(704, 396).crop(0, 140, 704, 256).flip().rotate(5.4)``.

    Attributes:
        coefficients: (a, b, tx, c, d, ty), source to output, pixels, edge-origin.
        source_wh: width and height of the stored image in pixels.
        out_wh: width and height of the output image in pixels.
        visible: (left, top, right, bottom) in source pixels, edge-origin. Output pixels whose
            centre falls outside of it are black; all of them where it is empty (left >= right). A
            crop shrinks it, so that a later rotation turns black corners in, as cropping and then
            rotating an image does.
        published: None, or centre-origin coefficients that the matrices say in place of the truth,
            for models that were trained with inexact ones. What is decoded does not change, and
            operations do not keep it.
        lens: None, or the lens of the stored image: the map begins at the rectified image then,
            which has the stored one's size. Decoders undo it in the same interpolation. Operations
            do not keep it.
    """

    coefficients: Coefficients
    source_wh: tuple[int, int]
    out_wh: tuple[int, int]
    visible: Rectangle
    published: Coefficients | None = None
    lens: Lens | None = None

    @classmethod
    def identity(cls, source_wh: tuple[int, int]) -> ImageMap:
        """Return the map that changes nothing on an image of (width, height) pixels."""
        width, height = source_wh
        _check_size(width, height)
        return cls(
            (1.0, 0.0, 0.0, 0.0, 1.0, 0.0),
            (width, height),
            (width, height),
            (0.0, 0.0, width, height),
        )

    def resize(self, width: int, height: int) -> ImageMap:
        """Scale the current canvas to (width, height): by the integers used, never by the factor
        that led to them.
        """
        _check_size(width, height)
        out_width, out_height = self.out_wh
        scale_x = width / out_width
        scale_y = height / out_height
        a, b, tx, c, d, ty = self.coefficients
        coefficients = (
            a * scale_x,
            b * scale_x,
            tx * scale_x,
            c * scale_y,
            d * scale_y,
            ty * scale_y,
        )
        return ImageMap(
            coefficients,
            self.source_wh,
            (width, height),
            self.visible,
        )

    def crop(
        self,
        left: int,
        top: int,
        width: int,
        height: int,
    ) -> ImageMap:
        """Take the rectangle of the current canvas; what is outside of the canvas becomes black
        padding.
        """
        _check_size(width, height)
        a, b, tx, c, d, ty = self.coefficients
        coefficients = (a, b, tx - left, c, d, ty - top)
        visible = self.visible
        if b == 0.0 and c == 0.0:
            # After a rotation the canvas alone cuts; the rectangle would no longer be one in the
            # source.
            canvas = _preimage(coefficients, width, height)
            visible = _intersect(visible, canvas)
        return ImageMap(
            coefficients,
            self.source_wh,
            (width, height),
            visible,
        )

    def flip(self) -> ImageMap:
        """Mirror the current canvas left to right: x' = width - x."""
        width, _ = self.out_wh
        a, b, tx, c, d, ty = self.coefficients
        coefficients = (-a, -b, width - tx, c, d, ty)
        return ImageMap(
            coefficients,
            self.source_wh,
            self.out_wh,
            self.visible,
        )

    def rotate(self, degrees: float) -> ImageMap:
        """Turn the content counter-clockwise (as seen, y down) about the canvas centre; the
        canvas keeps its size.
        """
        if degrees == 0.0:
            return self
        quarters, rest = divmod(degrees, 90.0)
        # Exact for quarter turns, so that half a turn keeps rows rows: cos(radians(90)) is 6e-17.
        cos = 1.0
        sin = 0.0
        if rest:
            angle = math.radians(rest)
            cos = math.cos(angle)
            sin = math.sin(angle)
        for _ in range(int(quarters) % 4):
            cos, sin = -sin, cos
        width, height = self.out_wh
        cx = width / 2
        cy = height / 2
        a, b, tx, c, d, ty = self.coefficients
        tx -= cx
        ty -= cy
        coefficients = (
            cos * a + sin * c,
            cos * b + sin * d,
            cos * tx + sin * ty + cx,
            cos * c - sin * a,
            cos * d - sin * b,
            cos * ty - sin * tx + cy,
        )
        return ImageMap(
            coefficients,
            self.source_wh,
            self.out_wh,
            self.visible,
        )

    def of_rows(self, top: int, height: int) -> ImageMap:
        """Return the same map from another source: the pixel rows [top, top + height) of this
        one's, cut out.
        """
        a, b, tx, c, d, ty = self.coefficients
        left, visible_top, right, bottom = self.visible
        source_width, _ = self.source_wh
        return ImageMap(
            (a, b, tx + b * top, c, d, ty + d * top),
            (source_width, height),
            self.out_wh,
            (left, visible_top - top, right, bottom - top),
        )

    def of_scaled(self, factor: int) -> ImageMap:
        """Return the same map from the source decoded at 1/factor: coordinates are scaled by
        exactly that.
        """
        a, b, tx, c, d, ty = self.coefficients
        left, top, right, bottom = self.visible
        source_width, source_height = self.source_wh
        scaled_width = scaled_size(source_width, 1, factor)
        scaled_height = scaled_size(source_height, 1, factor)
        return ImageMap(
            (a * factor, b * factor, tx, c * factor, d * factor, ty),
            (scaled_width, scaled_height),
            self.out_wh,
            (left / factor, top / factor, right / factor, bottom / factor),
        )

    @property
    def matrix(self) -> F64:
        """The edge-origin map as float64 (2, 3)."""
        return np.array(self.coefficients).reshape(2, 3)

    @property
    def is_axis_aligned(self) -> bool:
        """True when rows stay rows: scaling, translation and flips only."""
        _, b, _, c, _, _ = self.coefficients
        return b == 0.0 and c == 0.0

    @property
    def flips(self) -> tuple[bool, bool]:
        """(left-right, top-bottom) mirroring of an axis-aligned map."""
        a, _, _, _, d, _ = self.coefficients
        return a < 0.0, d < 0.0

    @property
    def max_scale(self) -> float:
        """The largest number of output pixels that a source pixel's length becomes: the largest
        singular value.
        """
        a, b, _, c, d, _ = self.coefficients
        if b == 0.0 and c == 0.0:
            return max(abs(a), abs(d))
        turning = math.hypot(a + d, b - c)
        mirroring = math.hypot(a - d, b + c)
        return (turning + mirroring) / 2

    def centre_coefficients(self) -> Coefficients:
        """Return (a, b, tx, c, d, ty) of M = H^-1 A H on centre-origin pixels, or what is
        published in its place.
        """
        if self.published is not None:
            return self.published
        a, b, tx, c, d, ty = self.coefficients
        centre_tx = (a + b) / 2 + tx - 0.5
        centre_ty = (c + d) / 2 + ty - 0.5
        return a, b, centre_tx, c, d, centre_ty

    def centre_matrix(self) -> F64:
        """Return M, float64 (3, 3): centre-origin source pixel (u, v, 1) to output pixel."""
        matrix = np.eye(3)
        matrix[:2] = np.reshape(self.centre_coefficients(), (2, 3))
        return matrix

    def ida_mat(self) -> F64:
        """Return M as float64 (4, 4) for projections: (u d, v d, d, 1), d the depth, source to
        output image.
        """
        return ida_mats([self]).reshape(4, 4)

    def inverse_coefficients(self) -> Coefficients:
        """Return the edge-origin coefficients of the inverse map, output to source."""
        a, b, tx, c, d, ty = self.coefficients
        det = a * d - b * c
        return (
            d / det,
            -b / det,
            (b * ty - d * tx) / det,
            -c / det,
            a / det,
            (c * tx - a * ty) / det,
        )

    def covered_output(self) -> tuple[int, int, int, int]:
        """Return (left, top, right, bottom): output pixels whose centre sees the source;
        axis-aligned maps only.

        The rest is black. Empty rectangles are (0, 0, 0, 0).
        """
        a, _, tx, _, d, ty = self.coefficients
        left, top, right, bottom = self.visible
        if left >= right or top >= bottom:
            return 0, 0, 0, 0
        width, height = self.out_wh
        x0, x1 = _covered(
            scale=a,
            offset=tx,
            low=left,
            high=right,
            size=width,
        )
        y0, y1 = _covered(
            scale=d,
            offset=ty,
            low=top,
            high=bottom,
            size=height,
        )
        if x0 < x1 and y0 < y1:
            return x0, y0, x1, y1
        return 0, 0, 0, 0

    def visible_columns(self) -> tuple[I64, I64] | None:
        """Return (first, last + 1) output columns whose centre sees the source, int64 (height,)
        each, for any map.

        None when all output pixels do. Rows that see nothing have first >= last + 1.
        """
        width, height = self.out_wh
        a, b, tx, c, d, ty = self.inverse_coefficients()
        left, top, right, bottom = self.visible
        if left >= right or top >= bottom:  # crops beyond each other
            return np.full(height, width), np.zeros(height, np.int64)
        are_corners_seen = True
        for u in (0.5, width - 0.5):
            for v in (0.5, height - 0.5):
                x = a * u + b * v + tx
                y = c * u + d * v + ty
                are_corners_seen &= left <= x <= right and top <= y <= bottom
        if are_corners_seen:
            return None
        rows = np.arange(height) + 0.5
        first = np.full(height, 0.5)
        last = np.full(height, width - 0.5)
        for along, across, offset, low, high in (
            (a, b, tx, left, right),
            (c, d, ty, top, bottom),
        ):
            if abs(along) <= 1e-30:  # parallel to the border: all or nothing
                along = 1e-30
            low_border = (low - offset - across * rows) / along
            high_border = (high - offset - across * rows) / along
            near_border = np.minimum(low_border, high_border)
            far_border = np.maximum(low_border, high_border)
            first = np.maximum(first, near_border)
            last = np.minimum(last, far_border)
        first = np.clip(first, 0.0, width)
        last = np.clip(last, -1.0, width - 0.5)
        first_column = np.ceil(first - 0.5 - _FUZZ)
        last_column = np.floor(last - 0.5 + _FUZZ)
        return first_column.astype(np.int64), last_column.astype(np.int64) + 1

    def source_roi(self, support_px: float = 1.0) -> tuple[int, int, int, int]:
        """Return (left, top, right, bottom): whole source pixels that the output samples, within
        the source.

        ``support_px`` widens it by the reach of the resampling filter, in source pixels. Empty (0,
        0, 0, 0) when the output sees nothing of the source.
        """
        canvas = _preimage(self.coefficients, *self.out_wh)
        left, top, right, bottom = _intersect(self.visible, canvas)
        if left >= right or top >= bottom:
            return 0, 0, 0, 0
        width, height = self.source_wh
        first_column = math.floor(left - support_px)
        first_row = math.floor(top - support_px)
        end_column = math.ceil(right + support_px)
        end_row = math.ceil(bottom + support_px)
        return (
            max(0, first_column),
            max(0, first_row),
            min(width, end_column),
            min(height, end_row),
        )


def ida_mats(maps: Sequence[ImageMap]) -> F64:
    """Return the `ImageMap.ida_mat` of each map, float64 (N, 4, 4)."""
    mats = np.tile(np.eye(4), (len(maps), 1, 1))
    rows = [image_map.centre_coefficients() for image_map in maps]
    coefficients = np.array(rows, np.float64)
    mats[:, :2, :3] = coefficients.reshape(-1, 2, 3)
    return mats


def apply_to_intrinsics(ida_mat: F64, intrinsics: F64) -> F64:
    """Return M @ K, float64 (..., 3, 3), from ida_mat (..., 4, 4) and the stored image's K (..., 3,
    3).

    A flip gives a negative focal length and a rotation gives skew: use the whole matrix, not (fx,
    fy, cx, cy).
    """
    return ida_mat[..., :3, :3] @ intrinsics


def _check_size(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise ConfigError(f"image size {width}x{height} must be at least 1x1")


def _intersect(a: Rectangle, b: Rectangle) -> Rectangle:
    a_left, a_top, a_right, a_bottom = a
    b_left, b_top, b_right, b_bottom = b
    left = max(a_left, b_left)
    top = max(a_top, b_top)
    right = min(a_right, b_right)
    bottom = min(a_bottom, b_bottom)
    return left, top, right, bottom


def _covered(
    scale: float,
    offset: float,
    low: float,
    high: float,
    size: int,
) -> tuple[int, int]:
    """Return the output pixels [first, last) whose centre maps into [low, high] of the source,
    on one axis.
    """
    low_border = scale * low + offset
    high_border = scale * high + offset
    start = min(low_border, high_border)
    end = max(low_border, high_border)
    first = math.ceil(start - 0.5 - _FUZZ)
    last = math.floor(end - 0.5 + _FUZZ)
    return max(0, first), min(size, last + 1)


def _preimage(coefficients: Coefficients, width: int, height: int) -> Rectangle:
    """Return the bounding box, in the source, of the output canvas."""
    a, b, tx, c, d, ty = coefficients
    if b == 0.0 and c == 0.0:
        xs = [-tx / a, (width - tx) / a]
        ys = [-ty / d, (height - ty) / d]
    else:
        det = a * d - b * c
        xs = []
        ys = []
        for u, v in ((0, 0), (width, 0), (0, height), (width, height)):
            right = u - tx
            down = v - ty
            xs.append((d * right - b * down) / det)
            ys.append((a * down - c * right) / det)
    return min(xs), min(ys), max(xs), max(ys)
