"""JPEGs prepared with restart markers: lossless, the same bytes every time, and cut by the loader."""

from __future__ import annotations

import importlib.util
import io
import shutil
import subprocess

import cv2
import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image

from fuelrail import ImageAugment
from fuelrail.loaders.decode import make_decoder
from fuelrail.loaders.decode.splice import splice_rows
from fuelrail.loaders.storage.reader import SampleReader
from fuelrail.pipeline.errors import (
    ConfigError,
    DatasetExistsError,
    ImageError,
    SourceError,
)
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.native import CameraJpeg, Scratch, load
from fuelrail.pipeline.sample.image_header import probe
from fuelrail.pipeline.transforms.image_map import ImageMap
from fuelrail.sharding.write import images
from support.loaders import make_loader
from support.pictures import encode, natural
from support.sharding import digests, shard_nuscenes

if isinstance(load(), str):
    pytest.skip(f"no native decoder: {load()}", allow_module_level=True)


@pytest.fixture(scope="module")
def source(dataroot):
    return dataroot("a3 b3")


HAS_DALI = importlib.util.find_spec("nvidia") is not None and (
    importlib.util.find_spec("nvidia.dali") is not None
)


def by_every_library(encoded: bytes) -> list[np.ndarray]:
    """The pixels of a file as Pillow, libjpeg-turbo and OpenCV decode it, and DALI where it is installed."""
    with Image.open(io.BytesIO(encoded)) as image:
        pictures = [np.asarray(image)]
    data = np.frombuffer(encoded, np.uint8)
    pictures.append(cv2.imdecode(data, cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION))
    pictures.append(simplejpeg.decode_jpeg(encoded, "RGB", strict=True))
    if HAS_DALI:
        width, height = pictures[0].shape[1::-1]
        out = np.empty((3, height, width), np.uint8)
        make_decoder("dali").decode_into(encoded, ImageMap.identity((width, height)), out)
        pictures.append(out)
    return pictures


def rewrite(encoded: bytes) -> bytes | None:
    native = load()
    assert isinstance(native, CameraJpeg)
    return native.add_restarts(encoded, Scratch())


EXIF = b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0\0\0"
NOISE = np.random.default_rng(4).integers(0, 256, (97, 131, 3), np.uint8)
PICTURES = {
    "photograph": natural(325, 411),
    "noise": NOISE,
    "gray": NOISE[..., 0],
    "one row": natural(333, 12),
    "flat": np.full((90, 100, 3), 77, np.uint8),
    "one pixel": np.zeros((1, 1, 3), np.uint8),
}
FILES = {
    "4:2:0": {"subsampling": "4:2:0"},
    "4:2:2": {"subsampling": "4:2:2"},
    "4:4:4": {"subsampling": "4:4:4"},
    "best": {"subsampling": "4:2:0", "quality": 100},
    "worst": {"quality": 1},
    "own tables": {"quality": 60, "optimize": True},
    "a marker in 3 MCUs": {"restart_marker_blocks": 3},
    "a marker in 2 rows": {"restart_marker_rows": 2, "optimize": True},
}


@pytest.mark.parametrize("picture", PICTURES)
@pytest.mark.parametrize("kind", FILES)
def test_every_library_decodes_the_same_pixels_and_rows_can_be_cut(kind, picture) -> None:
    encoded = encode(PICTURES[picture], exif=EXIF, comment=b"by hand", **FILES[kind])
    rewritten = rewrite(encoded)
    assert rewritten is not None
    assert all(map(np.array_equal, by_every_library(encoded), by_every_library(rewritten)))
    info = probe(rewritten)
    assert info.restart_interval > 0
    assert EXIF in rewritten
    assert b"by hand" in rewritten
    assert rewrite(rewritten) == rewritten
    if info.height > 64:
        assert splice_rows(rewritten, info, info.height - 9, info.height) is not None


needs_jpegtran = pytest.mark.skipif(
    shutil.which("jpegtran") is None, reason="jpegtran is not installed"
)


def jpegtran(encoded: bytes, *options: str) -> bytes:
    """The file as libjpeg-turbo rewrites it losslessly."""
    command = ["jpegtran", "-restart", "1", "-copy", "all", *options]
    return subprocess.run(command, input=encoded, capture_output=True, check=True).stdout


@pytest.mark.process
@needs_jpegtran
@pytest.mark.parametrize("picture", PICTURES)
@pytest.mark.parametrize("kind", FILES)
def test_coefficients_are_those_of_jpegtran(kind, picture) -> None:
    """Files of the same coefficients and headers are the same with tables made for them."""
    encoded = encode(PICTURES[picture], exif=EXIF, comment=b"by hand", **FILES[kind])
    rewritten = rewrite(encoded)
    assert rewritten is not None
    assert jpegtran(rewritten, "-optimize") == jpegtran(encoded, "-optimize")


