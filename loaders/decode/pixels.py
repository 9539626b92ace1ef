"""Changes pixel values in place: photometric distortion and grid masks on decoded planes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cv2
import numpy as np

from fuelrail.pipeline.native import Picture, Scratch
from fuelrail.pipeline.transforms.pixels import NO_CHANGE, PixelChange

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import U8


_scratch = Scratch()


def change_pixels(
    planes: U8,
    change: PixelChange,
    fill: tuple[int, int, int],
) -> None:
    """Apply a change to uint8 (3, height, width) RGB planes, whose rows are contiguous, in place.

    Computed in float32 without clipping in between, as mmdet3d does, then rounded and clipped once.
    ``fill`` is the RGB of holes.
    """
    if change == NO_CHANGE:
        return
    _, height, width = planes.shape
    if change.saturation == 1.0 and change.hue_deg == 0.0:
        if change.brightness != 0.0 or change.contrast != 1.0:
            levels = np.arange(256) + change.brightness
            levels = np.rint(levels * change.contrast)
            table = np.clip(levels, 0, 255).astype(np.uint8)
            for plane in planes:
                cv2.LUT(plane, table, plane)
    else:
        image: Picture = _scratch.take("float", height, width, 12).view(np.float32)
        merged = _scratch.take("merged", height, width, 3)
        cv2.merge(list(planes), merged)
        np.copyto(image, merged)
        before = change.contrast if change.contrast_first else 1.0
        after = 1.0 if change.contrast_first else change.contrast
        if change.brightness != 0.0 or before != 1.0:
            image += change.brightness
            image *= before
        hsv: Picture = _scratch.take("hsv", height, width, 12).view(np.float32)
        cv2.cvtColor(image, cv2.COLOR_RGB2HSV, hsv)
        if change.hue_deg != 0.0:
            hue = hsv[..., 0]
            hue += change.hue_deg
            hue[hue > 360.0] -= 360.0
            hue[hue < 0.0] += 360.0
        hsv[..., 1] *= change.saturation
        cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB, image)
        if after != 1.0:
            image *= after
        np.rint(image, out=image)
        np.clip(image, 0.0, 255.0, out=image)
        np.copyto(merged, image, casting="unsafe")
        cv2.split(merged, list(planes))
    if change.order != (0, 1, 2):
        planes[:] = planes[list(change.order)]
    holes = change.holes
    if holes is not None:
        rows = np.arange(height) - holes.top_px
        columns = np.arange(width) - holes.left_px
        is_row_hidden = rows % holes.spacing_px >= holes.bar_px
        is_column_hidden = columns % holes.spacing_px >= holes.bar_px
        mask = is_row_hidden[:, None] & is_column_hidden
        for plane, level in zip(planes, fill, strict=True):
            plane[mask] = level
