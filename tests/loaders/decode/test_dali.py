from __future__ import annotations

import dataclasses
import gc
import importlib.metadata
import importlib.util
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import xxhash

from fuelrail.loaders import Transforms
from fuelrail.loaders.decode import dali_install, make_decoder
from fuelrail.loaders.decode.dali_install import Engine, InstalledDali
from fuelrail.loaders.decode.protocol import MIN_LANES, UNKNOWN, DaliOptions, ImageFacts
from fuelrail.pipeline.errors import ConfigError, DecoderError, ImageError
from fuelrail.pipeline.transforms.image import ImageAugment
from fuelrail.pipeline.transforms.image_map import ImageMap
from fuelrail.pipeline.transforms.lens import Lens
from support.backends import HAS_DALI
from support.decoder_suite import ALL_MAPS, DecoderSuite, photograph
from support.pictures import encode, natural, psnr_db, seen, shift_px

if not HAS_DALI:
    pytest.skip("NVIDIA DALI is not installed", allow_module_level=True)

from fuelrail.loaders.decode import dali

if TYPE_CHECKING:
    from collections.abc import Callable

    from fuelrail.loaders.decode import ImageDecoder, Interpolation

HAS_CUDA12 = dali_install.installed_dali().package == "nvidia-dali-cuda120"
SIZES = [(320, 180), (64, 64), (250, 333), (401, 97)]
AUGMENT = ImageAugment(
    height=48, width=64, train=True, resize_range=(0.6, 0.9), rotate_deg=(-5.4, 5.4), flip_prob=0.5, crop_y="top"
)
EVALUATION = AUGMENT.evaluation()


class TestDali(DecoderSuite):
    backend = "dali"


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dali.DaliDecoder]:
    """Make decoders that run the GPU's graph and everything around it in host memory."""
    monkeypatch.setattr(dali, "_MIXED", "cpu")

    def make(**options: Any) -> dali.DaliDecoder:
        decoder = dali.DaliDecoder(options=DaliOptions(**options))
        decoder._on_gpu = True
        decoder._check_every = decoder._options.check_every
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
def test_f29_f30_f7_the_graph_of_a_gpu_decodes_whole_images_by_hardware(decoding, monkeypatch, facts, is_aligned):
    monkeypatch.setattr(dali.Pipeline, "build", lambda pipeline: None)  # which needs a GPU; defining does not
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
    image_map, interpolation = ALL_MAPS[name], ("bicubic", "bilinear")[[*ALL_MAPS].index(name) % 2]  # the suite's other
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


def batch(count: int, augment: ImageAugment = AUGMENT) -> tuple[list[bytes], list[ImageMap]]:
    encoded, maps = [], []
    for number in range(count):
        wh = SIZES[number % len(SIZES)]
        encoded.append(encode(natural(*wh, seed=number % 5), "png" if number % 7 == 3 else "jpeg"))
        maps += augment.draw([wh], seed=0, epoch=0, sample=number)
    return encoded, maps


def empty(count: int, fill: int = 7) -> torch.Tensor:
    return torch.full((count, 3, 48, 64), fill, dtype=torch.uint8)


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
    importlib.metadata.version("nvidia-dali-cuda120" if HAS_CUDA12 else "nvidia-dali-cuda130") != "2.4.0",
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
        picture = np.stack([(x * (3 + number % 5) + y * 7 * k) % 251 for k in (1, 2, 3)], -1).astype(np.uint8)
        is_png = number % 7 == 3
        options: dict[str, Any] = {} if is_png else {"subsampling": "4:2:0" if number % 2 else "4:4:4"}
        if number % 3 and not is_png:
            options["restart_marker_rows"] = 1
        file = encode(picture, "png" if is_png else "jpeg", **options)
        encoded.append(None if number % 11 == 10 else file)
        maps += augment.draw([(width, height)], seed=0, epoch=0, sample=number)
    out = empty(80)
    assert make_decoder("dali").decode_batch(encoded, maps, out, interpolation) == [None] * 80
    assert xxhash.xxh3_64_hexdigest(out.numpy().tobytes()) == GOLDEN[interpolation, train]


