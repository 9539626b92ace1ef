"""A shard as pure byte functions: normalised tar members out, spans in.

A shard is a plain POSIX tar (IEEE Std 1003.1, ustar interchange format) in WebDataset's naming,
``{key}.{field}``, all members of a sample adjacent. Headers are normalised (mode 0644, uid and gid
0, no owner names, mtime 0), so equal content is equal bytes. FORMAT.md has the rules.

A *span* is one sample's run of bytes in the shard: from its first header to the end of its last
member's padding.
"""

from __future__ import annotations

import functools
import re
import tarfile
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from fuelrail.pipeline.errors import (
    ConfigError,
    MemberTooLargeError,
    TarFormatError,
    TruncatedShardError,
)
from fuelrail.pipeline.text import shortened

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.arrays import Buffer

BLOCK_BYTES: Final = 512
END_OF_ARCHIVE: Final = bytes(2 * BLOCK_BYTES)
"""Two zero blocks close a tar."""

MAX_STORED_BYTES: Final = 0o77777777777
"""What a ustar size field holds: 8 GiB less one byte."""

MAX_KEY_BYTES: Final = 512
"""Cap on a sample's key, and on a clip's id."""

_KEY = re.compile(r"(?!__)[a-z0-9_-]+\Z")  # webdataset skips files called __...__
_FIELD = re.compile(r"[a-z0-9_]+(?:\.[a-z0-9_]+)+\Z")
_USTAR_NAME_BYTES: Final = 100
_FRONT_BYTES: Final = 136
"""Name, mode, owner and size in a header: what it says of its member."""
_MODE_UID_GID = b"".join(b"%07o\0" % number for number in (0o644, 0, 0))
_MTIME = b"%011o\0" % 0
_DEVICES = 2 * (b"%07o\0" % 0)
_NO_DEVICES = bytes(len(_DEVICES))
_ZERO_BLOCK = bytes(BLOCK_BYTES)


class StoredMember(NamedTuple):
    """One member to be packed: its field name as stored (``cam_front.jpg``, ``meta.json.zst``)
    and its stored bytes.
    """

    field: str
    data: Buffer


class PackedSpan(NamedTuple):
    """A sample's span: the pieces to write in order, the data offset of each member in the span,
    the span's length.
    """

    pieces: list[Buffer]
    offsets: list[int]
    length: int


class FoundMember(NamedTuple):
    """One member found in a tar: full name, offset of its first header block, offset and length
    of its data.
    """

    name: str
    header_offset: int
    offset: int
    length: int


def check_key(key: str) -> None:
    """Raise ConfigError unless ``key`` is a legal sample key: ``[a-z0-9_-]+``, no dot, no slash
    (FORMAT.md).
    """
    if not _KEY.match(key) or len(key) > MAX_KEY_BYTES:
        raise ConfigError(
            f"sample key '{shortened(key)}' is not allowed: use only the characters a-z 0-9 "
            f"_ -, not __ in front, {MAX_KEY_BYTES} at most"
        )


@functools.lru_cache(maxsize=1024)
def check_field(field: str) -> None:
    """Raise ConfigError unless ``field`` is a legal field name: lower-case parts joined by dots,
    one dot at least.
    """
    if not _FIELD.match(field) or field.startswith("__"):
        raise ConfigError(
            f"field name {field!r} is not allowed: lower-case letters, digits and _ in two "
            "or more parts joined by dots, such as cam_front.jpg, and not starting with __"
        )


def member_header(name: str, size: int) -> bytes:
    """Return the header block(s) of a regular file ``name`` of ``size`` bytes.

    One ustar block of 512 bytes, as GNU tar writes it. A name over 100 bytes or not ASCII takes a
    pax extended header in front (three blocks in all, or more) with one record, ``path``; the ustar
    block then holds the name's front.
    """
    if not 0 <= size <= MAX_STORED_BYTES:
        raise MemberTooLargeError(
            f"{size} bytes do not fit a tar header (at most {MAX_STORED_BYTES})",
            member=name,
        )
    if len(name) <= _USTAR_NAME_BYTES and name.isascii():
        return _ustar_block(name.encode("ascii"), size, b"0", _DEVICES)
    # Written here, not by Python's tarfile: its bytes have changed between Python versions.
    # A record is `LENGTH path=NAME\n`, where LENGTH counts all of it, itself included.
    rest = b" path=%s\n" % name.encode("utf-8")
    length = len(rest) + len(str(len(rest)))
    length = len(rest) + len(str(length))  # one digit more where the first guess carried over
    record = b"%d%s" % (length, rest)
    padding = _ZERO_BLOCK[: -len(record) % BLOCK_BYTES]
    front = name.encode("ascii", "replace")[:_USTAR_NAME_BYTES]
    # GNU tar leaves the device numbers of the extended header itself blank.
    extended = _ustar_block(b"././@PaxHeader", len(record), b"x", _NO_DEVICES)
    return extended + record + padding + _ustar_block(front, size, b"0", _DEVICES)


