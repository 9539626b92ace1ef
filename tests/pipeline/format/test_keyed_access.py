"""``fuelrail.open``: samples by key, parts of samples, the table, and what a notebook shows."""

from __future__ import annotations

import base64
import os
import pickle
import re
import threading

import numpy as np
import pyarrow as pa
import pytest
import simplejpeg
from hypothesis import given
from hypothesis import strategies as st

from fuelrail.pipeline.errors import (
    ChecksumError,
    ConfigError,
    IndexFileError,
    StorageError,
)
from fuelrail.pipeline.format import dataset as dataset_module
from fuelrail.pipeline.format import fetch
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.format.index import blocks, keys, samples
from fuelrail.pipeline.storage.retry import RetryPolicy
from support.datasets import CAMERAS, LIDAR
from support.fault_server import FaultServer, Misbehaviour
from support.forked import fork
from support.hostile import small_dataset

ALL = ["meta", "geometry", "boxes", *CAMERAS, LIDAR]


@pytest.fixture(scope="module", params=["member", "frame"])
def built(request, tiny_dataset):
    return tiny_dataset(
        {"train": (4, 3)},
        size=(64, 48),
        layout=request.param,
        missing=frozenset({(2, "cam_back")}),
    )


def test_samples_by_key(built) -> None:
    root, raw = built
    dataset = open_dataset(root)
    for number, key in enumerate(raw):
        assert dataset[key].key == dataset[number].key == key
        assert dataset.position(key) == dataset.position(np.int64(number)) == number
        assert key in dataset
    assert "clip" not in dataset
    assert 0 not in dataset
    for unknown in ("clip-9", "\ud800"):
        with pytest.raises(KeyError, match="has no sample with the key"):
            dataset[unknown]
    with pytest.raises(TypeError, match="one sample's number or key, not slice"):
        dataset[0:2]  # type: ignore[index]


@given(st.data())
def test_any_channels_of_any_sample(built, data) -> None:
    root, raw = built
    dataset = open_dataset(root)
    number = data.draw(st.integers(-7, 6))
    channels = data.draw(st.none() | st.lists(st.sampled_from(ALL), unique=True))
    sample = dataset[number]
    values = dataset.read(number, channels)
    expected = {
        "meta": sample.meta,
        "geometry": sample.geometry,
        "boxes": sample.boxes,
        **sample.images,
        **sample.points,
    }
    assert set(values) == {name for name in expected if channels is None or name in channels}
    assert "cam_back" not in dataset.read(2)
    assert set(dataset.read(number, "meta")) == {"meta"}
    for name, value in values.items():
        if name in CAMERAS:
            assert value == raw[sample.key][f"{name}.jpg"]
        elif name == LIDAR:
            np.testing.assert_array_equal(value, sample.points[LIDAR])
        elif name == "boxes":
            np.testing.assert_array_equal(value.boxes3d, sample.boxes.boxes3d)
        elif name == "geometry":
            np.testing.assert_array_equal(value.cam2ego, sample.geometry.cam2ego)
        else:
            assert value == sample.meta


def test_an_unknown_channel_is_named(built) -> None:
    with pytest.raises(
        ConfigError,
        match="has no channel 'cam_top'; it has: meta, geometry, boxes, cam_front",
    ):
        open_dataset(built[0]).read(0, ["cam_front", "cam_top"])


@pytest.mark.parametrize(
    ("offset", "error", "words"),
    [
        (-512, IndexFileError, r"no member 'clip-0000-000001\.cam_front\.jpg'"),
        (40, ChecksumError, r"member 'cam_front\.jpg': checksum mismatch"),
    ],
)
def test_damage_in_a_part_is_found_by_its_header_or_its_digest(
    tiny_dataset, tmp_path, offset, error, words
) -> None:
    dataset = open_dataset(
        tiny_dataset({"train": (2,)}, size=(64, 48), copy_to=tmp_path / "d").root
    )
    row = dataset.index.row(1)
    front = next(entry for entry in row.members if entry.name == "cam_front.jpg")
    path = dataset.shard_path(row)
    data = bytearray(path.read_bytes())
    data[row.offset + front.offset + offset] ^= 1
    path.write_bytes(data)
    with pytest.raises(error, match=words):
        dataset.read(1, ["cam_front"])
    with pytest.raises(ChecksumError):
        dataset.read(1)
    assert set(dataset.read(1, ["boxes", "meta", "cam_back"])) == {
        "boxes",
        "meta",
        "cam_back",
    }


def test_a_damaged_key_in_the_index_is_not_a_missing_key(tiny_dataset, tmp_path) -> None:
    root = tiny_dataset({"train": (3,)}, size=(64, 48), copy_to=tmp_path / "d").root
    path = root / "index.arrow"
    data = bytearray(path.read_bytes())
    data[data.index(b"clip-0000-000001")] ^= 1
    path.write_bytes(data)
    dataset = open_dataset(root)
    for look in (
        dataset.find,
        dataset.position,
        dataset.__getitem__,
        dataset.__contains__,
    ):
        with pytest.raises(
            IndexFileError,
            match=r"its row 1 has the key 'blip-0000-000001', keys\.arrow",
        ):
            look("clip-0000-000001")
    assert (dataset.find("clip-0000-000002"), "clip-9" in dataset) == (2, False)


