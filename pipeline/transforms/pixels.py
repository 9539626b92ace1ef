"""Augmentation of pixel values: photometric distortion and grid mask, drawn from (seed, epoch,
sample, camera).

The distortion is mmdet3d's `PhotoMetricDistortionMultiViewImage`, which BEVFormer, UniAD and
SparseDrive train with; the grid mask is that of PETR and StreamPETR. Nothing here moves a pixel, so
no matrix changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.settings import (
    Probability,
    Settings,
    check_types,
    must_be,
)
from fuelrail.pipeline.transforms.randomness import (
    ALL_CAMERAS,
    settle_train,
    uniforms,
    within,
)

STREAM = "pixel-augment"
"""Name of the random stream; its columns are, each switch before its amount: brightness, contrast,
saturation, hue, channel order; then whether contrast comes first; then grid mask: switch, spacing,
offset down, offset right.
"""

_NUM_DRAWS = 15
_DRAWN = (
    "brightness",
    "contrast",
    "saturation",
    "hue_deg",
    "swap_channels",
    "grid_mask_prob",
)
_Level = Annotated[int, Meta(ge=0, le=255)]
_Colour = Annotated[tuple[_Level, _Level, _Level], must_be("three grey levels from 0 to 255")]
_ORDERS = ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0))


class GridHoles(NamedTuple):
    """Square holes on a grid: row y is solid where (y - top) mod spacing < bar, columns alike;
    the rest are holes.
    """

    spacing_px: int
    bar_px: int
    top_px: int
    left_px: int


class PixelChange(NamedTuple):
    """What happens to one image's pixels, in this order.

    brightness is added (grey levels of 255); contrast multiplies here if ``contrast_first``; then
    in HSV the saturation is multiplied and the hue turned; contrast multiplies here if not
    ``contrast_first``; channels are put in ``order``; holes are filled.
    """

    brightness: float = 0.0
    contrast: float = 1.0
    saturation: float = 1.0
    hue_deg: float = 0.0
    contrast_first: bool = False
    order: tuple[int, int, int] = (0, 1, 2)
    holes: GridHoles | None = None


NO_CHANGE = PixelChange()


class PixelAugment(Settings, frozen=True):
    """What becomes of each image's pixel values in training. The defaults change nothing.

    Attributes:
        train: draw at random; False changes nothing. It must be given with any of the other fields.
        brightness: grey levels of 255 added, uniform in [-brightness, brightness] (BEVFormer: 32).
        contrast, saturation: factors, uniform in this range (BEVFormer: 0.5 to 1.5).
        hue_deg: turn of the hue, uniform in [-hue_deg, hue_deg] degrees (BEVFormer: 18).
        swap_channels: put the channels in a random order.
        prob: probability of each of these, one by one.
        grid_mask_prob: probability of a grid of holes (StreamPETR: 0.7).
        grid_mask_ratio: width of the bars between the holes, share of the spacing.
        grid_mask_fill: RGB of the holes. The mean that images are normalised with becomes 0.
        scope: ``"camera"`` draws for each camera, ``"sample"`` once for all of them.

    Raises ConfigError for values out of range.
    """

    train: Annotated[bool | None, must_be("True or False")] = None
    brightness: Annotated[float, Meta(ge=0, le=255), must_be("from 0 to 255 grey levels")] = 0.0
    contrast: tuple[float, float] = (1.0, 1.0)
    saturation: tuple[float, float] = (1.0, 1.0)
    hue_deg: Annotated[float, Meta(ge=0, le=180), must_be("from 0 to 180 degrees")] = 0.0
    swap_channels: bool = False
    prob: Probability = 0.5
    grid_mask_prob: Probability = 0.0
    grid_mask_ratio: Annotated[float, Meta(gt=0, lt=1), must_be("between 0 and 1")] = 0.5
    grid_mask_fill: _Colour = (124, 116, 104)
    scope: Literal["camera", "sample"] = "camera"

    def __post_init__(self) -> None:
        """Check the ranges; settle ``train`` where it is not given."""
        check_types(self, ConfigError)
        for name in ("contrast", "saturation"):
            low, high = getattr(self, name)
            if not 0.0 <= low <= high < math.inf:
                raise ConfigError(f"{name}={[low, high]} must be [low, high] with 0 <= low <= high")
        settle_train(self, _DRAWN)

    @property
    def changes_nothing(self) -> bool:
        """True where every draw would be `NO_CHANGE`."""
        if not self.train:
            return True
        has_colours = self.prob > 0.0 and (
            self.brightness != 0.0
            or self.contrast != (1.0, 1.0)
            or self.saturation != (1.0, 1.0)
            or self.hue_deg != 0.0
            or self.swap_channels
        )
        return not has_colours and self.grid_mask_prob == 0.0

    def evaluation(self) -> PixelAugment:
        """Return the settings that change nothing."""
        return msgspec.structs.replace(self, train=False)

    def draw(
        self,
        height: int,
        *,
        seed: int,
        epoch: int,
        sample: int,
        cameras: Sequence[int],
    ) -> list[PixelChange]:
        """Return one change for each camera; ``height`` of the output in pixels, others as in
        `ImageAugment.draw`.
        """
        if self.changes_nothing:
            return [NO_CHANGE] * len(cameras)
        is_shared = self.scope == "sample"
        draws = uniforms(
            seed,
            epoch=epoch,
            sample=sample,
            cameras=(ALL_CAMERAS,) if is_shared else cameras,
            stream=STREAM,
            count=_NUM_DRAWS,
        )
        prob = self.prob
        changes = []
        for u in draws.tolist():
            brightness = 0.0
            contrast = 1.0
            saturation = 1.0
            hue_deg = 0.0
            order = (0, 1, 2)
            holes = None
            if u[0] < prob:
                brightness = self.brightness * (2 * u[1] - 1)
            if u[2] < prob:
                contrast = within(self.contrast, u[3])
            if u[4] < prob:
                saturation = within(self.saturation, u[5])
            if u[6] < prob:
                hue_deg = self.hue_deg * (2 * u[7] - 1)
            if self.swap_channels and u[8] < prob:
                order = _ORDERS[int(u[9] * len(_ORDERS))]
            if u[11] < self.grid_mask_prob:
                u_spacing, u_top, u_left = u[12:]
                spacing = 2 + int(u_spacing * max(1, height - 2))
                bar = int(spacing * self.grid_mask_ratio + 0.5)
                holes = GridHoles(
                    spacing,
                    min(max(bar, 1), spacing - 1),
                    int(u_top * spacing),
                    int(u_left * spacing),
                )
            change = PixelChange(
                brightness=brightness,
                contrast=contrast,
                saturation=saturation,
                hue_deg=hue_deg,
                order=order,
                contrast_first=u[10] < 0.5,
                holes=holes,
            )
            changes.append(change)
        if is_shared:
            return changes * len(cameras)
        return changes
