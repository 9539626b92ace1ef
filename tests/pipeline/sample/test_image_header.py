from __future__ import annotations

import importlib.util
import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fuelrail.loaders.decode import BACKENDS, make_decoder
from fuelrail.pipeline.errors import ConfigError, ImageError
from fuelrail.pipeline.sample.image_header import (
    MAX_PIXELS,
    MAX_SCANNED_PIXELS,
    MAX_SCANS,
    ImageInfo,
    check_jpeg_end,
    jpeg_length,
    png_length,
    probe,
    unpack_png,
)
from fuelrail.pipeline.transforms.image_map import ImageMap
from fuelrail.sharding.sources.shared import pictures
from support.pictures import encode, natural

PICTURE = natural(49, 35)


def exif(order: str, orientation: int, kind: int = 3) -> bytes:
    mark = {"<": b"II*\0", ">": b"MM\0*"}[order]
    value = (
        struct.pack(order + "HH", orientation, 0)
        if kind == 3
        else struct.pack(order + "I", orientation)
    )
    entry = struct.pack(order + "HHI", 0x0112, kind, 1) + value
    return (
        b"Exif\0\0" + mark + struct.pack(order + "IH", 8, 1) + entry + struct.pack(order + "I", 0)
    )


def chunk(name: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, bits: int, color_type: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, bits, color_type, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT") + chunk(b"IEND")


def replace_bytes(encoded: bytes, marker: int, offset: int, new: bytes) -> bytes:
    """The file with bytes replaced at ``offset`` behind the first such marker."""
    start = encoded.index(bytes((0xFF, marker))) + 2 + offset
    return encoded[:start] + new + encoded[start + len(new) :]


@pytest.mark.parametrize(
    ("options", "subsampling"),
    [
        ({}, "4:4:4"),
        ({"subsampling": "4:2:2"}, "4:2:2"),
        ({"subsampling": "4:2:0"}, "4:2:0"),
    ],
)
def test_jpeg_headers_are_read(options: dict, subsampling: str) -> None:
    encoded = encode(PICTURE, **options)
    info = probe(encoded)
    assert info == ImageInfo(
        width=49,
        height=35,
        format="jpeg",
        num_components=3,
        bits=8,
        subsampling=subsampling,
        progressive=False,
        restart_interval=0,
        orientation=1,
        frame_at=info.frame_at,
        scan_at=info.scan_at,
    )
    assert encoded[info.frame_at : info.frame_at + 2] == b"\xff\xc0"
    assert encoded[info.scan_at - 14 : info.scan_at - 12] == b"\xff\xda"


def test_gray_cmyk_progressive_and_restarts_are_reported() -> None:
    assert probe(encode(PICTURE[..., 0])).subsampling == "gray"
    assert probe(encode(PICTURE, progressive=True)).progressive
    assert not probe(encode(PICTURE)).progressive
    assert probe(encode(PICTURE, restart_marker_blocks=3)).restart_interval == 3
    four = probe(replace_bytes(encode(PICTURE), 0xE0, 2, b"JFIF"))
    assert not four.is_cmyk


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (0x21, "4:2:2"),
        (0x12, "4:4:0"),
        (0x41, "4:1:1"),
        (0x42, "4:1:0"),
        (0x31, "other"),
    ],
)
def test_sampling_factors_have_names(value: int, name: str) -> None:
    # The luma's factors in the frame header: marker, length 2, precision 1, size 4, count 1, id 1.
    assert probe(replace_bytes(encode(PICTURE), 0xC0, 9, bytes((value,)))).subsampling == name


@pytest.mark.parametrize("value", [0x33, 0x44, 0x43])
def test_sampling_factors_that_no_decoder_takes_are_refused(value: int) -> None:
    odd = replace_bytes(encode(PICTURE), 0xC0, 9, bytes((value,)))
    with pytest.raises(OSError, match="broken data stream"):
        Image.open(io.BytesIO(odd)).load()
    with pytest.raises(ImageError, match=f"sampling factors {value:02x} 11 11 is not supported"):
        probe(odd)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_of_both_byte_orders(order: str, orientation: int) -> None:
    assert probe(encode(PICTURE, exif=exif(order, orientation))).orientation == orientation


