"""The files of a source: in a folder of this machine, or at a URL that fsspec knows.

Only regular files are read: a FIFO would wait for a writer for ever, a device has no end. A link is
followed where it leads to something in the source's folder, or in one that the environment variable
``FUELRAIL_LINKED_FOLDERS`` names (several with a colon between them): a source that somebody else
made cannot bring other files of this machine into a dataset.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sqlite3
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.storage.files import open_descriptor
from fuelrail.pipeline.storage.filesystem import (
    filesystem,
    is_url,
    shown_url,
    stated_version,
)
from fuelrail.pipeline.storage.retry import RetryPolicy, call_with_retries
from fuelrail.pipeline.text import shortened

if TYPE_CHECKING:
    from fuelrail.pipeline.storage.retry import Fault

A = TypeVar("A")
T = TypeVar("T")

_NUM_TRIED: Final = 8
_SLOW_LOOK_S: Final = 1e-4
_NUM_THREADS: Final = 64
_MOST_TOGETHER: Final = 16
_KEPT_FOLDERS: Final = 4096
LINKED: Final = "FUELRAIL_LINKED_FOLDERS"
"""The environment variable with further folders that links in a source may lead to."""
MOST_BYTES: Final = 256 << 20
"""What is read of a file at once."""

_OF_SYSTEMS: Final = frozenset(
    (
        "__macosx",
        "thumbs.db",
        "desktop.ini",
        "$recycle.bin",
        "system volume information",
        "@eadir",
        "lost+found",
    )
)
LFS_MAGIC: Final = b"version https://git-lfs"


def looks(look: Callable[[A], T], items: Sequence[A]) -> list[T]:
    """Return ``look(item)`` for each item, in order: in 64 threads where the first ones take over
    0.1 ms each.

    So a network file system is asked many things at once, and a fast disk pays for no threads.
    """
    start = time.perf_counter()
    results = [look(item) for item in items[:_NUM_TRIED]]
    rest = items[_NUM_TRIED:]
    if time.perf_counter() - start < _SLOW_LOOK_S * len(results) or not rest:
        return results + [look(item) for item in rest]
    # A task takes as long as a look at a fast file.
    size = min(-(-len(rest) // _NUM_THREADS), _MOST_TOGETHER)
    parts = [rest[first : first + size] for first in range(0, len(rest), size)]
    with ThreadPoolExecutor(min(_NUM_THREADS, len(parts)), "look") as pool:
        return results + [
            result
            for part in pool.map(lambda part: [look(item) for item in part], parts)
            for result in part
        ]


def is_hidden(name: str) -> bool:
    """Return whether a file or folder is one that systems and editors leave beside data: hidden,
    or known by name.
    """
    is_dotted = name.startswith(".") and name not in (".", "..")
    return is_dotted or name.lower() in _OF_SYSTEMS


class _VisibleNames:
    """Leaves hidden names out of listings; ``hidden`` has the number of those of each folder."""

    def __init__(self) -> None:
        self.hidden: dict[str, int] = {}

    def without_hidden(self, names: list[str], folder: str) -> list[str]:
        """Return the names of a folder that are not hidden."""
        visible = [name for name in names if not is_hidden(name)]
        if len(visible) < len(names):
            self.hidden[folder] = len(names) - len(visible)
        return visible


class FileFacts(NamedTuple):
    """Size [bytes], and what changes when a file is written again: its time of change, or its
    ETag at a URL.
    """

    num_bytes: int
    stamp: str


def source_files(location: str, named: str = "") -> SourceFiles:
    """Return files at a folder or URL; read nothing.

    ``named``: a file that the user named, which may be any link.
    """
    if is_url(location):
        return UrlFiles(location)
    return FolderFiles(location.removeprefix("file://"), named)


class FolderFiles(_VisibleNames):
    """Files of a folder; ``named`` is one that the user named, which may be a link to anywhere.

    Names are relative to the root, with ``/``; errors are SourceError naming the file. ``shown`` is
    the root as messages may show it.
    """

    def __init__(self, root: str, named: str = "") -> None:
        super().__init__()
        self._root = self.shown = root
        linked = [folder for folder in os.environ.get(LINKED, "").split(os.pathsep) if folder]
        self._roots = [os.path.realpath(folder) for folder in (root, *linked)]
        if named:
            self._roots.append(os.path.realpath(os.path.join(root, named)))  # noqa: PTH118
        self._inside: set[str] = set()

    def folders_with(self, name: str) -> list[str]:
        """Return the root's folders that have a file of this name, sorted; raise SourceError
        without a root.
        """
        return [
            folder
            for folder in self.folders()
            if os.path.isfile(f"{self._root}/{folder}/{name}")  # noqa: PTH113
        ]

    def scanning(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which many facts are asked for."""
        return contextlib.nullcontext()

    def facts(self, name: str) -> FileFacts | None:
        """Return size and time of change of a file; None where it does not exist."""
        path = self._place(name)
        try:
            status = os.lstat(path)
            if stat.S_ISLNK(status.st_mode):
                status = os.stat(self._follow_links(path))  # noqa: PTH116
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise _make_read_error(path, error) from error
        kind = stat.S_IFMT(status.st_mode)
        if kind not in (stat.S_IFREG, stat.S_IFDIR):
            # A FIFO would wait for a writer.
            raise SourceError(f"'{path}' is a FIFO, socket or device; wanted is a file")
        return FileFacts(status.st_size, str(status.st_mtime_ns))

    def listed(self, folder: str = "") -> list[str]:
        """Return the names directly in a folder below the root, sorted, without hidden ones.

        Raises SourceError where it is no folder.
        """
        path = self._place(f"{folder}/").rstrip("/") or "/"
        try:
            return self.without_hidden(sorted(os.listdir(path)), folder)  # noqa: PTH208 - names
        except NotADirectoryError:
            raise SourceError(f"source '{shortened(path)}' is not a folder") from None
        except (OSError, ValueError) as error:
            raise SourceError(
                f"source '{shortened(path)}' cannot be read: {_reason(error)}"
            ) from error

    def folders(self, folder: str = "") -> list[str]:
        """Return the folders in a folder; of links too, which are followed when they are read."""
        return [
            name
            for name in self.listed(folder)
            if os.path.isdir(f"{self._root}/{folder}/{name}")  # noqa: PTH112
        ]

    def facts_of(self, names: Sequence[str]) -> list[FileFacts | None]:
        """Return the facts of each file: one by one on a local disk, in threads on a network's."""
        return looks(self.facts, names)

    def read(
        self,
        name: str,
        offset: int = 0,
        length: int | None = None,
        limit: int = MOST_BYTES,
    ) -> bytes:
        """Read a file, or a range of it; fewer bytes where it ends before.

        Refuse more than ``limit``.
        """
        # A file object takes twice as long, and scans read many heads.
        descriptor = self.descriptor(name)
        try:
            num_bytes = os.fstat(descriptor).st_size - offset if length is None else length
            check_most(num_bytes, f"file '{self._root}/{name}'", limit)
            if length is not None:
                return os.pread(descriptor, num_bytes, offset)
            os.lseek(descriptor, offset, os.SEEK_SET)
            with open(descriptor, "rb", buffering=0, closefd=False) as file:
                return file.read()
        except OSError as error:
            raise _make_read_error(f"{self._root}/{name}", error) from error
        finally:
            os.close(descriptor)

    def descriptor(self, name: str) -> int:
        """Open a descriptor to read a regular file."""
        path = self._place(name)
        try:
            try:
                return open_descriptor(path)
            except PermissionError:  # it may be a link to another folder of the source
                return open_descriptor(self._follow_links(path))
        except (OSError, ValueError) as error:
            raise _make_read_error(path, error) from error

    def path(self, name: str) -> str | None:
        """Return the path of a regular file, or of a missing one, for a library that opens it;
        None at a URL.
        """
        self.facts(name)
        return self._place(name)

    def _place(self, name: str) -> str:
        """Return the path of a name; refuse a folder outside the source."""
        folder = name.rpartition("/")[0]
        if folder not in self._inside:
            self._follow_links(f"{self._root}/{folder}" if folder else self._root)
            if len(self._inside) >= _KEPT_FOLDERS:
                self._inside.clear()
            self._inside.add(folder)
        return f"{self._root}/{name}"

    def _follow_links(self, path: str) -> str:
        """Follow the links of a path; raise SourceError where they lead outside of what the
        source may read.
        """
        try:
            target = os.path.realpath(path)
        except (OSError, ValueError) as error:
            raise _make_read_error(path, error) from error
        if not any(
            target == root or target.startswith(f"{root.rstrip('/')}/") for root in self._roots
        ):
            raise SourceError(
                f"'{shortened(path)}' leads to '{shortened(target)}', which is outside of "
                "the source: bring it into the source's folder, or name the folder that it "
                f"leads to in the environment variable {LINKED}"
            )
        return target


