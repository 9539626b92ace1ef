"""Frame shards: whole they are a plain tar, each sample is read by itself, and no damage goes unseen or unnamed."""

from __future__ import annotations

import io
import struct
import subprocess
import tarfile

import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from fuelrail.pipeline.errors import (
    ConfigError,
    FrameError,
    IndexFileError,
    MemberTooLargeError,
)
from fuelrail.pipeline.format import zstd_frames
from fuelrail.pipeline.format.dataset import open_dataset, read_members
from fuelrail.pipeline.format.index.row import IndexRow, MemberEntry
from fuelrail.pipeline.format.tar import (
    END_OF_ARCHIVE,
    StoredMember,
    iter_members,
    pack_sample,
)

SHARD = "train-000000.tar.zst"


@pytest.fixture(scope="module")
def tiny(tiny_dataset):
    return tiny_dataset({"train": (3, 2), "val": (2,)}, layout="frame")


FIELDS = st.dictionaries(
    st.from_regex(r"x_[a-z0-9]{1,6}\.[a-z]{1,4}", fullmatch=True),
    st.binary(max_size=3000),
    min_size=1,
    max_size=4,
)


def build(samples):
    """A frame shard of samples (key to fields) and its rows of the index."""
    data = bytearray()
    rows = []
    sizes = []
    for key, members in samples.items():
        packed = pack_sample(
            key,
            [StoredMember(name, content) for name, content in members.items()],
        )
        frame = zstd_frames.encode_frame(b"".join(packed.pieces), 3)
        entries = tuple(
            MemberEntry(
                name=name,
                offset=offset,
                stored_bytes=len(content),
                raw_bytes=len(content),
                codec="raw",
                xxh3=xxhash.xxh3_64_intdigest(content),
            )
            for (name, content), offset in zip(members.items(), packed.offsets, strict=True)
        )
        rows.append(
            IndexRow(
                key=key,
                clip_id="clip",
                frame=0,
                timestamp_ns=0,
                shard=0,
                offset=len(data),
                length=len(frame),
                xxh3=0,
                members=entries,
            )
        )
        sizes.append((len(frame), packed.length))
        data += frame
    end = zstd_frames.encode_frame(END_OF_ARCHIVE, 3)
    return bytes(data) + end + zstd_frames.encode_seek_table(
        [*sizes, (len(end), len(END_OF_ARCHIVE))]
    ), rows