@pytest.mark.parametrize(
    "broken",
    [
        exif("<", 9),
        exif("<", 0),
        exif("<", 6)[:16],
        b"Exif\0\0XX*\0" + b"\0" * 20,
        b"Exif\0\0II*\0\xff\xff\xff\xff" + b"\0" * 8,
    ],
)
def test_broken_exif_counts_as_none(broken: bytes) -> None:
    assert probe(encode(PICTURE, exif=broken)).orientation == 1


@pytest.mark.parametrize(("color_type", "channels"), [(0, 1), (2, 3), (4, 2), (6, 4)])
def test_png_headers_are_read(color_type: int, channels: int) -> None:
    assert probe(png(49, 35, 8, color_type)) == ImageInfo(
        width=49,
        height=35,
        format="png",
        num_components=channels,
        bits=8,
        subsampling="",
        progressive=False,
        restart_interval=0,
        orientation=1,
    )


SOF = 0xC0
TWO = b"\xff\xc0" + struct.pack(">HBHHB", 14, 8, 8, 8, 2) + b"\x01\x11\0\x02\x11\0"  # components


@pytest.mark.parametrize(
    ("encoded", "message"),
    [
        (encode(PICTURE)[:20], "ends inside its header: the file was cut"),
        (encode(PICTURE)[:200], "segment 0xffc4 at byte 177 claims 31 bytes"),
        (b"\xff\xd8\xff", "ends inside its header"),
        (
            b"\xff\xd8\x00\x00\x00\x00",
            "expected a marker at byte 2, found 0x00",
        ),
        (
            b"\xff\xd8\xff\x01\x00\x04\x00\x00",
            "marker 0xff01 at byte 2 is not allowed there",
        ),
        (
            b"\xff\xd8\xff\xe0\x00\x01\x00\x00",
            "segment 0xffe0 at byte 2 claims 1 bytes",
        ),
        (b"\xff\xd8\xff\xe0\xff\xff\x00\x00", "claims 65535 bytes"),
        (
            b"\xff\xd8\xff\xda\x00\x04\x00\x00",
            "pixel data start without a frame header",
        ),
        (
            b"\xff\xd8\xff\xc0\x00\x05\x08\x00\x10\xff\xda\x00\x04\x00\x00",
            "frame header of 5 bytes",
        ),
        (
            replace_bytes(encode(PICTURE), SOF, 2, b"\x0c"),
            "12-bit JPEG is not supported: re-encode",
        ),
        (
            replace_bytes(encode(PICTURE), SOF, 3, b"\0\0"),
            "size of 49x0 pixels",
        ),
        (
            replace_bytes(encode(PICTURE), SOF, 5, b"\0\0"),
            "size of 0x35 pixels",
        ),
        (
            replace_bytes(encode(PICTURE), SOF, 9, b"\x05"),
            "sampling factors 05 11 11",
        ),
        (
            replace_bytes(encode(PICTURE), SOF, 3, b"\xff\xff\xff\xff"),
            f"65535x65535 pixels is over the limit of {MAX_PIXELS}",
        ),
        (
            encode(PICTURE).replace(b"\xff\xc0", b"\xff\xc3", 1),
            "lossless JPEG is not supported",
        ),
        (
            encode(PICTURE).replace(b"\xff\xc0", b"\xff\xc9", 1),
            "arithmetic-coded JPEG is not supported",
        ),
        (
            png(49, 35, 16, 2),
            "PNG of 16 bits and colour type 2 is not supported: 8-bit gray and RGB are",
        ),
        (png(49, 35, 8, 3), "PNG of 8 bits and colour type 3"),
        (
            png(49, 35, 8, 2)[:28] + b"\2" + png(49, 35, 8, 2)[29:],
            "PNG header is broken: its methods are 00 00 02",
        ),
        (png(0, 35, 8, 2), "PNG header gives a size of 0x35"),
        (png(9, 5, 8, 2)[:30], "PNG of 30 bytes ends inside its header"),
        (png(60000, 60000, 8, 2), "60000x60000 pixels is over the limit"),
        (b"II*\0" + b"\0" * 20, "TIFF; JPEG and PNG are supported"),
        (b"\xff\x0a" + b"\0" * 20, "JPEG XL"),
        (b"\0" * 30, "image starts with zero bytes"),
        (
            b"\xff\xd8" + TWO + b"\xff\xda\0\x04\0\0",
            "2 components is not supported",
        ),
        (
            b"\xff\xd8" + TWO + TWO + b"\xff\xda\0\x04\0\0",
            "a second frame header",
        ),
        (
            encode(PICTURE, progressive=True) + b"\xff\xda\0\x02" * 200,
            f"more than {MAX_SCANS}: refused as hostile",
        ),
    ],
)
def test_what_cannot_be_taken_is_named(encoded: bytes, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        probe(encoded)


def set_size(encoded: bytes, width: int, height: int) -> bytes:
    marker = SOF if bytes((0xFF, SOF)) in encoded else 0xC2
    return replace_bytes(encoded, marker, 3, struct.pack(">HH", height, width))


def add_scans(encoded: bytes, count: int) -> bytes:
    return encoded + b"\xff\xda\0\x02" * (count - encoded.count(b"\xff\xda"))


def test_scans_times_pixels_are_limited() -> None:
    progressive = encode(PICTURE, progressive=True)
    for width, height, num_scans in ((8000, 8000, 12), (3840, 2160, MAX_SCANS)):
        assert probe(add_scans(set_size(progressive, width, height), num_scans)).progressive
    hostile = add_scans(set_size(progressive, 8000, 8000), 95)
    with pytest.raises(
        ImageError,
        match=f"8000x8000 pixels has 95 scans; .* at most {MAX_SCANNED_PIXELS}",
    ):
        probe(hostile)


def test_baseline_files_of_many_scans_are_limited_too() -> None:
    encoded = set_size(encode(PICTURE), 8000, 8000)
    start = encoded.index(b"\xff\xda")
    one_by_one = encoded[:start] + b"\xff\xda\0\x08\x01\x01\0\0\x3f\0" + encoded[start + 14 :]
    assert probe(one_by_one).width == 8000
    with pytest.raises(ImageError, match="8000x8000 pixels has 95 scans"):
        probe(add_scans(one_by_one, 95))
    assert (
        probe(add_scans(encoded, 95)).width == 8000
    )  # decoders refuse a scan after one of all components


def set_pixel_data(encoded: bytes, packed: bytes) -> bytes:
    return encoded[:33] + chunk(b"IDAT", packed) + chunk(b"IEND")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda raw: zlib.compress(raw + b"\0"),
            "more data than its 49x35 pixels",
        ),
        (
            lambda raw: zlib.compress(raw + bytes(64 << 20)),
            "more data than its 49x35 pixels",
        ),
        (
            lambda raw: zlib.compress(raw) + b"x",
            "more data than its 49x35 pixels",
        ),
        (
            lambda raw: zlib.compress(raw[:-1]),
            "PNG has 5179 of 5180 bytes of pixel data: the file was cut",
        ),
        (lambda raw: zlib.compress(raw)[:-4], "the file was cut"),
        (lambda raw: b"xx" + zlib.compress(raw), "its pixel data are broken"),
        (lambda raw: b"", "PNG has 0 of 5180 bytes"),
    ],
)
def test_png_data_are_as_many_as_the_header_says(
    change, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    raw = b"".join(b"\0" + row.tobytes() for row in PICTURE)
    encoded = encode(PICTURE, "png")
    hostile = set_pixel_data(encoded, change(raw))
    for refuse in (
        unpack_png,
        lambda png: pictures.check_pixels(png, "png", None),
    ):
        with pytest.raises(ImageError, match=message):
            refuse(hostile)
    for name in ("turbo", "pillow"):
        out = np.full((3, 35, 49), 7, np.uint8)
        with pytest.raises(ImageError, match=message):
            make_decoder(name).decode_into(hostile, ImageMap.identity((49, 35)), out)
        assert (out == 7).all()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA"])
@pytest.mark.parametrize("wh", [(1, 1), (3, 5), (4, 4), (49, 35)])
def test_unpacked_pngs_have_the_same_pixels(mode: str, wh: tuple[int, int]) -> None:
    image = Image.fromarray(natural(*wh)).convert(mode)
    file = io.BytesIO()
    image.save(file, "png")
    unpacked = unpack_png(file.getvalue())
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(unpacked))), np.asarray(image))