class UrlFiles(_VisibleNames):
    """Files under a prefix of an object store.

    Facts come from listings, one for each top folder, kept on disk.

    The listings are there while :meth:`scanning` is open; without one the store is asked about each
    file.
    """

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url.rstrip("/")
        self.shown = shown_url(self._url)
        self._fs, self._root = filesystem(self._url)
        self._listings: _Listings | None = None

    def folders_with(self, name: str) -> list[str]:
        """Return the prefixes that have an object of this name."""
        paths = self._try("", lambda: self._fs.glob(f"{self._root}/*/{name}"))
        folders = (path.split("/")[-2] for path in paths)
        return sorted(folder for folder in folders if not is_hidden(folder))

    @contextlib.contextmanager
    def scanning(self) -> Iterator[None]:
        """Keep listings on disk, and take facts from them."""
        with (
            tempfile.TemporaryDirectory(prefix="fuelrail-") as scratch,
            contextlib.closing(
                sqlite3.connect(f"{scratch}/listings", isolation_level=None)
            ) as database,
        ):
            self._listings = _Listings(database)
            try:
                yield
            finally:
                self._listings = None

    def facts(self, name: str) -> FileFacts | None:
        """Return size and ETag."""
        if self._listings is None:  # of one file, while samples are written
            look = functools.partial(self._fs.info, self._path(name))
            info = self._try(name, look)
            return FileFacts(info["size"], stated_version(info))
        top, in_folder, _ = name.partition("/")
        top = top if in_folder else ""
        if top not in self._listings.folders:
            listed = functools.partial(self._list_folder, self._root)
            self._listings.add(
                top,
                self._walk_pages(top) if in_folder else [self._select_files(self._try("", listed))],
            )
        return self._listings.facts(name)

    def listed(self, folder: str = "") -> list[str]:
        """Return the names under a prefix, without hidden ones."""
        path = self._path(folder).rstrip("/")
        entries = self._try(folder, functools.partial(self._list_folder, path))
        if not entries:
            raise SourceError(f"'{self.shown}/{folder}' has no objects")
        names = sorted(
            entry["name"].rstrip("/").rpartition("/")[2]
            for entry in entries
            if entry["name"] != path
        )
        return self.without_hidden(names, folder)

    def folders(self, folder: str = "") -> list[str]:
        """Return the prefixes under a prefix."""
        path = self._path(folder).rstrip("/")
        entries = self._try(folder, functools.partial(self._list_folder, path))
        folders = [entry for entry in entries if entry["type"] == "directory"]
        names = {entry["name"].rstrip("/") for entry in folders} - {path}
        visible = (name.rpartition("/")[2] for name in names)
        return sorted(name for name in visible if not is_hidden(name))

    def facts_of(self, names: Sequence[str]) -> list[FileFacts | None]:
        """Return the facts from the listing, which is in memory."""
        return [self.facts(name) for name in names]

    def read(
        self,
        name: str,
        offset: int = 0,
        length: int | None = None,
        limit: int = MOST_BYTES,
    ) -> bytes:
        """Read an object, or a range of it."""
        check_most(length or 0, f"'{self.shown}/{name}'", limit)

        def get() -> bytes:
            is_whole = not offset and length is None
            end = None if length is None else offset + length
            data: bytes = self._fs.cat_file(
                self._path(name),
                **({} if is_whole else {"start": offset, "end": end}),
            )
            return data

        return self._try(name, get)

    def path(self, name: str) -> str | None:  # noqa: ARG002 - nothing of it is here
        """Return None: an object has no path."""
        return None

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _walk_pages(self, top: str) -> Iterator[dict[str, FileFacts]]:
        """Yield all that is under a folder, a part at a time; the file system keeps no part.

        From S3 by pages of a thousand objects; from other stores folder by folder.
        """
        if hasattr(self._fs, "call_s3"):
            start = len(self._root) + 1
            bucket, _, prefix = self._path(top).partition("/")
            query = {"Bucket": bucket, "Prefix": f"{prefix}/"}
            while True:
                page = self._try(
                    top,
                    functools.partial(self._fs.call_s3, "list_objects_v2", **query),
                )
                yield {
                    f"{bucket}/{item['Key']}"[start:]: FileFacts(item["Size"], stated_version(item))
                    for item in page.get("Contents", ())
                }
                if not page.get("IsTruncated"):
                    return
                query["ContinuationToken"] = page["NextContinuationToken"]
        folders = [self._path(top)]
        while folders:
            folder = folders.pop()
            entries = self._try(top, functools.partial(self._list_folder, folder))
            self._fs.invalidate_cache()
            folders += [
                item["name"]
                for item in entries
                if item["type"] == "directory" and item["name"] != folder
            ]
            yield self._select_files(entries)

    def _select_files(self, entries: Iterable[dict[str, Any]]) -> dict[str, FileFacts]:
        """Return the files among what a store says of a folder."""
        start = len(self._root) + 1
        return {
            item["name"][start:]: FileFacts(item["size"], stated_version(item))
            for item in entries
            if item["type"] == "file"
        }

    def _list_folder(self, folder: str) -> list[dict[str, Any]]:
        try:
            entries: list[dict[str, Any]] = self._fs.ls(folder, detail=True)
        except FileNotFoundError:
            return []
        return entries

    def _try(self, name: str, work: Callable[[], T]) -> T:
        def report(fault: Fault, pause_s: float | None) -> None:
            if pause_s is None:
                where = f"{self.shown}/{name}".rstrip("/")
                reason = {
                    "missing": "is not there",
                    "refused": f"may not be read: {fault.advice}",
                }.get(fault.kind, "cannot be read")
                raise SourceError(f"'{where}' {reason} ({fault.text})") from None

        return call_with_retries(work, RetryPolicy(), report)


