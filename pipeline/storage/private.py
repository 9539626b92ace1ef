"""Folders and files of one user, in places where others may write too: caches.

A user that may write in a shared place can put a link or a folder where ours is about to be. So a
folder is opened, not believed: it must belong to this user and be no link, and what we make is for
this user only. Files in it are opened by its descriptor, and no link is followed there.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from fuelrail.pipeline.errors import ConfigError


def open_folder(
    path: Path,
    parent_fd: int | None = None,
    *,
    restrict: bool = True,
) -> int:
    """Open a folder of this user, made with mode 0700 where it is missing; returns its descriptor.

    With ``parent_fd`` only the last part of ``path`` is looked up, in that folder. ``restrict``
    takes away the rights of others in a folder that is already there. Raises ConfigError for a link
    or another owner, and OSError.
    """
    name = path if parent_fd is None else path.name
    try:
        os.mkdir(name, 0o700, dir_fd=parent_fd)
    except FileExistsError:
        if stat.S_ISLNK(os.stat(name, dir_fd=parent_fd, follow_symlinks=False).st_mode):
            raise _refused(path, "is a symbolic link, which others could turn elsewhere") from None
    fd = os.open(
        name,
        os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC,
        dir_fd=parent_fd,
    )
    try:
        status = os.fstat(fd)
        _check_owner(path, status)
        if restrict and status.st_mode & 0o077:
            os.fchmod(fd, 0o700)
    except BaseException:
        os.close(fd)
        raise
    return fd


def make_folder(path: Path, *, restrict: bool = True) -> None:
    """Make a folder as :func:`open_folder` does, and the folders above it as usual."""
    path.parent.mkdir(parents=True, exist_ok=True)
    os.close(open_folder(path, restrict=restrict))


def open_file(path: Path, flags: int, folder_fd: int | None = None) -> int:
    """Open a file of this user in a folder; returns its descriptor.

    With ``os.O_CREAT`` among ``flags`` it is made, with mode 0600, where it is missing. Raises
    ConfigError for a link, another owner or what is not a regular file, FileNotFoundError, and
    other OSErrors.
    """
    name = path if folder_fd is None else path.name
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # the last: opening a FIFO must not wait
    if flags & os.O_CREAT:
        try:
            return os.open(name, flags | os.O_EXCL, 0o600, dir_fd=folder_fd)
        except FileExistsError:
            flags &= ~os.O_CREAT
    mode = os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mode
    if not stat.S_ISREG(mode):
        raise _refused(
            path,
            "is a symbolic link" if stat.S_ISLNK(mode) else "is not a regular file",
        )
    fd = os.open(name, flags, dir_fd=folder_fd)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise _refused(path, "is another name of some other file")
        _check_owner(path, status)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise _refused(
            path,
            f"belongs to user {status.st_uid}, and this process runs as user {os.geteuid()}",
        )


def _refused(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"cache_dir: '{path}' {reason}; remove it, or choose a cache folder of your own"
    )
