"""Shards are tars: GNU tar, Python's tarfile and webdataset read them, and the strict reader lets no damage pass."""

from __future__ import annotations

import io
import subprocess
import tarfile
from shutil import which
from typing import TYPE_CHECKING

import pytest
import webdataset
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fuelrail.pipeline.errors import (
    ConfigError,
    MemberTooLargeError,
    ShardError,
)
from fuelrail.pipeline.format import tar
from fuelrail.pipeline.format.tar import (
    BLOCK_BYTES,
    END_OF_ARCHIVE,
    MAX_STORED_BYTES,
    FoundMember,
    StoredMember,
    are_members,
    check_field,
    check_key,
    iter_members,
    member_header,
    pack_sample,
)

if TYPE_CHECKING:
    from pathlib import Path

SHARD = "train-000000.tar"
WORDS = st.text("abcz019_", min_size=1, max_size=6)
KEYS = st.text("abcz019_-", min_size=1, max_size=12).filter(lambda key: not key.startswith("__"))
FIELDS = (
    st.lists(WORDS, min_size=2, max_size=4)
    .map(".".join)
    .filter(lambda field: not field.startswith("__"))
)
LONG_FIELDS = st.integers(80, 200).map(lambda length: "x_" + "n" * length + ".bin")
CONTENTS = st.sampled_from([0, 1, 3, 511, 512, 513, 1024, 1100]).map(
    lambda size: bytes(i % 251 for i in range(size))
)
MEMBERS = st.dictionaries(
    FIELDS | LONG_FIELDS,
    CONTENTS | st.binary(max_size=9),
    min_size=1,
    max_size=4,
)
SHARDS = st.dictionaries(KEYS, MEMBERS, max_size=3)


def pack(samples: dict[str, dict[str, bytes]]) -> bytes:
    spans = [
        pack_sample(key, [StoredMember(*item) for item in members.items()])
        for key, members in samples.items()
    ]
    return b"".join(piece for span in spans for piece in span.pieces) + END_OF_ARCHIVE


def unpack(data: bytes) -> dict[str, dict[str, bytes]]:
    samples: dict[str, dict[str, bytes]] = {}
    for name, _, offset, length in iter_members(data, shard=SHARD):
        key, field = webdataset.tariterators.base_plus_ext(name)
        samples.setdefault(key, {})[field] = data[offset : offset + length]
    return samples


# Three samples of several members: sizes 0, below, at and above a block, and a name that needs a pax header.
EXAMPLE = {
    "clip-0000-000000": {
        "meta.json": b"{}",
        "cam_front.jpg": bytes(range(256)) * 2,
        "x_empty.bin": b"",
    },
    "clip-0000-000001": {
        "meta.json": b"[" * 513,
        "x_" + "n" * 120 + ".bin": b"long name",
    },
    "clip-0001-000000": {"meta.json": b"1"},
}
PACKED = pack(EXAMPLE)


@settings(max_examples=50)
@given(SHARDS)
def test_what_is_packed_is_found(samples) -> None:
    data = pack(samples)
    assert len(data) % BLOCK_BYTES == 0
    assert unpack(data) == samples
    assert unpack(memoryview(data)) == samples


@given(KEYS, MEMBERS)
def test_offsets_and_length_are_those_of_the_span(key, members) -> None:
    span = pack_sample(key, [StoredMember(*item) for item in members.items()])
    joined = b"".join(span.pieces)
    assert span.length == len(joined)
    assert [
        joined[position : position + len(data)]
        for position, data in zip(span.offsets, members.values(), strict=True)
    ] == list(members.values())


@settings(max_examples=50)
@given(SHARDS)
def test_pythons_tarfile_reads_every_member_with_normal_attributes(
    samples,
) -> None:
    with tarfile.open(fileobj=io.BytesIO(pack(samples)), mode="r:") as tar:
        contents = {info.name: tar.extractfile(info).read() for info in tar}
        assert contents == {
            f"{key}.{field}": data
            for key, members in samples.items()
            for field, data in members.items()
        }
        for info in tar.getmembers():
            assert (
                info.mode,
                info.uid,
                info.gid,
                info.mtime,
                info.uname,
                info.gname,
            ) == (
                0o644,
                0,
                0,
                0,
                "",
                "",
            )
            assert info.isreg()


def without_device(block: bytes) -> bytes:
    """A header block less its device numbers, in which Python's versions differ, and less the checksum over them."""
    return block[:148] + block[156:329] + block[345:]


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 8 << 20, MAX_STORED_BYTES])
@pytest.mark.parametrize("length", [5, 99, 100])
def test_headers_are_those_that_tarfile_writes(length, size) -> None:
    info = tarfile.TarInfo("n" * length)
    info.size = size
    info.mode = 0o644
    assert without_device(member_header("n" * length, size)) == without_device(
        info.tobuf(tarfile.USTAR_FORMAT)
    )