class Runs:
    """Stand in for a pipeline's runs: ``answer`` gets the encoded images that were fed, and may raise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Callable[[list[np.ndarray]], None]) -> None:
        self.sizes: list[int] = []
        fed: list[np.ndarray] = []
        feed_input, run = dali.Pipeline.feed_input, dali.Pipeline.run

        def feed(pipeline: dali.Pipeline, name: str, data: list[np.ndarray]) -> None:
            if name == "encoded":
                fed[:] = data
            feed_input(pipeline, name, data)

        def run_or_raise(pipeline: dali.Pipeline) -> Any:
            self.sizes.append(len(fed))
            outputs = run(pipeline)  # a run that fails has taken its inputs too
            answer(fed)
            return outputs

        monkeypatch.setattr(dali.Pipeline, "feed_input", feed)
        monkeypatch.setattr(dali.Pipeline, "run", run_or_raise)


def test_images_that_only_turbo_decodes_are_left_to_it_and_it_is_logged_once(monkeypatch, caplog) -> None:
    encoded, maps = batch(16, EVALUATION)
    expected, out = (empty(16) for _ in range(2))
    make_decoder("dali").decode_batch(encoded, maps, expected)

    def fail_on_one(fed: list[np.ndarray]) -> None:
        if any(bytes(np.asarray(image)) == encoded[5] for image in fed):
            raise RuntimeError(BAD_IMAGE)

    Runs(monkeypatch, fail_on_one)
    decoder = make_decoder("dali")
    for _ in range(2):
        assert decoder.decode_batch(encoded, maps, out) == [None] * 16
    assert decoder.num_refused == 2
    others = [at for at in range(16) if at != 5]
    assert torch.equal(out[others], expected[others])
    assert [record.getMessage() for record in caplog.records] == [
        "DALI fails on images that libjpeg-turbo decodes; those are left to it: Failed to decode sample #0 :"
    ]


BAD_IMAGE = "Error in an operator, encountered:\n\nFailed to decode sample #0 : \n"


@pytest.mark.parametrize(
    ("text", "sizes", "says"),
    [
        ("CUDA runtime API error cudaErrorIllegalAddress (700): an illegal memory access", [16], "turbo"),
        ("Error in an operator, encountered: CUDA allocation failed", [16], "turbo"),
        ("Error in an operator, encountered: nvImageCodec failure: '#8'", [16], "turbo"),
        ("no decoder on this device", [16], "turbo"),
        (BAD_IMAGE, [16, 8, 4, 2, 1, 1], "not because of an image"),  # every image is called bad
    ],
)  # fmt: skip
def test_f9_what_is_not_about_an_image_is_raised_at_once(text, sizes, says, monkeypatch) -> None:
    def fail(fed: list[np.ndarray]) -> None:
        raise RuntimeError(text)

    runs = Runs(monkeypatch, fail)
    encoded, maps = batch(16, EVALUATION)
    decoder = make_decoder("dali")
    with pytest.raises(DecoderError, match=rf"decoder='dali': .*{says}"):
        decoder.decode_batch(encoded, maps, empty(16))
    assert runs.sizes == sizes, "the batch was halved"
    assert decoder.num_refused == 0


def test_f6_the_first_run_of_every_pipeline_on_a_gpu_is_a_full_batch(monkeypatch, as_on_gpu) -> None:
    runs = Runs(monkeypatch, lambda fed: None)
    decoder = as_on_gpu(check_every=0)
    encoded, maps = batch(3, EVALUATION)
    out = empty(3)
    for _ in range(2):
        assert decoder.decode_batch(encoded, maps, out) == [None] * 3
    assert runs.sizes == [dali.MAX_BATCH, 3, 3]
    expected = torch.empty_like(out)
    make_decoder("dali").decode_batch(encoded, maps, expected)
    assert (out.int() - expected.int()).abs().max() <= 2


def test_f20_an_image_that_comes_again_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch, lambda fed: None)
    encoded, maps = batch(6, EVALUATION)
    damaged = encode(natural(320, 180))[:-300]
    files, shown = [*encoded, damaged] * 2, [*maps, maps[0]] * 2
    out = empty(14)
    errors = make_decoder("dali").decode_batch(files, shown, out)
    assert runs.sizes == [6]
    assert [at for at, error in enumerate(errors) if error is not None] == [6, 13]
    assert torch.equal(out[:6], out[7:13])
    assert (out[[6, 13]] == 7).all()
    # The same file under another map is another image.
    make_decoder("dali").decode_batch([encoded[0]] * 2, [maps[0], batch(1)[1][0]], out[:2])
    assert sum(runs.sizes[1:]) == 2


def test_f16_f31_outputs_are_held_until_one_wait_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    wait = dali.ThreadState.wait
    monkeypatch.setattr(dali.ThreadState, "wait", lambda state: held.append(len(state._held)) or wait(state))
    encoded, maps = batch(dali.MAX_BATCH + 5, EVALUATION)
    decoder = make_decoder("dali")
    decoder.decode_batch(encoded, maps, empty(len(encoded)))
    assert held == [2], "two runs"
    assert decoder._local.state._held == []


@pytest.mark.parametrize(("engine", "threads"), [("hardware", 4), ("CUDA", 16 // MIN_LANES), (None, 4)])
def test_f18_threads_of_a_pipeline_are_few(engine: str | None, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: engine is not None)
    monkeypatch.setattr(dali_install, "gpu_engine", lambda index: Engine(engine, "as set by the test"))
    decoder = dali.DaliDecoder("cuda:0", num_threads=16)
    assert decoder._num_threads == threads
    assert dali.DaliDecoder("cpu", num_threads=16)._num_threads == 16


def test_f18_the_memory_of_a_thread_is_that_of_the_largest_image() -> None:
    options = dali.DaliDecoder("cuda:0", facts=ImageFacts((1600, 900), 1.0))._gpu_options()
    assert options["device_memory_padding"] == options["host_memory_padding"] == 1600 * 900 * 3 * 2
    assert "device_memory_padding" not in dali.DaliDecoder("cuda:0")._gpu_options()


def test_f18_a_run_takes_memory_for_the_images_of_a_batch_only(monkeypatch, as_on_gpu) -> None:
    assert dali.DaliDecoder(facts=ImageFacts((1600, 900), 1.0, 12))._max_run == 12
    assert dali.DaliDecoder(facts=ImageFacts((1600, 900), 1.0, 500))._max_run == dali.MAX_BATCH
    runs = Runs(monkeypatch, lambda fed: None)
    decoder = as_on_gpu(check_every=0)
    decoder._max_run = 5
    encoded, maps = batch(7, EVALUATION)
    assert decoder.decode_batch(encoded, maps, empty(7)) == [None] * 7
    assert runs.sizes == [5, 5, 2]  # the first is the warm-up


def test_f7_a_share_is_a_public_option() -> None:
    transforms = Transforms(dali={"hardware_share": 0.5, "check_every": 10})
    decoder = make_decoder("dali", "cuda:0", dali=transforms.dali)
    assert decoder._gpu_options()["hw_decoder_load"] == 0.5
    assert decoder._check_every == 10
    assert (dali.DaliDecoder("cuda:0")._check_every, dali.DaliDecoder("cpu")._check_every) == (1000, 0)  # f32
    for wrong in ({"hardware_share": 1.5}, {"check_every": -1}):
        with pytest.raises(ConfigError):
            DaliOptions(**wrong)


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (Engine("CPU", "no nvJPEG", "install it"), "decodes on the CPU: no nvJPEG; install it"),
        (Engine("CUDA", "no libnvcuvid", "set video"), "decodes on the GPU's CUDA cores: no libnvcuvid; set video"),
        (Engine("CUDA", "it has no engines"), None),
        (Engine("hardware", "engines", "a newer one is better"), None),
    ],
)
def test_another_engine_than_expected_is_logged(engine, said, monkeypatch, caplog) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dali_install, "gpu_engine", lambda index: engine)
    dali.DaliDecoder("cuda:0")
    assert [record.getMessage() for record in caplog.records] == [f"decoder='dali' on cuda:0 {said}"] * bool(said)


def test_a_driver_that_is_too_old_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dali_install, "driver_version", lambda: "470.1")
    with pytest.raises(ConfigError, match=r"on cuda:0: the NVIDIA driver 470\.1 is older than .*; update it"):
        dali.DaliDecoder("cuda:0")


def test_no_memory_on_the_device_is_a_sentence_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    decoder = dali.DaliDecoder()
    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(DecoderError, match="no memory left to decode in: take a smaller batch_size"):
        decoder.new_output((1, 3, 48, 64))


def test_f32_one_image_in_n_is_compared(monkeypatch, as_on_gpu) -> None:
    encoded, maps = batch(13)
    decoder = as_on_gpu(check_every=5)
    compared: list[int] = []
    decode_into = decoder._exact.decode_into
    monkeypatch.setattr(
        decoder._exact,
        "decode_into",
        lambda data, *rest: compared.append(encoded.index(data)) or decode_into(data, *rest),
    )
    out = empty(13)
    for _ in range(2):
        assert decoder.decode_batch(encoded, maps, out) == [None] * 13
    assert len(compared) == 6  # of 26: the first, and every fifth after it


@pytest.mark.parametrize(
    "image",
    [
        natural(320, 180),
        np.random.default_rng(0).integers(0, 256, (180, 320, 3), np.uint8),
        np.random.default_rng(1).integers(0, 256, (22, 40, 3), np.uint8).repeat(8, 0).repeat(8, 1),
    ],
)
def test_f32_right_pixels_pass(image: np.ndarray, as_on_gpu: Callable[..., dali.DaliDecoder]) -> None:
    encoded = [encode(image) for _ in range(12)]
    size = image.shape[1], image.shape[0]
    maps = [AUGMENT.draw([size], seed=0, epoch=0, sample=number)[0] for number in range(12)]
    out = empty(12)
    assert as_on_gpu(check_every=1).decode_batch(encoded, maps, out) == [None] * 12


@pytest.mark.parametrize("wrong", [torch.zeros_like, lambda pictures: pictures.roll(1, 0)])
def test_f32_wrong_pixels_without_an_error_are_an_error(wrong, monkeypatch, as_on_gpu) -> None:
    right = torch.utils.dlpack.from_dlpack
    monkeypatch.setattr(torch.utils.dlpack, "from_dlpack", lambda pictures: wrong(right(pictures)))
    encoded, maps = batch(8, EVALUATION)
    out = empty(8)
    with pytest.raises(DecoderError, match=r"returned wrong pixels .* image 0 of a batch of 8 .* at least 30 dB"):
        as_on_gpu().decode_batch(encoded, maps, out)
    assert make_decoder("dali").decode_batch(encoded, maps, out) == [None] * 8  # which compares nothing on the CPU


def test_f33_closing_drops_the_pipelines_of_all_threads() -> None:
    decoder = dali.DaliDecoder()
    encoded, maps = batch(2, EVALUATION)
    out = empty(2)
    built: list[weakref.ref[dali.Pipeline]] = []

    def decode() -> None:
        assert decoder.decode_batch(encoded, maps, out) == [None] * 2
        built.extend(map(weakref.ref, decoder._local.state.pipelines.values()))

    with ThreadPoolExecutor(1) as pool:
        pool.submit(decode).result()
        decode()
        assert [pipeline() is not None for pipeline in built] == [True, True]
        decoder.close()
        gc.collect()
        assert [pipeline() is not None for pipeline in built] == [False, False]
    decode()


@pytest.mark.process
def test_f33_no_pipeline_is_left_when_the_interpreter_ends() -> None:
    code = """
