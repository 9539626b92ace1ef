"""Models by name: sizes of ours, and the import of others; nothing here imports torch."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any, Literal

from fuelrail.pipeline.errors import ConfigError, FuelrailError
from fuelrail.pipeline.runtime.stages import stage_error
from fuelrail.pipeline.settings import Above0, NotNegative, Positive, Settings
from fuelrail.pipeline.transforms.image import ImageAugment

MODEL_IMAGE = ImageAugment(height=256, width=704)
"""What our camera models read where a run names no image: the size that BEVDet-R50's figures are
of.
"""


class CameraSettings(Settings, frozen=True, kw_only=True):
    """What all camera models have.

    ``subsample`` takes every n-th pixel in both directions before the first layer: the emulated
    accelerator's stand-in looks at little of the image, so that the host's time is left to the
    loader. The grid has ``grid`` cells a side and covers -``range_m`` to ``range_m`` metres around
    the vehicle.
    """

    subsample: Positive = 1
    grid: Positive = 16
    range_m: float = 51.2


class BevSettings(CameraSettings, frozen=True, kw_only=True):
    """Size of the bird's-eye model: convolutions, then a grid of queries."""

    width: Positive
    num_stages: Positive
    blocks_per_stage: NotNegative


class ResNetSettings(CameraSettings, frozen=True, kw_only=True):
    """Size of a bottleneck ResNet: ``width`` channels and ``blocks`` per stage; 64 and (3, 4, 6,
    3) is ResNet-50.
    """

    width: Positive = 64
    blocks: tuple[Positive, ...] = (3, 4, 6, 3)
    classes: Positive = 10


