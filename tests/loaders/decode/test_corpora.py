"""Public corpora of odd and broken files: each is decoded right or refused with an ImageError, by every backend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from PIL import Image

from fuelrail.loaders.decode import make_decoder
from fuelrail.pipeline.errors import ImageError
from fuelrail.pipeline.sample.image_header import probe
from fuelrail.pipeline.transforms.image_map import ImageMap
from support.backends import BACKENDS
from support.decode_fuzz import fuzz
from support.pictures import encode, natural, psnr_db
from support.shared_data import shared_data

if TYPE_CHECKING:
    from fuelrail.loaders.decode.protocol import ImageDecoder

pytestmark = pytest.mark.real

NUM_DECODED = {
    "jpeg-afl": 3,
    "jpeg-image-rs": 48,
    "jpeg-pillow": 33,
    "jpeg-libjpeg-turbo": 2,
}
CORPORA = tuple(NUM_DECODED)


def pictures(corpus: str, *suffixes: str) -> list[Path]:
    files = sorted(
        p
        for p in shared_data(corpus).rglob("*")
        if p.suffix in (suffixes or (".jpg", ".png", ".mpo"))
    )
    assert files
    return files


def decode_or_refuse(decoder: ImageDecoder, encoded: bytes) -> np.ndarray | str:
    """The picture as stored, or why not; nothing else may happen."""
    try:
        info = probe(encoded)
    except ImageError as error:
        return str(error)
    out = np.full((3, info.height, info.width), 77, np.uint8)
    try:
        decoder.decode_into(encoded, ImageMap.identity((info.width, info.height)), out)
    except ImageError as error:
        assert (out == 77).all()
        assert len(str(error)) > 20
        return str(error)
    small = np.empty((3, 24, 32), np.uint8)
    decoder.decode_into(
        encoded,
        ImageMap.identity((info.width, info.height)).resize(32, 24),
        small,
    )
    return out


def outcome(results: dict[str, np.ndarray | str]) -> str:
    """What became of a file: decoded; refused, as what; or by which backend only."""

    def describe(result: np.ndarray | str) -> str:
        if isinstance(result, np.ndarray):
            return "decoded"
        kinds = (
            "cannot be decoded",
            "header",
            "is not supported",
            "git-LFS",
            "was cut",
            "empty",
        )
        return "refused: " + next((kind for kind in kinds if kind in result), "not an image")

    descriptions = {backend: describe(result) for backend, result in results.items()}
    first = descriptions["turbo"]
    return (
        first
        if set(descriptions.values()) == {first}
        else "; ".join(f"{name} {description}" for name, description in descriptions.items())
    )


@pytest.mark.parametrize("corpus", [*CORPORA, "lfs-pointers"])
def test_every_file_has_its_stated_outcome(corpus: str) -> None:
    stated = json.loads(Path(__file__).with_name("corpus_outcomes.json").read_text())[corpus]
    decoders = {backend: make_decoder(backend) for backend in ("turbo", "pillow")}
    root = shared_data(corpus)
    outcomes = {}
    for file in pictures(corpus):
        encoded = file.read_bytes()
        results = {
            backend: decode_or_refuse(decoder, encoded) for backend, decoder in decoders.items()
        }
        outcomes[str(file.relative_to(root))] = outcome(results)
    # The file lists those with another outcome.
    decoded = [file for file, description in outcomes.items() if description == "decoded"]
    assert len(decoded) == NUM_DECODED.get(corpus, 0)
    assert outcomes == {
        **dict.fromkeys(decoded, "decoded"),
        **{file: description for description in stated for file in stated[description]},
    }


@pytest.mark.parametrize("corpus", CORPORA)
def test_backends_agree_on_what_both_take(corpus: str) -> None:
    turbo = make_decoder("turbo")
    pillow = make_decoder("pillow")
    num_compared = 0
    for file in pictures(corpus):
        encoded = file.read_bytes()
        a = decode_or_refuse(turbo, encoded)
        b = decode_or_refuse(pillow, encoded)
        if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
            num_compared += 1
            assert np.abs(a.astype(int) - b).max() <= 3, file.name
        assert not (isinstance(a, np.ndarray) and isinstance(b, str)), (
            f"{file.name}: only pillow refuses: {b}"
        )
    assert num_compared >= 2


REFUSED = {  # libjpeg would only warn
    "mjpeg.jpg": "extraneous bytes",
    "partial_progressive.jpg": "premature end",
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_reference_pictures_are_met(backend: str) -> None:
    # JPEGs with the expected picture beside them as PNG.
    decoder = make_decoder(backend)
    met = []
    for file in pictures("jpeg-image-rs", ".jpg"):
        expected = file.with_suffix(".png")
        if not expected.exists():
            continue
        got = decode_or_refuse(decoder, file.read_bytes())
        if isinstance(got, str):
            if backend != "pillow" and file.name == "jpg-cmyk-2.jpg":  # DALI's CMYK is turbo's
                assert "decoder='pillow' takes it" in got
            else:
                assert REFUSED[file.name] in got, file.name
            continue
        with Image.open(expected) as image:
            # 16-bit gray is scaled down by the high byte.
            wide = image.mode.startswith("I")
            pixels = np.asarray(image) // 257 if wide else np.asarray(image.convert("RGB"))
        pixels = np.atleast_3d(pixels).astype(np.uint8)
        pixels = np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else pixels
        # CMYK to RGB has no standard without a colour profile.
        floor = 20.0 if "cmyk" in file.name else 33.0
        assert psnr_db(got, pixels.transpose(2, 0, 1)) > floor, file.name
        met.append(file.name)
    assert len(met) >= 17


def test_libjpeg_turbos_own_test_picture() -> None:
    folder = shared_data("jpeg-libjpeg-turbo")
    with Image.open(folder / "testorig.ppm") as image:
        expected = np.asarray(image).transpose(2, 0, 1)
    for backend in ("turbo", "pillow"):
        got = decode_or_refuse(make_decoder(backend), (folder / "testorig.jpg").read_bytes())
        assert psnr_db(got, expected) > 30.0
    assert "12-bit" in decode_or_refuse(
        make_decoder("turbo"), (folder / "monkey12.jpg").read_bytes()
    )
    assert "arithmetic" in decode_or_refuse(
        make_decoder("turbo"), (folder / "testimgari.jpg").read_bytes()
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_git_lfs_pointers_are_named(backend: str) -> None:
    for file in pictures("lfs-pointers", ".jpg")[:5]:
        assert "git lfs pull" in decode_or_refuse(make_decoder(backend), file.read_bytes())


@pytest.mark.parametrize("backend", BACKENDS)
def test_real_png_cameras(backend: str) -> None:
    for file in pictures("kitti-tracking", ".png")[:2]:
        got = decode_or_refuse(make_decoder(backend), file.read_bytes())
        with Image.open(file) as image:
            assert np.array_equal(got, np.asarray(image.convert("RGB")).transpose(2, 0, 1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_mutated_files_never_hurt(backend: str) -> None:
    # A small share: 10,000 of real images are in `bench/results/decode_fuzz.json`.
    picture = natural(320, 180)
    originals = [
        encode(picture, subsampling="4:2:0", quality=90),
        encode(picture, progressive=True),
        encode(picture, restart_marker_rows=1),
        encode(picture[..., 0]),
        encode(picture[:60, :80], "png"),
    ]
    tally = fuzz(make_decoder(backend), originals, range(200), 20)
    assert tally.decoded + tally.refused_by_header + tally.refused_by_decoder == 200
    # DALI takes damaged pixel data at which libjpeg warns, which the others refuse.
    assert 0 < tally.decoded < (150 if backend == "dali" else 100)
    assert tally.refused_by_header > 15
    assert tally.grown_mib < 1024, (
        "a lie about the size may cost one picture of the limit, not more"
    )
