"""Quaternions and rigid transforms, and the seeded random streams everything synthetic is drawn from.

Matrices are named ``a2b`` with ``p_b = a2b @ p_a``. Quaternions are ``(w, x, y, z)`` as in the nuScenes tables. Values
that end up in a table are rounded here first, so what is rendered is what the tables say.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

QUATERNION_DECIMALS: Final = 12
METRE_DECIMALS: Final = 6


def stream(*path: object) -> np.random.Generator:
    """Random stream of its own for each path such as ``(seed, "clip", 3)``: independent of the order of use."""
    digest = hashlib.sha256("/".join(map(str, path)).encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))


def rotation_about(axis: str, angle_rad: float) -> NDArray[np.float64]:
    """Right-handed rotation (3, 3) about the x, y or z axis."""
    i = "xyz".index(axis)
    j, k = (i + 1) % 3, (i + 2) % 3
    matrix = np.eye(3)
    matrix[j, j] = matrix[k, k] = math.cos(angle_rad)
    matrix[k, j] = math.sin(angle_rad)
    matrix[j, k] = -matrix[k, j]
    return matrix


def yaw_quaternion(yaw_rad: float) -> tuple[float, float, float, float]:
    """Rounded quaternion of a rotation about z."""
    half = yaw_rad / 2.0
    return (round(math.cos(half), QUATERNION_DECIMALS), 0.0, 0.0, round(math.sin(half), QUATERNION_DECIMALS))


def quaternion_from_rotation(rotation: NDArray[np.float64]) -> tuple[float, float, float, float]:
    """Rounded unit quaternion (w, x, y, z) of a rotation matrix (3, 3); the largest component is positive.

    Shepperd's method: divide by the largest of the four components, so no rotation is badly conditioned.
    """
    r = rotation
    trace = r[0, 0] + r[1, 1] + r[2, 2]
    squares = [trace, *(2.0 * r[i, i] - trace for i in range(3))]
    largest = max(range(4), key=squares.__getitem__)
    size = 2.0 * math.sqrt(1.0 + squares[largest])
    q = [0.0] * 4
    q[largest] = size / 4.0
    if largest == 0:
        q[1:] = [(r[2, 1] - r[1, 2]) / size, (r[0, 2] - r[2, 0]) / size, (r[1, 0] - r[0, 1]) / size]
    else:
        i = largest - 1
        j, k = (i + 1) % 3, (i + 2) % 3
        q[0] = (r[k, j] - r[j, k]) / size
        q[1 + j] = (r[j, i] + r[i, j]) / size
        q[1 + k] = (r[k, i] + r[i, k]) / size
    w, x, y, z = (round(float(value), QUATERNION_DECIMALS) for value in q)
    return (w, x, y, z)


def rotation_from_quaternion(quaternion: tuple[float, float, float, float]) -> NDArray[np.float64]:
    """Rotation matrix (3, 3) of a quaternion (w, x, y, z), which is normalised first."""
    norm = math.sqrt(math.fsum(value * value for value in quaternion))
    w, x, y, z = (value / norm for value in quaternion)
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
            [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
            [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
        ]
    )


def rigid(rotation: NDArray[np.float64], translation: tuple[float, float, float]) -> NDArray[np.float64]:
    """Rigid transform (4, 4) from a rotation (3, 3) and a translation in metres."""
    matrix = np.eye(4)
    matrix[:3, :3] = rotation
    matrix[:3, 3] = translation
    return matrix


def inverse(a2b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Inverse (4, 4) of a rigid transform."""
    rotation = a2b[:3, :3].T
    matrix = np.eye(4)
    matrix[:3, :3] = rotation
    matrix[:3, 3] = -rotation @ a2b[:3, 3]
    return matrix