class VitSettings(CameraSettings, frozen=True, kw_only=True):
    """Size of the multi-camera ViT: ``depth`` blocks of ``width`` channels over patches of
    ``patch`` pixels a side.
    """

    width: Positive
    depth: Positive
    heads: Positive
    patch: Positive = 16

    def patches_along(self, pixels: int) -> int:
        """Return the number of whole patches along a side of an image of that many pixels."""
        pixels_read = range(self.subsample // 2, pixels, self.subsample)
        return len(pixels_read) // self.patch


class GptSettings(Settings, frozen=True):
    """Size of the decoder: ``depth`` blocks of ``width`` channels; it reads ``context`` tokens of a
    ``vocabulary``.

    ``kv_heads`` (default: ``heads``) are shared by groups of queries. A perceptron has ``ffn``
    channels inside (default: four times the width), and with ``gated`` a third matrix. ``experts``
    is the number of perceptrons of a block, of which a token passes ``active_experts`` on average.
    A head has ``head_width`` channels (default: ``width`` over ``heads``).
    """

    width: Positive
    depth: Positive
    heads: Positive
    vocabulary: Positive = 50304
    context: Positive = 1024
    kv_heads: Positive | None = None
    ffn: Positive | None = None
    gated: bool = False
    experts: Positive = 1
    active_experts: Above0 = 1
    head_width: Positive | None = None

    @property
    def channels_of_head(self) -> int:
        """Return the number of channels of a head."""
        return self.head_width or self.width // self.heads


GridSettings = BevSettings | VitSettings  # of models that say which cells are occupied
ModelSettings = BevSettings | ResNetSettings | VitSettings | GptSettings
# `light` costs a host CPU two milliseconds a step and a fifth of one a sample, `stand-in` a few a
# sample; `base` is a ResNet-like backbone at full resolution. vit-base and vit-large have the sizes
# of arXiv 2010.11929; vit-2b, of 2.03 billion parameters, has about the shape of arXiv 2106.04560's
# ViT-G. gpt2 and gpt-1.3b are the sizes of arXiv 2005.14165 (small, XL).
MODELS: dict[str, ModelSettings] = {
    "light": BevSettings(width=8, num_stages=2, blocks_per_stage=0, subsample=32, grid=8),
    "stand-in": BevSettings(width=16, num_stages=2, blocks_per_stage=0, subsample=8),
    "base": BevSettings(width=64, num_stages=4, blocks_per_stage=2, grid=48),
    "bev-tiny": BevSettings(width=8, num_stages=3, blocks_per_stage=2, subsample=8, grid=8),
    "resnet50": ResNetSettings(),
    "resnet-tiny": ResNetSettings(width=8, blocks=(2, 2, 2, 2), classes=16, subsample=2),
    "vit-tiny": VitSettings(width=32, depth=8, heads=8, patch=4, subsample=4, grid=8),
    "vit-base": VitSettings(width=768, depth=12, heads=12, grid=48),
    "vit-large": VitSettings(width=1024, depth=24, heads=16, grid=48),
    "vit-2b": VitSettings(width=2048, depth=40, heads=16, grid=48),
    "gpt-tiny": GptSettings(width=32, depth=8, heads=8, vocabulary=64, context=32),
    "gpt2": GptSettings(width=768, depth=12, heads=12),
    "gpt-1.3b": GptSettings(width=2048, depth=24, heads=16, context=2048),
    "gpt-100b": GptSettings(width=10240, depth=80, heads=80, context=2048),
}

if TYPE_CHECKING:
    ModelName = str
else:
    ModelName = Literal[tuple(MODELS)]


def num_blocks(settings: ModelSettings) -> int:
    """Return the number of blocks, between which a pipeline may cut."""
    if isinstance(settings, BevSettings):
        num_residuals = settings.num_stages * settings.blocks_per_stage
        num_strided = settings.num_stages - 1
        return num_residuals + num_strided
    if isinstance(settings, ResNetSettings):
        return sum(settings.blocks)
    return settings.depth


def tensor_sizes(settings: ModelSettings, image: tuple[int, int]) -> dict[str, int]:
    """Return sizes that tensor parallel divides, by name; ``image`` is the height and width of a
    delivered image.
    """
    if isinstance(settings, GptSettings):
        return {
            "heads": settings.heads,
            "key-value heads": settings.kv_heads or settings.heads,
            "channels of the perceptron": settings.ffn or 4 * settings.width,
            "vocabulary": settings.vocabulary,
            "context": settings.context,
        }
    if isinstance(settings, VitSettings):
        height, width = (settings.patches_along(side) for side in image)
        return {"heads": settings.heads, "patches of an image": height * width}
    if isinstance(settings, ResNetSettings):
        return {"classes": settings.classes}
    return {"width": settings.width}


def predictions(settings: ModelSettings, num_cameras: int) -> tuple[tuple[int, ...], str]:
    """Return the shape of a sample's logits, and what they say; models of which both are equal
    can teach each other.
    """
    if isinstance(settings, GptSettings):
        shape = settings.context, settings.vocabulary
        return shape, "the next token"
    if isinstance(settings, ResNetSettings):
        shape = num_cameras, settings.classes
        return shape, f"number of cells of {settings.grid} x {settings.grid}"
    shape = settings.grid, settings.grid
    return shape, f"occupancy within {settings.range_m:g} m"


def feature_width(settings: ModelSettings) -> int:
    """Return the number of channels in front of the head."""
    if isinstance(settings, BevSettings):
        return settings.width << (settings.num_stages - 1)
    if isinstance(settings, ResNetSettings):
        last_width = settings.width << (len(settings.blocks) - 1)
        return 4 * last_width
    return settings.width


def import_function(name: str, noun: str = "model") -> Any:
    """Import the function that ``MODULE:NAME`` names, from the working folder too.

    Raises ConfigError, which calls it a ``noun``, and StageError of its own.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ConfigError(f"{noun} {name!r} must be MODULE:FUNCTION, such as 'teacher:logits'")
    if "/" in module or module.startswith(".") or module.endswith(".py"):
        raise ConfigError(
            f"{noun} {name!r} has the path '{module}'; name a module as `import` does: "
            "'folder.teacher'"
        )
    folder = os.getcwd()  # noqa: PTH109 - as the interpreter itself does for `python -m`
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        namespace = importlib.import_module(module)
        function = getattr(namespace, attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{noun} {name!r} cannot be imported: {error}") from error
    except FuelrailError:
        raise
    except (Exception, SystemExit) as error:  # a script may end the process when it is imported
        raise stage_error(f"{noun} {name!r} cannot be made", error) from error
    if not callable(function):
        raise ConfigError(f"{noun} {name!r} is {type(function).__name__}, not a function")
    return function