@pytest.mark.parametrize("wh", [(1, 1), (2, 1), (5, 3), (8, 8), (49, 35)])
def test_interlaced_pngs_are_unpacked(wh: tuple[int, int]) -> None:
    width, height = wh
    picture = natural(*wh)
    raw = bytearray()
    for first_x, first_y, step_x, step_y in (
        (0, 0, 8, 8),
        (4, 0, 8, 8),
        (0, 4, 4, 8),
        (2, 0, 4, 4),
        (0, 2, 2, 4),
        (1, 0, 2, 2),
        (0, 1, 1, 2),
    ):
        part = picture[first_y::step_y, first_x::step_x]
        raw += b"".join(b"\0" + row.tobytes() for row in part if len(row))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 1)
    encoded = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    interlaced = set_pixel_data(encoded, zlib.compress(raw))
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(unpack_png(interlaced)))), picture)
    with pytest.raises(ImageError, match="more data"):
        unpack_png(set_pixel_data(encoded, zlib.compress(raw + b"\0")))
    with pytest.raises(ImageError, match="was cut"):
        unpack_png(set_pixel_data(encoded, zlib.compress(raw[:-1])))


def test_the_limit_of_pixels_can_be_set() -> None:
    assert probe(encode(PICTURE), max_pixels=49 * 35).width == 49
    with pytest.raises(ImageError, match="over the limit of 1000 pixels"):
        probe(encode(PICTURE), max_pixels=1000)


