"""Open shard files within the process's limit, and describe the change when one changed during a
run.
"""

from __future__ import annotations

import collections
import os
import resource
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, TypeVar

from fuelrail.pipeline.errors import (
    DatasetError,
    ShardError,
    TruncatedShardError,
)
from fuelrail.pipeline.format.layers import EITHER
from fuelrail.pipeline.format.manifest import load_manifest
from fuelrail.pipeline.storage.files import open_descriptor

if TYPE_CHECKING:
    from fuelrail.pipeline.format.dataset import Dataset
    from fuelrail.pipeline.format.index.row import IndexRow

T = TypeVar("T")

_FILES_AT_MOST: Final = 512
_ADVISED_BYTES: Final = 128 << 10
"""The bytes of one advice: the kernel reads its read-ahead (or a disk's request) at most and
forgets the rest, 128 KiB unless the system sets it lower.
"""


class OpenShards(Generic[T]):
    """Opened shards by number, least recently used ones forgotten beyond a limit. Thread-safe.

    A forgotten one is closed when its last user lets go of it, by reference counting.
    """

    _all: ClassVar[weakref.WeakSet[OpenShards[Any]]] = weakref.WeakSet()

    def __init__(self, opened: Callable[[int], T]) -> None:
        self._open = opened
        self._limit = 1
        self._all.add(self)
        self._shards: collections.OrderedDict[int, T] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __getitem__(self, number: int) -> T:
        shard = self._shards.get(number)
        # Nothing is evicted, so the uses do not matter.
        if shard is not None and len(self._shards) < self._limit:
            return shard
        with self._lock:
            shard = self._shards.get(number)
            if shard is None:
                shard = self._shards[number] = self._open(number)
                self._limit = open_files_limit(len(self._all))
                while len(self._shards) > self._limit:
                    self._shards.popitem(last=False)
            else:
                self._shards.move_to_end(number)
            return shard

    def drop(self, number: int) -> None:
        """Forget one, so that the next use opens it again."""
        with self._lock:
            self._shards.pop(number, None)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._shards.clear()


def open_files_limit(num_storages: int) -> int:
    """Return how many shards each of the storages may have open: half of the process's
    descriptors in all.
    """
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(_FILES_AT_MOST, allowed // 2 // num_storages))


class ShardFile:
    """An open shard of the size that the manifest states; closed when the last reference to it is
    gone.

    Raises OSError where it cannot be opened, TruncatedShardError or ShardError where its size is
    another.
    """

    def __init__(self, path: Path, expected_bytes: int) -> None:
        self.path = path
        self.name = path.name
        self.fd = -1
        self.fd = open_descriptor(path)
        self._opened = os.fstat(self.fd)
        self._byte = [bytearray(1)]
        if self._opened.st_size != expected_bytes:
            kind = TruncatedShardError if self._opened.st_size < expected_bytes else ShardError
            raise kind(
                f"has {self._opened.st_size} bytes, the manifest says {expected_bytes}",
                shard=path.name,
            )

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    def has_in_memory(self, position: int) -> bool | None:
        """Return whether a byte is in the page cache; None where the file system cannot say.

        False beyond the end.

        Where it says no, the kernel may have started to read that page.
        """
        try:
            return os.preadv(self.fd, self._byte, position, os.RWF_NOWAIT) == 1
        except BlockingIOError:
            return False
        except (OSError, AttributeError):  # the latter: not Linux
            return None

    def read_ahead(self, start: int, length: int) -> None:
        """Have the kernel read a range into the page cache, without waiting for it.

        Raises OSError.
        """
        for offset in range(start, start + length, _ADVISED_BYTES):
            os.posix_fadvise(
                self.fd,
                offset,
                min(_ADVISED_BYTES, start + length - offset),
                os.POSIX_FADV_WILLNEED,
            )

    def was_replaced(self) -> bool:
        """Return whether the name now leads to another file, or the file was written to since it
        was opened.
        """
        try:
            now = self.path.stat()
        except OSError:
            return True
        opened = self._opened
        return (now.st_ino, now.st_size, now.st_mtime_ns) != (
            opened.st_ino,
            opened.st_size,
            opened.st_mtime_ns,
        )


def explained(
    dataset: Dataset,
    row: IndexRow,
    error: ShardError,
    file: ShardFile | None = None,
) -> ShardError:
    """Return the error with the sample's address, and whether dataset or shard was replaced
    since it was opened.
    """
    try:
        fingerprint = load_manifest(dataset.root, EITHER).fingerprint
    except DatasetError:
        fingerprint = None
    message = error.message
    if fingerprint is not None and fingerprint != dataset.manifest.fingerprint:
        message = f"{message}; {replaced(dataset, fingerprint)}"
    elif file is not None and file.was_replaced():
        message = (
            f"{message}; the shard was replaced or written to while in use, by other bytes than "
            "the manifest describes"
        )
    return type(error)(
        message,
        shard=dataset.shards.name(row.shard),
        offset=row.offset,
        key=row.key,
    )


def replaced(dataset: Dataset, fingerprint: str) -> str:
    """Return the clause on a dataset that is another one by now."""
    return (
        "the dataset was replaced while in use: its fingerprint was "
        f"{dataset.manifest.fingerprint} when it was opened and is {fingerprint} now; open it again"
    )
