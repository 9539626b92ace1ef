from __future__ import annotations

import cv2
import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st

from fuelrail.loaders.decode import dali_jobs, make_decoder, turbo
from fuelrail.loaders.decode.dali_jobs import prepare
from fuelrail.loaders.decode.splice import RowsWanted, splice_batch, splice_rows
from fuelrail.pipeline.errors import ImageError
from fuelrail.pipeline.native import Scratch
from fuelrail.pipeline.native import load as load_native
from fuelrail.pipeline.sample.image_header import probe
from fuelrail.pipeline.transforms.image import ImageAugment
from fuelrail.pipeline.transforms.image_map import ImageMap
from support.image_maps import ALL_MAPS, NUSCENES_WH
from support.pictures import encode, natural, open_with_pillow, psnr_db
from support.shared_data import shared_data

SUBSAMPLINGS = ("4:4:4", "4:2:2", "4:2:0", "4:4:0", "4:1:1", "gray")
SAMPLING_FACTORS = {"4:4:0": 0x121111, "4:1:1": 0x411111}


def with_restarts(width: int, height: int, subsampling: str = "4:2:0", **options) -> bytes:
    picture = natural(width, height)
    if subsampling == "gray":
        return encode(picture[..., 0], restart_marker_rows=1, **options)
    if subsampling in SAMPLING_FACTORS:  # which Pillow does not write
        mcu_width = 8 if subsampling == "4:4:0" else 32
        parameters = (
            *(cv2.IMWRITE_JPEG_SAMPLING_FACTOR, SAMPLING_FACTORS[subsampling]),
            *(cv2.IMWRITE_JPEG_RST_INTERVAL, -(-width // mcu_width)),
        )
        return cv2.imencode(".jpg", picture, parameters)[1].tobytes()
    return encode(picture, subsampling=subsampling, restart_marker_rows=1, **options)


@given(
    wh=st.tuples(st.integers(1, 200), st.integers(60, 400)),
    subsampling=st.sampled_from(SUBSAMPLINGS),
    rows=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
@settings(max_examples=80)
def test_spliced_rows_are_the_rows_of_the_whole(wh, subsampling, rows) -> None:
    encoded = with_restarts(*wh, subsampling)
    full_image = open_with_pillow(encoded)
    top, bottom = sorted(int(share * (wh[1] - 1)) for share in rows)
    bottom += 1
    spliced = splice_rows(encoded, probe(encoded), top, bottom)
    if spliced is None:
        return
    assert spliced.top <= top
    assert spliced.top + spliced.height >= bottom
    info = probe(spliced.encoded)
    assert (info.width, info.height) == (wh[0], spliced.height)
    part = open_with_pillow(spliced.encoded)
    assert np.array_equal(part[top - spliced.top : bottom - spliced.top], full_image[top:bottom])


@pytest.mark.parametrize("subsampling", SUBSAMPLINGS)
def test_it_does_splice_and_saves_bytes(subsampling: str) -> None:
    encoded = with_restarts(320, 400, subsampling)
    spliced = splice_rows(encoded, probe(encoded), 250, 400)
    assert spliced is not None
    assert len(spliced.encoded) < 0.55 * len(encoded)
    middle = splice_rows(encoded, probe(encoded), 200, 260)
    assert middle is not None
    assert len(middle.encoded) < 0.45 * len(encoded)
    assert splice_rows(encoded, probe(encoded), 0, 400) is None


@pytest.mark.costly
@pytest.mark.parametrize("filter_", ["bilinear", "bicubic"])
@pytest.mark.parametrize("name", ALL_MAPS)
def test_the_backend_gives_the_same_bytes_as_without(
    name: str, filter_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    image_map = ALL_MAPS[name]
    if name == "sixteenth":
        pytest.skip("blocks that are averaged beyond 1/8 start at the first row that is there")
    encoded = with_restarts(*NUSCENES_WH, quality=90)
    width, height = image_map.out_wh
    first = np.empty((3, height, width), np.uint8)
    second = np.empty((3, height, width), np.uint8)
    decoder = turbo.TurboDecoder(native=False)
    decoder.decode_into(encoded, image_map, first, filter_)
    monkeypatch.setattr(turbo, "splice_rows", lambda *_, **__: None)
    decoder.decode_into(encoded, image_map, second, filter_)
    assert np.array_equal(first, second)


def test_the_backend_decodes_only_what_a_crop_sees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heights = []
    true_decode = simplejpeg.decode_jpeg

    def spy(*arguments, **options):
        picture = true_decode(*arguments, **options)
        heights.append(picture.shape[0])
        return picture

    monkeypatch.setattr(simplejpeg, "decode_jpeg", spy)
    (image_map,) = ImageAugment(height=256, width=704).draw(
        [NUSCENES_WH], seed=0, epoch=0, sample=0
    )
    out = np.empty((3, 256, 704), np.uint8)
    turbo.TurboDecoder(native=False).decode_into(
        with_restarts(*NUSCENES_WH, quality=90), image_map, out
    )
    # Seen: rows 318 to 900; 316 is in row 19 of MCUs.
    assert heights == [(900 - 19 * 16) // 2]


@pytest.mark.parametrize("factor", [1, 2, 4, 8])
@pytest.mark.parametrize("subsampling", SUBSAMPLINGS)
def test_scaled_decoding_of_the_rows_is_that_of_the_whole(subsampling: str, factor: int) -> None:
    encoded = with_restarts(325, 411, subsampling)
    full_image = simplejpeg.decode_jpeg(
        encoded,
        "RGB",
        min_height=-(-411 // factor),
        min_width=-(-325 // factor),
    )
    for top, bottom in ((200, 411), (161, 250), (0, 100), (176, 208)):
        spliced = splice_rows(encoded, info=probe(encoded), top=top, bottom=bottom, factor=factor)
        part = simplejpeg.decode_jpeg(
            spliced.encoded,
            "RGB",
            min_height=-(-spliced.height // factor),
            min_width=-(-325 // factor),
        )
        first = top // factor
        last = -(-bottom // factor)
        offset = spliced.top // factor
        assert np.array_equal(part[first - offset : last - offset], full_image[first:last])


def test_files_that_cannot_be_cut_are_left_alone() -> None:
    picture = natural(320, 400)
    for encoded in (
        encode(picture, subsampling="4:2:0"),  # no markers
        encode(picture, subsampling="4:2:0", restart_marker_rows=2),
        encode(picture, subsampling="4:2:0", restart_marker_blocks=7),
        encode(
            picture,
            subsampling="4:2:0",
            restart_marker_rows=1,
            progressive=True,
        ),
        encode(picture, "png"),
    ):
        assert splice_rows(encoded, probe(encoded), 300, 400) is None


def test_damaged_markers_are_left_to_the_decoder() -> None:
    encoded = with_restarts(320, 400)
    info = probe(encoded)
    marker = encoded.index(b"\xff\xd3", info.scan_at)
    swapped = encoded[: marker + 1] + b"\xd5" + encoded[marker + 2 :]
    missing = encoded[:marker] + encoded[marker + 2 :]
    cut = encoded[:-40]
    out = np.full((3, 50, 320), 9, np.uint8)
    bottom = ImageMap.identity((320, 400)).crop(0, 350, 320, 50)
    for damaged in (swapped, missing, cut):
        assert splice_rows(damaged, probe(damaged), 300, 400) is None
        with pytest.raises(ImageError):
            make_decoder("turbo").decode_into(damaged, bottom, out)
    assert (out == 9).all()


def test_views_can_be_spliced() -> None:
    encoded = with_restarts(320, 400)
    expected = splice_rows(encoded, probe(encoded), 300, 400)
    assert splice_rows(memoryview(b"x" + encoded)[1:], probe(encoded), 300, 400) == expected


def test_the_native_library_cuts_a_whole_batch_as_python_does() -> None:
    native = load_native()
    assert not isinstance(native, str), native
    requests = []
    for subsampling in SUBSAMPLINGS:
        for wh in ((320, 400), (325, 411), (17, 60)):
            encoded = with_restarts(*wh, subsampling)
            info = probe(encoded)
            requests += [
                RowsWanted(encoded, info, int(top * wh[1]), int(bottom * wh[1]))
                for top, bottom in (
                    (0.0, 1.0),
                    (0.6, 1.0),
                    (0.3, 0.6),
                    (0.0, 0.2),
                    (0.5, 0.5),
                )
            ]
    encoded = with_restarts(320, 400)
    info = probe(encoded)
    marker = encoded.index(b"\xff\xd3", info.scan_at)
    for damaged in (
        encoded[: marker + 1] + b"\xd5" + encoded[marker + 2 :],
        encoded[:marker] + encoded[marker + 2 :],
        encoded[:marker] + b"\xff\xd3" + encoded[marker:],
        encoded[:-40],
        encoded + bytes(32),
        encode(natural(320, 400), subsampling="4:2:0", restart_marker_rows=2),
        encode(natural(320, 400), "png"),
    ):
        requests.append(RowsWanted(damaged, probe(damaged), 300, 400))
    expected = [splice_rows(*rows) for rows in requests]
    assert sum(spliced is not None for spliced in expected) > 30
    scratch = Scratch()
    for library in (native, None):
        assert splice_batch(requests, scratch, library) == expected
    assert splice_batch([], scratch, native) == []


def test_a_batch_is_cut_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    native = load_native()
    assert not isinstance(native, str), native
    calls: list[int] = []
    cut_rows = native.cut_rows
    monkeypatch.setattr(
        native,
        "cut_rows",
        lambda table: calls.append(len(table)) or cut_rows(table),
    )
    encoded = [with_restarts(*NUSCENES_WH, quality=90)] * 1 + [encode(natural(*NUSCENES_WH))]
    maps = [
        ImageAugment(height=256, width=704).draw([NUSCENES_WH], seed=0, epoch=0, sample=n)[0]
        for n in range(8)
    ]
    prepared = prepare(
        [bytes(bytearray(encoded[n % 2])) for n in range(8)],
        maps,
        Scratch(),
        native,
    )
    assert calls == [4]
    assert [probe(job.encoded).height < 700 for job in prepared.jobs] == [
        True,
        False,
    ] * 4


@pytest.mark.real
def test_real_pictures_with_restart_markers() -> None:
    native = load_native()
    if isinstance(native, str):
        pytest.skip(f"no native decoder: {native}")
    file = min(shared_data("nuscenes-mini").glob("samples/CAM_FRONT/*.jpg"))
    plain = file.read_bytes()
    prepared = native.add_restarts(plain, Scratch())
    assert prepared is not None
    assert len(prepared) < 1.002 * len(plain)
    decoder = make_decoder("turbo")
    for sample in range(5):
        augment = ImageAugment(
            height=256,
            width=704,
            train=True,
            resize_range=(0.38, 0.55),
            rotate_deg=(-5, 5),
        )
        (image_map,) = augment.draw([NUSCENES_WH], seed=0, epoch=0, sample=sample)
        first = np.empty((3, 256, 704), np.uint8)
        second = np.empty((3, 256, 704), np.uint8)
        decoder.decode_into(plain, image_map, first)
        decoder.decode_into(prepared, image_map, second)
        assert np.array_equal(first, second)


@pytest.mark.parametrize("name", ["eval", "bevdet", "streampetr", "padded"])
def test_dali_is_fed_only_what_a_crop_sees(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = with_restarts(*NUSCENES_WH, quality=90)
    image_map = ALL_MAPS[name]
    (job,) = prepare([encoded], [image_map], Scratch(), None).jobs
    rows = probe(job.encoded).height
    assert (rows < 800) == (name != "padded")
    pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed")
    pictures = []
    for splice in (
        splice_batch,
        lambda requests, *arguments: [None] * len(requests),
    ):
        monkeypatch.setattr(dali_jobs, "splice_batch", splice)
        pictures.append(np.empty((3, image_map.out_wh[1], image_map.out_wh[0]), np.uint8))
        make_decoder("dali").decode_into(encoded, image_map, pictures[-1])
    # The same pixels go in; DALI's resampling of another height may round another way.
    assert psnr_db(*pictures) > 55.0
    assert np.abs(pictures[0].astype(int) - pictures[1]).max() <= 3