@pytest.mark.process
@needs_jpegtran
@pytest.mark.parametrize("picture", PICTURES)
@pytest.mark.parametrize("kind", [kind for kind in FILES if "optimize" not in FILES[kind]])
def test_bytes_are_those_of_jpegtran_where_tables_are_the_standard_ones(kind, picture) -> None:
    encoded = encode(PICTURES[picture], exif=EXIF, comment=b"by hand", **FILES[kind])
    rewritten = rewrite(encoded)
    assert rewritten is not None
    if (
        PICTURES[picture].ndim == 2
    ):  # jpegtran writes 1x1 for the sampling factors of a lone component
        factors = probe(rewritten).frame_at + 11
        rewritten = rewritten[:factors] + b"\x11" + rewritten[factors + 1 :]
    assert rewritten == jpegtran(encoded)


def dc_tables(encoded: bytes) -> list[tuple[list[int], bytes]]:
    """The DC tables of a file: codes by their length, and sizes of differences."""
    tables = []
    for part in encoded[: probe(encoded).scan_at].split(b"\xff\xc4")[1:]:
        if part[2] >> 4 == 0:
            counts = list(part[3:19])
            tables.append((counts, part[19 : 19 + sum(counts)]))
    return tables


@pytest.mark.parametrize("picture", ["photograph", "flat", "one pixel"])
def test_dc_tables_get_codes_for_all_sizes_and_keep_their_own(picture) -> None:
    encoded = encode(PICTURES[picture], optimize=True)
    rewritten = rewrite(encoded)
    assert rewritten is not None
    tables = dc_tables(encoded)
    for (counts, sizes), (all_counts, all_sizes) in zip(tables, dc_tables(rewritten), strict=True):
        assert len(sizes) < 12
        assert all_sizes[: len(sizes)] == sizes
        assert sorted(all_sizes) == list(range(12))
        num_codes = sum(count << (15 - index) for index, count in enumerate(all_counts))
        assert num_codes < 1 << 16  # that of all ones is none
        longest = max(index for index in range(16) if counts[index])
        assert all_counts[:longest] == counts[:longest]


def with_dc_table(encoded: bytes, counts: list[int], sizes: bytes) -> bytes:
    """The file with another first table, and data that are no longer its own."""
    table = encoded.index(b"\xff\xc4")
    length = 2 + int.from_bytes(encoded[table + 2 : table + 4], "big")
    segment = b"\xff\xc4" + (19 + len(sizes)).to_bytes(2, "big") + b"\0" + bytes(counts) + sizes
    return encoded[:table] + segment + encoded[table + length :]


def test_four_inks_stay() -> None:
    with io.BytesIO() as file:
        Image.fromarray(NOISE).convert("CMYK").save(file, "jpeg", quality=90)
        encoded = file.getvalue()
    rewritten = rewrite(encoded)
    assert rewritten is not None
    pixels = [simplejpeg.decode_jpeg(data, "CMYK") for data in (encoded, rewritten)]
    assert np.array_equal(*pixels)


def with_ones_as_a_code(encoded: bytes) -> bytes:
    """The file with a table whose last code is all ones, which T.81 forbids and libjpeg takes."""
    start = encoded.index(b"\xff\xc4") + 5
    num_symbols = sum(encoded[start : start + 16])
    length = max(i for i in range(16) if encoded[start + i])
    used = sum(encoded[start + i] << (15 - i) for i in range(16))
    more = ((1 << 16) - used) >> (15 - length)
    altered = bytearray(encoded)
    altered[start + length] += more
    end = start + 16 + num_symbols
    altered[end:end] = bytes(range(12, 12 + more))
    altered[start - 2] += more
    return bytes(altered)


@pytest.mark.parametrize(
    "encoded",
    [
        encode(natural(64, 48), progressive=True),
        with_ones_as_a_code(encode(natural(64, 48))),
        encode(natural(64, 48))[:-2] + b"\x12\x34\xff\xd9",
        encode(natural(64, 48)).replace(b"\xff\x00", b"\xff\xff\x00"),
        with_dc_table(encode(natural(64, 48)), [1] * 16, bytes(16)),
        with_dc_table(encode(natural(64, 48)), [0] * 7 + [255] + [0] * 8, bytes(255)),
    ],
    ids=[
        "progressive",
        "a code of all ones",
        "stray bytes",
        "fill bytes before no marker",
        "a DC table without longer codes",
        "a DC table of too many codes",
    ],
)
def test_what_is_not_plain_baseline_is_left_as_it_is(encoded: bytes) -> None:
    assert images.with_restart_rows(encoded) is encoded


def test_what_follows_the_image_is_dropped() -> None:
    encoded = encode(natural(64, 48))
    assert rewrite(encoded + b"a second picture") == rewrite(encoded)


