"""Where the members of a tar are: headers are read, payloads are skipped, and the end is looked at.

A tar ends with two blocks of zeros, and with zeros that fill up its last record. A compressed one
ends with a whole frame besides. Whatever else follows is an error, for members may be lost: those
of a second tar (``cat a.tar b.tar``), of a download that was given its full size and was cut, of a
file that was cut between two members.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import re
import tarfile
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple, cast

import pyarrow as pa

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.shared.files import check_most
from fuelrail.sharding.sources.shared.foreign import parsing
from fuelrail.sharding.sources.shared.windows import open_file

if TYPE_CHECKING:
    from collections import Counter

    from fuelrail.sharding.sources.shared.files import SourceFiles

_BLOCK: Final = 512
_END_BYTES: Final = 2 * _BLOCK
_MOST_BLOCKS: Final = 20
"""Blocks of a record, as tar writes them where nothing else is said."""
_PIECE_BYTES: Final = 64 << 10
_MOST_ZEROS: Final = 256 << 20
"""How far a tar that does not end as it should is searched for another one."""
_AHEAD_BYTES: Final = 64 << 10
_BAD: Final = "is damaged, cut off or none"
_MOST_OF_HEADER: Final = 64 << 10
"""Bytes of a long name or of a pax header: tarfile reads these as a whole, and compressed ones may
be of any size.
"""
_NUMBER_WITHOUT_END: Final = re.compile(rb"[0-9]{1000}")
"""What tarfile, before Python 3.11.10, tries again from each digit."""
_READ_AS_WHOLE: Final = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)
COMPRESSED: Final = (".tar.gz", ".tgz", ".tar.zst", ".tzst")
OF_IGNORE_ZEROS: Final = (
    "true reads on behind the end of a tar, as GNU tar's --ignore-zeros does (tars joined "
    "by cat), and takes tars without an end and with more zeros than tar writes"
)
"""The description of the option ``ignore_zeros``, which sources of tars have."""


class Member(NamedTuple):
    """A regular file in a tar: its name, and where its bytes begin and how many they are."""

    name: str
    offset: int
    length: int


class _BoundedInfo(tarfile.TarInfo):
    """A header of a tar that takes little memory and time, however it is made.

    Raises ValueError for one that is larger than writers make it. The maps of sparse files, which
    are refused, are not read.
    """

    def _proc_member(self, tar: Any) -> Any:
        if self.type == tarfile.GNUTYPE_SPARSE:
            self.sparse = b""
            return self._proc_builtin(tar)  # type: ignore[attr-defined]
        if self.type in _READ_AS_WHOLE:
            if self.size > _MOST_OF_HEADER:
                raise ValueError(
                    f"a header of {self.size} bytes, of which at most {_MOST_OF_HEADER} are read"
                )
            begin = tar.fileobj.tell()
            if _NUMBER_WITHOUT_END.search(tar.fileobj.read(self.size)):
                raise ValueError("a header has a number of more than 1,000 digits")
            tar.fileobj.seek(begin)
        return super()._proc_member(tar)  # type: ignore[misc]

    def _leave_out_map(self, member: Any, *_: object) -> None:
        member.sparse = b""

    _proc_gnusparse_00 = _leave_out_map
    _proc_gnusparse_01 = _leave_out_map
    _proc_gnusparse_10 = _leave_out_map


class _Unpacked:
    """The bytes of a compressed file: read forward, and back within what the last read returned."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._last = b""
        self._end = 0
        self._back = 0

    def tell(self) -> int:
        return self._end - self._back

    def read(self, length: int) -> bytes:
        if self._back:
            begin = len(self._last) - self._back
            data = self._last[begin : begin + length]
            self._back -= len(data)
            if len(data) < length:
                return data + self.read(length - len(data))
            return data
        pieces = []
        num_bytes = 0
        while num_bytes < length and (piece := self._stream.read(length - num_bytes)):
            pieces.append(piece)
            num_bytes += len(piece)
        self._last = b"".join(pieces)
        self._end += num_bytes
        return self._last

    def seek(self, offset: int) -> int:
        if offset < self._end:
            self._back = self._end - offset
            if self._back > len(self._last):
                raise io.UnsupportedOperation("a compressed file is read from front to back")
            return offset
        self._back = 0
        while self._end < offset and self.read(min(offset - self._end, _PIECE_BYTES)):
            pass
        return self._end


def tar_members(
    files: SourceFiles,
    tar: str,
    *,
    ignore_zeros: bool = False,
    noted: Counter[str] | None = None,
) -> Iterator[Member]:
    """Yield the regular files of an uncompressed tar in order.

    Folders are passed over. Raises SourceError for a tar that is damaged, cut off, or goes on
    behind its end, and for sparse files, links, devices, and names that lead out of the tar. With
    ``ignore_zeros`` what follows the end is read too; ``noted`` counts then what is not as it
    should be.
    """
    where = f"tar '{files.shown}/{tar}'"
    with open_file(files, tar, _AHEAD_BYTES) as file:
        for _, info in _iter_regular_files(file, where, ignore_zeros=ignore_zeros, noted=noted):
            yield Member(info.name, info.offset_data, info.size)


