"""Codecs: exact both ways, refused when damaged, sizes capped before memory is taken, usable from many threads."""

from __future__ import annotations

import subprocess
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from shutil import which

import numpy as np
import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from fuelrail.pipeline.errors import (
    CodecError,
    ConfigError,
    MemberTooLargeError,
)
from fuelrail.pipeline.format import codecs
from fuelrail.pipeline.sample.arrays import write_npy
from support.shared_data import shared_data

CODECS = st.sampled_from([codecs.RAW, codecs.ZSTD]) | st.integers(1, 4096).map(codecs.planes)
ZSTD_CODECS = [codecs.ZSTD, "zstd-p1", "zstd-p20"]
NAMES = st.from_regex(r"[a-z0-9_]+(\.[a-z0-9_]+)+", fullmatch=True)


@given(CODECS, st.binary(max_size=500), st.integers(1, 5))
@example("zstd-p20", b"", 3)
@example("zstd-p20", bytes(19), 3)
@example("zstd-p20", bytes(range(41)), 3)
@example("zstd-p2", bytes(range(256)) * 64 + b"x", 3)
def test_round_trip_is_exact_with_and_without_the_promised_size(codec, raw, level) -> None:
    stored = codecs.encode(codec, raw, level=level)
    assert bytes(codecs.decode(codec, stored, len(raw))) == raw
    assert bytes(codecs.decode(codec, memoryview(stored))) == raw
    assert bytes(codecs.encode(codec, bytearray(raw), level=level)) == bytes(stored)


@given(st.integers(1, 64), st.integers(0, 9), st.integers(0, 63))
def test_planes_are_the_columns_of_the_rows_counted_from_the_end(row, num_rows, head) -> None:
    head %= row
    raw = bytes(i % 251 for i in range(head + row * num_rows))
    shuffled = zstandard.ZstdDecompressor().decompress(codecs.encode(codecs.planes(row), raw))
    rows = [raw[head + row * i : head + row * (i + 1)] for i in range(num_rows)]
    assert shuffled == raw[:head] + b"".join(
        bytes(r[column] for r in rows) for column in range(row)
    )


@given(st.binary(max_size=300))
def test_stored_zstd_is_one_plain_frame_that_the_library_reads(raw) -> None:
    stored = codecs.encode(codecs.ZSTD, raw)
    assert zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False) == raw
    assert zstandard.get_frame_parameters(stored).content_size == len(raw)


@pytest.mark.process
@pytest.mark.skipif(which("zstd") is None, reason="the zstd program is not installed")
def test_stored_zstd_is_what_the_zstd_program_reads() -> None:
    raw = b"six cameras " * 1000
    done = subprocess.run(
        ["zstd", "-d", "-c"],
        input=codecs.encode(codecs.ZSTD, raw),
        capture_output=True,
        check=True,
    )
    assert done.stdout == raw


@pytest.mark.parametrize("codec", [codecs.RAW, codecs.ZSTD])
def test_another_size_than_promised_is_refused(codec) -> None:
    stored = codecs.encode(codec, b"12345")
    with pytest.raises(CodecError, match=r"5 bytes.* the index promises 6"):
        codecs.decode(codec, stored, 6)


def test_a_bomb_is_refused_before_memory_is_taken() -> None:
    size = codecs.MAX_MEMBER_BYTES + 1
    # RFC 8878: magic number, then a descriptor that says "one segment, content size in eight bytes".
    header = b"\x28\xb5\x2f\xfd\xe0" + size.to_bytes(8, "little")
    assert zstandard.frame_content_size(header) == size
    tracemalloc.start()
    try:
        with pytest.raises(
            MemberTooLargeError,
            match=f"{size} bytes, over the cap of {codecs.MAX_MEMBER_BYTES}",
        ):
            codecs.decode(codecs.ZSTD, header, size)
        with pytest.raises(MemberTooLargeError):
            codecs.decode(codecs.ZSTD, header)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_member_over_the_cap_is_refused_when_written(monkeypatch) -> None:
    monkeypatch.setattr(codecs, "MAX_MEMBER_BYTES", 10)
    for codec in (codecs.RAW, codecs.ZSTD):
        codecs.encode(codec, bytes(10))
        with pytest.raises(MemberTooLargeError, match="11 bytes, over the cap of 10"):
            codecs.encode(codec, bytes(11))


