"""Images from uint8 to what the model takes: channel order, mean, standard deviation, dtype, memory format.

Done where the batch ends up, on a GPU after the copy: uint8 is a quarter of the bytes to copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence


class Normalize(Settings, frozen=True):
    """How ``img`` becomes floating point: (channel - mean) / std, computed in float32, then cast.

    Attributes:
        mean, std: of grey levels 0 to 255, for the channels in ``channel_order``. The defaults are ImageNet's, RGB.
            (BEVDet applies the RGB numbers to BGR channels: ``channel_order="bgr"`` and the defaults.)
        channel_order: ``"rgb"`` or ``"bgr"`` of the result.
        dtype: of the result.
        channels_last: memory format of each image; the shape stays [..., 3, H, W].

    Raises ConfigError for a standard deviation that is not above 0.
    """

    mean: tuple[float, float, float] = (123.675, 116.28, 103.53)
    std: tuple[float, float, float] = (58.395, 57.12, 57.375)
    channel_order: Literal["rgb", "bgr"] = "rgb"
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    channels_last: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if not all(level > 0.0 for level in self.std):
            raise ConfigError(f"std={list(self.std)} must be three numbers above 0")

    def images(self, img: torch.Tensor) -> torch.Tensor:
        """Return the images uint8 [..., 3, H, W], RGB, as the settings say; on their device."""
        flat = img.flatten(0, -4) if img.ndim > 3 else img[None]
        if self.channel_order == "bgr":
            flat = flat.flip(1)
        values = flat.to(torch.float32)
        values.sub_(_column(self.mean, img.device)).div_(_column(self.std, img.device))
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        return values.to(getattr(torch, self.dtype), memory_format=layout).view(img.shape)

    def __call__(self, batch: Any) -> Any:  # noqa: ANN401
        """The batch with its ``img`` normalised. Raises ConfigError for a batch that has none of uint8."""
        img = batch.get("img") if isinstance(batch, dict) else None
        if not isinstance(img, torch.Tensor) or img.dtype != torch.uint8 or img.ndim < 3 or img.shape[-3] != 3:
            kind = f"{img.dtype} {list(img.shape)}" if isinstance(img, torch.Tensor) else type(img).__name__
            raise ConfigError(
                f"normalize needs batches with a uint8 'img' [..., 3, H, W], got {kind}: "
                "let transform and collate_fn keep it, or normalise there"
            )
        return {**batch, "img": self.images(img)}


def _column(levels: Sequence[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(levels, dtype=torch.float32, device=device)[:, None, None]
