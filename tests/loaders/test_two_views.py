"""Transforms.two_views: each sample twice, under two draws; the first is that of a loader without it."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from fuelrail import BevAugment, ImageAugment, PixelAugment
from fuelrail.loaders.schedule.layers import view_settings
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.format.layers import LayerView
from fuelrail.pipeline.transforms.image_map import ida_mats
from fuelrail.sharding.write.layers.writer import LayerWriter
from support.backends import needs_dali
from support.batches import batches, load, unlike
from support.channels import points
from support.datasets import build_dataset
from support.pictures import encode, natural

IMAGE = ImageAugment(
    height=32,
    width=48,
    train=True,
    resize_range=(0.6, 0.9),
    flip_prob=0.5,
    rotate_deg=(-5, 5),
)
EGO = BevAugment(train=True, rotate_deg=(-22.5, 22.5), scale=(0.9, 1.1))
PIXELS = PixelAugment(train=True, brightness=32)
RADAR = (
    points("radar", units=("m", "m", "m")),
    lambda row: np.arange(3 * row + 3, dtype=np.float32).reshape(-1, 3),
)
OPTIONS = {
    "image": IMAGE,
    "ego": EGO,
    "pixels": PIXELS,
    "seed": 3,
    "points": True,
    "select": ["radar"],
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    root = tmp_path_factory.mktemp("views") / "dataset"

    def smooth(row: int, channel: str, data: bytes) -> bytes:
        return encode(np.roll(natural(96, 64), 7 * row, axis=1), quality=90, subsampling=2)

    build_dataset(root, {"train": (8, 4)}, extra=[RADAR], rewrite=smooth)
    return root


def views(dataset, **options) -> list[dict]:
    return batches(dataset, 4, **{**OPTIONS, "two_views": True, **options})


def half(value, number: int):
    """Return one view's part of an entry."""
    if isinstance(value, torch.Tensor):
        return value.chunk(2)[number]
    return (
        value[len(value) // 2 * number :][: len(value) // 2] if isinstance(value, list) else value
    )


@pytest.mark.parametrize("window", [None, {"frames": [-1, 0]}])
@pytest.mark.parametrize(
    "decoder",
    [
        "turbo",
        "pillow",
        pytest.param("dali", marks=[needs_dali, pytest.mark.slow]),
    ],
)
def test_the_first_view_is_that_of_a_loader_without_it(dataset, decoder, window) -> None:
    options = {
        "decoder": decoder,
        "window": window,
        **({"pixels": PixelAugment()} if decoder == "dali" else {}),
    }
    for plain, batch in zip(
        views(dataset, two_views=False, **options),
        views(dataset, **options),
        strict=True,
    ):
        assert batch["view"].tolist() == [0] * 4 + [1] * 4
        assert batch.keys() == plain.keys() | {"view"}
        for name, value in plain.items():
            first = half(batch[name], 0)
            if name == "img":
                assert (first.float() - value.float()).abs().mean() < 1.0
            else:
                assert unlike(first, value) == [], name


def test_the_second_view_is_a_draw_of_its_own_of_the_same_samples(
    dataset,
) -> None:
    for batch in views(dataset, pixels=PixelAugment()):
        for name in (
            "sample_key",
            "global_index",
            "frame",
            "timestamp_ns",
            "cam2ego",
            "gt_labels_3d",
            "valid",
        ):
            assert unlike(half(batch[name], 0), half(batch[name], 1)) == [], name
        for name in ("ida_mat", "bda_mat", "ego2img", "img"):
            assert not torch.equal(*batch[name].chunk(2)), name
        for row, number in enumerate(batch["global_index"].tolist()):
            address = number if row < 4 else -1 - number
            maps = IMAGE.draw([[96, 64]] * 2, seed=3, epoch=0, sample=address)
            assert np.allclose(batch["ida_mat"][row], ida_mats(maps), atol=1e-6)
            bev = EGO.draw(seed=3, epoch=0, sample=address)
            assert np.allclose(batch["bda_mat"][row], bev.matrix, atol=1e-6)
            radar = np.arange(3 * number + 3, dtype=np.float32).reshape(-1, 3)
            moved = np.c_[radar, np.ones(len(radar))] @ bev.matrix.T
            assert np.allclose(batch["radar"][row], moved[:, :3], atol=1e-4)


def test_layers_of_one_view_are_refused(dataset, tmp_path) -> None:
    with load(dataset, 4, **OPTIONS) as loader:
        settings = view_settings(3, loader.transforms.content())
    score = {
        "name": "score",
        "kind": "array",
        "field": "score.npy",
        "dtype": "float32",
        "law": {"name": "fixed"},
    }
    view = LayerView(kind="per_view", epoch=0, settings=settings)
    with LayerWriter(dataset, tmp_path / "seen", channels=[score], view=view) as writer:
        for row in range(12):
            writer.write(row, {"score": np.float32(row)})
    writer.finish()
    options = {
        **OPTIONS,
        "layers": {"seen": tmp_path / "seen"},
        "select": ["seen.score"],
    }
    with load(dataset, 4, **options) as loader:
        assert len(list(loader)) == 3
    with pytest.raises(ConfigError, match=re.escape("two_views")):
        load(dataset, 4, **options, two_views=True)
