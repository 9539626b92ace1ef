"""Batches of images for DALI's decoder, and stand-ins for its runs and its device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from fuelrail.loaders.decode import dali
from fuelrail.loaders.decode.protocol import DaliOptions
from fuelrail.pipeline.transforms.image import ImageAugment
from support.pictures import encode, natural

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from fuelrail.pipeline.transforms.image_map import ImageMap

SIZES = [(320, 180), (64, 64), (250, 333), (401, 97)]
AUGMENT = ImageAugment(
    height=48,
    width=64,
    train=True,
    resize_range=(0.6, 0.9),
    rotate_deg=(-5.4, 5.4),
    flip_prob=0.5,
    crop_y="top",
)
EVALUATION = AUGMENT.evaluation()


@pytest.fixture
def as_on_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., dali.DaliDecoder]:
    """Make decoders that run the GPU's graph and everything around it in host memory."""
    monkeypatch.setattr(dali, "_MIXED", "cpu")

    def make(**options: Any) -> dali.DaliDecoder:
        decoder = dali.DaliDecoder(options=DaliOptions(**options))
        decoder._on_gpu = True
        decoder._check_every = decoder._options.check_every
        return decoder

    return make


def batch(count: int, augment: ImageAugment = AUGMENT) -> tuple[list[bytes], list[ImageMap]]:
    encoded = []
    maps = []
    for number in range(count):
        wh = SIZES[number % len(SIZES)]
        encoded.append(
            encode(
                natural(*wh, seed=number % 5),
                "png" if number % 7 == 3 else "jpeg",
            )
        )
        maps += augment.draw([wh], seed=0, epoch=0, sample=number)
    return encoded, maps


def empty(count: int, fill: int = 7) -> torch.Tensor:
    return torch.full((count, 3, 48, 64), fill, dtype=torch.uint8)


class Runs:
    """Stand in for a pipeline's runs: ``answer`` gets the encoded images that were fed, and may raise."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        answer: Callable[[list[np.ndarray]], None],
    ) -> None:
        self.sizes: list[int] = []
        fed: list[np.ndarray] = []
        feed_input = dali.Pipeline.feed_input
        run = dali.Pipeline.run

        def feed(pipeline: dali.Pipeline, name: str, data: list[np.ndarray]) -> None:
            if name == "encoded":
                fed[:] = data
            feed_input(pipeline, name, data)

        def run_or_raise(pipeline: dali.Pipeline) -> Any:
            self.sizes.append(len(fed))
            outputs = run(pipeline)  # a run that fails has taken its inputs too
            answer(fed)
            return outputs

        monkeypatch.setattr(dali.Pipeline, "feed_input", feed)
        monkeypatch.setattr(dali.Pipeline, "run", run_or_raise)
