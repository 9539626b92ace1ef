from __future__ import annotations

import pytest
import torch

from fuelrail.bench.measure.cuda import count_training_flop
from fuelrail.bench.trainer.models.resnet import ResNet
from fuelrail.bench.trainer.models.settings import MODELS

pytestmark = pytest.mark.slow


def inputs(batch, cameras, size, label):
    return (
        torch.randint(0, 256, (batch, cameras, 3, size, size), dtype=torch.uint8),
        torch.ones(batch, cameras, dtype=torch.uint8),
        torch.eye(3).expand(batch, cameras, 3, 3),
        torch.eye(4).expand(batch, cameras, 4, 4),
        torch.full((batch, 256), float(label)),
        torch.ones(batch),
    )


def test_it_is_resnet_50():
    model = ResNet(MODELS["resnet50"])
    # torchvision's has 25,557,032 parameters with a head of 1000 classes.
    assert sum(p.numel() for p in model.parameters()) == 25_557_032 - 2049 * 1000 + 2049 * 10
    # 4.09 G multiply-adds an image at 224, thrice that in training but for the first layer's input: per 64x64 image.
    flop = count_training_flop(model, inputs(2, 1, 64, 1)) / 2
    assert 0.95 < flop / (3 * 2 * 4.09e9 * (64 / 224) ** 2) < 1.02


def test_absent_cameras_and_padding_do_not_count():
    model = ResNet(MODELS["resnet50"]).eval()
    images = list(inputs(2, 2, 32, 1))
    images[1] = torch.tensor([[1, 0], [1, 1]], dtype=torch.uint8)
    images[5] = torch.tensor([1.0, 0.0])
    padded_loss = model(*images)
    real_loss = model(
        *[value[:1, :1] if value.ndim > 2 else value[:1] for value in images[:1]],
        torch.ones(1, 1),
        *images[2:4],
        images[4][:1],
        torch.ones(1),
    )
    assert torch.allclose(padded_loss, real_loss, rtol=1e-4)
