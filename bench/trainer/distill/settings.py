"""How a student is distilled, as plain values; nothing here imports torch."""

from __future__ import annotations

from typing import NamedTuple

from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.settings import Settings, read_pairs

DISTILL = "labels=1,logits=1"


class DistillSettings(Settings, frozen=True, kw_only=True):
    """A teacher out of ``checkpoints``, or a ``layer`` of its predictions; one of them is given.

    ``weights`` is the text that :func:`weights_of` reads. ``temperature`` softens the logits.
    """

    checkpoints: str | None = None
    layer: str | None = None
    weights: str = DISTILL
    temperature: float = 2.0


class LossWeights(NamedTuple):
    """Weights of the parts of the loss of distillation; 0: left out."""

    labels: float = 0.0
    logits: float = 0.0
    features: float = 0.0
    targets: float = 0.0


def weights_of(text: str) -> LossWeights:
    """Read ``PART=WEIGHT,...``. Raises ConfigError."""
    rule = "PART=WEIGHT with a weight above 0, each part once; parts"
    weights = LossWeights(**read_pairs("distill", text, LossWeights._fields, float, rule))
    if weights == LossWeights(labels=weights.labels):
        raise ConfigError(f"distill '{text}' takes nothing from the teacher; add logits=1, features=1 or targets=1")
    return weights
