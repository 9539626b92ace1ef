"""Open files of a dataset without trusting its folder; publish files by rename.

Only regular files are opened: a FIFO would wait for a writer for ever, a device has no end. A link
is followed within the dataset's folder and not out of it, so that a dataset cannot make a command
read, digest or copy other files. Errors are OSErrors, whose ``strerror`` is a clause for the
message: ``it is not a regular file``.

A working folder (``.fuelrail``) may have come with the dataset as well, and commands write and
delete in it. So
:func:`check_plain_tree` refuses links there altogether, and a lock is opened by :func:`open_lock`
alone.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
import shutil
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import numpy as np

from fuelrail.pipeline.sample.arrays import read_npy

if TYPE_CHECKING:
    from io import BufferedReader

    from numpy.typing import NDArray

    from fuelrail.pipeline.limits import Limit


_MAX_DEPTH: Final = 16
"""Of a working folder, which has four folders in each other at most."""


def open_descriptor(path: str | os.PathLike[str]) -> int:
    """Return a descriptor to read a file of a dataset, whose folder is the path's parent; raises
    OSError.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise _refused(path, "it is not a regular file") from error
        if error.errno == errno.EMFILE:
            allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            reason = (
                f"this process has as many open files as it may, {allowed}: allow 1024 or more "
                "(`ulimit -n 1024`)"
            )
            raise OSError(errno.EMFILE, reason, str(path)) from error
        if error.errno != errno.ELOOP:
            raise
        place = Path(path)
        target = Path(os.path.realpath(place))
        folder = Path(os.path.realpath(place.parent))
        # A link that leads to itself stays one.
        if folder not in target.parents or target.is_symlink():
            reason = (
                "it is a link that leads out of the dataset's folder, or nowhere; put the file "
                "itself there"
            )
            raise _refused(path, reason) from error
        descriptor = os.open(target, flags)
    _check_regular(path, descriptor)
    return descriptor


def _check_regular(path: str | os.PathLike[str], descriptor: int) -> None:
    """Close the descriptor and raise OSError where it is of no regular file."""
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise _refused(
            path,
            "it is a folder, not a file" if stat.S_ISDIR(mode) else "it is not a regular file",
        )


def open_file(path: str | os.PathLike[str], max_bytes: int | None = None) -> BufferedReader:
    """Open a file object as :func:`open_descriptor`; raise OSError also for more than
    ``max_bytes``.
    """
    file = os.fdopen(open_descriptor(path), "rb")
    size = os.fstat(file.fileno()).st_size
    if max_bytes is not None and size > max_bytes:
        file.close()
        raise OSError(
            errno.EFBIG,
            f"has {size} bytes, at most {max_bytes} are read",
            str(path),
        )
    return file


def read_file(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Return the whole of a file of a dataset, of at most ``max_bytes``; raises OSError."""
    with open_file(path, max_bytes) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file that a user named, wherever links lead; raise OSError for what is none.

    Nothing is waited for, as the writer of a FIFO would be.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise _refused(path, "it is not a regular file") from error
        raise
    _check_regular(path, descriptor)
    return os.fdopen(descriptor, "rb")


def read_regular(path: str | os.PathLike[str], limit: Limit) -> bytes:
    """Return the whole of a regular file that a user named, within a limit; raises OSError."""
    with open_regular(path) as file:
        data = file.read(limit.maximum + 1)
    text = limit.broken(len(data))
    if text is not None:
        raise OSError(errno.EFBIG, f"it {text}", str(path))
    return data


def map_npy(path: str | os.PathLike[str]) -> NDArray[np.generic]:
    """Map a ``.npy`` 1.0 file of a dataset.

    Raises OSError, SchemaError for what `read_npy` refuses, ValueError for an empty file.
    """
    with open_file(path) as file:
        return read_npy(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))


def check_plain_tree(folder: Path) -> None:
    """Raise OSError unless a folder, where it exists, holds nothing but folders and regular files,
    at any depth.

    Links, FIFOs, sockets and devices are refused, and the folder itself must not be a link. What
    another process removes meanwhile does not matter.
    """
    try:
        mode = folder.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if not stat.S_ISDIR(mode):
        raise _refused(folder, f"it is {_kind_of(mode)}, not a folder; remove it")
    folders = [(folder, 0)]
    while folders:
        parent, depth = folders.pop()
        if depth > _MAX_DEPTH:
            raise _refused(
                parent,
                f"it lies {depth} folders deep, more than {_MAX_DEPTH}; remove it",
            )
        with (
            contextlib.suppress(FileNotFoundError),
            os.scandir(parent) as entries,
        ):
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append((parent / entry.name, depth + 1))
                elif not entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        kind = _kind_of(entry.stat(follow_symlinks=False).st_mode)
                        clause = f"it is {kind}, not a folder or a regular file; remove it"
                        raise _refused(parent / entry.name, clause)


def open_lock(path: Path) -> int:
    """Return a descriptor of a lock file, to read and write, made where it is missing.

    Its folder must exist. Raises OSError for what is not a regular file of one name: a link or
    another name may lead to a file elsewhere, and the holder of a lock writes into it.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o644)
    except OSError as error:
        clause = {
            errno.ELOOP: "it is a link; remove it",
            errno.EISDIR: "it is a folder, not a file; remove it",
            errno.ENXIO: "it is a socket, not a file; remove it",
        }.get(error.errno or 0)
        if clause is None:
            raise
        raise _refused(path, clause) from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        is_file = stat.S_ISREG(status.st_mode)
        kind = "another name of some other file" if is_file else _kind_of(status.st_mode)
        raise _refused(path, f"it is {kind}; remove it")
    return descriptor


def empty_folder(folder: Path) -> None:
    """Make a folder, or empty it; raises OSError where it is a link or no folder."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        check_plain_tree(folder)
        for entry in list(folder.iterdir()):
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)


def save_npy(path: Path, array: NDArray[Any]) -> None:
    """Write a ``.npy`` file, whole, in the place of whatever has its name: nothing is written
    through a link.
    """
    with published(path, sync=False) as file:
        np.save(file, array, allow_pickle=False)


@contextlib.contextmanager
def published(
    path: Path,
    temporary: Path | None = None,
    *,
    sync: bool = True,
) -> Iterator[BinaryIO]:
    """Write a file under another name, in the folder ``temporary`` (default: its own), and rename
    it at the end.

    No reader sees a part of it. The other name is this call's alone: a worker of a run that was
    killed may live a moment longer than that, here or on another machine, and must not take the
    file of a new run for its own. ``sync``: the file survives a crash of the machine.
    """
    part = (temporary or path.parent) / f".{path.name}.{uuid.uuid4().hex[:12]}"
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        # A file system that became read-only says so by the first error.
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    if sync:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that a rename in it survives a crash of the machine."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _kind_of(mode: int) -> str:
    kinds = {
        stat.S_IFLNK: "a link",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
        stat.S_IFBLK: "a device",
        stat.S_IFCHR: "a device",
        stat.S_IFDIR: "a folder",
    }
    return kinds.get(stat.S_IFMT(mode), "a file")


def _refused(path: str | os.PathLike[str], reason: str) -> OSError:
    # Of this class, so that it is not retried (pipeline.storage.retry).
    return PermissionError(errno.EPERM, reason, str(path))
