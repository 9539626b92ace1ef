from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from fuelrail.loaders.decode import make_decoder
from fuelrail.loaders.decode.protocol import UNKNOWN, ImageFacts
from fuelrail.pipeline.errors import ConfigError, ImageError
from fuelrail.pipeline.transforms.image import ImageAugment
from fuelrail.pipeline.transforms.image_map import ImageMap
from support.backends import HAS_DALI
from support.decoder_suite import ALL_MAPS, NUSCENES_WH, DecoderSuite
from support.pictures import encode, natural, psnr_db, seen, shift_px

if not HAS_DALI:
    pytest.skip("NVIDIA DALI is not installed", allow_module_level=True)

from fuelrail.loaders.decode import dali

if TYPE_CHECKING:
    from collections.abc import Callable

    from fuelrail.loaders.decode import ImageDecoder, Interpolation

SIZES = [(320, 180), (64, 64), (250, 333), (401, 97)]
AUGMENT = ImageAugment(
    height=48, width=64, train=True, resize_range=(0.6, 0.9), rotate_deg=(-5.4, 5.4), flip_prob=0.5, crop_y="top"
)


class TestDali(DecoderSuite):
    backend = "dali"


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dali.DaliDecoder]:
    """Make decoders that run the GPU's graph and everything around it in host memory."""
    monkeypatch.setattr(dali, "_MIXED", "cpu")

    def make(**options: Any) -> dali.DaliDecoder:
        decoder = dali.DaliDecoder(**options)
        decoder._on_gpu = True
        return decoder

    return make


class Calls(list[dict[str, Any]]):
    """The keywords of every call of a function that it stands in for."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        self.append(keywords)
        return self._function(*arguments, **keywords)


@pytest.fixture
def decoding(monkeypatch: pytest.MonkeyPatch) -> dict[str, Calls]:
    """The calls of DALI's decoders by their names, as graphs are defined."""
    calls = {name: Calls(getattr(dali.fn.decoders, name)) for name in ("image", "image_slice")}
    for name, each in calls.items():
        monkeypatch.setattr(dali.fn.decoders, name, each)
    return calls


@pytest.mark.parametrize("is_aligned", [True, False])
@pytest.mark.parametrize("facts", [UNKNOWN, ImageFacts((1600, 900), 0.5), ImageFacts((1600, 900), 0.0)])
def test_f29_f30_f7_the_graph_of_a_gpu_decodes_whole_images_by_hardware(
    decoding: dict[str, Calls], monkeypatch: pytest.MonkeyPatch, facts: ImageFacts, is_aligned: bool
) -> None:
    monkeypatch.setattr(dali.Pipeline, "build", lambda pipeline: None)  # which needs a GPU; defining does not
    decoder = dali.DaliDecoder("cuda:0", facts=facts)
    decoder._build("bilinear", is_aligned, 64, 48)
    assert not decoding["image_slice"]
    (options,) = decoding["image"]
    assert options["device"] == "mixed"
    assert not {"start", "end", "shape", "rel_start", "rel_shape"} & options.keys()
    # A share between 0 and 1 makes pixels depend on an image's neighbours.
    assert options["hw_decoder_load"] == (1.0 if facts.baseline_share else 0.0)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("name", ALL_MAPS)
def test_both_graphs_agree(name: str, interpolation: Interpolation, as_on_gpu: Callable[..., dali.DaliDecoder]) -> None:
    image_map = ALL_MAPS[name]
    width, height = image_map.out_wh
    pictures = []
    for decoder in (make_decoder("dali"), as_on_gpu()):
        pictures.append(np.empty((3, height, width), np.uint8))
        decoder.decode_into(
            encode(natural(*NUSCENES_WH), quality=92, subsampling="4:2:0"), image_map, pictures[-1], interpolation
        )
    assert psnr_db(*pictures) > 48.0


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@needs_gpu
class TestDaliOnGpu(DecoderSuite):
    backend = "dali"

    @pytest.fixture
    def decoder(self) -> ImageDecoder:
        return make_decoder("dali", "cuda")


@needs_gpu
def test_both_devices_agree() -> None:
    encoded, maps = batch(40)
    on_cpu = torch.empty((40, 3, 48, 64), dtype=torch.uint8)
    assert make_decoder("dali").decode_batch(encoded, maps, on_cpu) == [None] * 40
    decoder = make_decoder("dali", "cuda")
    on_gpu = decoder.new_output((40, 3, 48, 64))
    assert decoder.decode_batch(encoded, maps, on_gpu) == [None] * 40
    # What another stream queues afterwards sees finished pixels.
    copied = on_gpu.to("cpu")
    assert psnr_db(copied.flatten(0, 1).numpy(), on_cpu.flatten(0, 1).numpy()) > 38.0


def batch(count: int, augment: ImageAugment = AUGMENT) -> tuple[list[bytes], list[ImageMap]]:
    encoded, maps = [], []
    for number in range(count):
        wh = SIZES[number % len(SIZES)]
        encoded.append(encode(natural(*wh, seed=number % 5), "png" if number % 7 == 3 else "jpeg"))
        maps += augment.draw([wh], seed=0, epoch=0, sample=number)
    return encoded, maps


