"""The decode stage for decoders that take batches, with one that is always there."""

from __future__ import annotations

import json
import threading
import time
from typing import ClassVar

import numpy as np
import pytest
import torch

from fuelrail.loaders import ImageAugment, PixelAugment
from fuelrail.loaders.batch.stages import check_pixels
from fuelrail.loaders.decode import BACKENDS, BatchDecoder, make_decoder
from fuelrail.loaders.decode.turbo import TurboDecoder
from fuelrail.pipeline.errors import ConfigError, ImageError, StageError
from support.backends import HAS_DALI, needs_dali
from support.datasets import build_dataset
from support.loaders import make_loader

IMAGE = ImageAugment(height=32, width=64, train=True, resize_range=(0.7, 0.9), flip_prob=0.5, rotate_deg=(-5.0, 5.0))
PIXELS = PixelAugment(train=True, brightness=32, hue_deg=18, prob=0.9)


class Batched(TurboDecoder):
    """The turbo backend behind the protocol of batches; counts the batches."""

    name = "batched"
    sizes: ClassVar[list[int]] = []
    closed = 0

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.device = torch.device(device)

    def close(self):
        type(self).closed += 1

    def new_output(self, shape):
        return torch.empty(shape, dtype=torch.uint8)

    def decode_batch(self, encoded, image_maps, out, interpolation="bilinear"):
        type(self).sizes.append(len(encoded))
        errors = []
        for data, image_map, picture in zip(encoded, image_maps, out, strict=True):
            if data is None:
                picture[:] = 0
                errors.append(None)
                continue
            try:
                self.decode_into(data, image_map, picture.numpy(), interpolation)
                errors.append(None)
            except ImageError as error:
                errors.append(error)
        return errors


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> type[Batched]:
    import fuelrail.loaders.decode.turbo as module

    monkeypatch.setattr(module, "Batched", Batched, raising=False)
    monkeypatch.setitem(BACKENDS, "batched", "fuelrail.loaders.decode.turbo:Batched")
    Batched.sizes = []
    return Batched


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("batched") / "dataset"
    build_dataset(root, {"train": (6, 6)}, missing=frozenset({(2, "cam_back"), (9, "cam_front")}))
    return root


def load(dataset, decoder: str, **options) -> list[dict]:
    settings = {"batch_size": 4, "seed": 3, "image": IMAGE, "pixels": PIXELS, "num_workers": 2, **options}
    with make_loader(dataset, decoder=decoder, **settings) as loader:
        return list(loader)


def assert_same(first: list[dict], second: list[dict]) -> None:
    for a, b in zip(first, second, strict=True):
        assert a.keys() == b.keys()
        assert a["sample_key"] == b["sample_key"]
        for name, value in a.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, b[name]), name


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("window", [{}, {"frames": [-1, 0, 2], "pad": "mask"}])
def test_batches_are_those_of_decoding_one_by_one(dataset, drop_last: bool, window) -> None:
    options = {"batch_size": 5, "drop_last": drop_last, **window}
    assert_same(load(dataset, "turbo", **options), load(dataset, "batched", **options))
    frames = len(window.get("frames", [0]))
    assert Batched.sizes[:2] == [10 * frames, 10 * frames]  # all frames and cameras of a batch in one call


