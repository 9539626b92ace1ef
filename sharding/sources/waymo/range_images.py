"""Range images of Waymo's five lidars as one cloud of points in the vehicle's frame.

After ``range_image_utils.py`` and ``frame_utils.py`` of
github.com/waymo-research/waymo-open-dataset: rows are inclinations from top to bottom, columns
azimuths from pi to -pi, less the yaw of the lidar's extrinsic. The top lidar has a pose of the
vehicle for each pixel, so its points are compensated for the vehicle's motion.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.rigid import invert_rigid, move_points
from fuelrail.sharding.sources.shared.protobuf import doubles, fields
from fuelrail.sharding.sources.waymo.frame_heads import transform

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.schema import F32, F64

POINT_COLUMNS: Final = ("x", "y", "z", "intensity", "elongation")
_MAX_BYTES: Final = 1 << 27
"""The largest decompressed range image: those of the dataset have 2.7 and 4.1 MB."""


def frame_points(frame: bytes, where: str) -> F32:
    """Return all lidars' first returns (P, 5): x, y, z [m] in the vehicle's frame, and two of
    light.

    ``frame`` is a whole ``Frame`` message. Lidars are in the order of the message, pixels row by
    row. Raises SourceError, naming ``where``.
    """
    try:
        calibrations: dict[int, bytes] = {}
        lasers: list[dict[int, Any]] = []
        pose = np.eye(4)
        for number, _, value in fields(frame):
            if isinstance(value, int):
                continue
            if number == 1:
                messages = [
                    part
                    for field, _, part in fields(value)
                    if field == 3 and not isinstance(part, int)
                ]
                calibrations = {_read_message(part).get(1, 0): part for part in messages}
            elif number == 3:
                pose = np.array(transform(value)).reshape(4, 4)
            elif number == 5:
                lasers.append(_read_message(value))
        parts = [np.empty((0, 5), np.float32)]
        for laser in lasers:
            images = _read_message(laser.get(2, b""))
            if 2 in images:
                if laser.get(1, 0) not in calibrations:
                    raise ValueError(f"lidar {laser.get(1, 0)} has no calibration")
                calibration = calibrations[laser[1]]
                plain = _read_message(calibration)
                mount = np.array(transform(plain[5])).reshape(4, 4)
                low = doubles(calibration, 3) or [0.0]
                high = doubles(calibration, 4) or [0.0]
                inclination = Inclination(
                    stated=doubles(calibration, 2),
                    low=low[0],
                    high=high[0],
                )
                poses = _decode_matrix(images[4], 6) if 4 in images else None
                parts.append(
                    first_returns(
                        _decode_matrix(images[2], 4),
                        inclination=inclination,
                        mount=mount,
                        pose=pose,
                        poses=poses,
                    )
                )
        return np.concatenate(parts)
    except (ValueError, KeyError, struct.error, zlib.error) as error:
        raise SourceError(f"{where}: the range images cannot be read: {error}") from error


def _read_message(data: bytes) -> dict[int, Any]:
    return {number: value for number, _, value in fields(data)}


class Inclination(NamedTuple):
    """Angles of the rows of a range image, from bottom to top [rad], or none: evenly between
    ``low`` and ``high``.
    """

    stated: Sequence[float]
    low: float
    high: float

    def interpolate_rows(self, number: int) -> F64:
        """Return an inclination for each row."""
        if len(self.stated):
            return np.array(self.stated, np.float64)
        share = (np.arange(number) + 0.5) / number
        return self.low + share * (self.high - self.low)


def first_returns(
    image: F32,
    inclination: Inclination,
    mount: F64,
    pose: F64,
    poses: F32 | None,
) -> F32:
    """Return points (P, 5) of a range image (H, W, 4) in the vehicle's frame at ``pose``.

    ``mount`` is lidar to vehicle. ``poses`` (H, W, 6) are roll, pitch, yaw and place of the vehicle
    for each pixel; None: they are ``pose``. Raises ValueError for another number of inclinations or
    poses than of rows.
    """
    rows, columns = image.shape[:2]
    steep = inclination.interpolate_rows(rows)
    has_poses = poses is None or poses.shape[:2] == image.shape[:2]
    if len(steep) != rows or not has_poses:
        raise ValueError(
            f"{len(steep)} inclinations for {rows} rows, or poses for another number of pixels"
        )
    mount_yaw = np.arctan2(mount[1, 0], mount[0, 0])
    turn = 2 * (np.arange(columns) + 0.5) / columns
    azimuth = (1 - turn) * np.pi - mount_yaw
    row, column = np.nonzero(image[..., 0] > 0)
    returns = image[row, column].astype(np.float64)
    up = steep[::-1][row]
    around = azimuth[column]
    level = np.cos(up)
    x = np.cos(around) * level
    y = np.sin(around) * level
    z = np.sin(up)
    ray = np.stack([x, y, z], 1)
    place = move_points(returns[:, :1] * ray, mount)
    if poses is not None:
        pixel_poses = poses[row, column].astype(np.float64)
        # Yaw first, then pitch, then roll.
        angles = pixel_poses[:, :3]
        cr, cp, cy = np.cos(angles).T
        sr, sp, sy = np.sin(angles).T
        elements = [
            cy * cp,
            cy * sp * sr - sy * cr,
            cy * sp * cr + sy * sr,
            sy * cp,
            sy * sp * sr + cy * cr,
            sy * sp * cr - cy * sr,
            -sp,
            cp * sr,
            cp * cr,
        ]
        rotation = np.stack(elements, 1).reshape(-1, 3, 3)
        place = np.einsum("pij,pj->pi", rotation, place)
        place = move_points(place + pixel_poses[:, 3:], invert_rigid(pose))
    points = np.concatenate([place, returns[:, 1:3]], 1)
    return points.astype(np.float32)


def _decode_matrix(data: bytes, depth: int) -> F32:
    """Decode a compressed ``MatrixFloat`` (H, W, ``depth``)."""
    unpacked = zlib.decompressobj()
    message = unpacked.decompress(data, _MAX_BYTES)
    if unpacked.unconsumed_tail or not unpacked.eof:
        raise ValueError(f"a range image is cut off, or has over {_MAX_BYTES} bytes")
    values = b""
    shape: list[int] = []
    for number, _, value in fields(message):
        if number == 1 and not isinstance(value, int):
            values += value
        elif number == 2 and not isinstance(value, int):
            shape = [
                side for field, _, side in fields(value) if field == 1 and isinstance(side, int)
            ]
    numbers = np.frombuffer(values, "<f4")
    is_image = len(shape) == 3 and shape[2] == depth
    if not is_image or numbers.size != shape[0] * shape[1] * depth:
        raise ValueError(f"a range image of {numbers.size} numbers has the shape {shape}")
    return numbers.reshape(shape)
