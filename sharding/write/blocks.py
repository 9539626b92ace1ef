"""Write a file in large aligned blocks, which is faster to write, and to read and map afterwards.

The kernel keeps what is written in pages whose size follows the writes (ext4 and XFS, Linux 6.16
and newer): one call for 512 KiB that begins at a multiple of 512 KiB makes one large page; calls of
the length of a sample, beginning anywhere, make hundreds of small ones. Writing then takes a
fraction of the time, and so does mapping the file, for as long as it stays in the page cache.
Larger pages gain nothing, and where memory is fragmented the kernel has to make room for each:
writes of 2 MiB then take up to 15 times as long.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, BinaryIO, Final

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.arrays import Buffer

IO_BLOCK_BYTES: Final = 512 << 10

_MOST_PIECES: Final = os.sysconf("SC_IOV_MAX") - 1


class BlockWriter:
    """Writes to a new file, in blocks where it is one of this machine's.

    Call :meth:`flush` in the end.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        # A buffered file would copy what is small and cut what is large; its buffer stays empty,
        # all writes are these.
        self._is_local = isinstance(file, io.BufferedWriter) and isinstance(file.raw, io.FileIO)
        self._rest = memoryview(bytearray(IO_BLOCK_BYTES if self._is_local else 0))
        self._held = 0

    def write(self, pieces: Sequence[Buffer]) -> None:
        """Write all pieces; what is left over behind the last whole block is copied and goes out
        with the next ones.
        """
        if not self._is_local:
            self._file.writelines(pieces)
            return
        views = [memoryview(piece).cast("B") for piece in pieces]
        total = self._held + sum(map(len, views))
        direct = total // IO_BLOCK_BYTES * IO_BLOCK_BYTES - self._held  # bytes that go out at once
        if direct > 0:
            out = [self._rest[: self._held]]
            while direct:
                view = views.pop(0)
                if len(view) > direct:
                    views.insert(0, view[direct:])
                    view = view[:direct]
                out.append(view)
                direct -= len(view)
            self._write(out)
            self._held = 0
        for view in views:
            self._rest[self._held : self._held + len(view)] = view
            self._held += len(view)

    def flush(self) -> None:
        """Write what is left over."""
        if self._held:
            self._write([self._rest[: self._held]])
            self._held = 0

    def _write(self, views: list[memoryview]) -> None:
        if len(views) > _MOST_PIECES:
            views = [memoryview(b"".join(views))]
        written = os.writev(self._file.fileno(), views)
        if written < sum(map(len, views)):
            # A signal came, or the disk is full: the next call says so.
            rest = memoryview(b"".join(views))[written:]
            while rest:
                num_written = os.write(self._file.fileno(), rest)
                rest = rest[num_written:]