def test_fill_bytes_before_markers_are_passed_over() -> None:
    encoded = encode(natural(64, 48), restart_marker_rows=1)
    filled = encoded.replace(b"\xff\xd0", b"\xff\xff\xff\xd0").replace(b"\xff\xdb", b"\xff\xff\xdb")
    assert filled != encoded
    assert rewrite(filled) == rewrite(encoded)


def damaged(fault: str) -> bytes:
    encoded = bytearray(encode(natural(64, 48), restart_marker_rows=1))
    scan = probe(bytes(encoded)).scan_at
    first_marker = encoded.index(b"\xff\xd0", scan)
    match fault:
        case "header":
            encoded[encoded.index(b"\xff\xc4") + 5] = 0xFF
        case "cut":
            del encoded[scan + 40 :]
        case "code":
            encoded[scan + 8 : scan + 12] = b"\xfe\xff\0\xff\0"
        case "marker":
            encoded[first_marker + 1] = 0xD3
    return bytes(encoded)


FAULTS = {
    "header": "its header is broken",
    "cut": "its data end before the image does",
    "code": "its data hold a code that its Huffman tables do not",
    "marker": "a restart marker or the end marker is missing, or not where it should be",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_damaged_files_are_refused(fault: str) -> None:
    with pytest.raises(ImageError, match=f"JPEG is damaged: {FAULTS[fault]}"):
        images.with_restart_rows(damaged(fault))


def test_a_dc_step_that_no_code_has_is_refused() -> None:
    """Of two rows the second begins at twice the largest level, in steps that each have a code."""
    gray = encode(np.full((16, 16), 128, np.uint8), quality=50)
    encoded = with_dc_table(gray, [0, 0, 2] + [0] * 13, b"\0\x0b")
    scan = probe(encoded).scan_at
    steps = ("001" + "1" * 11 + "1010") * 4
    steps += "1" * (-len(steps) % 8)
    data = int(steps, 2).to_bytes(len(steps) // 8, "big").replace(b"\xff", b"\xff\0")
    with pytest.raises(ImageError, match="coefficients that no 8-bit image has"):
        images.with_restart_rows(encoded[:scan] + data + b"\xff\xd9")


def test_without_the_compiled_code_the_run_does_not_begin(
    source, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "load", lambda: "it was not built: install a C compiler")
    with pytest.raises(ConfigError, match=r"jpeg=restart needs .*: install a C compiler"):
        shard_nuscenes(source.root, tmp_path / "out", jpeg="restart")
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def datasets(source, sharded):
    return sharded(source), sharded(source, jpeg="restart")


@pytest.mark.costly
def test_datasets_hold_the_same_pixels_and_the_same_bytes_each_time(
    source, datasets, tmp_path
) -> None:
    shard_nuscenes(source.root, tmp_path / "three", num_workers=3, jpeg="restart")
    assert digests(datasets[1]) == digests(tmp_path / "three")
    plain, prepared = (SampleReader(open_dataset(out)) for out in datasets)
    for row in range(6):
        a = plain.sample(row)
        b = prepared.sample(row)
        assert a.key == b.key
        for channel, encoded in a.images.items():
            assert probe(b.images[channel]).restart_interval > 0
            pixels = [
                np.asarray(Image.open(io.BytesIO(bytes(data))))
                for data in (encoded, b.images[channel])
            ]
            assert np.array_equal(*pixels)
    with pytest.raises(DatasetExistsError, match="jpeg"):
        shard_nuscenes(source.root, datasets[0], jpeg="restart")
    recipe = open_dataset(datasets[1]).manifest.provenance["recipe"]
    assert recipe["jpegtran"] == "fuelrail 2"


@pytest.mark.costly
def test_loaders_give_the_same_batches(datasets) -> None:
    image = ImageAugment(height=24, width=80, train=True, resize_range=(0.5, 0.9), flip_prob=0.5)
    loaders = [make_loader(out, 1, image=image, seed=1, num_workers=1) for out in datasets]
    for a, b in zip(*loaders, strict=True):
        assert a["sample_key"] == b["sample_key"]
        assert torch.equal(a["img"], b["img"])


def test_a_dataset_of_another_writer_is_not_continued(
    source, datasets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "RESTART_WRITER", "fuelrail 3")
    says = "writer of restart markers.*fuelrail 2.*fuelrail 3"
    with pytest.raises(DatasetExistsError, match=says):
        shard_nuscenes(source.root, datasets[1], jpeg="restart")


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_damaged_picture_is_named(source, tmp_path, num_workers) -> None:
    root = shutil.copytree(source.root, tmp_path / "source")
    victim = min(root.rglob("*.jpg"))
    data = bytearray(victim.read_bytes())
    position = data.index(b"\xff\xc4") + 5
    data[position] = 0xFF  # a Huffman table with more codes than fit
    victim.write_bytes(data)
    with pytest.raises(SourceError, match=f"{victim.name}.*JPEG is damaged: its header"):
        shard_nuscenes(root, tmp_path / "out", num_workers=num_workers, jpeg="restart")
