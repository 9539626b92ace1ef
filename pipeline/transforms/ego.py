"""Augmentation of the world about the vehicle: one linear map of the ego frame for boxes, points
and matrices at once.

p' = B p with B = translation . flip . scale . rotation about z, as BEVDet's `bda`, bevfusion's
`lidar_aug_matrix` and StreamPETR's global augmentations. B is not rigid: it may mirror and scale.
An image flip is not one of these; that is drawn separately (`fuelrail.pipeline.transforms.image`).

With the ego frame replaced by the augmented one (ego'):

* boxes: centre' = B centre, size' = scale * size, heading' = the direction of B heading, velocity'
  = B's 3 x 3 part * velocity, since positions scale and time does not;
* ego' to anything: X' = X . B^-1 (``ego2img``, ``ego2global``); anything to ego': X' = B . X
  (``cam2keyego``);
* points of a lidar stay in the lidar's frame: p' = L^-1 B L p with L its ``lidar2ego``, which does
  not change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np

from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.rigid import move_points
from fuelrail.pipeline.settings import (
    AtLeast0,
    Probability,
    Settings,
    check_types,
    must_be,
)
from fuelrail.pipeline.transforms.randomness import (
    settle_train,
    uniforms,
    within,
)

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import F32, F64


STREAM = "bev-augment"
"""Name of the random stream; its columns are rotation, scale, flip x, flip y, then six for the
translation.
"""

_NUM_DRAWS = 10
_DRAWN = (
    "rotate_deg",
    "scale",
    "flip_x_prob",
    "flip_y_prob",
    "translate_std_m",
)


@dataclass(frozen=True, slots=True)
class BevMap:
    """One map of the ego frame.

    Attributes:
        rotation_rad: about z, counter-clockwise seen from above; applied first.
        scale: of all three axes, applied next.
        flip_x, flip_y: mirror the x (y) coordinate, applied next.
        translation_m: (x, y, z), applied last.
    """

    rotation_rad: float = 0.0
    scale: float = 1.0
    flip_x: bool = False
    flip_y: bool = False
    translation_m: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def matrix(self) -> F64:
        """B, float64 (4, 4): ego to augmented ego; read-only where it is the identity."""
        if self is IDENTITY:
            return _EYE
        cos = self.scale * math.cos(self.rotation_rad)
        sin = self.scale * math.sin(self.rotation_rad)
        sign_x = -1.0 if self.flip_x else 1.0
        sign_y = -1.0 if self.flip_y else 1.0
        matrix = np.eye(4)
        matrix[0, 0] = sign_x * cos
        matrix[0, 1] = -sign_x * sin
        matrix[1, 0] = sign_y * sin
        matrix[1, 1] = sign_y * cos
        matrix[2, 2] = self.scale
        matrix[:3, 3] = self.translation_m
        return matrix

    @property
    def inverse(self) -> F64:
        """B^-1, float64 (4, 4): augmented ego to ego; read-only where it is the identity."""
        if self is IDENTITY:
            return _EYE
        matrix = self.matrix
        linear = matrix[:3, :3]  # a mirrored rotation times the scale
        shift = matrix[:3, 3]
        inverse_linear = linear.T / self.scale**2
        inverse = np.eye(4)
        inverse[:3, :3] = inverse_linear
        inverse[:3, 3] = -inverse[:3, :3] @ shift
        return inverse

    def boxes3d(self, boxes3d: F32) -> F32:
        """Return float32 (M, 7) boxes x y z l w h yaw, ego to augmented ego; yaw in [-pi, pi).

        A copy.
        """
        if self == IDENTITY:
            return boxes3d.copy()
        matrix = self.matrix
        boxes = boxes3d.astype(np.float64)
        boxes[:, :3] = move_points(boxes[:, :3], matrix)
        boxes[:, 3:6] *= self.scale
        boxes[:, 6] = self.yaws(boxes[:, 6])
        return boxes.astype(np.float32)

    def yaws(self, yaws: F64) -> F64:
        """Return headings (any shape), radians about z from +x, in augmented ego axes; in [-pi,
        pi).
        """
        yaw = yaws + self.rotation_rad
        if self.flip_x:
            yaw = math.pi - yaw
        if self.flip_y:
            yaw = -yaw
        wrapped: F64 = (yaw + math.pi) % math.tau - math.pi
        return wrapped

    def rotations(self, rotation_wxyz: F64) -> F64:
        """Return unit quaternions (..., 4) of bodies in augmented ego axes, box to ego; a copy.

        A mirrored body has its own left and right exchanged, so that its rotation stays one: with
        M_y the mirror of y, M_y R M_y has the quaternion (w, -x, y, -z), and mirroring x as well is
        half a turn about z.
        """
        quaternions = rotation_wxyz.astype(np.float64)
        quaternions = _turn_about_z(self.rotation_rad, quaternions)
        if self.flip_x != self.flip_y:
            quaternions = quaternions * (1.0, -1.0, 1.0, -1.0)
        if self.flip_x:
            return _turn_about_z(math.pi, quaternions)
        return quaternions

    def in_frame(self, frame2ego: F64) -> tuple[F64, F64]:
        """Return B as a sensor's frame sees it, F^-1 B F: a linear map (3, 3) and a shift (3,),
        float64.

        ``frame2ego`` F is rigid, (4, 4) float64.
        """
        rotation = frame2ego[:3, :3]
        place = frame2ego[:3, 3]
        matrix = self.matrix
        ego_linear = matrix[:3, :3]
        ego_shift = matrix[:3, 3]
        linear = rotation.T @ ego_linear @ rotation
        shift = rotation.T @ (ego_linear @ place + ego_shift - place)
        return linear, shift

    def vectors(self, vectors: F32) -> F32:
        """Return float32 (M, 3) velocities in augmented ego axes; NaN stays NaN. A copy."""
        if self == IDENTITY:
            return vectors.copy()
        linear = self.matrix[:3, :3]
        moved = vectors.astype(np.float64) @ linear.T
        return moved.astype(np.float32)

    def points(self, points: F32, lidar2ego: F64) -> F32:
        """Return float32 (P, C) points in the lidar's frame, moved as ego is; columns after x, y, z
        are copied.

        ``lidar2ego`` is rigid, (4, 4) float64.
        """
        if self == IDENTITY:
            return points.copy()
        linear64, shift64 = self.in_frame(lidar2ego)
        linear = linear64.astype(np.float32)
        shift = shift64.astype(np.float32)
        moved = points.copy()
        moved[:, :3] = points[:, :3] @ linear.T + shift
        return moved


def _turn_about_z(angle_rad: float, quaternions: F64) -> F64:
    """Return quaternions (..., 4) w, x, y, z, turned by an angle about the fixed z axis."""
    cos = math.cos(angle_rad / 2)
    sin = math.sin(angle_rad / 2)
    w = quaternions[..., 0]
    x = quaternions[..., 1]
    y = quaternions[..., 2]
    z = quaternions[..., 3]
    turned = [
        cos * w - sin * z,
        cos * x - sin * y,
        cos * y + sin * x,
        cos * z + sin * w,
    ]
    return np.stack(turned, axis=-1)


IDENTITY = BevMap()
_EYE = np.broadcast_to(np.eye(4), (4, 4))  # which makes it read-only


class BevAugment(Settings, frozen=True):
    """What becomes of the world about the vehicle, drawn once a sample.

    Attributes:
        train: draw at random; False changes nothing. It must be given with any of the other fields.
        rotate_deg: rotation about z, uniform in this range, degrees (BEVDet: -22.5 to 22.5).
        scale: factor, uniform in this range (BEVDet, StreamPETR: 0.95 to 1.05; bevfusion: 0.9 to
            1.1).
        flip_x_prob, flip_y_prob: probability of mirroring the x (y) coordinate.
        translate_std_m: standard deviation of a normal translation of each axis, metres (bevfusion:
            0.5).

    Raises ConfigError for values out of range.
    """

    train: Annotated[bool | None, must_be("True or False")] = None
    rotate_deg: tuple[float, float] = (0.0, 0.0)
    scale: tuple[float, float] = (1.0, 1.0)
    flip_x_prob: Probability = 0.0
    flip_y_prob: Probability = 0.0
    translate_std_m: Annotated[AtLeast0, must_be("0 or more metres")] = 0.0

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        check_types(self, ConfigError)
        for name in ("rotate_deg", "scale"):
            low, high = getattr(self, name)
            is_finite = math.isfinite(low) and math.isfinite(high)
            if not (is_finite and low <= high):
                raise ConfigError(f"{name}={[low, high]} must be [low, high] with low <= high")
        smallest, _ = self.scale
        if smallest <= 0.0:
            raise ConfigError(f"scale={list(self.scale)} must be factors above 0")
        settle_train(self, _DRAWN)

    def evaluation(self) -> BevAugment:
        """Return the settings that change nothing."""
        return msgspec.structs.replace(self, train=False)

    def draw(self, *, seed: int, epoch: int, sample: int) -> BevMap:
        """Return the map of a sample; arguments as in `ImageAugment.draw`."""
        if not self.train:
            return IDENTITY
        draws = uniforms(
            seed,
            epoch,
            sample,
            stream=STREAM,
            count=_NUM_DRAWS,
        )
        u = draws[0].tolist()
        # Box and Muller's transform: two uniforms make one normal number. 1 - u is never 0.
        translation = []
        for axis in range(3):
            radius = math.sqrt(-2 * math.log(1 - u[4 + axis]))
            angle = 2 * math.pi * u[7 + axis]
            translation.append(self.translate_std_m * (radius * math.cos(angle)))
        x, y, z = translation
        rotation_deg = within(self.rotate_deg, u[0])
        return BevMap(
            rotation_rad=math.radians(rotation_deg),
            scale=within(self.scale, u[1]),
            flip_x=u[2] < self.flip_x_prob,
            flip_y=u[3] < self.flip_y_prob,
            translation_m=(x, y, z),
        )
