"""What a DALI decoder does about images, devices and runs that fail; its runs, threads and pipelines."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from fuelrail import Transforms
from fuelrail.loaders.decode import dali_install, make_decoder
from fuelrail.loaders.decode.dali_install import Engine, InstalledDali
from fuelrail.loaders.decode.protocol import MIN_LANES, DaliOptions, ImageFacts
from fuelrail.pipeline.errors import ConfigError, DecoderError, ImageError
from fuelrail.pipeline.transforms.image_map import ImageMap
from support.backends import HAS_DALI
from support.pictures import encode, natural

if not HAS_DALI:
    pytest.skip("NVIDIA DALI is not installed", allow_module_level=True)

from fuelrail.loaders.decode import dali
from support.dali_runs import AUGMENT, EVALUATION, Runs, as_on_gpu, batch, empty

__all__ = ["as_on_gpu"]


@pytest.mark.costly
def test_images_that_only_turbo_decodes_are_left_to_it_and_it_is_logged_once(
    monkeypatch, caplog
) -> None:
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
    good = [index for index in range(16) if index != 5]
    assert torch.equal(out[good], expected[good])
    assert [record.getMessage() for record in caplog.records] == [
        "DALI fails on images that libjpeg-turbo decodes; those are left to it: Failed to decode sample #0 :"
    ]


BAD_IMAGE = "Error in an operator, encountered:\n\nFailed to decode sample #0 : \n"


@pytest.mark.parametrize(
    ("text", "sizes", "says"),
    [
        (
            "CUDA runtime API error cudaErrorIllegalAddress (700): an illegal memory access",
            [16],
            "turbo",
        ),
        (
            "Error in an operator, encountered: CUDA allocation failed",
            [16],
            "turbo",
        ),
        (
            "Error in an operator, encountered: nvImageCodec failure: '#8'",
            [16],
            "turbo",
        ),
        ("no decoder on this device", [16], "turbo"),
        (
            BAD_IMAGE,
            [16, 8, 4, 2, 1, 1],
            "not because of an image",
        ),  # every image is called bad
    ],
)
def test_what_is_not_about_an_image_is_raised_at_once(text, sizes, says, monkeypatch) -> None:
    def fail(fed: list[np.ndarray]) -> None:
        raise RuntimeError(text)

    runs = Runs(monkeypatch, fail)
    encoded, maps = batch(16, EVALUATION)
    decoder = make_decoder("dali")
    with pytest.raises(DecoderError, match=rf"decoder='dali': .*{says}"):
        decoder.decode_batch(encoded, maps, empty(16))
    assert runs.sizes == sizes, "the batch was halved"
    assert decoder.num_refused == 0


@pytest.mark.costly
def test_the_first_run_of_every_pipeline_on_a_gpu_is_a_full_batch(monkeypatch, as_on_gpu) -> None:
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


def test_an_image_that_comes_again_is_decoded_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = Runs(monkeypatch, lambda fed: None)
    encoded, maps = batch(6, EVALUATION)
    damaged = encode(natural(320, 180))[:-300]
    files = [*encoded, damaged] * 2
    repeated_maps = [*maps, maps[0]] * 2
    out = empty(14)
    errors = make_decoder("dali").decode_batch(files, repeated_maps, out)
    assert runs.sizes == [6]
    assert [index for index, error in enumerate(errors) if error is not None] == [6, 13]
    assert torch.equal(out[:6], out[7:13])
    assert (out[[6, 13]] == 7).all()
    # The same file under another map is another image.
    make_decoder("dali").decode_batch([encoded[0]] * 2, [maps[0], batch(1)[1][0]], out[:2])
    assert sum(runs.sizes[1:]) == 2


@pytest.mark.costly
def test_outputs_are_held_until_one_wait_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = []
    wait = dali.ThreadState.wait
    monkeypatch.setattr(
        dali.ThreadState,
        "wait",
        lambda state: held.append(len(state._held)) or wait(state),
    )
    encoded, maps = batch(dali.MAX_BATCH + 5, EVALUATION)
    decoder = make_decoder("dali")
    decoder.decode_batch(encoded, maps, empty(len(encoded)))
    assert held == [2], "two runs"
    assert decoder._local.state._held == []


@pytest.mark.parametrize(
    ("engine", "threads"),
    [("hardware", 4), ("CUDA", 16 // MIN_LANES), (None, 4)],
)
def test_threads_of_a_pipeline_are_few(
    engine: str | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: engine is not None)
    monkeypatch.setattr(
        dali_install,
        "gpu_engine",
        lambda index: Engine(engine, "as set by the test"),
    )
    decoder = dali.DaliDecoder("cuda:0", num_threads=16)
    assert decoder._num_threads == threads
    assert dali.DaliDecoder("cpu", num_threads=16)._num_threads == 16


def test_the_memory_of_a_thread_is_that_of_the_largest_image() -> None:
    options = dali.DaliDecoder("cuda:0", facts=ImageFacts((1600, 900), 1.0))._gpu_options()
    assert options["device_memory_padding"] == options["host_memory_padding"] == 1600 * 900 * 3 * 2
    assert "device_memory_padding" not in dali.DaliDecoder("cuda:0")._gpu_options()


def test_a_run_takes_memory_for_the_images_of_a_batch_only(monkeypatch, as_on_gpu) -> None:
    assert dali.DaliDecoder(facts=ImageFacts((1600, 900), 1.0, 12))._max_run == 12
    assert dali.DaliDecoder(facts=ImageFacts((1600, 900), 1.0, 500))._max_run == dali.MAX_BATCH
    runs = Runs(monkeypatch, lambda fed: None)
    decoder = as_on_gpu(check_every=0)
    decoder._max_run = 5
    encoded, maps = batch(7, EVALUATION)
    assert decoder.decode_batch(encoded, maps, empty(7)) == [None] * 7
    assert runs.sizes == [5, 5, 2]  # the first is the warm-up


def test_a_share_is_a_public_option() -> None:
    transforms = Transforms(dali={"hardware_share": 0.5, "check_every": 10})
    decoder = make_decoder("dali", "cuda:0", dali=transforms.dali)
    assert decoder._gpu_options()["hw_decoder_load"] == 0.5
    assert decoder._check_every == 10
    assert (
        dali.DaliDecoder("cuda:0")._check_every,
        dali.DaliDecoder("cpu")._check_every,
    ) == (
        1000,
        0,
    )  # f32
    for wrong in ({"hardware_share": 1.5}, {"check_every": -1}):
        with pytest.raises(ConfigError):
            DaliOptions(**wrong)


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (
            Engine("CPU", "no nvJPEG", "install it"),
            "decodes on the CPU: no nvJPEG; install it",
        ),
        (
            Engine("CUDA", "no libnvcuvid", "set video"),
            "decodes on the GPU's CUDA cores: no libnvcuvid; set video",
        ),
        (Engine("CUDA", "it has no engines"), None),
        (Engine("hardware", "engines", "a newer one is better"), None),
    ],
)
def test_another_engine_than_expected_is_logged(engine, said, monkeypatch, caplog) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dali_install, "gpu_engine", lambda index: engine)
    dali.DaliDecoder("cuda:0")
    assert [record.getMessage() for record in caplog.records] == [
        f"decoder='dali' on cuda:0 {said}"
    ] * bool(said)


def test_a_driver_that_is_too_old_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dali_install, "driver_version", lambda: "470.1")
    with pytest.raises(
        ConfigError,
        match=r"on cuda:0: the NVIDIA driver 470\.1 is older than .*; update it",
    ):
        dali.DaliDecoder("cuda:0")


def test_no_memory_on_the_device_is_a_sentence_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    decoder = dali.DaliDecoder()
    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(
        DecoderError,
        match="no memory left to decode in: take a smaller batch_size",
    ):
        decoder.new_output((1, 3, 48, 64))


@pytest.mark.costly
def test_one_image_in_n_is_compared(monkeypatch, as_on_gpu) -> None:
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
def test_right_pixels_pass(image, as_on_gpu) -> None:
    encoded = [encode(image) for _ in range(12)]
    size = image.shape[1], image.shape[0]
    maps = [AUGMENT.draw([size], seed=0, epoch=0, sample=number)[0] for number in range(12)]
    out = empty(12)
    assert as_on_gpu(check_every=1).decode_batch(encoded, maps, out) == [None] * 12


@pytest.mark.parametrize("wrong", [torch.zeros_like, lambda pictures: pictures.roll(1, 0)])
def test_wrong_pixels_without_an_error_are_an_error(wrong, monkeypatch, as_on_gpu) -> None:
    right = torch.utils.dlpack.from_dlpack
    monkeypatch.setattr(
        torch.utils.dlpack,
        "from_dlpack",
        lambda pictures: wrong(right(pictures)),
    )
    encoded, maps = batch(8, EVALUATION)
    out = empty(8)
    with pytest.raises(
        DecoderError,
        match=r"returned wrong pixels .* image 0 of a batch of 8 .* at least 30 dB",
    ):
        as_on_gpu().decode_batch(encoded, maps, out)
    assert (
        make_decoder("dali").decode_batch(encoded, maps, out) == [None] * 8
    )  # which compares nothing on the CPU


def test_closing_drops_the_pipelines_of_all_threads() -> None:
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
def test_no_pipeline_is_left_when_the_interpreter_ends() -> None:
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


def test_a_dali_that_is_too_old_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed = InstalledDali(
        package="nvidia-dali-cuda120",
        version="2.1.1",
        missing=[],
        nvjpeg="12.4.0.76",
        nvimgcodec="0.7.0",
    )
    monkeypatch.setattr(dali_install, "installed_dali", lambda: installed)
    with pytest.raises(
        ConfigError,
        match=r"2\.1\.1 is too old: 2\.2 or newer is needed; .*pip install -e '\.\[dali\]' in a checkout",
    ):
        make_decoder("dali")


def test_bad_images_are_named_and_the_others_come() -> None:
    decoder = make_decoder("dali")
    encoded, maps = batch(12)
    expected = empty(12)
    decoder.decode_batch(encoded, maps, expected)
    damaged = bytearray(encoded[4])
    damaged[damaged.index(b"\xff\xc4") + 5] = 0xFF  # a Huffman table with more codes than fit
    encoded[1] = b""
    encoded[4] = bytes(damaged)
    encoded[8] = encoded[8][:-300]
    maps[6] = ImageMap.identity((11, 12)).resize(64, 48)
    out = empty(12)
    errors = decoder.decode_batch(encoded, maps, out)
    bad = [1, 4, 6, 8]
    assert [index for index, error in enumerate(errors) if isinstance(error, ImageError)] == bad
    assert (out[bad] == 7).all()
    good = [index for index in range(12) if index not in bad]
    assert torch.equal(out[good], expected[good]), (
        "what becomes of an image must not depend on its neighbours"
    )
    second_out = torch.empty_like(expected)
    encoded, maps = batch(12)
    assert decoder.decode_batch(encoded, maps, second_out) == [None] * 12
    assert torch.equal(second_out, expected)


def test_failed_runs_cost_no_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    build = dali.DaliDecoder._build
    monkeypatch.setattr(
        dali.DaliDecoder,
        "_build",
        lambda *arguments: built.append(arguments) or build(*arguments),
    )
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


def test_a_wrong_output_tensor_is_the_callers_mistake() -> None:
    decoder = make_decoder("dali")
    encoded, maps = batch(2)
    for wrong in (
        torch.empty((2, 3, 48, 65), dtype=torch.uint8),
        torch.empty((2, 3, 48, 64)),
        torch.empty((2, 3, 48, 64), dtype=torch.uint8, device="meta"),
    ):
        with pytest.raises(
            ConfigError,
            match=r"out must be a uint8 tensor on cpu of shape \[2, 3, height, width\]",
        ):
            decoder.decode_batch(encoded, maps, wrong)
    with pytest.raises(ConfigError, match="interpolation='area' must be one of"):
        decoder.decode_batch(encoded, maps, empty(2), "area")
