"""2-D boxes of nuScenes: the bounds of what of each 3-D box is in an image, and the tables'
tokens of each box.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.rigid import invert_rigid, move_points
from fuelrail.pipeline.sample.schema import F64, I64, box_corners
from fuelrail.sharding.sources.adapter.boxes import in_ego
from fuelrail.sharding.sources.adapter.channels import (
    boxes2d_channel,
    value_channel,
)
from fuelrail.sharding.sources.adapter.frame import ImageBoxRows

if TYPE_CHECKING:
    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.sharding.sources.adapter.frame import BoxRows
    from fuelrail.sharding.sources.nuscenes.geometry import SceneRows

_DESCRIPTION: Final = (
    "bounds of the part of each 3-D box that is in the image, whatever hides it; row counts in "
    "boxes"
)
_NEAR_M: Final = 0.1
_FACES: Final = np.array(
    (
        (0, 1, 3, 2),
        (4, 5, 7, 6),
        (0, 1, 5, 4),
        (2, 3, 7, 6),
        (0, 2, 6, 4),
        (1, 3, 7, 5),
    )
)
"""Corners of each side of a box, in the order of `Boxes.corners`."""

TOKENS: Final = value_channel(
    "box_tokens",
    description=(
        'JSON: lists "annotation", "instance" and "visibility" of the tables\' tokens, in the '
        "order of boxes"
    ),
)


def image_box_channels(cameras: Sequence[str]) -> tuple[Channel, ...]:
    """Return the entries of the table for the 2-D boxes of these cameras."""
    return tuple(boxes2d_channel(name.lower(), _DESCRIPTION) for name in cameras)


def image_boxes(
    rows: SceneRows,
    number: int,
    boxes: BoxRows,
) -> dict[str, ImageBoxRows]:
    """Return the 2-D boxes of one sample by camera; raise SourceError for an image that is not
    rectified.
    """
    boxes_by_camera: dict[str, ImageBoxRows] = {}
    ego2global = rows.ego2global[number]
    frame = np.zeros(len(boxes.category), np.int64)
    category = np.array(boxes.category, object)
    track = np.array(boxes.track, object)
    timestamp_ns = np.zeros(1, np.int64)
    columns = in_ego(
        [(0, boxes)],
        frame=frame,
        timestamp_ns=timestamp_ns,
        ego2global=ego2global[None],
    )
    corners = box_corners(columns["boxes3d"], columns["rotation_wxyz"])
    corners = corners.astype(np.float64)
    for camera, image in rows.images[number].items():
        if image.absent:
            continue
        calibration = image.calibration
        if calibration.dist:
            raise SourceError(
                f"sample '{rows.tokens[number]}': the image of '{camera}' is not rectified, "
                "so that its 2-D boxes are not known; leave out 'boxes2d' in the option channels"
            )
        assert calibration.intrinsics is not None, "every camera is calibrated"
        assert calibration.sensor2ego is not None, "every camera is calibrated"
        assert image.ego2global is not None, "every row has a pose"
        ego2cam = invert_rigid(image.ego2global @ calibration.sensor2ego) @ ego2global
        in_camera = move_points(corners, ego2cam)
        bounds, numbers = image_bounds(in_camera, calibration.intrinsics, image.size)
        boxes_by_camera[camera] = ImageBoxRows(
            box=bounds,
            category=category[numbers].tolist(),
            track=track[numbers].tolist(),
            row=numbers,
        )
    return boxes_by_camera


def image_bounds(
    corners: F64,
    intrinsics: F64,
    size_wh: tuple[int, int],
) -> tuple[F64, I64]:
    """Return bounds (K, 4) [px] of the parts of boxes that are in an image, and the rows of these K
    boxes.

    ``corners`` (M, 8, 3) are in camera axes, in the order of `Boxes.corners`. The image reaches
    from -0.5 to side - 0.5: the centre of the first pixel is 0. A box is cut off 0.1 m before the
    camera and at the image's borders, side by side, so that the bounds are those of what is left,
    not those of its corners.
    """
    width, height = size_wh
    u, v, z = intrinsics
    left_plane = u + 0.5 * z
    right_plane = (width - 0.5) * z - u
    top_plane = v + 0.5 * z
    bottom_plane = (height - 0.5) * z - v
    planes = np.stack((z, left_plane, right_plane, top_plane, bottom_plane))
    shifts = np.array((_NEAR_M, 0.0, 0.0, 0.0, 0.0))
    distance = corners @ planes.T - shifts
    is_outside = (distance < 0).all(1).any(1)
    is_inside = (distance >= 0).all((1, 2))
    bounds = np.full((len(corners), 4), np.nan)
    projected = corners[is_inside] @ intrinsics.T
    pixels = projected[..., :2] / projected[..., 2:]
    low = pixels.min(1)
    high = pixels.max(1)
    bounds[is_inside] = np.concatenate((low, high), 1)
    for row in np.flatnonzero(~is_inside & ~is_outside).tolist():
        faces = [_clip_polygon(corners[row, face], planes, shifts) for face in _FACES]
        image = np.concatenate(faces) @ intrinsics.T
        if len(image):
            pixels = image[:, :2] / image[:, 2:]
            bounds[row] = (*pixels.min(0), *pixels.max(0))
    has_area = (bounds[:, 2:] > bounds[:, :2]).all(1)
    rows = np.flatnonzero(has_area)
    limits = (width - 0.5, height - 0.5, width - 0.5, height - 0.5)
    return np.clip(bounds[rows], -0.5, limits), rows


def _clip_polygon(
    polygon: F64,
    planes: F64,
    shifts: F64,
) -> F64:
    """Return part (K, 3) of a planar polygon (N, 3) on the inner side of all planes: Sutherland
    and Hodgman, 1974.
    """
    for plane, shift in zip(planes, shifts, strict=True):
        distance = polygon @ plane - shift
        following = np.roll(distance, -1)
        crosses = (distance >= 0) != (following >= 0)
        share = np.divide(
            distance,
            distance - following,
            out=np.zeros_like(distance),
            where=crosses,
        )
        edges = np.roll(polygon, -1, 0) - polygon
        crossing = polygon + share[:, None] * edges
        vertices = np.stack((polygon, crossing), 1).reshape(-1, 3)
        keep = np.stack((distance >= 0, crosses), 1).reshape(-1)
        polygon = vertices[keep]
        if not len(polygon):
            break
    return polygon
