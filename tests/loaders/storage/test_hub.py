"""Datasets on the Hugging Face hub: opened and loaded by fsspec's own client, from a server on the loopback."""

from __future__ import annotations

import pytest
import torch

from fuelrail.loaders import DataLoader, StorageOptions
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.storage import filesystem
from support.datasets import build_dataset
from support.hub_server import REPOSITORY, HubServer
from support.pages import EXTRAS

pytestmark = pytest.mark.network
IMAGE = {"image": {"height": 32, "width": 64}}


def test_a_dataset_on_the_hub_gives_the_same_batches(tmp_path, monkeypatch) -> None:
    pytest.importorskip("huggingface_hub", reason="the extra hf is not installed here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "repo").mkdir()
    build_dataset(tmp_path / "repo" / "v1", {"train": (4, 3)}, size=(64, 48))
    with DataLoader(tmp_path / "repo" / "v1", 2, seed=3, transforms=IMAGE) as local:
        wanted = list(local)
    with HubServer(tmp_path / "repo") as server:
        options = {"endpoint": server.endpoint, "token": False}
        url = f"hf://datasets/{REPOSITORY}/v1"
        assert len(open_dataset(url, storage_options=options)) == 7
        with DataLoader(url, 2, seed=3, transforms=IMAGE, storage=StorageOptions(options=options)) as loader:
            found = list(loader)
        assert any(line.startswith("GET /datasets/") and ".tar" in line for line in server.requests)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours["sample_key"] == theirs["sample_key"]
        assert torch.equal(ours["img"], theirs["img"])


def test_what_to_install_is_an_extra_that_exists(monkeypatch) -> None:
    assert set(filesystem._EXTRAS.values()) <= EXTRAS.keys()

    def missing(*_: object, **__: object) -> None:
        raise ImportError("Install huggingface_hub to access HfFileSystem")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    with pytest.raises(ConfigError, match=r"pip install 'fuelrail\[hf\]'"):
        filesystem.filesystem("hf://datasets/someone/drives")
