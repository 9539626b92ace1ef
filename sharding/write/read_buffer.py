"""Read source files into memory that every shard reuses, with few calls."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.format.tar import BLOCK_BYTES

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.arrays import Buffer

_FIRST_BYTES: Final = 4 << 20

# Room for the members in front of the first file: metadata, geometry, boxes.
_FRONT_BYTES: Final = 64 << 10

_SMALL_BYTES: Final = 16 << 10  # what is smaller is copied to where it belongs


class ReadBuffer:
    """Memory for the files of one sample; :meth:`clear` gives it to the next one.

    Not for two threads at once.
    """

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(_FIRST_BYTES))
        self._kept: memoryview | None = None
        self._used = _FRONT_BYTES
        self._files: dict[int, tuple[memoryview, int]] = {}

    def clear(self, *, keep: bool = False) -> None:
        """Allow what was read before to be overwritten from now on.

        ``keep``: what was read since the last call stays good until the next one.
        """
        if keep:
            memory = self._kept or memoryview(bytearray(_FIRST_BYTES))
            self._kept = self._memory
            self._memory = memory
        self._used = _FRONT_BYTES
        self._files.clear()

    def read(self, path: str, num_bytes: int, offset: int | None = None) -> memoryview:
        """Return the whole file, of which ``num_bytes`` are expected, or as many from ``offset``
        on, as a view.

        Raises SourceError where the file cannot be read, has another size, or ends before.
        """
        start = self._used + BLOCK_BYTES
        padded = num_bytes + -num_bytes % BLOCK_BYTES
        if start + padded + BLOCK_BYTES > len(self._memory):
            # Views of the old memory keep it alive until the sample is done.
            start = _FRONT_BYTES + BLOCK_BYTES
            self._memory = memoryview(
                bytearray(max(start + padded + BLOCK_BYTES, 2 * len(self._memory)))
            )
            self._files.clear()
        # One byte more than a whole file should have is asked for: a file that has grown is noticed
        # without another system call.
        first = offset or 0
        view = self._memory[start : start + num_bytes + (offset is None)]
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                num_read = os.preadv(handle, [view], first)
                # A network file system may hand out less than asked for.
                while 0 < num_read < num_bytes:
                    num_more = os.preadv(handle, [view[num_read:]], first + num_read)
                    if not num_more:
                        break
                    num_read += num_more
                if num_read > num_bytes:
                    num_read = os.fstat(handle).st_size
            finally:
                os.close(handle)
        except OSError as error:
            raise SourceError(f"file '{path}' cannot be read: {error.strerror}") from error
        if offset is not None and num_read < num_bytes:
            raise SourceError(
                f"file '{path}' ends at byte {offset + num_read}, before byte {offset + num_bytes}"
            )
        if offset is None and num_read != num_bytes:
            raise SourceError(
                f"file '{path}' had {num_bytes} bytes when the run started and has {num_read} now"
            )
        self._used = start + padded
        data = view[:num_bytes]
        self._files[id(data)] = data, start
        return data

    def joined(self, pieces: Sequence[Buffer]) -> list[Buffer]:
        """Return the same bytes in fewer pieces, which are good until :meth:`clear`.

        Bytes between two files that were read here one after the other are copied into the space
        between them, which ends at ``limit``; small pieces elsewhere are joined; large ones stay
        where they are.
        """
        pieces_joined: list[Buffer] = []
        small: list[Buffer] = []
        # Of the run in this memory that the last pieces are part of; empty where they are not.
        begin = end = limit = 0
        for piece in pieces:
            data, start = self._files.get(id(piece), (None, 0))
            if data is None and memoryview(piece).nbytes < _SMALL_BYTES:
                small.append(piece)
                continue
            between = b"".join(small)
            small.clear()
            if data is not None and begin < end and end + len(between) == start == limit:
                self._memory[end:start] = between
            elif (
                data is not None
                and begin == end
                and start == _FRONT_BYTES + BLOCK_BYTES >= len(between)
            ):
                begin = start - len(between)
                self._memory[begin:start] = between
            else:
                pieces_joined += [
                    *self._with_rest(begin, end, limit, between),
                    piece,
                ]
                begin = end = 0
                continue
            end = start + data.nbytes
            limit = end + -data.nbytes % BLOCK_BYTES + BLOCK_BYTES
        return [
            *pieces_joined,
            *self._with_rest(begin, end, limit, b"".join(small)),
        ]

    def _with_rest(
        self,
        begin: int,
        end: int,
        limit: int,
        rest: bytes,
    ) -> list[Buffer]:
        """Return a run and what follows it: in one piece where that ends in front of the next
        file's data.
        """
        if begin < end and end + len(rest) <= limit:
            self._memory[end : end + len(rest)] = rest
            return [self._memory[begin : end + len(rest)]]
        pieces = (self._memory[begin:end], rest)
        return [piece for piece in pieces if piece]