import atexit
atexit.register(lambda: print("left", len(decoder._local.state.pipelines)))  # runs after what dali registers
import numpy as np, simplejpeg
from fuelrail.loaders.decode import make_decoder
from fuelrail.pipeline.transforms.image_map import ImageMap
decoder = make_decoder("dali")
image = simplejpeg.encode_jpeg(np.zeros((64, 64, 3), np.uint8))
decoder.decode_into(image, ImageMap.identity((64, 64)), np.zeros((3, 64, 64), np.uint8))
print("built", len(decoder._local.state.pipelines))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["built", "1", "left", "0"]


def test_a_lens_on_a_gpu_is_undone_on_the_cpu_and_it_is_logged_once(as_on_gpu, caplog) -> None:
    camera = ((200.0, 0.0, 160.0), (0.0, 200.0, 90.0), (0.0, 0.0, 1.0))
    lens = Lens("pinhole", (0.01, 0.0, 0.0, 0.0, 0.0), camera, camera)
    image_map = dataclasses.replace(ImageMap.identity((320, 180)).resize(64, 48), lens=lens)
    decoder = as_on_gpu()
    for _ in range(2):
        decoder.decode_into(encode(natural(320, 180)), image_map, np.empty((3, 48, 64), np.uint8))
    assert len(caplog.records) == 1
    assert "decodes images with a lens (undistort) or in CMYK on the CPU" in caplog.text


