"""Source files read into memory that is used again: no allocation, and so no page faults, for each of them."""

from __future__ import annotations

import os
from typing import Final

from fuelrail.pipeline.errors import SourceError

_FIRST_BYTES: Final = 4 << 20


class ReadBuffer:
    """Memory for the files of one sample; :meth:`clear` gives it to the next one. Not for two threads at once."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(_FIRST_BYTES))
        self._used = 0

    def clear(self) -> None:
        """From now on what was read before may be overwritten."""
        self._used = 0

    def read(self, path: str, num_bytes: int) -> memoryview:
        """The whole file, of which ``num_bytes`` are expected, as a view of this memory.

        Raises SourceError where the file cannot be read or has another size.
        """
        # One byte more than expected is asked for: a file that has grown is noticed without another system call.
        end = self._used + num_bytes + 1
        if end > len(self._memory):
            # Views of the old memory keep it alive until the sample is done.
            self._memory, self._used = memoryview(bytearray(max(end, 2 * len(self._memory)))), 0
            end = num_bytes + 1
        view = self._memory[self._used : end]
        try:
            found = _fill(path, view)
        except OSError as error:
            raise SourceError(f"file '{path}' cannot be read: {error.strerror}") from error
        if found != num_bytes:
            raise SourceError(f"file '{path}' had {num_bytes} bytes when the run began and has {found} now")
        self._used = end
        return view[:num_bytes]


def _fill(path: str, view: memoryview) -> int:
    """Read a file into ``view``; returns the file's size if it is smaller or does not fit."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        have = os.readv(handle, [view])
        while 0 < have < len(view) - 1:  # a network file system may hand out less than asked for
            more = os.readv(handle, [view[have:]])
            if not more:
                break
            have += more
        return have if have < len(view) else os.fstat(handle).st_size
    finally:
        os.close(handle)
