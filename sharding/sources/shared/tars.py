"""Where the members of a tar are: headers are read, payloads are skipped."""

from __future__ import annotations

import gzip
import tarfile
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import zstandard

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.shared.files import check_most
from fuelrail.sharding.sources.shared.foreign import parsing
from fuelrail.sharding.sources.shared.windows import open_file

if TYPE_CHECKING:
    from fuelrail.sharding.sources.shared.files import SourceFiles

_BLOCK: Final = 512
_AHEAD_BYTES: Final = 64 << 10
_BAD: Final = "is damaged, cut off or none"
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
    with open_file(files, tar, _AHEAD_BYTES) as file:
        with parsing(where, _BAD):
            with tarfile.open(fileobj=file, mode="r:") as opened:
                for found in _regular(opened, where):
                    yield Member(found.name, found.offset_data, found.size)
                at = opened.offset
            # The library takes a damaged header for the end.
            file.seek(at)
            rest = file.read(_BLOCK) or b""
        if rest.strip(b"\0"):
            raise SourceError(f"{where} is cut off, or has a damaged header, at byte {at}")


def compressed_members(
    files: SourceFiles,
    tar: str,
    head_bytes: int | None,
    whole: tuple[str, ...] = (),
    wanted: Collection[str] | None = None,
) -> Iterator[tuple[Member, bytes | None]]:
    """Yield the regular files of a compressed tar in order, with their first ``head_bytes`` (None: all of them).

    Those whose names end with one of ``whole`` are read whole. ``wanted``: of others nothing is read, and None is
    given. Raises SourceError as :func:`tar_members` does.
    """
    where = f"tar '{files.shown}/{tar}'"
    with open_file(files, tar, _AHEAD_BYTES) as file:
        zstd = zstandard.ZstdDecompressor().stream_reader
        plain: Any = (
            zstd(file, read_across_frames=True)
            if tar.endswith("zst")
            else gzip.GzipFile(fileobj=file)
        )
        with plain, parsing(where, _BAD), tarfile.open(fileobj=plain, mode="r|") as opened:
            for found in _regular(opened, where):
                data = None
                if wanted is None or found.name in wanted:
                    content = opened.extractfile(found)
                    assert content is not None, "a regular file"
                    is_whole = found.name.lower().endswith(whole)
                    length = found.size if is_whole or head_bytes is None else head_bytes
                    check_most(length, f"{where}: '{found.name}'")
                    data = content.read(length)
                yield Member(found.name, 0, found.size), data


def _regular(opened: tarfile.TarFile, where: str) -> Iterator[tarfile.TarInfo]:
    while (found := opened.next()) is not None:
        opened.members = []  # type: ignore[attr-defined] # the library keeps them all otherwise
        name = found.name
        if found.isdir():
            continue
        if not found.isreg() or found.issparse():
            raise SourceError(
                f"{where}: '{name}' is sparse, a link or a device; wanted are regular files"
            )
        if name.startswith("/") or ".." in name.split("/") or "\0" in name:
            raise SourceError(f"{where}: the name '{name}' leads out of the tar")
        yield found
