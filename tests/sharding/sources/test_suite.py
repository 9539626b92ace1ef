"""Fuelrail datasets and nuScenes tables as sources do what every source must do."""

from __future__ import annotations

import json
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
from support.source_suite import ANSWERS, FAULTS, SourceSuite


class TestFuelrail(SourceSuite):
    kind = "fuelrail"
    refused: ClassVar = dict.fromkeys(FAULTS, ANSWERS)

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
            "cameras",
            {"cam_front": (64, 48), "cam_back": (48, 64), "cam_left": (64, 48)},
        )
        return super().world(**{"cameras": sizes, **changes})

    def write(self, world, root):
        write_nuscenes(world, root, "v1.0-mini")
        return str(root)

    def faulty(self, option, tmp_path):
        if option != "dangling_links":
            return None
        spec = self.spec(tmp_path)
        table = tmp_path / "source" / "v1.0-mini" / "instance.json"
        table.write_text(json.dumps(json.loads(table.read_text())[1:]))
        return spec