def _ustar_block(
    name: bytes,
    size: int,
    typeflag: bytes,
    devices: bytes,
) -> bytes:
    # Fields of the ustar header: name 100, mode 8, uid 8, gid 8, size 12, mtime 12, chksum 8,
    # typeflag 1, linkname 100, magic 6, version 2, uname 32, gname 32, devmajor 8, devminor 8,
    # prefix 155, padding 12.
    digits = b"%011o\0" % size
    end, constant_sum = _after_checksum(typeflag, devices)
    checksum = constant_sum + sum(name) + sum(digits)
    return b"".join(
        (
            name.ljust(100, b"\0"),
            _MODE_UID_GID,
            digits,
            _MTIME,
            b"%06o\0 " % checksum,
            end,
        )
    )


def are_members(
    view: memoryview,
    key: str,
    fields: tuple[str, ...],
    offsets: Sequence[int],
    sizes: Sequence[int],
) -> bool:
    """Return whether the headers in front of ``offsets`` in a span are those of the members of a
    sample.

    Only the first 100 bytes of a name are compared. ``fields`` and ``sizes`` [bytes] are those of
    the members.
    """
    # Every sample that is read passes here, so all headers are compared at once. The key is in
    # each; one will do.
    front = key.encode("ascii", "replace")[:_USTAR_NAME_BYTES]
    begin = len(front) - BLOCK_BYTES
    end = _FRONT_BYTES - BLOCK_BYTES
    headers = b"".join([view[offset + begin : offset + end] for offset in offsets])
    expected = _fronts(fields, len(front)) % tuple(sizes)
    if headers != expected:
        return False
    if not offsets:
        return True
    first = offsets[0]
    return view[first - BLOCK_BYTES : first + begin] == front


@functools.lru_cache(maxsize=1024)
def _fronts(fields: tuple[str, ...], key_bytes: int) -> bytes:
    """Return what follows the key in the headers of these fields, up to the sizes."""
    room = _USTAR_NAME_BYTES - key_bytes
    fronts = []
    for field in fields:
        name = b"." + field.encode("ascii", "replace")
        padded_name = name[:room].ljust(room, b"\0")
        fronts.append(padded_name.replace(b"%", b"%%") + _MODE_UID_GID + b"%011o\0")
    return b"".join(fronts)


@functools.cache
def _after_checksum(typeflag: bytes, devices: bytes) -> tuple[bytes, int]:
    """Return what follows the checksum in a header, and the checksum's part that is independent
    of name and size.
    """
    link_name = bytes(100)
    owner_names = bytes(64)
    prefix_and_padding = bytes(167)
    end = b"".join(
        (
            typeflag,
            link_name,
            b"ustar\x00",
            b"00",
            owner_names,
            devices,
            prefix_and_padding,
        )
    )
    blank_checksum = 8 * ord(" ")
    return end, sum(_MODE_UID_GID) + sum(_MTIME) + blank_checksum + sum(end)


def pack_sample(key: str, members: Sequence[StoredMember]) -> PackedSpan:
    """Lay the members of one sample out as they are in the shard; data buffers are referenced, not
    copied.

    Raises ConfigError for a bad key or field and for a field that occurs twice.
    """
    check_key(key)
    pieces: list[Buffer] = []
    offsets: list[int] = []
    position = 0
    packed_fields: set[str] = set()
    for field, data in members:
        check_field(field)
        if field in packed_fields:
            raise ConfigError(f"sample {key!r} has the field {field!r} twice")
        packed_fields.add(field)
        size = memoryview(data).nbytes
        header = member_header(f"{key}.{field}", size)
        padding = _ZERO_BLOCK[: -size % BLOCK_BYTES]
        offsets.append(position + len(header))
        pieces += (header, data, padding) if padding else (header, data)
        position += len(header) + size + len(padding)
    return PackedSpan(pieces, offsets, position)