def compressed_members(
    files: SourceFiles,
    tar: str,
    head_bytes: int | None,
    whole_endings: tuple[str, ...] = (),
    names: Collection[str] | None = None,
    *,
    ignore_zeros: bool = False,
    noted: Counter[str] | None = None,
) -> Iterator[tuple[Member, bytes | None]]:
    """Yield the regular files of a compressed tar in order, with their first ``head_bytes`` (None:
    all of them).

    Those whose names end with one of ``whole_endings`` are read whole. ``names``: of others nothing
    is read, and None is given. Raises SourceError as :func:`tar_members` does, and where the
    compressed data is cut off or goes on.
    """
    where = f"tar '{files.shown}/{tar}'"
    with (
        open_file(files, tar, _AHEAD_BYTES) as file,
        contextlib.ExitStack() as stack,
    ):
        with parsing(where, _BAD):
            stream: Any = (
                pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd")
                if tar.endswith("zst")
                else gzip.GzipFile(fileobj=file)
            )
            stack.enter_context(stream)
        plain = cast("BinaryIO", _Unpacked(stream))
        for opened, info in _iter_regular_files(
            plain,
            where,
            ignore_zeros=ignore_zeros,
            noted=noted,
        ):
            data = None
            if names is None or info.name in names:
                with parsing(where, _BAD):
                    content = opened.extractfile(info)
                    assert content is not None, "a regular file"
                    is_whole = info.name.lower().endswith(whole_endings)
                    length = info.size if is_whole or head_bytes is None else head_bytes
                    check_most(length, f"{where}: '{info.name}'")
                    data = content.read(length)
            yield Member(info.name, 0, info.size), data


def _iter_regular_files(
    file: BinaryIO,
    where: str,
    *,
    ignore_zeros: bool,
    noted: Counter[str] | None,
) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """Yield the regular files of all tars of a file, which is one where nothing else is said."""
    start: int | None = 0
    num_tars = 0
    while start is not None:
        with parsing(where, _BAD):
            file.seek(start)
            opened = tarfile.open(  # noqa: SIM115 - it holds nothing
                fileobj=file,
                mode="r:",
                tarinfo=_BoundedInfo,
            )
        num_tars += 1
        while True:
            with parsing(where, _BAD):
                info = opened.next()
            if info is None:
                break
            opened.members = []  # type: ignore[attr-defined] # the library keeps them all otherwise
            name = info.name
            if info.isdir():
                continue
            if not info.isreg() or info.issparse():
                raise SourceError(
                    f"{where}: '{name}' is sparse, a link or a device; wanted are regular files"
                )
            if name.startswith("/") or ".." in name.split("/") or "\0" in name:
                raise SourceError(f"{where}: the name '{name}' leads out of the tar")
            yield opened, info
        with parsing(where, _BAD):
            num_bytes = opened.offset - start
            start, fault = _look_at_end(
                file,
                opened.offset,
                num_bytes,
                where=where,
                ignore_zeros=ignore_zeros,
            )
        if fault and not ignore_zeros:
            raise SourceError(f"{where} {fault}")
        if fault and start is None and noted is not None:
            noted[f"{where} {fault.partition(';')[0].partition(':')[0]}"] += 1
    if num_tars > 1 and noted is not None:
        noted[f"{where}: further tars behind the end of the first"] += num_tars - 1


def _look_at_end(
    file: BinaryIO,
    end: int,
    num_bytes: int,
    *,
    where: str,
    ignore_zeros: bool,
) -> tuple[int | None, str]:
    """Return where another tar begins behind the end of one, None for nowhere, and what is wrong
    with the end.

    ``num_bytes`` are those of the tar up to there. What tarfile takes for the end may be a damaged
    header.
    """
    file.seek(end)
    num_zeros = 0
    is_long = False
    while not is_long and (piece := file.read(_PIECE_BYTES)):
        rest = piece.lstrip(b"\0")
        num_zeros += len(piece) - len(rest)
        if rest:
            break
        is_long = not ignore_zeros and num_zeros > _MOST_ZEROS
    else:
        if num_zeros < _END_BYTES:
            return None, (
                f"has no end: its last member ends at byte {end}, and {num_zeros} bytes of "
                f"zeros follow, where every tar ends with {_END_BYTES}; it may be cut off "
                "between two members: get the file again, or take it as it is with the option "
                "ignore_zeros=true"
            )
        num_blocks = (num_bytes + num_zeros) // _BLOCK
        num_zero_blocks = num_zeros // _BLOCK
        for record in range(1, _MOST_BLOCKS + 1):
            if num_blocks % record == 0 and num_zero_blocks < record + 2:
                return None, ""
        return None, (
            f"has {num_zeros} bytes of zeros from byte {end} on, more than the end that tar "
            f"writes in records of at most {_MOST_BLOCKS} blocks; a download that was cut, in a "
            "file that had its full size before, looks like this, and so does a tar of larger "
            "records (`tar -b`); get the file again, or take it as it is with the option "
            "ignore_zeros=true"
        )
    if num_zeros < _BLOCK:
        raise SourceError(f"{where} is cut off, or has a damaged header, at byte {end}")
    first = end + num_zeros // _BLOCK * _BLOCK
    file.seek(first)
    try:
        tarfile.TarInfo.frombuf(file.read(_BLOCK), "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        raise SourceError(
            f"{where} ends at byte {end}, and bytes that are no tar follow at byte {first}: "
            "members may be damaged or lost; get the file again, or cut off what does not "
            "belong to it"
        ) from None
    return first, (
        f"ends at byte {end}, and another member follows at byte {first}: these are tars "
        "joined by `cat`, or a part of the tar was overwritten with zeros; the option "
        "ignore_zeros=true reads what follows, too"
    )
