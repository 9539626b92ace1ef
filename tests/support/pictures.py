"""Pictures with known content, encoded by Pillow (not by a backend), and measures of where things lie in them.

Pictures are uint8 (height, width, 3) RGB; decoder outputs are uint8 (3, height, width). Places are centre-origin
pixels (u, v): (0, 0) is the centre of the top-left pixel.
"""

from __future__ import annotations

import functools
import io
import math
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageFilter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fuelrail.pipeline.transforms.image_map import ImageMap

BACKGROUND = 40


def encode(picture: NDArray[np.uint8], kind: str = "jpeg", **options: Any) -> bytes:
    """Return the file of a picture (h, w), (h, w, 3) or (h, w, 4); JPEG at quality 98 without subsampling."""
    image = Image.fromarray(picture)
    if kind == "jpeg":
        options = {"quality": 98, "subsampling": 0, **options}
    with io.BytesIO() as file:
        image.save(file, kind, **options)
        return file.getvalue()


def blobs(
    width: int,
    height: int,
    places: Sequence[tuple[float, float]],
    sigma_px: float,
) -> NDArray[np.uint8]:
    """Bright Gaussian spots on a dark ground, each centred on its place to a thousandth of a pixel."""
    x = np.arange(width)
    y = np.arange(height)
    picture = np.full((height, width), float(BACKGROUND))
    for u, v in places:
        across = np.exp(-((x - u) ** 2) / (2 * sigma_px**2))
        down = np.exp(-((y - v) ** 2) / (2 * sigma_px**2))
        picture += 200.0 * down[:, None] * across
    gray = np.clip(np.rint(picture), 0, 255).astype(np.uint8)
    return np.repeat(gray[..., None], 3, axis=2)


def blob_place(
    planes: NDArray[np.uint8], near: tuple[float, float], radius_px: int
) -> tuple[float, float]:
    """Centre of gravity of the spot within a square about ``near``, from the mean of the planes."""
    u0 = round(near[0])
    v0 = round(near[1])
    top = max(0, v0 - radius_px)
    left = max(0, u0 - radius_px)
    window = (
        planes[:, top : v0 + radius_px + 1, left : u0 + radius_px + 1].mean(axis=0) - BACKGROUND
    )
    window[window < 4.0] = 0.0  # ringing of the JPEG far from the spot
    y, x = np.mgrid[: window.shape[0], : window.shape[1]]
    mass = window.sum()
    assert mass > 0, f"no spot near {near}"
    return float((window * x).sum() / mass + left), float((window * y).sum() / mass + top)


