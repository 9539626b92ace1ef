"""Every file under configs/ loads as what its folder says, so that none can rot."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuelrail.bench.measure.accelerator import load_profile
from fuelrail.bench.planner.hardware import load_cluster
from fuelrail.bench.planner.scenario import Scenario
from fuelrail.pipeline.order.spec import OrderSpec
from fuelrail.pipeline.settings import load_yaml
from fuelrail.pipeline.transforms.ego import BevAugment
from fuelrail.pipeline.transforms.image import ImageAugment
from fuelrail.pipeline.transforms.pixels import PixelAugment

CONFIGS = Path(__file__).parent.parent / "configs"
LOADERS = {
    "images": lambda path: load_yaml(path, ImageAugment),
    "pixels": lambda path: load_yaml(path, PixelAugment),
    "bev": lambda path: load_yaml(path, BevAugment),
    "orders": lambda path: load_yaml(path, OrderSpec),
    "scenarios": lambda path: load_yaml(path, Scenario),
    "clusters": lambda path: load_cluster(str(path)),
    "accelerators": lambda path: load_profile(str(path)),
}
# configs/trainers, configs/recipes and configs/monitoring have tests of their own.
FILES = sorted(
    path for path in CONFIGS.rglob("*.yaml") if path.parent.name not in {"monitoring", "recipes"}
)


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(CONFIGS)) for path in FILES])
def test_it_loads(path):
    assert LOADERS[path.parent.name](path) is not None


@pytest.mark.parametrize(
    "path",
    sorted((CONFIGS / "images").glob("*.yaml")),
    ids=lambda path: path.stem,
)
def test_image_presets_draw_maps_of_their_size(path):
    preset = load_yaml(path, ImageAugment)
    maps = preset.draw([(1600, 900)] * 6, seed=1, epoch=0, sample=3)
    assert {image_map.out_wh for image_map in maps} == {(preset.width, preset.height)}
    same = all(image_map == maps[0] for image_map in maps)
    assert same == (preset.scope == "sample" or not preset.train)