@pytest.mark.parametrize(
    "length",
    [
        *range(88, 105),
        155,
        156,
        255,
        256,
        257,
        488,
        489,
        490,
        980,
        990,
        9_980,
        9_990,
    ],
)
def test_names_of_any_length_are_read_back_by_tarfile(length) -> None:
    name = "n" * length
    with tarfile.open(fileobj=io.BytesIO(member_header(name, 0) + END_OF_ARCHIVE)) as tar:
        assert tar.getnames() == [name]
    assert [f.name for f in iter_members(member_header(name, 0) + END_OF_ARCHIVE, shard=SHARD)] == [
        name
    ]


@given(
    st.text(
        st.characters(codec="utf-8", exclude_characters="\0/\n"),
        min_size=1,
        max_size=200,
    )
)
def test_names_outside_ascii_are_read_back_too(name) -> None:
    data = member_header(name, 3) + b"abc" + bytes(509) + END_OF_ARCHIVE
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert tar.getnames() == [name]
    assert [f.name for f in iter_members(data, shard=SHARD)] == [name]


def test_sizes_beyond_a_header_are_refused() -> None:
    for size in (-1, MAX_STORED_BYTES + 1):
        with pytest.raises(MemberTooLargeError, match="do not fit a tar header"):
            member_header("a.bin", size)


@pytest.mark.process
@pytest.mark.skipif(which("tar") is None, reason="GNU tar is not installed")
def test_gnu_tar_lists_and_extracts(tmp_path: Path) -> None:
    shard = tmp_path / SHARD
    shard.write_bytes(PACKED)
    names = [f"{key}.{field}" for key, members in EXAMPLE.items() for field in members]
    listed = subprocess.run(["tar", "tf", shard], capture_output=True, text=True, check=True)
    assert listed.stdout.splitlines() == names
    assert listed.stderr == ""
    subprocess.run(["tar", "xf", shard, "-C", tmp_path], check=True)
    for key, members in EXAMPLE.items():
        for field, data in members.items():
            assert (tmp_path / f"{key}.{field}").read_bytes() == data


@pytest.mark.process
@pytest.mark.skipif(which("tar") is None, reason="GNU tar is not installed")
def test_gnu_tar_writes_the_same_bytes(tmp_path: Path) -> None:
    """An independent writer with our conventions arrives at our bytes, long names included."""
    version = subprocess.run(
        ["tar", "--version"], capture_output=True, text=True, check=True
    ).stdout
    if version.split()[3] >= "1.35":
        pytest.skip("GNU tar 1.35 and newer leave device numbers empty behind a long name's header")
    members = {
        f"{key}.{field}": data for key, fields in EXAMPLE.items() for field, data in fields.items()
    }
    for name, data in members.items():
        (tmp_path / name).write_bytes(data)
    normal = [
        "--mode=0644",
        "--owner=:0",
        "--group=:0",
        "--numeric-owner",
        "--mtime=@0",
        "--blocking-factor=1",
    ]
    pax = "--pax-option=exthdr.name=././@PaxHeader,exthdr.mtime=0,delete=atime,delete=ctime"
    command = [
        "tar",
        "cf",
        "-",
        "--format=posix",
        pax,
        *normal,
        "-C",
        tmp_path,
        *members,
    ]
    assert subprocess.run(command, capture_output=True, check=True).stdout == PACKED


def webdataset_samples(path: Path) -> dict[str, dict[str, bytes]]:
    with path.open(
        "rb"
    ) as stream:  # webdataset leaves files that it opened to the garbage collector
        files = webdataset.tariterators.tar_file_expander([{"url": path.name, "stream": stream}])
        samples = list(webdataset.tariterators.group_by_keys(files))
    return {s["__key__"]: {k: v for k, v in s.items() if not k.startswith("__")} for s in samples}


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(samples=SHARDS)
@example(samples=EXAMPLE)
def test_webdataset_reads_the_same_samples(tmp_path, samples) -> None:
    path = tmp_path / SHARD
    path.write_bytes(pack(samples))
    assert webdataset_samples(path) == samples


@pytest.mark.parametrize("key", ["", "a.b", "a/b", "..", "A", "a b", "a\n", "ä", "__meta", "a\0"])
def test_illegal_keys_are_refused(key) -> None:
    with pytest.raises(ConfigError, match="sample key"):
        check_key(key)
    with pytest.raises(ConfigError, match="sample key"):
        pack_sample(key, [])


