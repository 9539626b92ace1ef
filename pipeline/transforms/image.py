"""Image augmentation settings and their draw: from (seed, epoch, sample, camera) to one `ImageMap`
an image.

The order of operations, the sizes and the crops are those of the BEVDet family (BEVDet, bevfusion,
StreamPETR, Sparse4D, SparseDrive): resize by a factor with the side lengths cut to integers, crop,
flip, rotate. The matrices are exact (`fuelrail.pipeline.transforms.image_map`): they follow the
integers used and the half-pixel centres. Those code bases use the
drawn factor and edge-origin formulas on centre-origin pixels, and are off by up to two pixels; for
weights that were trained so, ``geometry="legacy_mmdet3d"`` gives their matrices.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.settings import (
    Probability,
    Settings,
    check_types,
    must_be,
    resolve_fields,
)
from fuelrail.pipeline.transforms.image_map import ImageMap
from fuelrail.pipeline.transforms.randomness import (
    ALL_CAMERAS,
    settle_train,
    uniforms,
    within,
)

STREAM = "image-augment"
"""Name of the random stream; its columns are resize, crop x, crop y, flip, rotate, in this
order.
"""

_NUM_DRAWS = 5
_MIN_FACTOR = 1e-3
_MAX_FACTOR = 1e3
_DRAWN = ("resize_jitter", "resize_range", "flip_prob", "rotate_deg")
_MAX_SIDE = 16384
_Side = Annotated[int, Meta(ge=1, le=_MAX_SIDE), must_be(f"1 to {_MAX_SIDE} pixels")]
_Factor = Annotated[float, Meta(ge=_MIN_FACTOR, le=_MAX_FACTOR)]
_RESIZE = must_be(
    f"width, cover, contain, stretch, or a factor from {_MIN_FACTOR} to {_MAX_FACTOR:g}"
)
_MAX_PIXELS = 1 << 26
"""The largest output: the limit of a stored image, too."""


class ImageAugment(Settings, frozen=True):
    """What becomes of each camera image before the model sees it.

    Attributes:
        height, width: final size in pixels.
        train: draw at random. False gives the deterministic evaluation of the same settings: no
            jitter, no flip, no rotation, mean of ``crop_bottom``, random crops centred. It must be
            given where there is something of these but the default ``crop_x``; else it is False.
        resize: factor from stored to resized image. ``"width"``: final width / stored width
            (BEVDet). ``"cover"``: the smallest factor at which the final size is filled
            (StreamPETR, SparseDrive). ``"contain"``: the largest at which the whole image fits; the
            rest is black. ``"stretch"``: each side to its final length, aspect not kept. Or a
            number (bevfusion evaluates with 0.48, BEVFormer-tiny uses 0.5).
        resize_jitter: in training, uniform in this range is added to ``resize`` (BEVDet: -0.06 to
            0.11).
        resize_range: in training, the factor is uniform in this range instead of ``resize``
            (StreamPETR: 0.38 to 0.55).
        crop_y: where the final height is taken: ``"bottom"``, ``"center"``, ``"top"`` or
            ``"random"``.
        crop_bottom: with ``crop_y="bottom"``, the share of the resized height left out below:
            uniform in this range in training, its mean in evaluation (``bot_pct_lim`` elsewhere).
        crop_x: where the final width is taken: ``"random"``, ``"center"`` or ``"left"``.
        flip_prob: probability of a left-right flip in training.
        rotate_deg: in training, rotation uniform in this range, degrees, counter-clockwise.
        geometry: ``"exact"``, or ``"legacy_mmdet3d"``: the matrices of BEVDet, bevfusion,
            StreamPETR and SparseDrive as published, errors included. Pixels are the same.
        scope: ``"camera"`` draws for each camera (BEVDet, bevfusion), ``"sample"`` once for all of
            them (StreamPETR).

    Resized images smaller than the final size are padded with black at the right and at the bottom;
    at the top with ``crop_y="bottom"``. Raises ConfigError for values out of range.
    """

    height: _Side
    width: _Side
    train: Annotated[bool | None, must_be("True or False")] = None
    resize: Annotated[Literal["width", "cover", "contain", "stretch"] | _Factor, _RESIZE] = "cover"
    resize_jitter: tuple[float, float] | None = None
    resize_range: tuple[float, float] | None = None
    crop_y: Literal["bottom", "center", "top", "random"] = "bottom"
    crop_bottom: tuple[float, float] = (0.0, 0.0)
    crop_x: Literal["random", "center", "left"] = "random"
    flip_prob: Probability = 0.0
    rotate_deg: tuple[float, float] = (0.0, 0.0)
    geometry: Literal["exact", "legacy_mmdet3d"] = "exact"
    scope: Literal["camera", "sample"] = "camera"

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        check_types(self, ConfigError)
        num_pixels = self.height * self.width
        if num_pixels > _MAX_PIXELS:
            raise ConfigError(
                f"final size height={self.height}, width={self.width} has "
                f"{num_pixels} pixels: at most {_MAX_PIXELS} are allowed"
            )
        if self.resize_jitter is not None and self.resize_range is not None:
            raise ConfigError("resize_jitter and resize_range exclude each other: give one of them")
        if self.resize == "stretch" and (self.resize_jitter or self.resize_range):
            raise ConfigError(
                "resize='stretch' has no factor to vary: leave out resize_jitter and resize_range"
            )
        for name in (
            "resize_jitter",
            "resize_range",
            "crop_bottom",
            "rotate_deg",
        ):
            limits = getattr(self, name)
            if limits is None:
                continue
            low, high = limits
            if not -math.inf < low <= high < math.inf:
                raise ConfigError(
                    f"{name}={[low, high]} must be [low, high] with low <= high, both finite"
                )
        for name, minimum in (
            ("resize_range", _MIN_FACTOR),
            ("resize_jitter", -_MAX_FACTOR),
        ):
            limits = getattr(self, name)
            if limits is None:
                continue
            low, high = limits
            if low < minimum or high > _MAX_FACTOR:
                raise ConfigError(
                    f"{name}={[low, high]} must be factors from {minimum:g} to {_MAX_FACTOR:g}"
                )
        low, high = self.crop_bottom
        if low < 0.0 or high >= 1.0:
            raise ConfigError(f"crop_bottom={[low, high]} must lie in [0, 1)")
        drawn = list(_DRAWN)
        if self.crop_y == "random":
            drawn.append("crop_y")
        if low != high:
            drawn.append("crop_bottom")
        settle_train(self, drawn)

    def evaluation(self) -> ImageAugment:
        """Return the deterministic variant of these settings."""
        return msgspec.structs.replace(self, train=False)

    def draw(
        self,
        img_wh: Sequence[Sequence[int]],
        *,
        seed: int,
        epoch: int,
        sample: int,
        cameras: Sequence[int] | None = None,
    ) -> list[ImageMap]:
        """Return one map for each camera of a sample.

        Args:
            img_wh: width and height in pixels of each stored image; (N, 2) integers. A camera
                without an image may say 0, 0: its map is the identity on the final size.
            seed: the run's seed.
            epoch: counted from 0.
            sample: index of the sample in the dataset, not its position in the epoch.
            cameras: the cameras' indices in the dataset's rig, where not 0 .. N-1, so that a loader
                of some cameras draws for them what a loader of all cameras draws.

        """
        if not self.train:
            return [self._evaluate(int(width), int(height)) for width, height in img_wh]
        count = len(img_wh)
        is_shared = self.scope == "sample"
        rows = range(count) if cameras is None else cameras
        table = uniforms(
            seed,
            epoch=epoch,
            sample=sample,
            cameras=(ALL_CAMERAS,) if is_shared else rows,
            stream=STREAM,
            count=_NUM_DRAWS,
        )
        draws = table.tolist()
        if is_shared:
            draws *= count
        maps = []
        for wh, draw in zip(img_wh, draws, strict=True):
            width, height = map(int, wh)
            if width < 1 or height < 1:
                maps.append(ImageMap.identity((self.width, self.height)))
                continue
            u_resize, u_x, u_y, u_flip, u_rotate = draw
            factors, size = self._base(width, height)
            factor = None
            if self.resize_range is not None:
                factor = within(self.resize_range, u_resize)
            elif self.resize_jitter is not None:
                jitter = within(self.resize_jitter, u_resize)
                factor = max(_MIN_FACTOR, factors[0] + jitter)
            if factor is not None:
                factors = (factor, factor)
                size = (int(width * factor), int(height * factor))
            size = _at_least_1(size)
            share = within(self.crop_bottom, u_y)
            left_top = self._crop(size, share, u_x, u_y)
            image_map = self._map(
                (width, height),
                factors,
                size,
                left_top,
                flip=u_flip < self.flip_prob,
                degrees=within(self.rotate_deg, u_rotate),
            )
            maps.append(image_map)
        return maps

    def _base(
        self,
        width: int,
        height: int,
    ) -> tuple[tuple[float, float], tuple[int, int]]:
        """Return the factors of width and height without randomness, and the (width, height) that
        they lead to.

        Those are exact integers, where int(W * (fW / W)) may be one short.
        """
        resize = self.resize
        if not isinstance(resize, str):
            size = (int(width * resize), int(height * resize))
            return (resize, resize), size
        by_width = self.width / width
        by_height = self.height / height
        if resize == "stretch":
            size = (self.width, self.height)
            return (by_width, by_height), size
        is_wider = self.width * height >= self.height * width
        if resize == "width" or is_wider == (resize == "cover"):
            size = (self.width, height * self.width // width)
            return (by_width, by_width), size
        size = (width * self.height // height, self.height)
        return (by_height, by_height), size

    @functools.lru_cache(maxsize=256)  # noqa: B019 - settings are few, and equal ones share maps
    def _evaluate(self, width: int, height: int) -> ImageMap:
        if width < 1 or height < 1:
            return ImageMap.identity((self.width, self.height))
        factors, size = self._base(width, height)
        size = _at_least_1(size)
        low, high = self.crop_bottom
        left_top = self._crop(
            size,
            share=(low + high) / 2,
            u_x=0.5,
            u_y=0.5,
        )
        return self._map(
            (width, height),
            factors,
            size,
            left_top,
            flip=False,
            degrees=0.0,
        )

    def _crop(
        self,
        size: tuple[int, int],
        share: float,
        u_x: float,
        u_y: float,
    ) -> tuple[int, int]:
        """Return left and top of the final size in a resized one; ``share`` of its height is
        left out below.
        """
        width, height = size
        room_x = max(0, width - self.width)
        room_y = max(0, height - self.height)
        offsets_x = {
            "left": 0,
            "center": room_x // 2,
            "random": int(u_x * room_x),
        }
        bottom = int((1.0 - share) * height)
        offsets_y = {
            "top": 0,
            "center": room_y // 2,
            "random": int(u_y * room_y),
            "bottom": bottom - self.height,
        }
        return offsets_x[self.crop_x], offsets_y[self.crop_y]

    def _map(
        self,
        source_wh: tuple[int, int],
        factors: tuple[float, float],
        size: tuple[int, int],
        left_top: tuple[int, int],
        *,
        flip: bool,
        degrees: float,
    ) -> ImageMap:
        """Return the map of what was drawn; ``factors`` are those that led to the resized
        ``size``.
        """

        left, top = left_top

        def finish(resized: ImageMap) -> ImageMap:
            image_map = resized.crop(left, top, self.width, self.height)
            if flip:
                image_map = image_map.flip()
            return image_map.rotate(degrees)

        source = ImageMap.identity(source_wh)
        exact = finish(source.resize(*size))
        if self.geometry == "exact":
            return exact
        scale_x, scale_y = factors
        resized_by_factors = ImageMap(
            coefficients=(scale_x, 0.0, 0.0, 0.0, scale_y, 0.0),
            source_wh=source_wh,
            out_wh=size,
            visible=source.visible,
        )
        published = finish(resized_by_factors).coefficients
        return dataclasses.replace(exact, published=published)


class CameraGroup(Settings, frozen=True):
    """Cameras of a rig whose images have one size and augmentation of their own.

    Attributes:
        cameras: their channels, such as ``("cam_front", "cam_back")``; the batch has them in this
            order.
        image: size and augmentation of their images.

    Raises ConfigError for values that are not allowed.
    """

    cameras: tuple[str, ...]
    image: ImageAugment

    def __post_init__(self) -> None:
        """Read a dict or a file of settings; refuse what cannot be meant."""
        resolve_fields(self)
        check_types(self, ConfigError)
        if not self.cameras or len(set(self.cameras)) < len(self.cameras):
            raise ConfigError(
                f"cameras={list(self.cameras)} must name one camera or more, each once"
            )

    def evaluation(self) -> CameraGroup:
        """Return the deterministic variant of these settings."""
        return msgspec.structs.replace(self, image=self.image.evaluation())


def _at_least_1(size: tuple[int, int]) -> tuple[int, int]:
    return max(1, size[0]), max(1, size[1])
