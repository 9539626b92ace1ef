from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import xxhash

from fuelrail.loaders.decode import dali_install, make_decoder
from fuelrail.loaders.decode.protocol import UNKNOWN, ImageFacts
from fuelrail.pipeline.transforms.image_map import ImageMap
from fuelrail.pipeline.transforms.lens import Lens
from support.backends import HAS_DALI
from support.decoder_suite import DecoderSuite
from support.image_maps import ALL_MAPS, photograph
from support.pictures import encode, natural, psnr_db, seen, shift_px

if not HAS_DALI:
    pytest.skip("NVIDIA DALI is not installed", allow_module_level=True)

from fuelrail.loaders.decode import dali
from support.dali_runs import (
    AUGMENT,
    EVALUATION,
    SIZES,
    Runs,
    as_on_gpu,
    batch,
    empty,
)

__all__ = ["as_on_gpu"]

if TYPE_CHECKING:
    from collections.abc import Callable

    from fuelrail.loaders.decode.protocol import ImageDecoder, Interpolation
    from fuelrail.pipeline.transforms.image import ImageAugment

pytestmark = pytest.mark.costly

HAS_CUDA12 = dali_install.installed_dali().package == "nvidia-dali-cuda120"


class TestDali(DecoderSuite):
    backend = "dali"


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
    for name, operator in calls.items():
        monkeypatch.setattr(dali.fn.decoders, name, operator)
    return calls


@pytest.mark.parametrize("is_aligned", [True, False])
@pytest.mark.parametrize(
    "facts",
    [UNKNOWN, ImageFacts((1600, 900), 0.5), ImageFacts((1600, 900), 0.0)],
)
def test_the_graph_of_a_gpu_decodes_whole_images_by_hardware(
    decoding, monkeypatch, facts, is_aligned
):
    monkeypatch.setattr(
        dali.Pipeline, "build", lambda pipeline: None
    )  # which needs a GPU; defining does not
    decoder = dali.DaliDecoder("cuda:0", facts=facts)
    decoder._build("bilinear", is_aligned, 64, 48)
    assert not decoding["image_slice"]
    (options,) = decoding["image"]
    assert options["device"] == "mixed"
    assert not {"start", "end", "shape", "rel_start", "rel_shape"} & options.keys()
    # A share between 0 and 1 makes pixels depend on an image's neighbours.
    assert options["hw_decoder_load"] == (1.0 if facts.baseline_share else 0.0)


@pytest.mark.parametrize("name", ALL_MAPS)
def test_both_graphs_agree(name: str, as_on_gpu: Callable[..., dali.DaliDecoder]) -> None:
    # the suite's other
    image_map = ALL_MAPS[name]
    interpolation = ("bicubic", "bilinear")[[*ALL_MAPS].index(name) % 2]
    width, height = image_map.out_wh
    pictures = []
    for decoder in (make_decoder("dali"), as_on_gpu()):
        pictures.append(np.empty((3, height, width), np.uint8))
        decoder.decode_into(photograph(), image_map, pictures[-1], interpolation)
    assert psnr_db(*pictures) > 48.0


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.gpu
@needs_gpu
class TestDaliOnGpu(DecoderSuite):
    backend = "dali"

    @pytest.fixture
    def decoder(self) -> ImageDecoder:
        return make_decoder("dali", "cuda")


@pytest.mark.gpu
@needs_gpu
def test_both_devices_agree() -> None:
    encoded, maps = batch(40)
    on_cpu = empty(40)
    assert make_decoder("dali").decode_batch(encoded, maps, on_cpu) == [None] * 40
    decoder = make_decoder("dali", "cuda")
    on_gpu = decoder.new_output((40, 3, 48, 64))
    assert decoder.decode_batch(encoded, maps, on_gpu) == [None] * 40
    # What another stream queues afterwards sees finished pixels.
    copied = on_gpu.to("cpu")
    assert psnr_db(copied.flatten(0, 1).numpy(), on_cpu.flatten(0, 1).numpy()) > 38.0


@pytest.mark.parametrize("augment", [AUGMENT, EVALUATION])
@pytest.mark.parametrize("count", [1, 13, dali.MAX_BATCH + 5])
def test_a_batch_is_its_images_one_by_one(count: int, augment: ImageAugment) -> None:
    decoder = make_decoder("dali")
    encoded, maps = batch(count, augment)
    out = empty(count)
    assert decoder.decode_batch(encoded, maps, out) == [None] * count
    for data, image_map, picture in zip(encoded, maps, out, strict=True):
        alone = np.empty((3, 48, 64), np.uint8)
        decoder.decode_into(data, image_map, alone)
        assert np.array_equal(picture, alone)
    assert decoder.num_refused == 0, "libjpeg-turbo did DALI's work"


