"""Ego poses over time, and the checks on poses that come from files; quaternions are w, x, y, z."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.rigid import rigid

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.schema import F64, Mask

MAX_SKEW: Final = 1e-3
"""How far a rotation of a file may be from orthonormal, and a quaternion from unit length."""
FARTHEST_M: Final = 1e9
"""The largest coordinate of a translation [m]: those of the Earth are below 1e8, and squares
must stay finite.
"""
OPTICAL2FLU: Final = np.array(
    [
        [0.0, 0.0, 1.0, 0.0],
        [-1.0, 0.0, 0.0, 0.0],
        [0.0, -1.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 1.0],
    ]
)
"""A camera's axes right, down and forward to the axes forward, left and up."""
_ROUNDED: Final = 1e-9
_LAST_ROW: Final = np.array([[0.0], [0.0], [0.0], [1.0]])


def pose(rotation_wxyz: Any, translation: Any, where: str) -> F64:
    """Make transforms (..., 4, 4) of quaternions (..., 4) w, x, y, z and translations (..., 3) [m].

    Raises SourceError, naming ``where``, for what is not finite, and for quaternions that are not
    of unit length.
    """
    q = np.asarray(rotation_wxyz, np.float64)
    t = np.asarray(translation, np.float64)
    if q.shape[-1:] != (4,) or t.shape[-1:] != (3,):
        raise SourceError(
            f"{where}: a rotation of {list(q.shape)} numbers and a translation of "
            f"{list(t.shape)}; wanted are quaternions of 4 (w, x, y, z) and translations of 3"
        )
    bad = ~are_poses(q, t)
    if bad.any():
        row = "" if bad.ndim == 0 else f" row {int(np.argmax(bad))}:"
        index = int(np.argmax(bad)) if bad.ndim else ()
        raise SourceError(
            f"{where}:{row} the pose is not finite, its translation is over {FARTHEST_M:g} "
            f"m, or its quaternion is not of unit length: {q[index].tolist()}, translation "
            f"{t[index].tolist()}"
        )
    return np.asarray(rigid(q, t))


def are_poses(q: F64, t: F64) -> Mask:
    """Return whether quaternions (..., 4) are of unit length and translations (..., 3) within
    ``FARTHEST_M``.
    """
    is_near = (np.abs(t) <= FARTHEST_M).all(-1)
    return np.asarray(is_near & are_unit(q))


def are_unit(q: F64) -> Mask:
    """Return whether quaternions (..., 4) are of unit length."""
    with np.errstate(over="ignore"):
        length = np.linalg.norm(q, axis=-1)
    return np.asarray(np.abs(length - 1) <= MAX_SKEW)


def nearest_rigid(matrices: F64) -> tuple[F64, Mask]:
    """Return transforms (P, 4, 4) with the nearest rotations, and which of the given ones were
    rigid (P,).

    A rotation of rounded numbers becomes one to 1e-12; what is over 1e-3 away from one is none. The
    nearest rotation of M is U V^T of its singular value decomposition (Horn et al. 1988).
    """
    number = len(matrices)
    is_fixed = number > 1 and (matrices == matrices[0]).all()
    if is_fixed:  # of a sensor that stays where it is
        matrices, sound = nearest_rigid(matrices[:1])
        return np.repeat(matrices, number, 0), np.repeat(sound, number)
    with np.errstate(all="ignore"):
        numbers = np.moveaxis(matrices, 0, -1).copy()  # numpy is slow where the last axis is short
        rotation = numbers[:3, :3]
        squared = np.einsum("ijp,kjp->ikp", rotation, rotation)
        difference = squared - np.eye(3)[..., None]
        skew = np.abs(difference).max((0, 1))
        a, b, c = rotation
        following = [1, 2, 0]
        preceding = [2, 0, 1]
        cross = b[following] * c[preceding] - b[preceding] * c[following]
        determinant = (a * cross).sum(0)
        sound = skew <= MAX_SKEW
        sound &= determinant > 0
        sound &= (np.abs(numbers) <= FARTHEST_M).all((0, 1))
        sound &= (numbers[3] == _LAST_ROW).all(0)
        rounded = sound & (skew > _ROUNDED)
    if rounded.any():
        u, _, vt = np.linalg.svd(matrices[rounded, :3, :3])
        matrices = matrices.copy()
        matrices[rounded, :3, :3] = u @ vt
    return matrices, sound


