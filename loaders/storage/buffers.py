"""Reused buffers that nobody can overwrite while somebody still looks at them."""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import U8


Memory: TypeAlias = Callable[[int], NDArray[np.uint8]]
"""Returns new memory of a number of bytes, uint8 (n,)."""


def pageable(num_bytes: int) -> U8:
    """Return plain host memory."""
    return np.empty(num_bytes, np.uint8)


def rounded_up(length: int) -> int:
    """Return the smallest m * 2**k >= length with m of 8 .. 15; at least 4096."""
    if length <= 4096:
        return 4096
    step: int = 1 << ((length - 1).bit_length() - 4)
    return -(-length // step) * step


class Buffers:
    """Byte buffers of any length, handed out as arrays and taken back when the last view is gone.

    Thread-safe.

    Fresh memory costs a page fault every 4 KiB, which is dearer than filling it. Here a buffer
    comes back when the array dies that every view and tensor refers to, so one that is kept is
    simply not reused. Lengths are ``rounded``, by default to one of eight sizes an octave, so that
    a buffer can serve again; up to ``keep_bytes`` lie ready.
    """

    def __init__(
        self,
        memory: Memory = pageable,
        *,
        keep_bytes: int,
        rounded: Callable[[int], int] = rounded_up,
    ) -> None:
        self._memory = memory
        self._keep_bytes = keep_bytes
        self._rounded = rounded
        self._free: dict[int, list[U8]] = collections.defaultdict(list)
        self._free_bytes = 0
        self._lent: dict[int, tuple[weakref.ref[U8], U8]] = {}
        self._returned: collections.deque[weakref.ref[U8]] = collections.deque()
        self._lock = threading.Lock()

    def take(self, length: int) -> U8:
        """Return ``length`` bytes with undefined content, uint8 (n,); raise ConfigError where there
        is no memory.

        The buffer is free again when the returned array and all views of it, numpy's and torch's,
        are gone.
        """
        size = self._rounded(length)
        with self._lock:
            # Those whose arrays died since the last call.
            while self._returned:
                _, base = self._lent.pop(id(self._returned.popleft()))
                if self._free_bytes + base.size <= self._keep_bytes:
                    self._free[base.size].append(base)
                    self._free_bytes += base.size
            if self._free[size]:
                base = self._free[size].pop()
                self._free_bytes -= size
            else:
                try:
                    base = self._memory(size)
                # numpy's, torch's, and numpy's beyond all addresses
                except (MemoryError, RuntimeError, ValueError) as error:
                    raise ConfigError(
                        f"no memory for a buffer of {size} bytes: take a smaller batch_size, "
                        f"prefetch_factor or image size, or fewer frames ({error})"
                    ) from error
            # numpy lets a view of a view refer to the array that owns the memory, which would be
            # `base`. An array on a memoryview ends that chain: all views of it refer to it.
            lent = np.frombuffer(base.data, np.uint8)
            # The callback is C code on purpose. Batches die in the training loop, and a Ctrl-C that
            # struck at the start of a Python function called from there would be printed and
            # dropped.
            ref = weakref.ref(lent, self._returned.append)
            self._lent[id(ref)] = ref, base
        return lent[:length]
