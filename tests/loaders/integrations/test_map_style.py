"""A dataset by number in torch's own DataLoader and in Grain."""

from __future__ import annotations

import numpy as np
import pytest
import simplejpeg
import torch

from fuelrail.loaders.integrations.map_style import MapView
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.format.dataset import open_dataset


@pytest.fixture(scope="module")
def built(build_once):
    return build_once({"train": (4, 3)}, size=(64, 48))


def front(item):
    return item["cam_front"].mean(), item["key"]


def test_items_are_decoded(built) -> None:
    root, raw = built
    view = MapView(open_dataset(root), ["cam_front", "lidar_top"])
    assert len(view) == 7
    for number, key in enumerate(raw):
        item = view[number]
        assert (set(item), item["key"]) == (
            {"key", "cam_front", "lidar_top"},
            key,
        )
        pixels = simplejpeg.decode_jpeg(raw[key]["cam_front.jpg"], "RGB").transpose(2, 0, 1)
        assert np.abs(item["cam_front"].astype(int) - pixels).max() <= 1
        np.testing.assert_array_equal(view[key]["cam_front"], item["cam_front"])
    with pytest.raises(IndexError):
        view[7]
    by_generator = MapView(open_dataset(root), (name for name in ["cam_front"]))  # type: ignore[arg-type]
    assert set(by_generator[0]) == set(by_generator[1]) == {"key", "cam_front"}


def test_attributes_and_subsets(built) -> None:
    dataset = open_dataset(built[0])
    view = MapView(dataset, ["cam_front", "frame", "split"])
    (batch,) = torch.utils.data.DataLoader(torch.utils.data.Subset(view, [5, 2]), batch_size=2)
    rows = dataset.table.to_pylist()
    assert batch["frame"].tolist() == [rows[5]["frame"], rows[2]["frame"]]
    assert (batch["key"], batch["split"]) == (
        [rows[5]["key"], rows[2]["key"]],
        ["train", "train"],
    )
    with pytest.raises(
        ConfigError,
        match=r"has no channel or attribute 'nosuch'; channels: .*attributes: ",
    ):
        MapView(dataset, ["nosuch"])


def test_arrays_can_be_written_to(built) -> None:
    root, _ = built
    item = MapView(open_dataset(root), ["cam_front", "lidar_top"])[0]
    for channel in ("cam_front", "lidar_top"):
        torch.from_numpy(
            item[channel]
        ).zero_()  # torch warns where the array is read-only, and warnings are errors


@pytest.mark.process
def test_in_torchs_data_loader_with_workers(built) -> None:
    root, raw = built
    view = MapView(open_dataset(root), ["cam_front"])
    loader = torch.utils.data.DataLoader(
        view, batch_size=2, num_workers=1, multiprocessing_context="spawn"
    )
    batches = list(loader)
    assert [key for batch in batches for key in batch["key"]] == list(raw)
    assert batches[0]["cam_front"].shape == (2, 3, 48, 64)
    np.testing.assert_array_equal(batches[3]["cam_front"][0], view[6]["cam_front"])


def test_in_grain(built) -> None:
    grain = pytest.importorskip("grain", reason="Grain is not installed: pip install grain")
    root, raw = built
    view = MapView(open_dataset(root), ["cam_front"], transform=front)
    items = list(grain.MapDataset.source(view).shuffle(seed=3))
    assert sorted(key for _, key in items) == sorted(raw)
    assert {key: mean for mean, key in items} == {key: view[key][0] for key in raw}
    assert isinstance(view, grain.sources.RandomAccessDataSource)
    loader = grain.DataLoader(
        data_source=view,
        sampler=grain.samplers.IndexSampler(7, shuffle=False, num_epochs=1),
        worker_count=0,
    )
    assert [key for _, key in loader] == list(raw)
