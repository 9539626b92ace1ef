"""Rigid transforms as homogeneous matrices; quaternions are w, x, y, z."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import F64


def invert_rigid(matrix: F64) -> F64:
    """Return the inverse of rigid transforms (..., 4, 4): [R t]^-1 = [R^T -R^T t]."""
    inverse = np.zeros_like(matrix)
    rotation = np.swapaxes(matrix[..., :3, :3], -1, -2)
    translation = matrix[..., :3, 3:]
    inverse[..., :3, :3] = rotation
    inverse[..., :3, 3:] = -(rotation @ translation)
    inverse[..., 3, 3] = 1
    return inverse


def move_points(points: NDArray[Any], a2b: F64) -> F64:
    """Return points (..., 3) of frame a in frame b, by a transform (4, 4)."""
    rotation = a2b[:3, :3]
    translation = a2b[:3, 3]
    return np.asarray(points @ rotation.T + translation)


def homogeneous(matrix: F64) -> F64:
    """Embed (..., 3, 3) matrices into (..., 4, 4) identities."""
    shape = (*matrix.shape[:-2], 4, 4)
    embedded = np.zeros(shape, matrix.dtype)
    embedded[..., :3, :3] = matrix
    embedded[..., 3, 3] = 1
    return embedded


def rigid(rotation_wxyz: F64, translation: F64) -> F64:
    """Make rigid transforms (..., 4, 4) from quaternions (..., 4) w, x, y, z and translations
    (..., 3).
    """
    rotation = rotation_matrices(rotation_wxyz)
    transform = homogeneous(rotation)
    transform[..., :3, 3] = translation
    return transform


def rotation_matrices(rotation_wxyz: NDArray[Any]) -> NDArray[Any]:
    """Make rotation matrices (..., 3, 3) from quaternions (..., 4) w, x, y, z, normalised first."""
    norm = np.linalg.norm(rotation_wxyz, axis=-1, keepdims=True)
    quaternion = rotation_wxyz / norm
    w = quaternion[..., 0]
    x = quaternion[..., 1]
    y = quaternion[..., 2]
    z = quaternion[..., 3]
    xx = x * x
    yy = y * y
    zz = z * z
    xy = x * y
    xz = x * z
    yz = y * z
    wx = w * x
    wy = w * y
    wz = w * z
    elements = [
        1 - 2 * (yy + zz),
        2 * (xy - wz),
        2 * (xz + wy),
        2 * (xy + wz),
        1 - 2 * (xx + zz),
        2 * (yz - wx),
        2 * (xz - wy),
        2 * (yz + wx),
        1 - 2 * (xx + yy),
    ]
    return np.stack(elements, -1).reshape(*w.shape, 3, 3)
