"""Engines by name: the same bytes from each, and what is said where one is not available."""

from __future__ import annotations

import sys

import pytest

from fuelrail.__main__ import main
from fuelrail.pipeline.errors import ConfigError
from fuelrail.sharding.engines import LOCAL_ENGINES, EngineOptions, make_engine
from support.nuscenes_tables import build_nuscenes
from support.sharding import digests, shard_nuscenes

pytestmark = pytest.mark.process


def test_each_local_engine_gives_the_same_bytes(tmp_path):
    source = build_nuscenes(tmp_path / "source", {"a": 4, "b": 4}, cameras=("CAM_FRONT", "CAM_BACK"))
    made = []
    for name in LOCAL_ENGINES:
        for num_workers in (1, 2):
            out = tmp_path / f"{name}-{num_workers}"
            engine = make_engine(EngineOptions(engine=name, workers=num_workers))
            shard_nuscenes(source.root, out, engine=engine, shard_size_bytes=10_000)
            made.append(digests(out))
    assert len(made) == 4
    assert all(one == made[0] for one in made)


def test_without_ray_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"--engine ray needs Ray: pip install 'fuelrail\[ray\]'"):
        make_engine(EngineOptions(engine="ray"))


def test_an_address_without_ray_is_a_mistake(tmp_path, capsys):
    assert main(["shard", "nuscenes:x", str(tmp_path / "out"), "--ray-address", "auto"]) == 2
    assert "a Ray address needs the engine ray, got address 'auto' without it" in capsys.readouterr().err
