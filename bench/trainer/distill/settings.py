"""Weights of a student's lessons; nothing here imports torch."""

from __future__ import annotations

from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.settings import read_pairs

DISTILL = "labels=1,logits=1"
TEMPERATURE = 2.0
_PARTS = ("labels", "logits", "features", "targets")


def weights_of(text: str) -> dict[str, float]:
    """Read ``PART=WEIGHT,...``, the parts of the loss of distillation. Raises ConfigError."""
    weights = read_pairs(
        "distill",
        text=text,
        names=_PARTS,
        number=float,
        rule="PART=WEIGHT with a weight above 0, each part once; parts",
    )
    if weights.keys() <= {"labels"}:
        raise ConfigError(
            f"distill '{text}' takes nothing from the teacher; add logits=1, features=1 or "
            "targets=1"
        )
    return weights
