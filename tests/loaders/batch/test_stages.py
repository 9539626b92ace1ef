"""The decode stage for decoders that take batches, with one that is always there."""

from __future__ import annotations

import itertools
import json
import threading

import numpy as np
import pytest
import torch

from fuelrail import ImageAugment, PixelAugment
from fuelrail.loaders.batch.stages import check_pixels
from fuelrail.loaders.decode import make_decoder
from fuelrail.loaders.decode.protocol import BatchDecoder
from fuelrail.pipeline.errors import ConfigError, ImageError, StageError
from support import batched_turbo
from support.backends import HAS_DALI, needs_dali
from support.batched_turbo import BatchedTurbo
from support.batches import batches, keys, load, unlike
from support.datasets import build_dataset

IMAGE = ImageAugment(
    height=32,
    width=64,
    train=True,
    resize_range=(0.7, 0.9),
    flip_prob=0.5,
    rotate_deg=(-5.0, 5.0),
)
PIXELS = PixelAugment(train=True, brightness=32, hue_deg=18, prob=0.9)
OPTIONS = {"seed": 3, "image": IMAGE, "pixels": PIXELS}


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    batched_turbo.install(monkeypatch)


@pytest.fixture(scope="module")
def dataset(build_once):
    return build_once(
        {"train": (6, 6)},
        missing=frozenset({(2, "cam_back"), (9, "cam_front")}),
    )[0]


def decoded(dataset, decoder: str, **options) -> list[dict]:
    return batches(
        dataset,
        options.pop("batch_size", 4),
        decoder=decoder,
        **{**OPTIONS, **options},
    )


def assert_same(dataset, **options) -> None:
    assert (
        unlike(
            decoded(dataset, "turbo", **options),
            decoded(dataset, "batched", **options),
        )
        == []
    )


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("window", [{}, {"frames": [-1, 0, 2], "pad": "mask"}])
def test_batches_are_those_of_decoding_one_by_one(dataset, drop_last: bool, window) -> None:
    assert_same(dataset, batch_size=5, drop_last=drop_last, **window)
    frames = len(window.get("frames", [0]))
    assert BatchedTurbo.sizes[:2] == [
        10 * frames,
        10 * frames,
    ]  # all frames and cameras of a batch in one call