GOLDEN = {
    ("bilinear", True): "571cce7d538c6f86",
    ("bicubic", True): "cb4b27196694765b",
    ("bilinear", False): "bf5f4ace04d0ce21",
    ("bicubic", False): "cb08aca55f06a5b7",
}
"""xxh3 of 80 images by filter, and whether maps are drawn for training; of DALI 2.4.0 on a processor with AVX2."""


@pytest.mark.skipif(
    importlib.metadata.version("nvidia-dali-cuda120" if HAS_CUDA12 else "nvidia-dali-cuda130")
    != "2.4.0",
    reason="the digests are those of DALI 2.4.0",
)
@pytest.mark.parametrize(("interpolation", "train"), GOLDEN)
def test_pixels_on_the_cpu_are_those_of_before(interpolation: Interpolation, train: bool) -> None:
    augment = AUGMENT if train else EVALUATION
    encoded: list[bytes | None] = []
    maps: list[ImageMap] = []
    for number in range(80):
        width, height = SIZES[number % 4]
        x, y = np.meshgrid(np.arange(width), np.arange(height))
        picture = np.stack(
            [(x * (3 + number % 5) + y * 7 * k) % 251 for k in (1, 2, 3)], -1
        ).astype(np.uint8)
        is_png = number % 7 == 3
        options: dict[str, Any] = {}
        if not is_png:
            options["subsampling"] = "4:2:0" if number % 2 else "4:4:4"
        if number % 3 and not is_png:
            options["restart_marker_rows"] = 1
        file = encode(picture, "png" if is_png else "jpeg", **options)
        encoded.append(None if number % 11 == 10 else file)
        maps += augment.draw([(width, height)], seed=0, epoch=0, sample=number)
    out = empty(80)
    assert make_decoder("dali").decode_batch(encoded, maps, out, interpolation) == [None] * 80
    assert xxhash.xxh3_64_hexdigest(out.numpy().tobytes()) == GOLDEN[interpolation, train]


def test_a_lens_on_a_gpu_is_undone_on_the_cpu_and_it_is_logged_once(as_on_gpu, caplog) -> None:
    camera = ((200.0, 0.0, 160.0), (0.0, 200.0, 90.0), (0.0, 0.0, 1.0))
    lens = Lens("pinhole", (0.01, 0.0, 0.0, 0.0, 0.0), camera, camera)
    image_map = dataclasses.replace(ImageMap.identity((320, 180)).resize(64, 48), lens=lens)
    decoder = as_on_gpu()
    for _ in range(2):
        decoder.decode_into(
            encode(natural(320, 180)),
            image_map,
            np.empty((3, 48, 64), np.uint8),
        )
    assert len(caplog.records) == 1
    assert "decodes images with a lens (undistort) or in CMYK on the CPU" in caplog.text


@pytest.mark.parametrize("restart", [0, 1])
@pytest.mark.parametrize("augment", [AUGMENT, AUGMENT.evaluation()])
@pytest.mark.parametrize("is_whole", [False, True])
def test_two_views_of_images_are_one_decode_and_equal_those_of_two(
    augment, restart, is_whole, monkeypatch, as_on_gpu
):
    encoded = [
        encode(natural(320, 180, seed=n), restart_marker_rows=restart, quality=90) for n in range(4)
    ]
    maps = [
        image_map
        for n in (0, 1)
        for image_map in augment.draw([(320, 180)] * 4, seed=7, epoch=0, sample=n)
    ]
    if augment is not AUGMENT:
        maps = [dataclasses.replace(image_map) for image_map in maps]
    decoder = as_on_gpu(check_every=0) if is_whole else make_decoder("dali")
    runs = Runs(monkeypatch, lambda fed: None)
    together, alone = torch.zeros((2, 8, 3, 48, 64), dtype=torch.uint8)
    assert decoder.decode_batch(encoded * 2, maps, together) == [None] * 8
    assert sum(size for size in runs.sizes if size <= 4) == 4  # larger ones warm a pipeline up
    for first in (0, 4):
        decoder.decode_batch(encoded, maps[first : first + 4], alone[first : first + 4])
    # With rows cut out, the whole graph's places are rounded on another grid.
    assert (together.int() - alone.int()).abs().max() <= int(is_whole and restart)


@pytest.mark.parametrize("name", ALL_MAPS)
def test_it_agrees_with_the_turbo_backend(name: str) -> None:
    image_map = ALL_MAPS[name]
    width, height = image_map.out_wh
    pictures = []
    for backend in ("dali", "turbo"):
        pictures.append(np.empty((3, height, width), np.uint8))
        make_decoder(backend).decode_into(photograph(), image_map, pictures[-1])
    where = seen(image_map, 2.0 / min(1.0, image_map.max_scale))
    assert psnr_db(*pictures, where) > 38.0
    assert max(map(abs, shift_px(*pictures, where))) < 0.05
    assert ((pictures[0] == 0).all(axis=0) | seen(image_map, -1e-3)).all()
