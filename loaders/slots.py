"""Reused batch buffers that nobody can overwrite while somebody still looks at them."""

from __future__ import annotations

import collections
import weakref
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray


class BufferPool:
    """uint8 buffers of one shape, pinned at choice, handed out as tensors and taken back when the last view is gone.

    Taking fresh memory for each batch costs a page fault every 4 KiB. Here a buffer comes back through a finaliser on
    the array that every view and tensor refers to, so a batch that the user keeps is simply not reused. The pool
    keeps at most ``keep`` free buffers. Thread-safe.
    """

    def __init__(self, shape: tuple[int, ...], *, pinned: bool, keep: int) -> None:
        self._shape, self._pinned = shape, pinned
        self._free: collections.deque[NDArray[np.uint8]] = collections.deque(maxlen=keep)

    def take(self) -> NDArray[np.uint8]:
        """A buffer with undefined content.

        It is free again when the returned array and all views of it, numpy's and torch's, are gone.
        """
        try:
            base = self._free.pop()
        except IndexError:
            base = self._new()
        # numpy lets a view of a view refer to the array that owns the memory, which would be `base`. An array on a
        # memoryview ends that chain: all views of it refer to it.
        lent = np.frombuffer(base.data, np.uint8)
        weakref.finalize(lent, self._free.append, base).atexit = False
        return lent.reshape(self._shape)

    def _new(self) -> NDArray[np.uint8]:
        if self._pinned:
            pinned: NDArray[np.uint8] = torch.empty(self._shape, dtype=torch.uint8, pin_memory=True).numpy()
            return pinned
        return np.empty(self._shape, np.uint8)
