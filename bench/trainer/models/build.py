"""A model from its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuelrail.bench.trainer.models.bev import BevOccupancy
from fuelrail.bench.trainer.models.gpt import Gpt
from fuelrail.bench.trainer.models.resnet import ResNet
from fuelrail.bench.trainer.models.settings import BevSettings, GptSettings, ResNetSettings
from fuelrail.bench.trainer.models.vit import MultiCameraVit

if TYPE_CHECKING:
    from fuelrail.bench.trainer.models.settings import ModelSettings
    from fuelrail.bench.trainer.models.staged import StagedModel


def build_model(settings: ModelSettings) -> StagedModel:
    """Make the model on torch's default device (``with torch.device("meta")`` for shapes only)."""
    if isinstance(settings, BevSettings):
        return BevOccupancy(settings)
    if isinstance(settings, ResNetSettings):
        return ResNet(settings)
    return Gpt(settings) if isinstance(settings, GptSettings) else MultiCameraVit(settings)