@pytest.mark.network
def test_one_range_request_for_one_camera(tiny_dataset, tmp_path) -> None:
    root = tiny_dataset({"train": (4,)}, size=(640, 480)).root
    local = open_dataset(root)
    with FaultServer(root) as server:
        dataset = open_dataset(server.url, cache_dir=tmp_path / "cache")
        before = len(server.requests)
        values = dataset.read(3, channels=["cam_front"])
        (request,) = server.requests[before:]
        assert values == local.read(3, ["cam_front"])
        entry = next(entry for entry in local.index.row(3).members if entry.name == "cam_front.jpg")
        assert (request.name, request.end - request.start) == (
            "train-000000.tar",
            entry.stored_bytes + 512,
        )
        dataset = open_dataset(server.url, cache_dir=tmp_path / "cache")
        before = len(server.requests)
        assert dataset["clip-0000-000002"].key == "clip-0000-000002"
        assert [request.name for request in server.requests[before:]] == ["train-000000.tar"]
        copy = pickle.loads(pickle.dumps(dataset))
        assert (copy.url, copy.root, copy[1].key) == (
            dataset.url,
            dataset.root,
            local[1].key,
        )


@pytest.mark.network
def test_one_request_for_a_sample_whose_tables_are_here(
    tiny_dataset, tmp_path, monkeypatch
) -> None:
    root = tiny_dataset({"train": (4,)}, size=(64, 48)).root
    monkeypatch.setattr(fetch, "WHOLE_BYTES", 0)  # as of a large dataset: tables come by blocks
    with FaultServer(root) as server:

        def requested(key, **options) -> list[str]:
            before = len(server.requests)
            dataset.read(key, **options)
            return [request.name for request in server.requests[before:]]

        dataset = open_dataset(server.url, cache_dir=tmp_path / "cache")
        # The index's only block came when the dataset was opened.
        assert requested("clip-0000-000002") == [
            "keys.arrow",
            "train-000000.tar",
        ]
        assert (
            requested("clip-0000-000001")
            == requested(3, channels=["cam_back", "boxes"])
            == ["train-000000.tar"]
        )
        dataset = open_dataset(server.url, cache_dir=tmp_path / "cache")
        assert requested("clip-0000-000000") == ["train-000000.tar"]


@pytest.mark.network
def test_two_round_trips_for_a_key_of_which_nothing_is_here(
    tiny_dataset, tmp_path, monkeypatch
) -> None:
    """The table of keys says where the sample is: its row and its bytes are asked for at the same time."""
    monkeypatch.setattr(fetch, "WHOLE_BYTES", 0)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 512)
    monkeypatch.setattr(samples, "ROWS_PER_BATCH", 4)
    root = tiny_dataset({"train": (8, 8)}, size=(64, 48)).root
    front = open_dataset(root).read(5, ["cam_front"])
    with FaultServer(root) as server:
        together = threading.Barrier(2, timeout=60)
        waits = list[str]()
        fetched = fetch.RemoteFolder.read
        read = dataset_module._read

        def fetch_with_the_other(self, name, first, end):
            if name == "index.arrow" and waits:
                waits.pop()
                together.wait()
            return fetched(self, name, first, end)

        def read_with_the_other(self, path, row):
            together.wait()
            return read(self, path, row)

        monkeypatch.setattr(fetch.RemoteFolder, "read", fetch_with_the_other)
        dataset = open_dataset(server.url, cache_dir=tmp_path / "cache")
        monkeypatch.setattr(dataset_module, "_read", read_with_the_other)
        waits.append("the first part of the row")
        assert dataset["clip-0000-000002"].key == "clip-0000-000002"
        waits.append("the first part of the row")
        assert dataset.read("clip-0001-000001", ["cam_front"]) == front
        monkeypatch.setattr(dataset_module, "_read", read)
        for thread in dataset.keys._file._in_background:
            thread.join(60)
        before = len(server.requests)
        assert (
            dataset["clip-0001-000003"].key == "clip-0001-000003"
        )  # its part of the index is here now
        assert [request.name for request in server.requests[before:]] == ["train-000000.tar"]


@pytest.mark.network
@pytest.mark.process
def test_a_fork_fetches_what_is_not_here(tiny_dataset, tmp_path, monkeypatch) -> None:
    """As the workers of torch's DataLoader do: file systems of fsspec work in the process alone that made them."""
    monkeypatch.setattr(fetch, "WHOLE_BYTES", 0)
    root = tiny_dataset({"train": (4,)}, size=(64, 48)).root
    with FaultServer(root) as server:
        dataset = open_dataset(server.url, cache_dir=tmp_path / "cache")

        def work() -> None:
            assert dataset["clip-0000-000003"].key == "clip-0000-000003"

        _, status = os.waitpid(fork(work), 0)
        assert status == 0
        before = len(server.requests)
        work()
        assert [request.name for request in server.requests[before:]] == ["train-000000.tar"]