def checkerboard(width: int, height: int, square_px: int) -> NDArray[np.uint8]:
    """Squares of 60 and 200 grey levels whose corners lie on pixel edges: at k * square_px - 0.5, centre-origin.

    Blurred by a Gaussian of one pixel, as any lens does: of an infinitely sharp edge, interpolation without
    antialiasing sees only which pixel it falls into, a quantisation that would be measured here instead of geometry.
    """
    y, x = np.mgrid[:height, :width]
    gray = np.where((x // square_px + y // square_px) % 2, 200, 60).astype(np.uint8)
    gray = np.asarray(Image.fromarray(gray).filter(ImageFilter.GaussianBlur(1.0)))
    return np.repeat(gray[..., None], 3, axis=2)


@functools.cache
def natural(width: int, height: int, seed: int = 0) -> NDArray[np.uint8]:
    """A picture with the statistics of a photograph: amplitude falling as 1/frequency, coloured, with hard edges."""
    rng = np.random.default_rng(seed)
    fy = np.fft.fftfreq(height)[:, None]
    fx = np.fft.rfftfreq(width)[None]
    spectrum = 1.0 / np.maximum(np.hypot(fy, fx), 1.0 / max(width, height)) ** 1.2
    channels = []
    shared = rng.standard_normal((height, width))
    for _ in range(3):
        noise = np.fft.rfft2(0.8 * shared + 0.2 * rng.standard_normal((height, width)))
        field = np.fft.irfft2(noise * spectrum, s=(height, width))
        channels.append(128 + 42 * field / max(field.std(), 1e-9))
    picture = np.stack(channels, axis=-1)
    for _ in range(12):  # things with edges, as cars and buildings have
        x = rng.integers(0, width)
        y = rng.integers(0, height)
        w = rng.integers(width // 20 + 1, width // 6 + 2)
        h = rng.integers(height // 20 + 1, height // 5 + 2)
        picture[y : y + h, x : x + w] = 0.4 * picture[y : y + h, x : x + w] + 0.6 * rng.uniform(
            20, 235, 3
        )
    return np.clip(np.rint(picture), 0, 255).astype(np.uint8)


def open_with_pillow(encoded: bytes) -> NDArray[np.uint8]:
    """The picture as Pillow decodes it to RGB in full, pixels as stored."""
    return np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB"))


def reference(
    encoded: bytes, image_map: ImageMap, interpolation: str = "bilinear"
) -> NDArray[np.uint8]:
    """What the map makes of the file by Pillow alone: full decode, antialiased resize, one affine transform.

    Independent of the backends: the whole source is resized to whole pixels, and the rest is one transform.
    """
    source = Image.open(io.BytesIO(encoded)).convert("RGB")
    a, b, _, c, d, _ = image_map.coefficients
    width = max(1, round(source.size[0] * min(1.0, math.hypot(a, c))))
    height = max(1, round(source.size[1] * min(1.0, math.hypot(b, d))))
    resample = {
        "bilinear": Image.Resampling.BILINEAR,
        "bicubic": Image.Resampling.BICUBIC,
    }[interpolation]
    small = source.resize((width, height), resample)
    a, b, tx, c, d, ty = image_map.inverse_coefficients()
    sx = width / source.size[0]
    sy = height / source.size[1]
    # Rounded: Pillow's transforms cut fractions off, so that -0.9999999999 for -1 would change grey levels by one.
    affine = tuple(round(x, 9) for x in (a * sx, b * sx, tx * sx, c * sy, d * sy, ty * sy))
    image = small.transform(
        image_map.out_wh,
        Image.Transform.AFFINE,
        affine,
        Image.Resampling.BILINEAR,
    )
    return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))


def psnr_db(
    a: NDArray[np.uint8],
    b: NDArray[np.uint8],
    where: NDArray[np.bool_] | None = None,
) -> float:
    """Peak signal to noise ratio over all pixels, or those ``where`` (height, width) says."""
    error = np.square(a.astype(np.int32) - b)
    mean = float((error if where is None else error[:, where]).mean())
    return 99.0 if mean == 0.0 else float(10 * np.log10(255.0**2 / mean))


def shift_px(
    a: NDArray[np.uint8], b: NDArray[np.uint8], where: NDArray[np.bool_]
) -> tuple[float, float]:
    """The displacement (du, dv) of ``b`` against ``a`` that explains their difference best (Lucas and Kanade 1981).

    Least squares on the brightness of the pixels ``where``; good to about a hundredth of a pixel when it is small.
    """
    first = a.astype(np.float64).mean(axis=0)
    second = b.astype(np.float64).mean(axis=0)
    mean = (first + second) / 2
    gv, gu = np.gradient(mean)
    inner = where.copy()
    inner[:2], inner[-2:], inner[:, :2], inner[:, -2:] = (
        False,
        False,
        False,
        False,
    )
    gradients = np.stack((gu[inner], gv[inner]), axis=1)
    solution, *_ = np.linalg.lstsq(gradients, (first - second)[inner], rcond=None)
    return float(solution[0]), float(solution[1])


def seen(image_map: ImageMap, margin_px: float = 0.0) -> NDArray[np.bool_]:
    """Output pixels (height, width) whose centre maps into the visible source, ``margin_px`` source pixels inside."""
    width, height = image_map.out_wh
    v, u = np.mgrid[:height, :width] + 0.5
    a, b, tx, c, d, ty = image_map.inverse_coefficients()
    x = a * u + b * v + tx
    y = c * u + d * v + ty
    left, top, right, bottom = image_map.visible
    inside: NDArray[np.bool_] = (
        (x >= left + margin_px)
        & (x <= right - margin_px)
        & (y >= top + margin_px)
        & (y <= bottom - margin_px)
    )
    return inside