@pytest.mark.parametrize(
    "field",
    [
        "",
        "jpg",
        ".jpg",
        "a.",
        "a..b",
        "A.jpg",
        "a/b.jpg",
        "__a.b",
        "a.b\n",
        "a-b.c",
        "a.ä",
    ],
)
def test_illegal_fields_are_refused(field) -> None:
    with pytest.raises(ConfigError, match="field name"):
        check_field(field)
    with pytest.raises(ConfigError, match="field name"):
        pack_sample("key", [StoredMember(field, b"")])


def test_a_field_stands_once() -> None:
    with pytest.raises(ConfigError, match=r"'key' has the field 'a\.b' twice"):
        pack_sample("key", [StoredMember("a.b", b""), StoredMember("a.b", b"")])


def test_data_is_referenced_not_copied() -> None:
    data = memoryview(bytes(1000))
    assert any(piece is data for piece in pack_sample("key", [StoredMember("a.b", data)]).pieces)


def frame(members: list[FoundMember]) -> list[tuple[int, int, int]]:
    return [(f.header_offset, f.offset, f.length) for f in members]


PACKED_MEMBERS = list(iter_members(PACKED, shard=SHARD))
CONTENT = {position for f in PACKED_MEMBERS for position in range(f.offset, f.offset + f.length)}
# A pax record has no checksum in a tar. Damage there is another name, which the index and the span's digest tell.
PAX_NAMES = {
    position
    for f in PACKED_MEMBERS
    if f.offset > f.header_offset + BLOCK_BYTES
    for position in range(f.header_offset, f.offset)
}


@given(st.sampled_from(sorted(CONTENT)), st.integers(1, 255))
def test_damage_in_content_leaves_the_frame_alone(position, flip) -> None:
    damaged = bytearray(PACKED)
    damaged[position] ^= flip
    assert list(iter_members(damaged, shard=SHARD)) == PACKED_MEMBERS


@pytest.mark.costly
def test_every_damaged_byte_of_headers_and_padding_is_found() -> None:
    for position in sorted(set(range(len(PACKED))) - CONTENT):
        damaged = bytearray(PACKED)
        damaged[position] ^= (0x01, 0x10, 0xFF)[position % 3]
        try:
            members = list(iter_members(damaged, shard=SHARD))
        except ShardError as error:
            assert error.shard == SHARD
            assert error.offset is not None
            assert error.offset <= position
        else:
            assert position in PAX_NAMES
            assert frame(members) == frame(PACKED_MEMBERS)
            assert [f.name for f in members] != [f.name for f in PACKED_MEMBERS]


def test_reserved_names_of_webdataset_cannot_be_made(tmp_path: Path) -> None:
    """webdataset drops files called ``__...__``; were keys free to begin so, a member could vanish from its eyes."""
    name = "__key.data.x__"
    header = member_header(name, 0)
    (tmp_path / SHARD).write_bytes(header + END_OF_ARCHIVE)
    assert webdataset_samples(tmp_path / SHARD) == {}
    with pytest.raises(ConfigError):
        tar.pack_sample("__key", [StoredMember("data.x__", b"")])


@pytest.mark.parametrize("length", [1, 5, 90, 92, 93, 99, 100, 101, 300])
def test_members_are_known_by_their_headers(length) -> None:
    key = "k" * length
    fields = ("meta.json", "cam_front.jpg.zst")
    sizes = [0o1234567, 0]
    packed = pack_sample(
        key,
        [StoredMember(field, bytes(size)) for field, size in zip(fields, sizes, strict=True)],
    )
    span = memoryview(b"".join(packed.pieces))
    offsets = packed.offsets
    assert are_members(span, key=key, fields=fields, offsets=offsets, sizes=sizes)
    assert are_members(span, key=key, fields=fields[1:], offsets=offsets[1:], sizes=sizes[1:])
    assert are_members(span, key=key, fields=(), offsets=[], sizes=[])
    assert not are_members(span, key=key, fields=fields, offsets=offsets[::-1], sizes=sizes)
    assert not are_members(span, key=key, fields=fields, offsets=offsets, sizes=sizes[::-1])
    assert not are_members(span, key=key, fields=fields, offsets=offsets, sizes=[sizes[0], -1])
    assert not are_members(
        span,
        key=key,
        fields=fields,
        offsets=[offsets[0], len(span) + 512],
        sizes=sizes,
    )
    assert not are_members(span, key="j" + key[1:], fields=fields, offsets=offsets, sizes=sizes)
    if length < 99:  # of longer names the rest is not compared
        assert not are_members(span, key=key, fields=fields[::-1], offsets=offsets, sizes=sizes)
        for wrong_key in (key[1:], key + "k", "", "%d", "\u00e9" + key):
            assert not are_members(span, key=wrong_key, fields=fields, offsets=offsets, sizes=sizes)
