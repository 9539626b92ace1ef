"""The output of a run: a folder, or a URL of an object store; both give a file its name when it is
complete.

A run writes ``OUT/{name}`` for what belongs to the dataset and ``OUT/.fuelrail/{name}`` for what
goes when the dataset is finished. How a file appears whole differs::

    folder   written under .fuelrail/tmp/, synced, renamed; the folder synced
    URL      a multipart upload, completed when all parts are uploaded, aborted where something
             fails

So OUT holds complete files only, at any moment. A partial run is known by ``.fuelrail/run.json``,
finished shards by their records in ``.fuelrail/records/``; ``dataset.json`` is written last.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final, TypeAlias, TypeVar

import msgspec

from fuelrail.pipeline.errors import DatasetError, DatasetExistsError
from fuelrail.pipeline.format.manifest import (
    DATASETS,
    MANIFEST_FILE,
    WORK_FOLDER,
    Kinds,
    Manifest,
    decode_manifest,
)
from fuelrail.pipeline.settings import explain
from fuelrail.pipeline.storage.files import (
    check_plain_tree,
    open_descriptor,
    open_file,
    published,
    read_file,
    sync_folder,
)
from fuelrail.pipeline.storage.filesystem import DISK_FULL, is_url
from fuelrail.sharding.output.url import UrlOutput

T = TypeVar("T")

_MAX_SMALL_BYTES: Final = 1 << 30
"""The largest file that is read as a whole: the largest are shards' records, which have their
rows of the index.
"""


def open_output(location: str | os.PathLike[str]) -> Output:
    """Return the output at a folder or a URL; raises ConfigError for a URL that cannot be
    written.
    """
    text = os.fspath(location)
    if is_url(text):
        return UrlOutput(text)
    return FolderOutput(text.removeprefix("file://"))


def manifest_in(out: Output, kinds: Kinds = DATASETS) -> Manifest | None:
    """Return the manifest of the dataset in OUT, None if none is finished; raises ManifestError
    if it is damaged.
    """
    data = out.read(MANIFEST_FILE)
    if data is None:
        return None
    return decode_manifest(data, f"{out.shown}/{MANIFEST_FILE}", kinds)


def if_whole(out: Output, manifest: Manifest | None) -> Manifest | None:
    """Return the manifest if tables and attributes match it, else None."""
    if manifest is None:
        return None
    is_complete = all(out.holds(entry.name, entry.bytes, entry.sha256) for entry in manifest.files)
    return manifest if is_complete else None


def check_out(out: Output) -> None:
    """Raise DatasetExistsError where OUT holds files that are neither a dataset's nor a run's.

    Raises DatasetError where the working folder holds what no run makes (:func:`check_work`).
    """
    check_work(out)
    names = out.names()
    if names and MANIFEST_FILE not in names and WORK_FOLDER not in names:
        raise DatasetExistsError(
            f"output folder '{out.shown}' is not empty and holds no dataset (there is "
            f"'{names[0]}'): choose an empty one"
        )


def check_work(out: Output) -> None:
    """Raise DatasetError where the working folder holds more than folders and regular files.

    It may have come with a dataset, and whatever works there writes and deletes.
    """
    try:
        check_plain_tree(out.work)
    except OSError as error:
        where = error.filename or out.work
        raise DatasetError(f"'{where}' cannot be used: {error.strerror or error}") from error


def read_json(
    out: Output,
    name: str,
    kind: type[T],
    remedy: str,
) -> T | None:
    """Return the content of a JSON file in the working folder of OUT; None where there is none.

    ``remedy`` says what to do about a damaged file. Raises DatasetExistsError for one that is not
    of this kind.
    """
    data = out.read(name)
    if data is None:
        return None
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise DatasetExistsError(
            f"'{out.shown}/{name}' was left by another version of fuelrail, or by another program "
            f"({explain(error, data, kind)}): {remedy}"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DatasetExistsError(
            f"'{out.shown}/{name}' is cut or damaged ({explain(error, data, kind)}): {remedy}"
        ) from error


def file_is(path: Path, num_bytes: int, sha256: str) -> bool:
    """Return whether a file exists with this size and SHA-256."""
    try:
        with open_file(path) as file:
            if os.fstat(file.fileno()).st_size != num_bytes:
                return False
            return hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except FileNotFoundError:
        return False


class FolderOutput:
    """A folder of this machine, or of a file system that several machines share.

    Names are relative to it, with ``/``; each process, on any machine, makes its own. ``location``
    is the text that :func:`open_output` takes, ``shown`` the location as messages may show it,
    ``work`` the folder on this machine for scan table, plan and files that are being made.
    """

    def __init__(self, folder: str) -> None:
        self.root = Path(os.path.abspath(folder))  # noqa: PTH100 - resolve() would follow links
        self.location = self.shown = str(self.root)
        self.work = self.root / WORK_FOLDER
        self.temporary = self.work / "tmp"

    def names(self, folder: str = "") -> list[str]:
        """Return the names in OUT, or in a folder of it, sorted; raises DatasetError where they
        cannot be listed.
        """
        try:
            return sorted(entry.name for entry in (self.root / folder).iterdir())
        except FileNotFoundError:
            return []
        except NotADirectoryError as error:
            file = next(
                (path for path in (self.root, *self.root.parents) if path.exists()),
                self.root,
            )
            kind = "a file" if file.is_file() else "not a folder"
            raise DatasetExistsError(
                f"output folder '{self.root}' cannot be made: '{file}' is {kind}"
            ) from error
        except OSError as error:
            raise DatasetError(
                f"output folder '{self.root}' cannot be read: {error.strerror}"
            ) from error

    def read(self, name: str, num_bytes: int | None = None) -> bytes | None:
        """Return a small file's bytes, or the first ``num_bytes`` of a file; None where it does
        not exist.
        """
        try:
            if num_bytes is not None:
                with open_file(self.root / name) as file:
                    return file.read(num_bytes)
            return read_file(self.root / name, _MAX_SMALL_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DatasetError(f"'{self.root / name}' cannot be read: {error.strerror}") from error

    @contextlib.contextmanager
    def publish(self, name: str) -> Iterator[BinaryIO]:
        """Yield a file in the working folder; it is synced and renamed where the block ends
        without an error.
        """
        final = self.root / name
        self.temporary.mkdir(parents=True, exist_ok=True)
        final.parent.mkdir(exist_ok=True)
        with published(final, self.temporary) as file:
            yield file

    def publish_file(self, name: str, file: Path) -> None:
        """Sync a complete file in ``work`` and rename it."""
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
        file.replace(self.root / name)
        sync_folder((self.root / name).parent)

    def fetch(self, name: str, file: Path) -> None:
        """Copy a file of OUT to ``file``."""
        with open_file(self.root / name) as source, file.open("wb") as target:
            shutil.copyfileobj(source, target)

    def size(self, name: str) -> int | None:
        """Return the size of a file [bytes], None where it does not exist.

        Raises DatasetError for what is not a regular file in OUT.
        """
        try:
            with open_file(self.root / name) as file:
                return os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DatasetError(f"'{self.root / name}' cannot be read: {error.strerror}") from error

    def holds(self, name: str, num_bytes: int, sha256: str) -> bool:
        """Return whether a file exists with this size and SHA-256; reads it."""
        return file_is(self.root / name, num_bytes, sha256)

    def version_tag(self, name: str) -> str:  # noqa: ARG002 - a file system keeps no such thing
        """Return no tag: times of files are not reliable, and reading is cheap here."""
        return ""

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        (self.root / name).unlink(missing_ok=True)

    def remove_work(self) -> None:
        """Remove the files that a run leaves for the next one to resume."""
        shutil.rmtree(self.work, ignore_errors=True)

    @contextlib.contextmanager
    def writing(self, reused: str = "finished shards") -> Iterator[None]:
        """Turn the system's errors while OUT is written into one sentence (DatasetError).

        ``reused`` names what the next run reuses.
        """
        try:
            yield
        except OSError as error:
            # Arrow's errors have the number in their text alone.
            match = re.search(r"\[errno ([0-9]+)\]", str(error))
            number = int(match.group(1)) if error.errno is None and match else error.errno
            reason = error.strerror or (str(error) if number is None else os.strerror(number))
            file = Path(str(error.filename2 or error.filename or self.root))
            name = f"'{file.name}': " if file.parent == self.root and file != self.work else ""
            hint = (
                f"; {reused} are kept; run the same command again to resume"
                if number in DISK_FULL
                else ""
            )
            raise DatasetError(
                f"output folder '{self.root}' cannot be written: {name}{reason}{hint}"
            ) from error


Output: TypeAlias = FolderOutput | UrlOutput


def link_file(old: Path, out: FolderOutput, new: str) -> bool:
    """Give a file of a dataset another name in OUT, as a hard link; False where the file system
    cannot.
    """
    final = out.root / new
    temporary = out.temporary / new
    if final.exists() and final.samefile(old):
        return True
    temporary.unlink(missing_ok=True)
    os.close(open_descriptor(old))
    try:
        os.link(os.path.realpath(old), temporary)
    except OSError as error:
        if error.errno not in (
            errno.EXDEV,
            errno.EPERM,
            errno.EMLINK,
            errno.ENOTSUP,
        ):
            raise
        return False
    out.publish_file(new, temporary)
    return True


def link_or_copy(folder: Path, out: FolderOutput, name: str) -> None:
    """Bring a file of a folder into OUT under its name, without bytes where the file system can."""
    if not link_file(folder / name, out, name):
        with out.publish(name) as copy, open_file(folder / name) as file:
            shutil.copyfileobj(file, copy, 8 << 20)