def test_f8_a_dali_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = InstalledDali("nvidia-dali-cuda120", "2.1.1", [], "12.4.0.76", "0.7.0")
    monkeypatch.setattr(dali_install, "installed_dali", lambda: found)
    with pytest.raises(
        ConfigError, match=r"2\.1\.1 is too old: 2\.2 or newer is needed; .*pip install 'fuelrail\[dali\]'"
    ):
        make_decoder("dali")


def test_bad_images_are_named_and_the_others_come() -> None:
    decoder = make_decoder("dali")
    encoded, maps = batch(12)
    expected = empty(12)
    decoder.decode_batch(encoded, maps, expected)
    damaged = bytearray(encoded[4])
    damaged[damaged.index(b"\xff\xc4") + 5] = 0xFF  # a Huffman table with more codes than fit
    encoded[1], encoded[4], encoded[8] = b"", bytes(damaged), encoded[8][:-300]
    maps[6] = ImageMap.identity((11, 12)).resize(64, 48)
    out = empty(12)
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


@pytest.mark.parametrize("restart", [0, 1])
@pytest.mark.parametrize("augment", [AUGMENT, AUGMENT.evaluation()])
@pytest.mark.parametrize("is_whole", [False, True])
def test_two_views_of_images_are_one_decode_and_equal_those_of_two(augment, restart, is_whole, monkeypatch, as_on_gpu):
    encoded = [encode(natural(320, 180, seed=n), restart_marker_rows=restart, quality=90) for n in range(4)]
    maps = [image_map for n in (0, 1) for image_map in augment.draw([(320, 180)] * 4, seed=7, epoch=0, sample=n)]
    if augment is not AUGMENT:
        maps = [dataclasses.replace(image_map) for image_map in maps]
    decoder = as_on_gpu(check_every=0) if is_whole else make_decoder("dali")
    runs = Runs(monkeypatch, lambda fed: None)
    both, alone = torch.zeros((2, 8, 3, 48, 64), dtype=torch.uint8)
    assert decoder.decode_batch(encoded * 2, maps, both) == [None] * 8
    assert sum(size for size in runs.sizes if size <= 4) == 4  # larger ones warm a pipeline up
    for first in (0, 4):
        decoder.decode_batch(encoded, maps[first : first + 4], alone[first : first + 4])
    # With rows cut out, the whole graph's places are rounded on another grid.
    assert (both.int() - alone.int()).abs().max() <= int(is_whole and restart)


def test_failed_runs_cost_no_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    build = dali.DaliDecoder._build
    monkeypatch.setattr(dali.DaliDecoder, "_build", lambda *arguments: built.append(arguments) or build(*arguments))
    decoder = make_decoder("dali")
    encoded, maps = batch(8, EVALUATION)
    expected, out = (empty(8) for _ in range(2))
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
    width, height = image_map.out_wh
    pictures = []
    for backend in ("dali", "turbo"):
        pictures.append(np.empty((3, height, width), np.uint8))
        make_decoder(backend).decode_into(photograph(), image_map, pictures[-1])
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
        decoder.decode_batch(encoded, maps, empty(2), "area")
