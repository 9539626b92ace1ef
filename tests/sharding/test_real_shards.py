"""Real keyframes in shards: what is read back, by any tool, is what the source holds."""

from __future__ import annotations

import json
import subprocess
import tarfile

import numpy as np
import pytest

from fuelrail.pipeline.format import codecs
from fuelrail.pipeline.format.dataset import check_span, open_dataset, read_members
from fuelrail.pipeline.sample.schema import Geometry, decode_arrays, decode_sample
from support.sharding import shard_nuscenes
from support.shared_data import shared_data

pytestmark = pytest.mark.real

VERSION = "v1.0-derived"


@pytest.fixture(scope="module")
def root():
    return shared_data("nuscenes-mini")


@pytest.fixture(scope="module", params=["member", "frame", "none"])
def out(request, root, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param) / "out"
    splits = {"train": ["scene-0103"], "val": ["scene-0061"]}
    shard_nuscenes(root, folder, version=VERSION, splits=splits, layout=request.param, license="CC BY-NC-SA 4.0")
    return folder


@pytest.fixture(scope="module")
def tables(root):
    names = ("sample", "sample_data", "calibrated_sensor", "sensor", "ego_pose")
    read = {name: json.loads((root / VERSION / f"{name}.json").read_text()) for name in names}
    return {name: {row["token"]: row for row in rows} for name, rows in read.items()}


def keyframe_files(tables, sample_token):
    """Channel (lower case) to its row of sample_data."""
    rows = {}
    for data in tables["sample_data"].values():
        if data["sample_token"] == sample_token and data["is_key_frame"]:
            calibrated = tables["calibrated_sensor"][data["calibrated_sensor_token"]]
            rows[tables["sensor"][calibrated["sensor_token"]]["channel"].lower()] = data
    return rows


def test_every_member_is_the_sources(root, out, tables):
    dataset = open_dataset(out)
    assert len(dataset.index) == 3
    num_images = 0
    for position in range(3):
        row = dataset.index.row(position)
        data = dataset.shard_path(row).read_bytes()[row.offset : row.offset + row.length]
        check_span(row, data, "shard")
        sample = decode_sample(row.key, read_members(row, data, dataset.shard_path(row).name))
        files = keyframe_files(tables, sample.meta.sample_token)
        assert set(sample.images) | set(sample.points) == set(files)
        for channel, image in sample.images.items():
            assert bytes(image) == (root / files[channel]["filename"]).read_bytes()
            num_images += 1
        for channel, points in sample.points.items():
            source = np.fromfile(root / files[channel]["filename"], np.float32).reshape(-1, 5)
            np.testing.assert_array_equal(points, source)
        for number, camera in enumerate(dataset.manifest.cameras):
            calibrated = tables["calibrated_sensor"][files[camera.channel]["calibrated_sensor_token"]]
            pose = tables["ego_pose"][files[camera.channel]["ego_pose_token"]]
            np.testing.assert_array_equal(sample.geometry.intrinsics[number], calibrated["camera_intrinsic"])
            np.testing.assert_array_equal(sample.geometry.cam2ego[number, :3, 3], calibrated["translation"])
            np.testing.assert_array_equal(sample.geometry.cam_ego2global[number, :3, 3], pose["translation"])
        assert sample.meta.license == "CC BY-NC-SA 4.0"
        assert sample.meta.dataset == f"nuscenes-{VERSION}"
        assert sample.meta.split == ("val" if sample.meta.clip_name == "scene-0061" else "train")
    assert num_images == 18


@pytest.mark.process
def test_gnu_tar_lists_and_extracts(root, out, tables, tmp_path):
    dataset = open_dataset(out)
    for shard in dataset.shards:
        listed = subprocess.run(["tar", "tf", out / shard.name], check=True, capture_output=True, text=True)
        assert listed.stderr == ""
        plain = out / shard.name
        if plain.suffix == ".zst":  # Python's tarfile learns it in 3.14
            plain = tmp_path / "plain.tar"
            subprocess.run(["zstd", "-dqf", out / shard.name, "-o", plain], check=True)
        with tarfile.open(plain) as tar:
            assert listed.stdout.split() == tar.getnames()
        done = subprocess.run(
            ["tar", "xf", out / shard.name, "-C", tmp_path], check=True, capture_output=True, text=True
        )
        assert done.stderr == ""
    first = dataset.index.row(0)
    meta = json.loads(bytes(_raw(tmp_path, first.key, "meta.json")))
    for channel, data in keyframe_files(tables, meta["sample_token"]).items():
        if channel.startswith("cam"):
            extracted = (tmp_path / f"{first.key}.{channel}.jpg").read_bytes()
            assert extracted == (root / data["filename"]).read_bytes()
    geometry = decode_arrays(_raw(tmp_path, first.key, "geometry.safetensors"), Geometry)
    assert geometry.cam_valid.tolist() == [1] * 6
    assert (tmp_path / f"{first.key}.cam_front.jpg").stat().st_mtime == 0


def _raw(folder, key, field):
    path = next(folder.glob(f"{key}.{field}*"))
    name, codec = codecs.split_name(path.name.removeprefix(f"{key}."))
    assert name == field
    return codecs.decode(codec, path.read_bytes())


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # webdataset leaves its files to the collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_webdataset_library_reads_the_shards(root, out, tables):
    webdataset = pytest.importorskip("webdataset")
    dataset = open_dataset(out)
    seen = []
    for shard in dataset.shards:
        path = out / shard.name
        url = f"pipe:zstd -dcq {path}" if path.suffix == ".zst" else str(path)
        for sample in webdataset.WebDataset(url, shardshuffle=False):
            seen.append(sample["__key__"])
            stored = {name: data for name, data in sample.items() if not name.startswith("__")}
            raw = {}
            for name, data in stored.items():
                field, codec = codecs.split_name(name)
                raw[field] = codecs.decode(codec, data)
            decoded = decode_sample(sample["__key__"], raw)
            files = keyframe_files(tables, decoded.meta.sample_token)
            for channel, image in decoded.images.items():
                assert image == (root / files[channel]["filename"]).read_bytes()
    assert seen == dataset.index.strings("key")
