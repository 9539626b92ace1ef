"""A few kills: the harness of the benchmark, on a tiny dataset."""

from __future__ import annotations

import json

import pytest

from fuelrail.bench.micro import checkpoint_kills
from fuelrail.bench.micro.checkpoint_ranks import MESHES
from support.datasets import build_dataset


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "tiny"
    build_dataset(folder, {"train": (16, 16, 16)})
    return folder


def kill(dataset, tmp_path, monkeypatch, capsys, meshes, num_kills):
    monkeypatch.setattr(checkpoint_kills, "MESHES", {name: MESHES[name] for name in meshes})
    assert checkpoint_kills.main([str(tmp_path / "work"), str(dataset), "--kills", str(num_kills)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kills"] == num_kills
    assert report["resumed_on_another_mesh"] > 0
    assert report["checkpoints_checked"] > 0
    assert report["wrong_samples"] == report["damaged_checkpoints"] == report["older_than_newest"] == 0
    assert report["largest_loss_difference"] <= 2e-6


@pytest.mark.process
def test_runs_on_two_ranks_survive_a_few_kills(dataset, tmp_path, monkeypatch, capsys):
    kill(dataset, tmp_path, monkeypatch, capsys, ["one", "fsdp2", "pipeline2"], 3)


@pytest.mark.slow
def test_runs_on_every_mesh_survive_kills(dataset, tmp_path, monkeypatch, capsys):
    kill(dataset, tmp_path, monkeypatch, capsys, list(MESHES), 15)