def test_the_end_of_jpegs_is_looked_for() -> None:
    encoded = encode(PICTURE)
    for trailer in (
        b"",
        b"\0" * 40,
        b"a trailer of the camera's maker",
        b"x" * 300_000,
        encoded[:99],
    ):
        check_jpeg_end(encoded + trailer)
        assert jpeg_length(encoded + trailer) == len(encoded)
    thumbnail = b"\xff\xe1" + (2 + len(encoded)).to_bytes(2, "big") + encoded
    with_thumbnail = encoded[:2] + thumbnail + encoded[2:]
    assert jpeg_length(with_thumbnail + b"\n") == len(with_thumbnail)
    for cut in (len(with_thumbnail) - 1, len(thumbnail) + 700):
        assert jpeg_length(with_thumbnail[:cut]) is None
    with pytest.raises(ImageError, match="no end-of-image marker: the file was cut"):
        check_jpeg_end(encoded[:-1])


def test_the_end_of_pngs_is_found_whatever_follows() -> None:
    encoded = encode(PICTURE, "png")
    for trailer in (b"", b"\n", b"IEND" * 9, encoded):
        assert png_length(encoded + trailer) == len(encoded)
    for cut in (9, 40, len(encoded) - 1):
        assert png_length(encoded[:cut]) is None


def test_png_checksums() -> None:
    encoded = encode(PICTURE, "png")
    unpack_png(encoded)
    for position in (40, len(encoded) // 2, len(encoded) - 30):
        damaged = bytearray(encoded)
        damaged[position] ^= 1
        with pytest.raises(ImageError, match=r"fails its checksum|no end chunk"):
            unpack_png(damaged)
    with pytest.raises(ImageError, match="no end chunk: the file was cut"):
        unpack_png(encoded[:-12])


@given(
    st.binary(max_size=300),
    st.sampled_from([b"", b"\xff\xd8", b"\x89PNG\r\n\x1a\n", encode(PICTURE)[:150]]),
)
@settings(max_examples=300)
def test_any_bytes_are_read_or_refused(tail: bytes, head: bytes) -> None:
    try:
        info = probe(head + tail)
    except ImageError:
        return
    assert 0 < info.width * info.height <= MAX_PIXELS


def test_views_are_as_good_as_bytes() -> None:
    encoded = encode(PICTURE)
    assert probe(memoryview(encoded)) == probe(bytearray(encoded)) == probe(encoded)
    with pytest.raises(ImageError, match="neither"):
        probe(memoryview(np.arange(99, dtype=np.uint8).tobytes()))


def test_backends_are_chosen_by_name() -> None:
    assert make_decoder("auto").name == "turbo"
    for name in ("turbo", "pillow"):
        assert make_decoder(name).name == name
    if importlib.util.find_spec("nvidia") is None:
        with pytest.raises(ConfigError, match=r"pip install -e '\.\[dali\]' in a checkout"):
            make_decoder("dali")
    with pytest.raises(
        ConfigError,
        match=f"decoder='gpu' must be one of auto, {', '.join(BACKENDS)}",
    ):
        make_decoder("gpu")
