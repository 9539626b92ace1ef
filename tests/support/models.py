"""The trainer's models, whole on one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fuelrail.bench.trainer.models.build import build_model

if TYPE_CHECKING:
    from fuelrail.bench.trainer.models.settings import ModelSettings
    from fuelrail.bench.trainer.models.staged import StagedModel


def build(settings: ModelSettings, device: str, seed: int) -> StagedModel:
    """Make the model with the weights that the seed says."""
    torch.manual_seed(seed)
    return build_model(settings).to(device)
