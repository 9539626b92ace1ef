"""The members of tars of any writer, and what is behind their end."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections import Counter

import numpy as np
import pytest
import zstandard

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.shared.files import source_files
from fuelrail.sharding.sources.shared.tars import (
    compressed_members,
    tar_members,
)
from support.shared_data import shared_data

FORMS = {
    "tar": bytes,
    "tar.gz": gzip.compress,
    "tar.zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}
CONTENT = {f"{number}.txt": bytes([65 + number]) * (900 * number) for number in range(5)}


def tar_of(content, *, end=True) -> bytes:
    """A tar; without its end, if so asked."""
    blob = io.BytesIO()
    with tarfile.open(fileobj=blob, mode="w") as tar:
        for name, data in content.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        num_bytes = tar.offset
    return blob.getvalue() if end else blob.getvalue()[:num_bytes]


def read(folder, data, form, **options):
    """The names and contents of the members of a file with these bytes."""
    (folder / f"a.{form}").write_bytes(data)
    files = source_files(str(folder))
    if form == "tar":
        return {
            member.name: data[member.offset : member.offset + member.length]
            for member in tar_members(files, "a.tar", **options)
        }
    members = compressed_members(files, f"a.{form}", None, **options)
    return {member.name: content for member, content in members}


@pytest.fixture(params=FORMS)
def form(request):
    return request.param


@pytest.mark.parametrize("end", [1024, 1536, 3000, 10_240])
def test_ends_that_writers_make_are_taken(tmp_path, form, end):
    archive = tar_of(CONTENT)
    plain = tar_of(CONTENT, end=False)
    for data in (archive, plain + bytes(end + -(len(plain) + end) % 512)):
        if len(data) % 1024 == 0 or data is archive:
            assert read(tmp_path, FORMS[form](data), form) == CONTENT


def test_a_tar_without_members_is_one(tmp_path, form):
    assert read(tmp_path, FORMS[form](tar_of({})), form) == {}


def test_tars_joined_by_cat_are_refused_or_read_whole(tmp_path, form):
    later = {name.replace(".txt", ".cls"): data for name, data in CONTENT.items()}
    pack = FORMS[form]
    joined = {
        "two files": pack(tar_of(CONTENT)) + pack(tar_of(later)),
        "one frame": pack(tar_of(CONTENT) + tar_of(later)),
        "short ends": pack(tar_of(CONTENT, end=False) + bytes(1024) + tar_of(later)),
        "a block of zeros": pack(tar_of(CONTENT, end=False) + bytes(512) + tar_of(later)),
        "a hole of 300 kB": pack(tar_of(CONTENT, end=False) + bytes(512 * 600) + tar_of(later)),
    }
    for name, data in joined.items():
        with pytest.raises(
            SourceError,
            match=r"ends at byte \d+, and another member follows at",
        ):
            read(tmp_path, data, form)
        noted: Counter[str] = Counter()
        members = read(tmp_path, data, form, ignore_zeros=True, noted=noted)
        assert members == CONTENT | later, name
        assert [text.partition(": ")[2] for text in noted if "further tars" in text] == [
            "further tars behind the end of the first"
        ]


def test_what_follows_the_end_and_is_no_tar_is_refused_with_any_option(tmp_path, form):
    data = tar_of(CONTENT, end=False) + bytes(1024) + b"x" * 512
    for ignore_zeros in (False, True):
        with pytest.raises(SourceError, match=r"bytes that are no tar follow at byte"):
            read(tmp_path, FORMS[form](data), form, ignore_zeros=ignore_zeros)


def test_zeros_in_place_of_members_are_no_end(tmp_path, form):
    """A file that was given its full size and then was cut: the rest is zeros."""
    files = {f"{number}.bin": b"x" * 3000 for number in range(12)}
    archive = tar_of(files)
    cut = len(tar_of(dict(list(files.items())[:6]), end=False))
    data = FORMS[form](archive[:cut] + bytes(len(archive) - cut))
    with pytest.raises(
        SourceError,
        match=rf"bytes of zeros from byte {cut} on, more than the end",
    ):
        read(tmp_path, data, form)
    noted: Counter[str] = Counter()
    assert len(read(tmp_path, data, form, ignore_zeros=True, noted=noted)) == 6
    assert noted.total() == 1


def test_a_tar_without_an_end_may_be_cut_between_two_members(tmp_path, form):
    data = FORMS[form](tar_of(CONTENT, end=False))
    with pytest.raises(SourceError, match=r"has no end: its last member ends at byte"):
        read(tmp_path, data, form)
    assert read(tmp_path, data, form, ignore_zeros=True) == CONTENT


def test_a_damaged_header_is_no_end(tmp_path, form):
    data = bytearray(tar_of(CONTENT))
    second = len(tar_of({"0.txt": b""}, end=False))
    data[second + 150] ^= 1
    for ignore_zeros in (False, True):
        with pytest.raises(SourceError, match=f"has a damaged header, at byte {second}"):
            read(
                tmp_path,
                FORMS[form](bytes(data)),
                form,
                ignore_zeros=ignore_zeros,
            )


@pytest.mark.parametrize("ignore_zeros", [False, True])
@pytest.mark.parametrize("num_frames", [1, 3])
def test_compressed_tars_that_are_cut_anywhere_are_refused(
    tmp_path, form, num_frames, ignore_zeros
):
    if form == "tar":
        pytest.skip("of compressed tars")
    archive = tar_of(CONTENT)
    size = -(-len(archive) // num_frames)
    parts = [archive[first : first + size] for first in range(0, len(archive), size)]
    frames = [FORMS[form](part) for part in parts]
    data = b"".join(frames)
    assert read(tmp_path, data, form) == CONTENT
    borders = np.cumsum([0, *map(len, frames)]).tolist()
    for cut in {
        *range(1, len(data), 23),
        *range(len(data) - 12, len(data)),
        *borders[1:-1],
    }:
        if ignore_zeros and cut in borders:
            continue
        with pytest.raises(SourceError):
            read(tmp_path, data[:cut], form, ignore_zeros=ignore_zeros)


@pytest.mark.parametrize("rest", [b"\n", b"<html>", b"\x1f\x8b", b"\x28\xb5\x2f\xfd"])
def test_bytes_behind_a_compressed_tar_are_refused(tmp_path, form, rest):
    if form == "tar":
        pytest.skip("of compressed tars")
    with pytest.raises(SourceError, match="is damaged, cut off or none"):
        read(tmp_path, FORMS[form](tar_of(CONTENT)) + rest, form)


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "num_members"),
    [
        ("tar-go/gnu-multi-hdrs.tar", None),
        ("tar-go/pax.tar", None),
        ("tar-cpython/testtar.tar", None),
        ("tar-ratarmount/single-file.tar", 1),
        ("tar-ratarmount/empty.tar", 0),
        (
            "tar-ratarmount/concatenated.tar",
            "and another member follows at byte 10240",
        ),
        (
            "tar-libarchive/libarchive/test/test_read_format_tar_concatenated.tar",
            "another member",
        ),
        ("tar-split/extranils.tar.gz", 1),
        ("tar-split/notenoughnils.tar.gz", "has no end"),
        ("tar-split/iso-8859.tar.gz", 1),
        ("tar-split/fatlonglink.tar.gz", 5),
    ],
)
def test_archives_of_other_projects(name, num_members):
    path = shared_data(name.partition("/")[0]) / name.partition("/")[2]
    files = source_files(str(path.parent))
    is_plain = path.suffix == ".tar"
    members = tar_members(files, path.name) if is_plain else compressed_members(files, path.name, 9)
    if isinstance(num_members, int):
        assert len(list(members)) == num_members
        return
    fault = num_members or "is sparse, a link or a device"
    with pytest.raises(SourceError, match=fault):
        list(members)


def header_of(kind, content) -> bytes:
    """A header that tarfile reads as a whole, with its content in whole blocks."""
    info = tarfile.TarInfo("a.txt")
    info.type = kind
    info.size = len(content)
    return info.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % 512)


@pytest.mark.parametrize(
    ("kind", "content", "says"),
    [
        (
            tarfile.XHDTYPE,
            bytes(1 << 20),
            "a header of 1048576 bytes, of which at most 65536",
        ),
        (
            tarfile.XGLTYPE,
            bytes(1 << 20),
            "a header of 1048576 bytes, of which at most 65536",
        ),
        (
            tarfile.GNUTYPE_LONGNAME,
            b"x" * (1 << 20),
            "a header of 1048576 bytes",
        ),
        (
            tarfile.GNUTYPE_LONGLINK,
            b"x" * (1 << 20),
            "a header of 1048576 bytes",
        ),
        (
            tarfile.XHDTYPE,
            b"1" * 60_000,
            "a header has a number of more than 1,000 digits",
        ),
    ],
    ids=["pax", "global pax", "long name", "long link", "digits"],
)
def test_headers_that_take_much_memory_or_time_are_refused(tmp_path, form, kind, content, says):
    data = header_of(kind, content) + tar_of(CONTENT)
    with pytest.raises(SourceError, match=f"a.{form}' is damaged, cut off or none: {says}"):
        read(tmp_path, FORMS[form](data), form)


def test_maps_of_sparse_members_are_not_read(tmp_path, form):
    """The next part of a map is wanted until the end of the file."""
    info = tarfile.TarInfo("a.txt")
    info.type = tarfile.GNUTYPE_SPARSE
    head = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    head[386:482] = b"00000000001 " * 8
    head[482] = 1
    head[148:156] = b" " * 8
    head[148:156] = f"{sum(head):06o}\0 ".encode()
    parts = (b"00000000001 " * 42 + b"\1" + bytes(7)) * 20_000
    old = bytes(head) + parts
    fields = b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n"
    new = header_of(tarfile.XHDTYPE, fields) + header_of(tarfile.REGTYPE, b"9" * 5000)
    for data in (old, new):
        with pytest.raises(SourceError, match=r"'a\.txt' is sparse"):
            read(tmp_path, FORMS[form](data + bytes(1024)), form)


def test_long_names_are_read(tmp_path, form):
    content = {f"{'folder/' * 100}{number}é.txt": b"x" for number in range(3)}
    for tar_format in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        blob = io.BytesIO()
        with tarfile.open(fileobj=blob, mode="w", format=tar_format) as tar:
            for name, data in content.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        assert read(tmp_path, FORMS[form](blob.getvalue()), form) == content
