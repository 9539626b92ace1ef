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
    inverse[..., :3, :3] = rotation
    inverse[..., :3, 3] = -(rotation @ matrix[..., :3, 3:])[..., 0]
    inverse[..., 3, 3] = 1
    return inverse


def move_points(points: NDArray[Any], a2b: F64) -> F64:
    """Return points (..., 3) of frame a in frame b, by a transform (4, 4)."""
    return np.asarray(points @ a2b[:3, :3].T + a2b[:3, 3])


def homogeneous(matrix: F64) -> F64:
    """Embed (..., 3, 3) matrices into (..., 4, 4) identities."""
    out = np.zeros((*matrix.shape[:-2], 4, 4), matrix.dtype)
    out[..., :3, :3] = matrix
    out[..., 3, 3] = 1
    return out


def rigid(rotation_wxyz: F64, translation: F64) -> F64:
    """Make rigid transforms (..., 4, 4) from quaternions (..., 4) w, x, y, z and translations
    (..., 3).
    """
    out = homogeneous(rotation_matrices(rotation_wxyz))
    out[..., :3, 3] = translation
    return out


def rotation_matrices(rotation_wxyz: NDArray[Any]) -> NDArray[Any]:
    """Make rotation matrices (..., 3, 3) from quaternions (..., 4) w, x, y, z, normalised first."""
    q = rotation_wxyz / np.linalg.norm(rotation_wxyz, axis=-1, keepdims=True)
    w, x, y, z = (q[..., i] for i in range(4))
    rows = [
        1 - 2 * (y * y + z * z),
        2 * (x * y - w * z),
        2 * (x * z + w * y),
        2 * (x * y + w * z),
        1 - 2 * (x * x + z * z),
        2 * (y * z - w * x),
        2 * (x * z - w * y),
        2 * (y * z + w * x),
        1 - 2 * (x * x + y * y),
    ]
    return np.stack(rows, -1).reshape(*q.shape[:-1], 3, 3)
