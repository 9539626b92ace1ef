"""Open files of a dataset without trusting its folder; publish files by rename.

Only regular files are opened: a FIFO would wait for a writer for ever, a device has no end. A link is followed within
the dataset's folder and not out of it, so that a dataset cannot make a command read, digest or copy other files.
Errors are OSErrors, whose ``strerror`` is a clause for the message: ``it is not a regular file``.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from fuelrail.pipeline.sample.arrays import read_npy

if TYPE_CHECKING:
    from io import BufferedReader

    import numpy as np
    from numpy.typing import NDArray

    from fuelrail.pipeline.limits import Limit


def open_descriptor(path: str | os.PathLike[str]) -> int:
    """Return a descriptor to read a file of a dataset, whose folder is the path's parent; raises OSError."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise _refused(path, "it is not a regular file") from error
        if error.errno == errno.EMFILE:
            allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            what = f"this process has as many open files as it may, {allowed}: allow 1024 or more (`ulimit -n 1024`)"
            raise OSError(errno.EMFILE, what, str(path)) from error
        if error.errno != errno.ELOOP:
            raise
        place = Path(path)
        target, folder = Path(os.path.realpath(place)), Path(os.path.realpath(place.parent))
        if (
            folder not in target.parents or target.is_symlink()
        ):  # a link that leads to itself stays one
            what = "it is a link that leads out of the dataset's folder, or nowhere; put the file itself there"
            raise _refused(path, what) from error
        descriptor = os.open(target, flags)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise _refused(
            path, "it is a folder, not a file" if stat.S_ISDIR(mode) else "it is not a regular file"
        )
    return descriptor


def open_file(path: str | os.PathLike[str], max_bytes: int | None = None) -> BufferedReader:
    """Open a file object as :func:`open_descriptor`; raise OSError also for more than ``max_bytes``."""
    file = os.fdopen(open_descriptor(path), "rb")
    size = os.fstat(file.fileno()).st_size
    if max_bytes is not None and size > max_bytes:
        file.close()
        raise OSError(errno.EFBIG, f"has {size} bytes, at most {max_bytes} are read", str(path))
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
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise _refused(
            path, "it is a folder, not a file" if stat.S_ISDIR(mode) else "it is not a regular file"
        )
    return os.fdopen(descriptor, "rb")


def read_regular(path: str | os.PathLike[str], limit: Limit) -> bytes:
    """Return the whole of a regular file that a user named, within a limit; raises OSError."""
    with open_regular(path) as file:
        data = file.read(limit.most + 1)
    if (text := limit.broken(len(data))) is not None:
        raise OSError(errno.EFBIG, f"it {text}", str(path))
    return data


def map_npy(path: str | os.PathLike[str]) -> NDArray[np.generic]:
    """Map a ``.npy`` 1.0 file of a dataset.

    Raises OSError, SchemaError for what `read_npy` refuses, ValueError for an empty file.
    """
    with open_file(path) as file:
        return read_npy(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))


@contextlib.contextmanager
def published(
    path: Path, temporary: Path | None = None, *, sync: bool = True
) -> Iterator[BinaryIO]:
    """Write a file under another name, in the folder ``temporary`` (default: its own), and rename it at the end.

    No reader sees a part of it. The other name is this call's alone: a worker of a run that was killed may live a
    moment longer than that, here or on another machine, and must not take the file of a new run for its own. ``sync``:
    the file survives a crash of the machine.
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
        with contextlib.suppress(
            OSError
        ):  # a file system that became read-only says so by the first error
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


def _refused(path: str | os.PathLike[str], what: str) -> OSError:
    # Of this class, so that it is not retried (pipeline.storage.retry).
    return PermissionError(errno.EPERM, what, str(path))
