"""Lens distortion: the coefficients of a camera, by the name of their model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.errors import ConfigError

Kind: TypeAlias = Literal["pinhole", "fisheye"]

MODELS: Final[dict[str, tuple[Kind, tuple[int, ...]]]] = {
    "opencv_radtan": ("pinhole", (4, 5)),
    "opencv_rational": ("pinhole", (8, 12, 14)),
    "kannala_brandt": ("fisheye", (4,)),
}
"""``dist_model`` to the kind of lens and the numbers of coefficients that OpenCV takes for it."""

UNBENT: Final = "none"

Matrix3: TypeAlias = tuple[tuple[float, float, float], ...]


@dataclass(frozen=True, slots=True)
class Lens:
    """A distorted camera and the pinhole that is to take its place; hashable, so that what it costs can be kept.

    Attributes:
        kind: ``"pinhole"``: OpenCV's k1, k2, p1, p2[, k3[, k4, k5, k6[, s1 .. s4[, tx, ty]]]]
            (calib3d, "Camera Calibration"); ``"fisheye"``: Kannala and Brandt's k1 .. k4 (``cv2.fisheye``).
        coefficients: of that model.
        stored: K of the stored image, centre-origin; without skew.
        rectified: K of the rectified image, which has the stored one's size.
    """

    kind: Kind
    coefficients: tuple[float, ...]
    stored: Matrix3
    rectified: Matrix3


def read_lens(model: str, dist: NDArray[np.float64], intrinsics: NDArray[np.float64]) -> Lens | None:
    """Return the lens of a camera, not rectified yet (``rectified`` is ``stored``); None where nothing is bent.

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
        raise ConfigError(f"dist_model '{model}' cannot be undone, only {', '.join(MODELS)}: leave out undistort")
    kind, lengths = MODELS[model]
    if len(coefficients) > lengths[-1]:
        raise ConfigError(f"dist_model '{model}' has at most {lengths[-1]} coefficients, got {len(coefficients)}")
    length = next(n for n in lengths if n >= len(coefficients))
    camera: Matrix3 = tuple(tuple(row) for row in intrinsics.tolist())
    return Lens(kind, tuple(coefficients + [0.0] * (length - len(coefficients))), camera, camera)


def source_places(
    matrix: NDArray[np.float64], lens: Lens, wh: tuple[int, int]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the stored coordinates of each pixel of an output that shows the rectified image under ``matrix`` (3, 3).

    Float32 (height, width) each, centre-origin; ``wh`` is the output's width and height.
    """
    import cv2

    camera, coefficients = np.array(lens.stored), np.array(lens.coefficients)
    to_output = matrix @ np.array(lens.rectified)
    make = cv2.fisheye.initUndistortRectifyMap if lens.kind == "fisheye" else cv2.initUndistortRectifyMap
    x, y = make(camera, coefficients, np.eye(3), to_output, wh, cv2.CV_32FC1)
    return x, y  # type: ignore[return-value]


def rectified_places(places: NDArray[np.float64], lens: Lens) -> NDArray[np.float64]:
    """Map pixels (P, 2) of the stored image to the rectified one, float64 (P, 2), centre-origin.

    By OpenCV's iterative inverse of the lens.
    """
    import cv2

    if not len(places):
        return places.copy()
    camera, coefficients = np.array(lens.stored), np.array(lens.coefficients)
    undo = cv2.fisheye.undistortPoints if lens.kind == "fisheye" else cv2.undistortPoints
    points = np.ascontiguousarray(places, np.float64).reshape(-1, 1, 2)
    found = undo(points, camera, coefficients, R=np.eye(3), P=np.array(lens.rectified))
    return np.asarray(found, np.float64).reshape(-1, 2)
