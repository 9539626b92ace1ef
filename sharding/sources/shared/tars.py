"""Where the members of a tar are: headers are read, payloads are skipped."""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple

import zstandard

from fuelrail.pipeline.errors import SourceError

if TYPE_CHECKING:
    from fuelrail.sharding.sources.shared.files import SourceFiles

_BLOCK: Final = 512
_AHEAD_BYTES: Final = 64 << 10
_KEPT: Final = 4
_DAMAGED: Final = (
    tarfile.TarError, OSError, ValueError, OverflowError, EOFError, zlib.error, zstandard.ZstdError
)  # fmt: skip
COMPRESSED: Final = (".tar.gz", ".tgz", ".tar.zst", ".tzst")


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
                for found in _regular(opened, where):
                    yield Member(found.name, found.offset_data, found.size)
                at = opened.offset
            # The library takes a damaged header for the end.
            file.seek(at)
            rest = file.read(_BLOCK) or b""
        except _DAMAGED as error:
            raise SourceError(f"{where} is damaged, cut off or none: {error}") from error
        if rest.strip(b"\0"):
            raise SourceError(f"{where} is cut off, or has a damaged header, at byte {at}")


def compressed_members(
    files: SourceFiles, tar: str, head_bytes: int | None, whole: str = "", wanted: Collection[str] | None = None
) -> Iterator[tuple[Member, bytes | None]]:
    """Yield the regular files of a compressed tar in order, with their first ``head_bytes`` (None: all of them).

    Those whose names end with ``whole`` are read whole. ``wanted``: of others nothing is read, and None is given.
    Raises SourceError as :func:`tar_members` does.
    """
    where = f"tar '{files.shown}/{tar}'"
    with _opened(files, tar) as file:
        plain: Any = gzip.GzipFile(fileobj=file) if not tar.endswith("zst") else _zstd(file)
        try:
            with plain, tarfile.open(fileobj=plain, mode="r|") as opened:
                for found in _regular(opened, where):
                    data = None
                    if wanted is None or found.name in wanted:
                        content = opened.extractfile(found)
                        assert content is not None, "a regular file"
                        is_whole = bool(whole) and found.name.lower().endswith(whole)
                        data = content.read(-1 if is_whole or head_bytes is None else head_bytes)
                    yield Member(found.name, 0, found.size), data
        except _DAMAGED as error:
            raise SourceError(f"{where} is damaged, cut off or none: {error}") from error


def _zstd(file: Any) -> Any:  # noqa: ANN401 - the library's reader
    return zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)


def _regular(opened: tarfile.TarFile, where: str) -> Iterator[tarfile.TarInfo]:
    while (found := opened.next()) is not None:
        opened.members = []  # type: ignore[attr-defined] # the library keeps them all otherwise
        name = found.name
        if found.isdir():
            continue
        if not found.isreg() or found.issparse():
            raise SourceError(f"{where}: '{name}' is sparse, a link or a device; wanted are regular files")
        if name.startswith("/") or ".." in name.split("/") or "\0" in name:
            raise SourceError(f"{where}: the name '{name}' leads out of the tar")
        yield found


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


def _opened(files: SourceFiles, name: str) -> BinaryIO:
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

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - a buffer
        length = max(min(len(buffer), self._size - self._at), 0)
        data = self._files.read(self._name, self._at, length) if length else b""
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
