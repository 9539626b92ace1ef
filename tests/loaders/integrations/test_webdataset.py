"""The webdataset library reads the shards, with the decoder hook, to the same values."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
from functools import partial

import cv2
import numpy as np
import pytest
import webdataset
import zstandard
from webdataset.autodecode import DecodingError, decoders

from fuelrail.loaders.integrations.webdataset import decode_member
from fuelrail.pipeline.errors import CodecError, ImageError
from fuelrail.pipeline.format.codecs import train_dictionary
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.sample.schema import decode_sample
from support.datasets import build_dataset

# webdataset leaves the shards it reads to the garbage collector to close.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def tiny(build_once):
    return build_once({"train": (3, 2)})


def open_shards(root):
    urls = sorted(str(path) for path in root.glob("*.tar"))
    return webdataset.WebDataset(urls, shardshuffle=False, nodesplitter=None, empty_check=False)


def test_every_member_of_every_sample_decodes_to_the_source_values(tiny):
    root, raw = tiny
    samples = list(open_shards(root).decode(decode_member))
    assert [sample["__key__"] for sample in samples] == list(raw)
    for sample in samples:
        members = raw[sample["__key__"]]
        expected = decode_sample(sample["__key__"], members)
        assert sample["meta.json.zst"]["timestamp_ns"] == expected.meta.timestamp_ns
        for array, stored in (
            (
                sample["geometry.safetensors.zst"]["intrinsics"],
                expected.geometry.intrinsics,
            ),
            (
                sample["boxes.safetensors.zst"]["boxes3d"],
                expected.boxes.boxes3d,
            ),
            (
                sample["lidar_top.npy.p20.zst"],
                np.load(io.BytesIO(members["lidar_top.npy"])),
            ),
        ):
            np.testing.assert_array_equal(array, stored, strict=True)
        assert sample["cam_front.jpg"] == members["cam_front.jpg"]


def test_frame_shards_come_through_a_pipe(build_once):
    root, raw = build_once({"train": (3, 2)}, layout="frame")
    urls = [f"pipe:zstd -dcq {path}" for path in sorted(root.glob("*.tar.zst"))]
    dataset = webdataset.WebDataset(urls, shardshuffle=False, nodesplitter=None, empty_check=False)
    samples = list(dataset.decode(decode_member))
    assert [sample["__key__"] for sample in samples] == list(raw)
    for sample in samples:
        members = raw[sample["__key__"]]
        assert sample["cam_front.jpg"] == members["cam_front.jpg"]
        assert sample["meta.json"]["key"] == sample["__key__"]
        points = np.load(io.BytesIO(members["lidar_top.npy"]))
        np.testing.assert_array_equal(sample["lidar_top.npy"], points, strict=True)


def test_members_stored_with_a_dictionary(tmp_path):
    small = [b'{"key": "%06d", "schema": "fuelrail/1"}' % number for number in range(500)]
    raw = build_dataset(
        tmp_path / "tiny",
        {"train": (3,)},
        dictionary=train_dictionary(small, 1024, 3),
    )
    dictionary = open_dataset(tmp_path / "tiny").dictionary
    samples = list(
        open_shards(tmp_path / "tiny").decode(partial(decode_member, dictionary=dictionary))
    )
    assert [sample["meta.json.dict.zst"]["key"] for sample in samples] == list(raw)


@pytest.mark.parametrize("shape", [(5, 4), (5, 4, 3)])
def test_pngs_of_16_bits_keep_their_values(shape):
    values = (np.arange(np.prod(shape)).reshape(shape) * 1000).astype(np.uint16)
    encoded = cv2.imencode(".png", values if values.ndim == 2 else values[..., ::-1])[1].tobytes()
    decoder = webdataset.autodecode.Decoder([decode_member, webdataset.imagehandler("rgb")], pre=[])
    sample = decoder({"__key__": "a", "instances.png": encoded})
    np.testing.assert_array_equal(sample["instances.png"], values, strict=True)


def test_images_are_left_to_webdatasets_own_handlers(tiny):
    root, _ = tiny
    sample = next(iter(open_shards(root).decode(decode_member, "rgb8")))
    assert sample["cam_front.jpg"].shape == (64, 96, 3)


def test_a_damaged_member_is_an_error_that_names_the_sample(tiny):
    root, raw = tiny
    sample = next(iter(open_shards(root)))
    sample["meta.json.zst"] = sample["meta.json.zst"][:-3]
    with pytest.raises(DecodingError) as caught:
        webdataset.autodecode.Decoder([decode_member])(sample)
    assert caught.value.key == next(iter(raw))
    assert isinstance(caught.value.__cause__, CodecError)


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def write_tar(path, members):
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return webdataset.WebDataset(
        str(path), shardshuffle=False, nodesplitter=None, empty_check=False
    )


@pytest.mark.parametrize("stored", ["", ".zst"])
@pytest.mark.parametrize("ending", ["pickle", "pkl", "pyd", "pth"])
def test_no_member_is_unpickled(tmp_path, ending, stored):
    evil = pickle.dumps(Payload(tmp_path / "PWNED"), protocol=0)
    data = zstandard.compress(evil) if stored else evil
    name = f"x_evil.{ending}{stored}"
    (sample,) = write_tar(tmp_path / "t.tar", {f"a.{name}": data}).decode(
        decode_member, "rgb", pre=[]
    )
    assert sample[name] == evil
    assert not (tmp_path / "PWNED").exists()
    pickle.loads(evil)
    assert (tmp_path / "PWNED").exists()


OTHER_ENDINGS = sorted(
    {*decoders, "bmp", "eps", "mp4", "wav", "gz", "pickle.gz", "pt", "unknown"} - {"json", "npy"}
)


@pytest.mark.parametrize("ending", OTHER_ENDINGS)
def test_only_the_known_endings_reach_webdatasets_handlers(tmp_path, ending):
    data = b"\x80 no value of any kind"
    name = f"x_mine.{ending}"
    shard = write_tar(tmp_path / "t.tar", {"a.meta.json": b"{}", f"a.{name}": data})
    (sample,) = shard.decode(
        decode_member,
        "rgb",
        webdataset.torch_video,
        webdataset.torch_audio,
        pre=[],
    )
    assert (sample["meta.json"], sample[name]) == ({}, data)


@pytest.mark.parametrize("name", ["x_page.jpg", "x_page.png", "x_page.jpg.zst"])
def test_other_content_under_an_images_name_is_refused(name):
    data = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n"
    data = zstandard.compress(data) if name.endswith(".zst") else data
    with pytest.raises(DecodingError) as caught:
        webdataset.autodecode.Decoder([decode_member, webdataset.imagehandler("rgb")])(
            {"__key__": "a", name: data}
        )
    assert isinstance(caught.value.__cause__, ImageError)
    assert "25 21 50 53" in str(caught.value.__cause__)
