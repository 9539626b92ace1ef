"""Lens distortion: the coefficients of a camera, by the name of their model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np

from fuelrail.pipeline.errors import ConfigError, needs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fuelrail.pipeline.dtypes import F32, F64


Kind: TypeAlias = Literal["pinhole", "fisheye", "ftheta", "mei"]

MODELS: Final[dict[str, tuple[Kind, tuple[int, ...]]]] = {
    "opencv_radtan": ("pinhole", (4, 5)),
    "opencv_rational": ("pinhole", (8, 12, 14)),
    "kannala_brandt": ("fisheye", (4,)),
    "ftheta": ("ftheta", (6,)),
    "mei": ("mei", (5,)),
}
"""``dist_model`` to the kind of lens and the numbers of coefficients that it takes."""

UNBENT: Final = "none"
OWN_MODELS: Final = ("ftheta", "mei")
"""Kinds that OpenCV does not have."""
_ROUNDS: Final = 30
_FARTHEST: Final = 10.0
"""Where the inverse of tangential terms ends that has none: beyond all images."""
_FLAT: Final = 1e-9
"""Determinant below which a lens is not inverted."""
_WIDEST: Final = np.radians(89.0)
"""The largest angle from the axis [rad] that a pinhole is asked to show."""

Matrix3: TypeAlias = tuple[tuple[float, float, float], ...]


@dataclass(frozen=True, slots=True)
class Lens:
    """A distorted camera and the pinhole that is to take its place; hashable, so that what it costs
    can be kept.

    Attributes:
        kind: ``"pinhole"``: OpenCV's k1, k2, p1, p2[, k3[, k4, k5, k6[, s1 .. s4[, tx, ty]]]]
            (calib3d, "Camera Calibration"); ``"fisheye"``: Kannala and Brandt's k1 .. k4
            (``cv2.fisheye``); ``"ftheta"``: k0 .. k5 of the radius k0 + k1 theta + ... + k5 theta^5
            under K; ``"mei"``: xi, k1, k2, p1, p2 of the unified model (Mei and Rives, ICRA 2007).
        coefficients: of that model.
        stored: K of the stored image, centre-origin; without skew.
        rectified: K of the rectified image, which has the stored one's size.
    """

    kind: Kind
    coefficients: tuple[float, ...]
    stored: Matrix3
    rectified: Matrix3


def read_lens(model: str, dist: F64, intrinsics: F64) -> Lens | None:
    """Return the lens of a camera, with the K of a pinhole of the same scale at the centre; None
    where nothing is bent.

    Args:
        model: the camera's ``dist_model``.
        dist: its coefficients, float64 (14,), NaN-padded.
        intrinsics: K of the stored image, float64 (3, 3).

    Raises ConfigError for a model that cannot be undone here.

    """
    coefficients = dist[np.isfinite(dist)].tolist()
    if model == UNBENT or not coefficients:
        return None
    if model not in MODELS:
        raise ConfigError(
            f"dist_model '{model}' cannot be undone, only {', '.join(MODELS)}: leave out undistort"
        )
    kind, lengths = MODELS[model]
    if len(coefficients) > lengths[-1]:
        raise ConfigError(
            f"dist_model '{model}' has at most {lengths[-1]} coefficients, got {len(coefficients)}"
        )
    length = next(n for n in lengths if n >= len(coefficients))
    coefficients += [0.0] * (length - len(coefficients))
    scale = 1.0
    if kind == "ftheta":
        scale = coefficients[1]
    elif kind == "mei":
        scale = 1.0 / (1.0 + coefficients[0])
    factors = np.ones((3, 3))
    factors[:2, :2] = scale
    return Lens(
        kind=kind,
        coefficients=tuple(coefficients),
        stored=_as_rows(intrinsics),
        rectified=_as_rows(intrinsics * factors),
    )


def _as_rows(matrix: F64) -> Matrix3:
    return tuple(tuple(row) for row in matrix.tolist())


def source_places(matrix: F64, lens: Lens, wh: tuple[int, int]) -> tuple[F32, F32]:
    """Return the stored coordinates of each pixel of an output that shows the rectified image under
    ``matrix`` (3, 3).

    Float32 (height, width) each, centre-origin; ``wh`` is the output's width and height.
    """
    camera = np.array(lens.stored)
    coefficients = np.array(lens.coefficients)
    to_output = matrix @ np.array(lens.rectified)
    if lens.kind in OWN_MODELS:
        width, height = wh
        columns = np.arange(width, dtype=np.float64)
        rows = np.arange(height, dtype=np.float64)
        grid_x, grid_y = np.meshgrid(columns, rows)
        pixels = np.stack((grid_x, grid_y, np.ones_like(grid_y)), -1)
        to_ray = np.linalg.inv(to_output)
        rays = pixels @ to_ray.T
        flat = rays[..., :2] / rays[..., 2:]
        focal = camera[:2, :2]
        centre = camera[:2, 2]
        places = bent(flat, lens) @ focal.T + centre
        x = places[..., 0]
        y = places[..., 1]
        return x.astype(np.float32), y.astype(np.float32)
    with needs("a lens that is undone"):
        import cv2

    if lens.kind == "fisheye":
        x, y = cv2.fisheye.initUndistortRectifyMap(
            K=camera,
            D=coefficients,
            R=np.eye(3),
            P=to_output,
            size=wh,
            m1type=cv2.CV_32FC1,
        )
    else:
        x, y = cv2.initUndistortRectifyMap(
            cameraMatrix=camera,
            distCoeffs=coefficients,
            R=np.eye(3),
            newCameraMatrix=to_output,
            size=wh,
            m1type=cv2.CV_32FC1,
        )
    return x, y  # type: ignore[return-value]


def rectified_places(places: F64, lens: Lens) -> F64:
    """Map pixels (P, 2) of the stored image to the rectified one, float64 (P, 2), centre-origin.

    By an iterative inverse of the lens, of OpenCV or (f-theta, Mei) of this module.
    """
    if not len(places):
        return places.copy()
    camera = np.array(lens.stored)
    coefficients = np.array(lens.coefficients)
    rectified = np.array(lens.rectified)
    if lens.kind in OWN_MODELS:
        focal = camera[:2, :2]
        centre = camera[:2, 2]
        to_ray = np.linalg.inv(focal)
        rays = (places - centre) @ to_ray.T
        flat = straight(rays, lens)
        focal = rectified[:2, :2]
        centre = rectified[:2, 2]
        return np.asarray(flat @ focal.T + centre)
    with needs("a lens that is undone"):
        import cv2

    undo = cv2.fisheye.undistortPoints if lens.kind == "fisheye" else cv2.undistortPoints
    points = np.ascontiguousarray(places, np.float64).reshape(-1, 1, 2)
    undistorted = undo(
        points,
        camera,
        coefficients,
        R=np.eye(3),
        P=rectified,
    )
    return np.asarray(undistorted, np.float64).reshape(-1, 2)


def bent(flat: F64, lens: Lens) -> F64:
    """Map rays x/z, y/z (..., 2) to coordinates (..., 2) under K of the stored image, for the
    kinds of ``OWN``.
    """
    radius = np.linalg.norm(flat, axis=-1, keepdims=True)
    if lens.kind == "ftheta":
        polynomial = np.polynomial.Polynomial(lens.coefficients)
        slope = np.full_like(radius, lens.coefficients[1])  # at the centre, which has no direction
        theta = np.arctan(radius)
        bent_radius = polynomial(theta)
        np.divide(bent_radius, radius, out=slope, where=radius > 0)
        return np.asarray(flat * slope)
    xi, *radtan = lens.coefficients
    depth = 1.0 + xi * np.sqrt(1.0 + radius**2)
    return _radtan(flat / depth, radtan)


def straight(places: F64, lens: Lens) -> F64:
    """Invert :func:`bent` by Newton's method, to 1e-12; a ray beyond 89 degrees becomes one of
    89.
    """
    if lens.kind == "ftheta":
        polynomial = np.polynomial.Polynomial(lens.coefficients)
        slope = polynomial.deriv()
        slope_at_centre = lens.coefficients[1]
        radius = np.linalg.norm(places, axis=-1, keepdims=True)
        theta = radius / slope_at_centre
        for _ in range(_ROUNDS):
            error = polynomial(theta) - radius
            change = error / slope(theta)
            theta = np.clip(theta - change, 0.0, _WIDEST)
        per_radius = np.full_like(radius, 1.0 / slope_at_centre)
        np.divide(np.tan(theta), radius, out=per_radius, where=radius > 0)
        return np.asarray(places * per_radius)
    xi, *coefficients = lens.coefficients
    points = places
    for _ in range(_ROUNDS):
        error = _radtan(points, coefficients) - places
        change = _solve_radtan(points, error, coefficients)
        points = np.clip(points - change, -_FARTHEST, _FARTHEST)
    square = (points**2).sum(-1, keepdims=True)
    # The ray through the place on the unit sphere, of which x/z and y/z are asked: Mei and Rives,
    # equation 4.
    root = np.sqrt(np.maximum(1.0 + (1.0 - xi**2) * square, 0.0))
    scale = (xi + root) / (1.0 + square)
    depth = np.maximum(scale - xi, np.cos(_WIDEST))
    return np.asarray(points * scale / depth)


def _radtan(flat: F64, coefficients: Sequence[float]) -> F64:
    """Bend places (..., 2) by k1, k2, p1, p2, as OpenCV does."""
    k1, k2, p1, p2 = coefficients
    x = flat[..., 0]
    y = flat[..., 1]
    xx = x**2
    yy = y**2
    square = xx + yy
    radial = 1.0 + k1 * square + k2 * square**2
    bent_x = x * radial
    bent_x += 2 * p1 * x * y
    bent_x += p2 * (square + 2 * xx)
    bent_y = y * radial
    bent_y += p1 * (square + 2 * yy)
    bent_y += 2 * p2 * x * y
    return np.stack((bent_x, bent_y), -1)


def _solve_radtan(flat: F64, change: F64, coefficients: Sequence[float]) -> F64:
    """Return how far places (..., 2) must move for `_radtan` to change by ``change``, to first
    order.
    """
    k1, k2, p1, p2 = coefficients
    x = flat[..., 0]
    y = flat[..., 1]
    change_x = change[..., 0]
    change_y = change[..., 1]
    xx = x**2
    yy = y**2
    square = xx + yy
    radial = 1.0 + k1 * square + k2 * square**2
    slope = 2.0 * (k1 + 2.0 * k2 * square)
    # The Jacobian of `_radtan`, which is symmetric.
    dx_dy = x * y * slope
    dx_dy += 2 * p1 * x
    dx_dy += 2 * p2 * y
    dx_dx = radial + xx * slope
    dx_dx += 2 * p1 * y
    dx_dx += 6 * p2 * x
    dy_dy = radial + yy * slope
    dy_dy += 6 * p1 * y
    dy_dy += 2 * p2 * x
    determinant = dx_dx * dy_dy - dx_dy**2
    # Beyond the fold of a lens there is no inverse; any step is as good there.
    is_solvable = np.abs(determinant) > _FLAT
    determinant = np.where(is_solvable, determinant, 1.0)
    move_x = dy_dy * change_x - dx_dy * change_y
    move_y = dx_dx * change_y - dx_dy * change_x
    return np.stack((move_x, move_y), -1) / determinant[..., None]