SourceFiles: TypeAlias = FolderFiles | UrlFiles


class _Listings:
    """Names with what a store says of them, in a database on disk."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self.folders: set[str] = set()
        self._database = database
        database.executescript(
            "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;"
            "CREATE TABLE facts (name TEXT PRIMARY KEY, num_bytes INTEGER, stamp TEXT) "
            "WITHOUT ROWID"
        )

    def add(self, folder: str, pages: Iterable[dict[str, FileFacts]]) -> None:
        """Add a folder's listing."""
        for page in pages:
            rows = ((name, *facts) for name, facts in page.items())
            self._database.executemany("INSERT OR IGNORE INTO facts VALUES (?, ?, ?)", rows)
        self.folders.add(folder)

    def facts(self, name: str) -> FileFacts | None:
        """Return the facts of one of them; None where it does not exist."""
        row = self._database.execute(
            "SELECT num_bytes, stamp FROM facts WHERE name = ?", (name,)
        ).fetchone()
        return None if row is None else FileFacts(*row)


def check_no_pointer(data: bytes, where: str) -> None:
    """Raise SourceError, naming ``where``, for a git-LFS pointer in place of a file."""
    if data.startswith(LFS_MAGIC):
        raise SourceError(f"{where} is a git-LFS pointer; run `git lfs pull` in the source first")


def check_most(num_bytes: int, where: str, limit: int = MOST_BYTES) -> None:
    """Raise SourceError, naming ``where``, for more bytes than are read at once."""
    if num_bytes > limit:
        raise SourceError(
            f"{where} has {num_bytes} bytes, of which at most {limit} are read at once: is "
            "it damaged?"
        )


def _reason(error: OSError | ValueError) -> str:
    reason = error.strerror if isinstance(error, OSError) else None
    return reason or str(error)


def _make_read_error(path: str, error: OSError | ValueError) -> SourceError:
    return SourceError(f"file '{shortened(path)}' cannot be read: {_reason(error)}")
