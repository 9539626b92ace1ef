"""Fuelrail datasets and nuScenes tables as sources do what every source must do."""

from __future__ import annotations

import shutil
from typing import ClassVar

import pytest

from fuelrail.sharding.engines.local import LocalEngine
from fuelrail.sharding.planning.recipe import make_recipe
from fuelrail.sharding.progress import Quiet
from fuelrail.sharding.run import shard
from fuelrail.sharding.sources.registry import SourceSpec
from support.neutral_source import install_plugin, write_neutral
from support.nuscenes_world import write_nuscenes
from support.source_suite import SourceSuite


class TestFuelrail(SourceSuite):
    kind = "fuelrail"
    damaged = "no option"

    @pytest.fixture(autouse=True)
    def plugin(self, tmp_path_factory, monkeypatch):
        folder = tmp_path_factory.mktemp("site")
        install_plugin(folder, "neutral", "support.neutral_source:Neutral")
        monkeypatch.syspath_prepend(folder)

    def write(self, world, root):
        (root / "neutral").mkdir()
        spec = SourceSpec("neutral", write_neutral(world, root / "neutral"), {})
        recipe = make_recipe(splits={"train": 1.0}, shard_size_bytes=1 << 16)
        shard(
            spec,
            out=root / "dataset",
            recipe=recipe,
            num_workers=1,
            progress=Quiet(),
            engine=LocalEngine(1),
        )
        shutil.rmtree(root / "neutral")
        return str(root / "dataset")


class TestNuScenes(SourceSuite):
    kind = "nuscenes"
    options: ClassVar = {"version": "v1.0-mini", "classes": "source"}

    def world(self, **changes):
        sizes = changes.pop(
            "cameras", {"cam_front": (64, 48), "cam_back": (48, 64), "cam_left": (64, 48)}
        )
        return super().world(**{"cameras": sizes, **changes})

    def write(self, world, root):
        write_nuscenes(world, root, "v1.0-mini")
        return str(root)