def iter_members(
    data: Buffer,
    *,
    shard: str,
    closed: bool = True,
) -> Iterator[FoundMember]:
    """Yield the members of a whole normalised tar held in ``data``, strictly; not ``closed``: of a
    span alone.

    This is the check for shards that Fuelrail wrote: regular files with our normalised headers, and
    pax headers in front of long names, nothing else. Raises TarFormatError for anything else,
    TruncatedShardError where the file ends early; both carry shard and offset.
    """
    view = memoryview(data)
    position = 0
    while closed or position < len(view):
        header_offset = position
        name, size, position = _read_header(view, position, shard)
        if name is None:
            if not closed:
                raise TarFormatError(
                    "zeros instead of a header",
                    shard=shard,
                    offset=header_offset,
                )
            if len(view) < header_offset + len(END_OF_ARCHIVE):
                raise TruncatedShardError(
                    "the closing zero blocks are cut",
                    shard=shard,
                    offset=header_offset,
                )
            end = header_offset + len(END_OF_ARCHIVE)
            if len(view) > end or any(view[header_offset:end]):
                raise TarFormatError(
                    "bytes after the end of the archive",
                    shard=shard,
                    offset=header_offset,
                )
            return
        end = position + size
        padded = end + -size % BLOCK_BYTES
        if padded > len(view):
            raise TruncatedShardError(
                f"member '{name}' needs {padded} bytes, the shard has {len(view)}",
                shard=shard,
                offset=header_offset,
            )
        if any(view[end:padded]):
            raise TarFormatError(
                f"padding of member '{name}' is not zero",
                shard=shard,
                offset=end,
            )
        yield FoundMember(
            name=name,
            header_offset=header_offset,
            offset=position,
            length=size,
        )
        position = padded


def _read_header(
    view: memoryview,
    position: int,
    shard: str,
) -> tuple[str | None, int, int]:
    """Name, size and data offset of the member whose header starts at ``position``; name None at
    the end's zeros.
    """
    block = bytes(view[position : position + BLOCK_BYTES])
    if len(block) < BLOCK_BYTES:
        raise TruncatedShardError("no end-of-archive blocks", shard=shard, offset=position)
    if block == _ZERO_BLOCK:
        return None, 0, position
    is_pax = block[156:157] == b"x"
    length = BLOCK_BYTES
    if is_pax:
        try:
            pax_bytes = int(block[124:135], 8)
        except ValueError as error:
            raise TarFormatError("size field is not octal", shard=shard, offset=position) from error
        if pax_bytes > 1 << 20:
            raise TarFormatError(
                f"a pax header of {pax_bytes} bytes",
                shard=shard,
                offset=position,
            )
        num_blocks = -(-pax_bytes // BLOCK_BYTES)
        length += BLOCK_BYTES + num_blocks * BLOCK_BYTES
    header = bytes(view[position : position + length])
    if len(header) < length:
        raise TruncatedShardError("the shard ends inside a header", shard=shard, offset=position)
    try:
        info = tarfile.TarInfo.frombuf(header[-BLOCK_BYTES:], "utf-8", "strict")
        name = info.name
        if is_pax:  # `LENGTH path=NAME\n`, and nothing else
            records = header[BLOCK_BYTES:-BLOCK_BYTES]
            match = re.match(rb"(\d+) path=", records)
            if match is None:
                raise ValueError("pax header without a path record")
            name = records[match.end() : int(match[1]) - 1].decode("utf-8")
        normal = member_header(name, info.size)
    except (
        tarfile.HeaderError,
        UnicodeDecodeError,
        ValueError,
        MemberTooLargeError,
    ) as error:
        raise TarFormatError(f"not a tar header: {error}", shard=shard, offset=position) from error
    if header != normal:
        raise TarFormatError(
            f"header of '{name}' is not normalised",
            shard=shard,
            offset=position,
        )
    return name, info.size, position + length