@given(
    st.dictionaries(
        st.from_regex(r"[a-z0-9]{1,8}-[0-9]{1,3}", fullmatch=True),
        FIELDS,
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=60, deadline=None)
def test_arbitrary_samples_come_back_one_by_one_and_as_a_whole(samples):
    shard, rows = build(samples)
    table = zstd_frames.read_seek_table(shard, shard=SHARD)
    assert [(f.offset, f.stored_bytes) for f in table[:-1]] == [
        (row.offset, row.length) for row in rows
    ]
    for row, frame in zip(rows, table, strict=False):
        stored = shard[row.offset : row.offset + row.length]
        assert zstd_frames.span_bytes(row) == frame.raw_bytes
        members = read_members(row, stored, SHARD)
        assert {name: bytes(data) for name, data in members.items()} == samples[row.key]
        first = row.members[0]
        head = zstd_frames.read_head(
            io.BytesIO(stored),
            first.offset + first.stored_bytes,
            shard=SHARD,
            offset=0,
        )
        assert head[first.offset :] == samples[row.key][first.name]
    tar = zstandard.ZstdDecompressor().stream_reader(shard, read_across_frames=True).read()
    contents = [
        (m.name, tar[m.offset : m.offset + m.length]) for m in iter_members(tar, shard="tar")
    ]
    assert contents == [
        (f"{key}.{name}", data)
        for key, members in samples.items()
        for name, data in members.items()
    ]


def test_equal_spans_are_equal_frames():
    span = b"".join(b"%d," % (i * i) for i in range(40_000))
    assert zstd_frames.encode_frame(span, 3) == zstd_frames.encode_frame(bytearray(span), 3)
    with pytest.raises(ConfigError, match="zstd level 0 is not allowed: use 1 to 22"):
        zstd_frames.encode_frame(span, 0)


class TestTools:
    """What others read of it."""

    @pytest.mark.process
    def test_zstd_and_tar(self, tiny):
        root, raw = tiny
        subprocess.run(["zstd", "--test", "-q", root / SHARD], check=True)
        listed = subprocess.run(
            ["tar", "--zstd", "-tf", root / SHARD],
            check=True,
            capture_output=True,
            text=True,
        )
        keys = list(raw)[:3]
        assert listed.stdout.splitlines() == [f"{key}.{name}" for key in keys for name in raw[key]]
        plain = subprocess.run(
            ["zstd", "-dcq", root / SHARD], check=True, capture_output=True
        ).stdout
        with tarfile.open(fileobj=io.BytesIO(plain)) as tar:
            for member in tar:
                key, _, name = member.name.partition(".")
                assert tar.extractfile(member).read() == raw[key][name]

    @pytest.mark.process
    def test_a_reader_of_the_seekable_format(self, tiny):
        pyzstd = pytest.importorskip(
            "pyzstd", reason="pyzstd is not installed (pip install pyzstd)"
        )
        root, _ = tiny
        plain = subprocess.run(
            ["zstd", "-dcq", root / SHARD], check=True, capture_output=True
        ).stdout
        with pyzstd.SeekableZstdFile(str(root / SHARD)) as file:
            for start in (len(plain) - 700, 5000, 0):
                file.seek(start)
                assert file.read(600) == plain[start : start + 600]


class TestDamage:
    """What is wrong with a frame is an error with shard, offset and key."""

    def test_a_size_over_the_cap_takes_no_memory(self, tiny):
        row = open_dataset(tiny[0]).index.row(0)
        for size in (zstd_frames.MAX_FRAME_BYTES + 1, 1 << 60):
            huge = row._replace(members=(row.members[0]._replace(stored_bytes=size),))
            with pytest.raises(FrameError, match="over the cap of 536870912"):
                read_members(huge, b"", SHARD)

    def test_a_sample_over_the_cap_is_refused_when_it_is_written(self, monkeypatch):
        monkeypatch.setattr(zstd_frames, "MAX_FRAME_BYTES", 1000)
        with pytest.raises(
            MemberTooLargeError,
            match="1001 bytes of one sample are over the frame layout's cap of 1000",
        ):
            zstd_frames.encode_frame(bytes(1001), 3)

    def test_a_member_that_does_not_decode_is_placed(self, tiny):
        row = open_dataset(tiny[0]).index.row(1)
        stored = (tiny[0] / SHARD).read_bytes()[row.offset : row.offset + row.length]
        entries = (
            row.members[0]._replace(offset=row.members[0].offset + 512),
            *row.members[1:],
        )
        with pytest.raises(
            IndexFileError,
            match=f"shard {SHARD}, frame at offset {row.offset}, 1024 bytes into it",
        ):
            read_members(row._replace(members=entries), stored, SHARD)

    def test_a_head_of_a_damaged_frame(self):
        frame = zstd_frames.encode_frame(bytes(100), 3)
        with pytest.raises(FrameError, match="holds 100 bytes, wanted are 101"):
            zstd_frames.read_head(io.BytesIO(frame), 101, shard=SHARD, offset=7)
        with pytest.raises(
            FrameError,
            match=r"damaged zstd frame: .* \(shard train-000000.tar.zst, offset 7\)",
        ):
            zstd_frames.read_head(io.BytesIO(b"x" * 50), 10, shard=SHARD, offset=7)


class TestSeekTable:
    def test_bytes(self):
        # As the seekable format's document has them: magic, size, entries, number of frames, descriptor, magic.
        assert zstd_frames.encode_seek_table([(5, 512), (9, 1024)]) == struct.pack(
            "<II IIII IBI", 0x184D2A5E, 25, 5, 512, 9, 1024, 2, 0, 0x8F92EAB1
        )