@pytest.mark.network
def test_a_sample_is_asked_for_again_as_the_tables_are(tiny_dataset, tmp_path) -> None:
    root = tiny_dataset({"train": (4,)}, size=(64, 48)).root
    retry = RetryPolicy(deadline_s=0.5, first_delay_s=0.01)
    with FaultServer(root) as server:
        dataset = open_dataset(server.url, cache_dir=tmp_path / "cache", retry=retry)
        opened = len(server.requests)
        server.misbehave = lambda request: Misbehaviour(
            status=503 if request.number < opened + 2 else None
        )
        assert dataset[1].key == open_dataset(root)[1].key
        assert len(server.requests) == opened + 3
        copy = pickle.loads(pickle.dumps(dataset))
        server.misbehave = lambda _: Misbehaviour(ignore_range=True)
        with pytest.raises(
            StorageError,
            match="does not serve byte ranges, which datasets need",
        ):
            copy[1]
        server.misbehave = lambda _: Misbehaviour(status=503)
        with pytest.raises(
            StorageError,
            match=r"train-000000\.tar.*could not be read for 0\.5 s .*clip-0000-000001",
        ):
            copy[1]


@pytest.mark.network
def test_a_wrong_place_in_the_table_of_keys_is_not_taken(
    tiny_dataset, tmp_path, monkeypatch
) -> None:
    root = tiny_dataset({"train": (4,)}, size=(64, 48)).root
    monkeypatch.setattr(samples.SampleIndex, "has_row", lambda *_, **__: False)
    find_rows = keys.KeyTable.find
    monkeypatch.setattr(
        keys.KeyTable,
        "find",
        lambda *arguments: [entry._replace(offset=0) for entry in find_rows(*arguments)],
    )
    with FaultServer(root) as server:
        dataset = open_dataset(server.url, cache_dir=tmp_path / "cache")
        assert dataset["clip-0000-000003"].key == "clip-0000-000003"


def test_the_table(tiny_dataset, tmp_path) -> None:
    dataset = open_dataset(small_dataset(tmp_path / "d"))
    table = dataset.table
    assert table.column_names == [
        "key",
        "clip_id",
        "split",
        "frame",
        "timestamp_ns",
        "night",
    ]
    assert table["key"].to_pylist() == dataset.index.strings("key")
    assert table["split"].to_pylist() == ["train"] * 8
    assert table["night"].to_pylist() == [True, False] * 4
    assert table.schema.field("split").type == pa.string()
    plain = tiny_dataset({"train": (2,), "val": (1,)}, size=(32, 24)).root
    assert open_dataset(plain).table["split"].to_pylist() == [
        "train",
        "train",
        "val",
    ]


def test_a_dataset_can_be_pickled(built, tmp_path, monkeypatch) -> None:
    dataset = open_dataset(built[0])
    monkeypatch.chdir(built[0].parent)
    pickled = pickle.dumps(open_dataset(built[0].name))
    monkeypatch.chdir(tmp_path)
    copy = pickle.loads(pickled)
    assert (copy.root, copy.manifest, copy[3].key) == (
        dataset.root,
        dataset.manifest,
        dataset[3].key,
    )


def test_a_relative_path_holds_when_the_process_changes_its_folder(
    built, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(built[0].parent)
    dataset = open_dataset(built[0].name)
    monkeypatch.chdir(tmp_path)
    assert dataset.root == built[0]
    assert dataset[3].key == open_dataset(built[0])[3].key


def test_what_a_notebook_shows(built) -> None:
    page = open_dataset(built[0])._repr_html_()
    assert "<td>train</td><td>7</td><td>2</td><td>2</td>" in page
    figures = re.findall(r"data:image/jpeg;base64,([^\"]+)\"><figcaption>(\w+)<", page)
    assert [channel for _, channel in figures] == list(CAMERAS)
    for data, _ in figures:
        assert simplejpeg.decode_jpeg_header(base64.b64decode(data))[:2] == (
            150,
            200,
        )


def test_a_notebook_shows_the_rest_of_a_dataset_whose_first_sample_is_damaged(
    tiny_dataset, tmp_path
) -> None:
    root = tiny_dataset({"train": (4, 3)}, size=(64, 48), copy_to=tmp_path / "d").root
    dataset = open_dataset(root)
    row = dataset.index.row(0)
    with dataset.shard_path(row).open("r+b") as file:
        file.seek(row.offset)
        file.write(bytes(row.length))
    page = dataset._repr_html_()
    assert "<td>train</td><td>7</td><td>2</td><td>2</td>" in page
    assert "<p>sample 0 cannot be shown: " in page
    assert "checksum mismatch" in page