def quaternions(matrices: F64) -> F64:
    """Return quaternions (P, 4), w, x, y, z, of rotations (P, 3, 3): the largest component first
    (Shepperd 1978).
    """
    m = np.moveaxis(matrices, 0, -1)
    axes = (m[0, 0], m[1, 1], m[2, 2])
    trace = axes[0] + axes[1] + axes[2]
    squares = np.stack([trace, *axes], 1)
    # Row k of each: 4 q_k * q.
    products = np.empty((len(matrices), 4, 4))
    diagonal = 1 + 2 * squares - trace[:, None]
    diagonal[:, 0] = 1 + trace
    for k in range(4):
        products[:, k, k] = diagonal[:, k]
    for axis in range(3):
        first = (axis + 1) % 3
        second = (axis + 2) % 3
        difference = m[second, first] - m[first, second]
        products[:, 0, axis + 1] = difference
        products[:, axis + 1, 0] = difference
        total = m[first, second] + m[second, first]
        products[:, first + 1, second + 1] = total
        products[:, second + 1, first + 1] = total
    rows = np.arange(len(matrices))
    largest = products[rows, squares.argmax(1)]
    lengths = np.linalg.norm(largest, axis=1, keepdims=True)
    return np.asarray(largest / lengths)


class Trajectory:
    """Ego poses of one clip: exact at their own times, between them linear and along the shortest
    rotation (slerp).

    There is no pose before the first and after the last, nor in a gap of over ``max_gap_s``
    seconds.
    """

    def __init__(
        self,
        timestamp_ns: Any,
        ego2global: F64,
        where: str,
        *,
        max_gap_s: float = 0.5,
    ) -> None:
        """Take poses (P, 4, 4) at times (P,) [ns], ascending; raises SourceError, naming
        ``where``.
        """
        times = np.asarray(timestamp_ns)
        is_integer = times.dtype.kind in "iu"
        if not is_integer or times.shape != (len(ego2global),):
            raise SourceError(
                f"{where}: times are {times.dtype}{list(times.shape)}, wanted integers, one "
                "for each pose"
            )
        times = times.astype(np.int64)
        is_backward = np.diff(times) <= 0
        if is_backward.any():
            row = int(np.argmax(is_backward)) + 1
            raise SourceError(
                f"{where}: row {row} has the time {times[row]}, not later than "
                f"{times[row - 1]} before it"
            )
        poses = np.asarray(ego2global, np.float64).reshape(-1, 4, 4)
        matrices, sound = nearest_rigid(poses)
        if not sound.all():
            row = int(np.argmin(sound))
            raise SourceError(
                f"{where}: row {row} is not a rotation and a translation: {matrices[row].tolist()}"
            )
        self._times = times
        self._matrices = matrices
        self._max_gap_ns = max_gap_s * 1e9
        self._q = quaternions(matrices[:, :3, :3])

    def at(self, timestamp_ns: Any) -> F64:
        """Return the poses (T, 4, 4) at times (T,) [ns]; NaN where there is none."""
        times = np.asarray(timestamp_ns, np.int64).reshape(-1)
        poses = np.full((len(times), 4, 4), np.nan)
        if not len(self._times):
            return poses
        last_row = len(self._times) - 1
        after = np.minimum(np.searchsorted(self._times, times), last_row)
        time_after = self._times[after]
        exact = time_after == times
        poses[exact] = self._matrices[after[exact]]
        before = np.maximum(after - 1, 0)
        time_before = self._times[before]
        gap = time_after - time_before
        between = ~exact & (gap <= self._max_gap_ns)
        between &= (time_before < times) & (times < time_after)
        if not between.any():
            return poses
        first = before[between]
        last = after[between]
        passed = times[between] - time_before[between]
        share = passed / gap[between]
        start = self._matrices[first, :3, 3]
        step = self._matrices[last, :3, 3] - start
        moved = start + share[:, None] * step
        # On the shortest way between both rotations (Shoemake 1985).
        q_first = self._q[first]
        q_last = self._q[last]
        cosine = np.einsum("ti,ti->t", q_first, q_last)
        is_opposite = cosine[:, None] < 0
        q_last = np.where(is_opposite, -q_last, q_last)
        angle = np.arccos(np.clip(np.abs(cosine), 0, 1))
        sine = np.sin(angle)
        close = sine < 1e-9
        safe = np.where(close, 1.0, sine)
        rest = 1 - share
        arc_first = np.sin(rest * angle) / safe
        arc_last = np.sin(share * angle) / safe
        a = np.where(close, rest, arc_first)
        b = np.where(close, share, arc_last)
        q = a[:, None] * q_first + b[:, None] * q_last
        poses[between] = rigid(np.asarray(q), moved)
        return poses
