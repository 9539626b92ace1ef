"""Shards as they are packed: arbitrary samples come back in every layout, at the addresses in their rows."""

from __future__ import annotations

import hashlib
import io
import tarfile
from concurrent.futures import ThreadPoolExecutor

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from fuelrail.pipeline.errors import MemberTooLargeError
from fuelrail.pipeline.format import zstd_frames
from fuelrail.pipeline.format.codecs import (
    RAW,
    ZSTD,
    ZSTD_DICT,
    planes,
    stored_name,
    train_dictionary,
)
from fuelrail.pipeline.format.dataset import check_span, read_members
from fuelrail.pipeline.format.tar import iter_members
from fuelrail.sharding.write.packer import RawMember, ShardPacker
from fuelrail.sharding.write.read_buffer import ReadBuffer

DICTIONARY = train_dictionary(
    [b'{"key": "%06d", "schema": "fuelrail/1"}' % number for number in range(500)],
    1024,
    3,
)
CODECS = st.sampled_from([RAW, ZSTD, ZSTD_DICT, planes(4), planes(20)])
FIELDS = st.from_regex(r"x_[a-z0-9_]{1,8}\.[a-z]{1,4}", fullmatch=True)
SAMPLES = st.dictionaries(
    st.from_regex(r"[a-z0-9]{1,6}-[0-9]{1,3}", fullmatch=True),
    st.dictionaries(
        FIELDS,
        st.tuples(CODECS, st.binary(max_size=2000)),
        min_size=1,
        max_size=4,
    ),
    min_size=1,
    max_size=4,
)


def pack(samples, *, framed, threads=None):
    file = io.BytesIO()
    buffer = ReadBuffer()
    packer = ShardPacker(
        file=file,
        number=3,
        level=3,
        dictionary=None if framed else DICTIONARY,
        buffer=buffer,
        threads=threads,
        framed=framed,
    )
    for number, (key, members) in enumerate(samples.items()):
        packer.add(
            key,
            "clip",
            number,
            number,
            [RawMember(name, *how) for name, how in members.items()],
        )
    return packer.close(), file.getvalue()


@given(samples=SAMPLES, framed=st.booleans())
@settings(max_examples=40)
def test_arbitrary_samples_come_back(samples, framed):
    if framed:
        samples = {
            key: {name: (RAW, raw) for name, (_, raw) in fields.items()}
            for key, fields in samples.items()
        }
    packed, data = pack(samples, framed=framed)
    assert (len(data), hashlib.sha256(data).hexdigest()) == (
        packed.num_bytes,
        packed.sha256,
    )
    name = "train-000003.tar.zst" if framed else "train-000003.tar"
    for row, (key, members) in zip(packed.rows, samples.items(), strict=True):
        span = data[row.offset : row.offset + row.length]
        check_span(row, span, name)
        stored = read_members(row, span, name, dictionary=DICTIONARY)
        assert (row.key, row.shard) == (key, 3)
        assert {field: bytes(raw) for field, raw in stored.items()} == {
            n: raw for n, (_, raw) in members.items()
        }
    tar = (
        zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
        if framed
        else data
    )
    assert [member.name for member in iter_members(tar, shard=name)] == [
        f"{key}.{stored_name(field, codec)}"
        for key, members in samples.items()
        for field, (codec, _) in members.items()
    ]
    if framed:
        assert packed.listing == b""
        ends = [row.offset + row.length for row in packed.rows]
        table = zstd_frames.read_seek_table(data, shard=name)
        assert [frame.offset + frame.stored_bytes for frame in table[:-1]] == ends
    assert pack(samples, framed=framed)[1] == data
    with ThreadPoolExecutor(2) as threads:
        assert pack(samples, framed=framed, threads=threads) == (packed, data)


def test_a_sample_that_a_frame_cannot_hold_is_named(monkeypatch):
    monkeypatch.setattr(zstd_frames, "MAX_FRAME_BYTES", 4096)
    with pytest.raises(
        MemberTooLargeError,
        match="a-1: 5632 bytes of one sample are over the frame layout's cap",
    ) as it:
        pack(
            {
                "a-0": {"x_a.b": (RAW, b"1")},
                "a-1": {"x_a.b": (RAW, bytes(5000))},
            },
            framed=True,
        )
    assert it.value.key == "a-1"


def test_lines_of_an_index():
    samples = {
        "k-0": {"a.json": (RAW, b"123"), "b.jpg": (RAW, b"")},
        "k-1": {"a.json": (RAW, b"1234")},
    }
    packed, _ = pack(samples, framed=False)
    text = "v1.2 2\na.json 512 3 k-0.a.json b.jpg 1536 0 k-0.b.jpg\na.json 2048 4 k-1.a.json\n"
    assert packed.listing == text.encode()


def test_indices_say_what_dali_s_own_indexer_would_say_of_the_tar(dataroot, sharded):
    # What wds2idx does: walk the members, split names at the first dot, a line for each run of one base name.
    shards = sorted(sharded(dataroot("a4 b5"), shard_size_bytes=20_000).glob("*.tar"))
    assert len(shards) > 1
    for shard in shards:
        lines: list[list[str]] = []
        last = None
        with tarfile.open(shard) as tar:
            for member in tar:
                key, _, field = member.name.partition(".")
                if key != last:
                    lines.append([])
                last = key
                lines[-1].append(f"{field} {member.offset_data} {member.size} {member.name}")
        expected = "".join(f"{line}\n" for line in [f"v1.2 {len(lines)}", *map(" ".join, lines)])
        assert shard.with_suffix(".idx").read_text() == expected