@pytest.mark.parametrize(
    "name",
    [
        "",
        "Raw",
        "zst",
        "zstd-p",
        "zstd-p0",
        "zstd-p01",
        "zstd-p4097",
        "zstd-p99999",
        "zstd-p2\n",
    ],
)
def test_unknown_codecs_name_the_known_ones(name) -> None:
    for use in (
        codecs.suffix,
        lambda n: codecs.encode(n, b""),
        lambda n: codecs.decode(n, b"", 0),
    ):
        with pytest.raises(
            ConfigError,
            match=r"known: raw, zstd, zstd-dict, zstd-pR with R from 1 to 4096",
        ):
            use(name)


@pytest.mark.parametrize("level", [-1, 0, 23, 99])
def test_levels_outside_zstd_are_refused(level) -> None:
    with pytest.raises(ConfigError, match=f"zstd level {level} .* use 1 to 22"):
        codecs.encode(codecs.ZSTD, b"", level=level)


@given(NAMES, CODECS)
def test_stored_names_split_back_or_are_refused(name, codec) -> None:
    try:
        stored = codecs.stored_name(name, codec)
    except ConfigError:
        assert name.endswith(".zst") or (codec == codecs.ZSTD and ".p" in name)
    else:
        assert stored == name + codecs.suffix(codec)
        assert codecs.split_name(stored) == (name, codec)


@pytest.mark.parametrize(
    ("name", "codec"),
    [("x_a.zst", "raw"), ("x_a.p20.zst", "raw"), ("x_a.p20", "zstd")],
)
def test_names_that_would_read_as_another_codec_are_refused(name, codec) -> None:
    with pytest.raises(ConfigError, match="reads as another codec's"):
        codecs.stored_name(name, codec)


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ("meta.json.zst", ("meta.json", "zstd")),
        ("lidar_top.npy.p20.zst", ("lidar_top.npy", "zstd-p20")),
        ("cam_front.jpg", ("cam_front.jpg", "raw")),
        ("x_a.p4097.zst", ("x_a.p4097", "zstd")),
        ("x_a.p020.zst", ("x_a.p020", "zstd")),
        ("x_a.p20.zst.bin", ("x_a.p20.zst.bin", "raw")),
    ],
)
def test_split_name(stored, expected) -> None:
    assert codecs.split_name(stored) == expected


def test_every_thread_has_its_own_contexts() -> None:
    rng = np.random.default_rng(5)
    blobs = [rng.integers(0, 8, 20_000, np.uint8).tobytes() for _ in range(8)]

    def work(number: int) -> bool:
        raw = blobs[number % len(blobs)]
        return all(
            bytes(codecs.decode(c, codecs.encode(c, raw), len(raw))) == raw for c in ZSTD_CODECS
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(64)))


def test_raw_is_handed_through_without_a_copy() -> None:
    data = memoryview(b"encoded image")
    assert codecs.encode(codecs.RAW, data) is data
    assert codecs.decode(codecs.RAW, data, len(data)) is data


def test_a_plane_that_does_not_shrink_is_kept_as_it_is() -> None:
    raw = write_npy(np.random.default_rng(0).normal(size=(256, 8, 8)).astype(np.float16))
    stored = bytes(codecs.encode("zstd-p2", raw))
    planes = zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
    assert planes[: len(raw) // 2] in stored  # the lower bytes of the numbers
    assert len(stored) < 0.95 * len(zstandard.ZstdCompressor().compress(planes))


@pytest.mark.real
def test_planes_pay_on_a_real_sweep() -> None:
    sweep = next(shared_data("nuscenes-mini").glob("samples/LIDAR_TOP/*.bin"))
    raw = write_npy(np.fromfile(sweep, "<f4").reshape(-1, 5))
    plain, split = (len(codecs.encode(codec, raw)) for codec in (codecs.ZSTD, "zstd-p20"))
    assert split < plain < len(raw)
    assert bytes(codecs.decode("zstd-p20", codecs.encode("zstd-p20", raw), len(raw))) == raw