def test_f16_on_a_device_three_lanes_take_batches_in_turns(dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()

    class Elsewhere(Batched):
        """Says that it is on another device; its memory is the host's."""

        def __init__(self) -> None:
            super().__init__("meta")

        def decode_batch(self, *arguments):
            threads.add(threading.get_ident())
            time.sleep(0.02)
            return super().decode_batch(*arguments)

    import fuelrail.loaders.decode.turbo as module

    monkeypatch.setattr(module, "Batched", Elsewhere)
    options = {"pixels": PixelAugment(), "batch_size": 2}
    assert_same(load(dataset, "turbo", **options), load(dataset, "batched", **options))
    assert len(threads) == 3


def test_transform_and_collate_get_single_samples(dataset) -> None:
    def transform(sample):
        sample["mean"] = float(sample["img"].float().mean())
        return sample

    assert_same(load(dataset, "turbo", transform=transform), load(dataset, "batched", transform=transform))
    kept = load(dataset, "batched", collate_fn=lambda samples: {"keys": [s["sample_key"] for s in samples]})
    assert [len(batch["keys"]) for batch in kept] == [4, 4, 4]


def damaged(encoded: bytes) -> bytes:
    """The same length, but cut: the end of the picture is zeros."""
    return encoded[: len(encoded) // 2] + bytes(len(encoded) - len(encoded) // 2)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory):
    """A dataset with one undecodable image, and its key."""
    root = tmp_path_factory.mktemp("broken") / "dataset"
    raw = build_dataset(root, {"train": (12,)})
    key = sorted(raw)[5]
    image = raw[key]["cam_back.jpg"]
    shard = root / "train-000000.tar"
    content = shard.read_bytes()
    at = content.index(image)
    shard.write_bytes(content[:at] + damaged(image) + content[at + len(image) :])
    return root, key


def test_a_bad_image_is_named(broken) -> None:
    root, key = broken
    with pytest.raises((ImageError, StageError)) as caught:
        load(root, "batched", verify=False)
    assert f"{key}.cam_back" in str(caught.value) + str(caught.value.__cause__)


def test_a_bad_image_is_replaced_as_with_other_decoders(broken, tmp_path) -> None:
    root, key = broken
    notes = tmp_path / "bad.jsonl"
    options = {"verify": False, "on_error": "substitute", "file": notes}
    first = load(root, "turbo", **options)
    Batched.sizes = []
    assert_same(first, load(root, "batched", **options))
    assert key not in [k for batch in first for k in batch["sample_key"]]
    assert [json.loads(line)["key"] for line in notes.read_text().splitlines()] == [key, key]
    assert 2 in Batched.sizes  # the replacement alone was decoded again


@needs_dali
@pytest.mark.parametrize("harm", ["cut", "huffman"])
def test_dali_survives_a_bad_image_of_which_it_names_nothing(tmp_path, harm: str) -> None:
    """``cut`` is found before DALI sees it; ``huffman`` makes the run of its whole batch fail."""
    raw = build_dataset(tmp_path / "dataset", {"train": (12,)})
    key = sorted(raw)[5]
    image = raw[key]["cam_back.jpg"]
    bad = bytearray(damaged(image) if harm == "cut" else image)
    if harm == "huffman":
        bad[bad.index(b"\xff\xc4") + 5] = 0xFF  # a table with more codes than fit
    shard = tmp_path / "dataset" / "train-000000.tar"
    shard.write_bytes(shard.read_bytes().replace(image, bytes(bad)))
    notes = tmp_path / "bad.jsonl"
    options = {"verify": False, "on_error": "substitute", "file": notes, "pixels": PixelAugment()}
    with_dali, with_turbo = (load(tmp_path / "dataset", decoder, **options) for decoder in ("dali", "turbo"))
    for ours, expected in zip(with_dali, with_turbo, strict=True):
        assert ours["sample_key"] == expected["sample_key"]
        assert key not in ours["sample_key"]
        assert float((ours["img"].float() - expected["img"].float()).abs().mean()) < 8.0  # textures of noise
    assert [json.loads(line)["key"] for line in notes.read_text().splitlines()] == [key, key]
    with pytest.raises((ImageError, StageError)) as caught:
        load(tmp_path / "dataset", "dali", verify=False, pixels=PixelAugment())
    assert f"{key}.cam_back" in str(caught.value) + str(caught.value.__cause__)


def test_pixels_on_a_device_are_refused() -> None:
    assert isinstance(Batched("meta"), BatchDecoder)
    assert not isinstance(make_decoder("turbo"), BatchDecoder)
    with pytest.raises(ConfigError, match="decoder='batched' decodes on meta: leave out pixels"):
        check_pixels(Batched("meta"), PIXELS)
    check_pixels(Batched("meta"), PixelAugment())
    check_pixels(Batched("cpu"), PIXELS)


@pytest.mark.gpu
@pytest.mark.skipif(not (HAS_DALI and torch.cuda.is_available()), reason="needs NVIDIA DALI and a CUDA GPU")
def test_dali_decodes_into_the_memory_of_the_gpu(dataset) -> None:
    options = {"pixels": PixelAugment(), "points": True}
    for a, b in zip(load(dataset, "dali", **options), load(dataset, "dali", device="cuda", **options), strict=True):
        assert a["sample_key"] == b["sample_key"]
        assert b["img"].device.type == "cuda"
        difference = a["img"].float() - b["img"].cpu().float()
        assert float(difference.abs().mean()) < 4.0
        for name in ("ego2img", "ida_mat", "bda_mat"):
            assert torch.equal(a[name], b[name].cpu()), name


@needs_dali
def test_dali_gives_the_same_samples_and_nearly_the_same_pixels(dataset) -> None:
    for a, b in zip(
        load(dataset, "turbo", pixels=PixelAugment()), load(dataset, "dali", pixels=PixelAugment()), strict=True
    ):
        assert a["sample_key"] == b["sample_key"]
        assert torch.equal(a["ego2img"], b["ego2img"])
        difference = a["img"].float() - b["img"].float()
        assert float(difference.abs().mean()) < 8.0  # their textures are noise, which filters treat differently
        assert np.array_equal(a["img"].flatten(2).any(2), b["img"].flatten(2).any(2))


def test_f33_closing_a_loader_closes_its_decoder(dataset, backend):
    loader = make_loader(dataset, 2, image=IMAGE, decoder="batched")
    before = backend.closed
    loader.close()
    assert backend.closed == before + 1


BAD = ((3, "cam_back"), (5, "cam_front"))
GROUPS = {
    "back": {"cameras": ["cam_back"], "image": ImageAugment(height=24, width=40, train=True, rotate_deg=(-5, 5))},
    "front": {"cameras": ["cam_front"], "image": IMAGE},
}


@pytest.mark.parametrize("window", [None, {"frames": [-1, 0]}])
@pytest.mark.parametrize("options", [{"two_views": True}, {"image": None}, {"image": None, "two_views": True}])
def test_two_views_and_groups_of_cameras(dataset, options, window) -> None:
    if "image" in options:
        options = {**options, "camera_groups": GROUPS, "image": ImageAugment(height=256, width=704)}
    found, expected = (load(dataset, decoder, window=window, **options) for decoder in ("batched", "turbo"))
    for have, want in zip(found, expected, strict=True):
        images = [
            [one["img"]] if isinstance(one["img"], torch.Tensor) else list(one["img"].values()) for one in (have, want)
        ]
        for mine, others in zip(*images, strict=True):
            assert mine.shape == others.shape
            # Each view is decoded alone here; turbo decodes both at once.
            assert (mine.float() - others.float()).abs().mean() < (1.0 if "two_views" in options else 1e-9)


@pytest.mark.parametrize(
    "options", [{"two_views": True}, {"camera_groups": GROUPS, "image": ImageAugment(height=256, width=704)}]
)
def test_a_bad_image_in_two_views_or_a_group_is_replaced(tmp_path, options) -> None:
    root = tmp_path / "bad"
    build_dataset(
        root, {"train": (8, 4)},
        rewrite=lambda row, channel, data: data[:150] if (row, channel) in BAD else data,
    )  # fmt: skip
    policy = {"on_error": "substitute", "max_bad": 9, "file": tmp_path / "bad.jsonl", "verify": False}
    for batch in load(root, "batched", **policy, **options):
        rows = batch["global_index"]
        assert not {3, 5} & set(rows.tolist())
        if "two_views" in options:
            assert torch.equal(*rows.chunk(2))
        parts = batch["img"].values() if isinstance(batch["img"], dict) else [batch["img"]]
        assert all(image.float().std() > 1 for part in parts for image in part)