def test_on_a_device_three_lanes_take_batches_in_turns(
    dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    # broken where there are fewer lanes
    together = threading.Barrier(3)
    calls = itertools.count()

    class Elsewhere(BatchedTurbo):
        """Says that it is on another device; its memory is the host's."""

        def __init__(self, *_: object, **__: object) -> None:
            super().__init__("meta")

        def decode_batch(self, *arguments):
            if next(calls) < 3:
                together.wait(60)
            return super().decode_batch(*arguments)

    batched_turbo.install(monkeypatch, Elsewhere)
    assert_same(dataset, pixels=PixelAugment(), batch_size=2)


@pytest.mark.costly
def test_transform_and_collate_get_single_samples(dataset) -> None:
    def transform(sample):
        sample["mean"] = float(sample["img"].float().mean())
        return sample

    assert_same(dataset, transform=transform)
    collated = decoded(
        dataset,
        "batched",
        collate_fn=lambda samples: {"keys": [s["sample_key"] for s in samples]},
    )
    assert [len(batch["keys"]) for batch in collated] == [4, 4, 4]


def damaged(encoded: bytes) -> bytes:
    """The same length, but cut: the end of the picture is zeros."""
    return encoded[: len(encoded) // 2] + bytes(len(encoded) - len(encoded) // 2)


@pytest.fixture(params=["cut", pytest.param("huffman", marks=needs_dali)])
def broken(request, tmp_path):
    """A dataset with one undecodable image, its key, and the decoder that is given it.

    ``cut`` is found before DALI sees it; ``huffman`` makes the run of its whole batch fail.
    """
    raw = build_dataset(tmp_path / "dataset", {"train": (12,)})
    key = sorted(raw)[5]
    image = raw[key]["cam_back.jpg"]
    bad = bytearray(damaged(image) if request.param == "cut" else image)
    if request.param == "huffman":
        bad[bad.index(b"\xff\xc4") + 5] = 0xFF  # a table with more codes than fit
    shard = tmp_path / "dataset" / "train-000000.tar"
    shard.write_bytes(shard.read_bytes().replace(image, bytes(bad)))
    return tmp_path / "dataset", key


@pytest.mark.parametrize("decoder", ["batched", pytest.param("dali", marks=needs_dali)])
def test_a_bad_image_is_named_or_replaced_as_with_other_decoders(broken, tmp_path, decoder) -> None:
    root, key = broken
    options = {"verify": False, "pixels": PixelAugment()}
    with pytest.raises((ImageError, StageError)) as caught:
        decoded(root, decoder, **options)
    assert f"{key}.cam_back" in str(caught.value) + str(caught.value.__cause__)
    options |= {"on_error": "substitute", "file": tmp_path / "bad.jsonl"}
    first = decoded(root, "turbo", **options)
    BatchedTurbo.sizes.clear()
    substituted = decoded(root, decoder, **options)
    assert keys(substituted) == keys(first) and key not in keys(substituted)
    tolerance = 0.0 if decoder == "batched" else 8.0  # textures of noise
    assert all(
        (a["img"].float() - b["img"].float()).abs().mean() <= tolerance
        for a, b in zip(substituted, first, strict=True)
    )
    assert [json.loads(line)["key"] for line in options["file"].read_text().splitlines()] == [
        key,
        key,
    ]
    assert decoder == "dali" or 2 in BatchedTurbo.sizes, "the replacement alone was decoded again"


def test_pixels_on_a_device_are_refused() -> None:
    assert isinstance(BatchedTurbo("meta"), BatchDecoder)
    assert not isinstance(make_decoder("turbo"), BatchDecoder)
    with pytest.raises(ConfigError, match="decoder='batched' decodes on meta: leave out pixels"):
        check_pixels(BatchedTurbo("meta"), PIXELS)
    check_pixels(BatchedTurbo("meta"), PixelAugment())
    check_pixels(BatchedTurbo("cpu"), PIXELS)


@pytest.mark.gpu
@pytest.mark.skipif(
    not (HAS_DALI and torch.cuda.is_available()),
    reason="needs NVIDIA DALI and a CUDA GPU",
)
def test_dali_decodes_into_the_memory_of_the_gpu(dataset) -> None:
    options = {"pixels": PixelAugment(), "points": True}
    host = decoded(dataset, "dali", **options)
    device = decoded(dataset, "dali", device="cuda", **options)
    for a, b in zip(host, device, strict=True):
        assert a["sample_key"] == b["sample_key"]
        assert b["img"].device.type == "cuda"
        difference = a["img"].float() - b["img"].cpu().float()
        assert float(difference.abs().mean()) < 4.0
        for name in ("ego2img", "ida_mat", "bda_mat"):
            assert torch.equal(a[name], b[name].cpu()), name


@needs_dali
def test_dali_gives_the_same_samples_and_nearly_the_same_pixels(
    dataset,
) -> None:
    turbo, dali = (
        decoded(dataset, decoder, pixels=PixelAugment()) for decoder in ("turbo", "dali")
    )
    for a, b in zip(turbo, dali, strict=True):
        assert a["sample_key"] == b["sample_key"]
        assert torch.equal(a["ego2img"], b["ego2img"])
        difference = a["img"].float() - b["img"].float()
        assert (
            float(difference.abs().mean()) < 8.0
        )  # their textures are noise, which filters treat differently
        assert np.array_equal(a["img"].flatten(2).any(2), b["img"].flatten(2).any(2))


def test_closing_a_loader_closes_its_decoder(dataset):
    loader = load(dataset, 2, decoder="batched")
    before = BatchedTurbo.num_closed
    loader.close()
    assert BatchedTurbo.num_closed == before + 1


BAD = ((3, "cam_back"), (5, "cam_front"))
GROUPS = {
    "back": {
        "cameras": ["cam_back"],
        "image": ImageAugment(height=24, width=40, train=True, rotate_deg=(-5, 5)),
    },
    "front": {"cameras": ["cam_front"], "image": IMAGE},
}


@pytest.mark.parametrize("window", [None, {"frames": [-1, 0]}])
@pytest.mark.parametrize(
    "options",
    [
        {"two_views": True},
        {"camera_groups": GROUPS},
        {"camera_groups": GROUPS, "two_views": True},
    ],
)
def test_two_views_and_groups_of_cameras(dataset, options, window) -> None:
    actual, expected = (
        decoded(dataset, decoder, window=window, **options) for decoder in ("batched", "turbo")
    )
    for have, want in zip(actual, expected, strict=True):
        for mine, reference in zip(images(have), images(want), strict=True):
            assert mine.shape == reference.shape
            # Each view is decoded alone here; turbo decodes both at once.
            assert (mine.float() - reference.float()).abs().mean() < (
                1.0 if "two_views" in options else 1e-9
            )


def images(batch: dict) -> list[torch.Tensor]:
    return list(batch["img"].values()) if isinstance(batch["img"], dict) else [batch["img"]]


@pytest.mark.parametrize("decoder", ["turbo", "batched", pytest.param("dali", marks=needs_dali)])
@pytest.mark.parametrize("options", [{"two_views": True}, {"camera_groups": GROUPS}])
def test_a_bad_image_in_two_views_or_a_group_is_replaced(tmp_path, options, decoder) -> None:
    build_dataset(
        tmp_path / "bad",
        {"train": (8, 4)},
        rewrite=lambda row, channel, data: data[:150] if (row, channel) in BAD else data,
    )
    policy = {
        "on_error": "substitute",
        "max_bad": 9,
        "file": tmp_path / "bad.jsonl",
        "verify": False,
    }
    for batch in decoded(tmp_path / "bad", decoder, pixels=PixelAugment(), **policy, **options):
        rows = batch["global_index"]
        assert not {3, 5} & set(rows.tolist())
        assert "two_views" not in options or torch.equal(*rows.chunk(2))
        assert all(image.float().std() > 1 for part in images(batch) for image in part)
