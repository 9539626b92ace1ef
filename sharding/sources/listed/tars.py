"""Where the members of a tar are: headers are read, payloads are skipped."""

from __future__ import annotations

import io
import tarfile
from typing import TYPE_CHECKING, Final, NamedTuple

from fuelrail.pipeline.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fuelrail.sharding.sources.files import SourceFiles

_BLOCK: Final = 512
_AHEAD_BYTES: Final = 64 << 10
_KEPT: Final = 4


class Member(NamedTuple):
    """A regular file in a tar: its name, and where its bytes begin and how many they are."""

    name: str
    offset: int
    length: int


def tar_members(files: SourceFiles, tar: str) -> Iterator[Member]:
    """Yield the regular files of an uncompressed tar in order.

    Folders are passed over. Raises SourceError for a tar that is damaged or cut off, and for sparse files, links,
    devices, and names that lead out of the tar.
    """
    where = f"tar '{files.shown}/{tar}'"
    with _opened(files, tar) as file:
        try:
            with tarfile.open(fileobj=file, mode="r:") as opened:
                while (found := opened.next()) is not None:
                    opened.members = []  # the library keeps them all otherwise
                    if found.isdir():
                        continue
                    name = found.name
                    if not found.isreg() or found.issparse():
                        raise SourceError(f"{where}: '{name}' is sparse, a link or a device; wanted are regular files")
                    if name.startswith("/") or ".." in name.split("/") or "\0" in name:
                        raise SourceError(f"{where}: the name '{name}' leads out of the tar")
                    yield Member(name, found.offset_data, found.size)
                # The library takes a damaged header for the end.
                file.seek(opened.offset)
                at = opened.offset
            rest = file.read(_BLOCK)
        except (tarfile.TarError, OSError, ValueError, OverflowError, EOFError) as error:
            raise SourceError(f"{where} is damaged, cut off or none: {error}") from error
        if rest.strip(b"\0"):
            raise SourceError(f"{where} has a damaged header at byte {at}")


class Tars:
    """Members by name of the tars of a source; those of the last few tars are kept."""

    def __init__(self, files: SourceFiles) -> None:
        self._files = files
        self._kept: dict[str, dict[str, Member]] = {}

    def find(self, tar: str, name: str) -> Member | None:
        """Return a member; None where the tar has none of that name."""
        found = self._kept.pop(tar, None)
        if found is None:
            found = {member.name: member for member in tar_members(self._files, tar)}
        self._kept[tar] = found
        if len(self._kept) > _KEPT:
            del self._kept[next(iter(self._kept))]
        return found.get(name)


def _opened(files: SourceFiles, name: str) -> io.RawIOBase | io.BufferedReader:
    path = files.path(name)
    if path is None:
        return io.BufferedReader(_Ranges(files, name), _AHEAD_BYTES)
    try:
        return open(path, "rb", buffering=0)  # noqa: PTH123 - closed by the caller
    except OSError as error:
        raise SourceError(f"tar '{path}' cannot be read: {error.strerror}") from error


class _Ranges(io.RawIOBase):
    """A file at a URL, read by ranges."""

    def __init__(self, files: SourceFiles, name: str) -> None:
        self._files, self._name, self._at = files, name, 0
        facts = files.facts(name)
        if facts is None:
            raise SourceError(f"tar '{files.shown}/{name}' is not there")
        self._size = facts.num_bytes

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        length = max(min(len(buffer), self._size - self._at), 0)
        data = self._files.read(self._name, self._at, length) if length else b""
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
