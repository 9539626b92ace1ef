"""Reused memory for spans that are read or downloaded: taken, looked at through views, and back when those are gone."""

from __future__ import annotations

import collections
import threading
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class _Lent(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """A buffer that somebody uses, and that goes back when the last view of it is gone.

    ``__del__`` costs a tenth of what a weakref's finaliser does.
    """

    pool: SpanBuffers | None = None
    whole: NDArray[np.uint8]

    def __del__(self) -> None:
        if self.pool is not None:
            self.pool.put_back(self.whole)


class SpanBuffers:
    """Byte buffers of any length, rounded up to one of eight sizes an octave so that they can serve again.

    Fresh memory costs a page fault every 4 KiB, which is dearer than filling it. A buffer comes back when the last view
    of it is gone; up to ``keep_bytes`` lie ready. Thread-safe.
    """

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._free: dict[int, collections.deque[NDArray[np.uint8]]] = {}
        self._free_bytes = 0
        self._lock = threading.Lock()

    def take(self, length: int) -> memoryview:
        """A writable view of ``length`` bytes with undefined content."""
        size = rounded_up(length)
        with self._lock:
            ready = self._free.get(size)
            base = ready.pop() if ready else None
            if base is not None:
                self._free_bytes -= size
        if base is None:
            base = np.empty(size, np.uint8)
        lent = base[:length].view(_Lent)
        lent.pool, lent.whole = self, base
        return memoryview(lent)  # type: ignore[arg-type]  # numpy 1 and 2 type the buffer protocol differently

    def put_back(self, base: NDArray[np.uint8]) -> None:
        """Take a buffer back that nobody looks at any more."""
        # Garbage collection may run this in a thread that holds the lock right now; then the buffer is let go.
        if self._lock.acquire(blocking=False):
            try:
                if self._free_bytes + base.size <= self._keep_bytes:
                    self._free.setdefault(base.size, collections.deque()).append(base)
                    self._free_bytes += base.size
            finally:
                self._lock.release()


def rounded_up(length: int) -> int:
    """The smallest m * 2**k >= length with m of 8 .. 15; at least 4096."""
    if length <= 4096:
        return 4096
    step: int = 1 << ((length - 1).bit_length() - 4)
    return -(-length // step) * step