@pytest.mark.parametrize("augment", [AUGMENT, AUGMENT.evaluation()])
@pytest.mark.parametrize("count", [1, 13, dali.MAX_BATCH + 5])
def test_a_batch_is_its_images_one_by_one(count: int, augment: ImageAugment) -> None:
    decoder = make_decoder("dali")
    encoded, maps = batch(count, augment)
    out = torch.full((count, 3, 48, 64), 7, dtype=torch.uint8)
    assert decoder.decode_batch(encoded, maps, out) == [None] * count
    for data, image_map, picture in zip(encoded, maps, out, strict=True):
        alone = np.empty((3, 48, 64), np.uint8)
        decoder.decode_into(data, image_map, alone)
        assert np.array_equal(picture, alone)
    assert decoder.num_refused == 0, "libjpeg-turbo did DALI's work"


def test_where_dali_fails_altogether_turbo_decodes_and_it_is_said(monkeypatch, caplog) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no decoder on this device")

    monkeypatch.setattr(dali.Pipeline, "run", fails)
    decoder = make_decoder("dali")
    encoded, maps = batch(3)
    out = torch.empty((3, 3, 48, 64), dtype=torch.uint8)
    for _ in range(2):
        assert decoder.decode_batch(encoded, maps, out) == [None] * 3
    assert decoder.num_refused == 6
    assert [record.getMessage() for record in caplog.records] == [
        "DALI fails on images that libjpeg-turbo decodes; those are left to it: no decoder on this device"
    ]


def test_bad_images_are_named_and_the_others_come() -> None:
    decoder = make_decoder("dali")
    encoded, maps = batch(12)
    expected = torch.empty((12, 3, 48, 64), dtype=torch.uint8)
    decoder.decode_batch(encoded, maps, expected)
    damaged = bytearray(encoded[4])
    damaged[damaged.index(b"\xff\xc4") + 5] = 0xFF  # a Huffman table with more codes than fit
    encoded[1], encoded[4], encoded[8] = b"", bytes(damaged), encoded[8][:-300]
    maps[6] = ImageMap.identity((11, 12)).resize(64, 48)
    out = torch.full((12, 3, 48, 64), 7, dtype=torch.uint8)
    errors = decoder.decode_batch(encoded, maps, out)
    bad = [1, 4, 6, 8]
    assert [at for at, error in enumerate(errors) if isinstance(error, ImageError)] == bad
    assert (out[bad] == 7).all()
    good = [at for at in range(12) if at not in bad]
    assert torch.equal(out[good], expected[good]), "what becomes of an image must not depend on its neighbours"
    again = torch.empty_like(expected)
    encoded, maps = batch(12)
    assert decoder.decode_batch(encoded, maps, again) == [None] * 12
    assert torch.equal(again, expected)


def test_failed_runs_cost_no_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    build = dali.DaliDecoder._build
    monkeypatch.setattr(dali.DaliDecoder, "_build", lambda *arguments: built.append(arguments) or build(*arguments))
    decoder = make_decoder("dali")
    encoded, maps = batch(8, AUGMENT.evaluation())
    expected, out = (torch.empty((8, 3, 48, 64), dtype=torch.uint8) for _ in range(2))
    decoder.decode_batch(encoded, maps, expected)
    for bad in range(8):
        damaged = bytearray(encoded[bad])
        if damaged.startswith(b"\xff\xd8"):
            damaged[damaged.index(b"\xff\xc4") + 5] = 0xFF
            decoder.decode_batch([*encoded[:bad], bytes(damaged), *encoded[bad + 1 :]], maps, out)
    assert decoder.decode_batch(encoded, maps, out) == [None] * 8
    assert torch.equal(out, expected)
    assert len(built) == 1


@pytest.mark.parametrize("name", ALL_MAPS)
def test_it_agrees_with_the_turbo_backend(name: str) -> None:
    image_map = ALL_MAPS[name]
    encoded = encode(natural(*NUSCENES_WH), quality=92, subsampling="4:2:0")
    width, height = image_map.out_wh
    pictures = []
    for backend in ("dali", "turbo"):
        pictures.append(np.empty((3, height, width), np.uint8))
        make_decoder(backend).decode_into(encoded, image_map, pictures[-1])
    where = seen(image_map, 2.0 / min(1.0, image_map.max_scale))
    assert psnr_db(*pictures, where) > 38.0
    assert max(map(abs, shift_px(*pictures, where))) < 0.05
    assert ((pictures[0] == 0).all(axis=0) | seen(image_map, -1e-3)).all()


def test_a_wrong_output_tensor_is_the_callers_mistake() -> None:
    decoder = make_decoder("dali")
    encoded, maps = batch(2)
    for wrong in (
        torch.empty((2, 3, 48, 65), dtype=torch.uint8),
        torch.empty((2, 3, 48, 64)),
        torch.empty((2, 3, 48, 64), dtype=torch.uint8, device="meta"),
    ):
        with pytest.raises(ConfigError, match=r"out must be a uint8 tensor on cpu of shape \[2, 3, height, width\]"):
            decoder.decode_batch(encoded, maps, wrong)
    with pytest.raises(ConfigError, match="interpolation='area' must be one of"):
        decoder.decode_batch(encoded, maps, torch.empty((2, 3, 48, 64), dtype=torch.uint8), "area")
