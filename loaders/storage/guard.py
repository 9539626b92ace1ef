"""Turn reads of mapped shards that were cut short into errors; without it SIGBUS would end the process.

Compiled code (map_guard.c, part of the native library) does the work: where a page of a guarded mapping cannot be
served it puts zeros there and counts. A storage asks for each sample whether a page of it was replaced, so zeros reach
nobody as data. Without the library nothing is guarded, and ``storage="auto"`` reads with ``pread``.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from functools import cache
from typing import TYPE_CHECKING, Final

import numpy as np

from fuelrail.loaders.decode.native import load
from fuelrail.loaders.decode.native.build import FOLDER, LIBRARY_NAME

if TYPE_CHECKING:
    from fuelrail.pipeline.format.dataset import Dataset

_INDEX_CUT: Final = (
    "fuelrail: '{path}' was cut or cannot be read while it is in use, and the process ends by SIGBUS. Files of a "
    "dataset must not be changed in place: write a new one and rename it.\n"
)

_libc = ctypes.CDLL(None, use_errno=True)  # releases the GIL during a call, as mmap.madvise does not

_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)

_libc.mmap.restype = ctypes.c_void_p

_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_MAP_FAILED: Final = ctypes.c_void_p(-1).value


class _Library:
    """The functions of map_guard.c. ``faults.value`` is the number of pages replaced so far."""

    def __init__(self) -> None:
        library = ctypes.PyDLL(str(FOLDER / LIBRARY_NAME))  # keeps the interpreter's lock: one thread at a time
        self.install, self.add = library.map_guard_install, library.map_guard_add
        self.hull, self.remove = library.map_guard_hull, library.map_guard_remove
        self.add.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
        self.hull.argtypes = (ctypes.c_int, ctypes.POINTER(ctypes.c_size_t))
        self.remove.argtypes, self.remove.restype = (ctypes.c_int,), None
        self.faults = ctypes.c_long.in_dll(library, "map_guard_faults")


@cache
def _library() -> _Library | None:
    return None if isinstance(load(), str) else _Library()


def is_guarding() -> bool:
    """Return whether mappings can be guarded here; take SIGBUS over, again if a library took it since."""
    library = _library()
    return library is not None and library.install() == 0


class Faults:
    """Which bytes of some shards, by number, were replaced by zeros."""

    def __init__(self) -> None:
        self._maps: weakref.WeakSet[GuardedMap] = weakref.WeakSet()
        self._gone: list[tuple[int, int, int]] = []
        library = _library()
        self._count = ctypes.c_long(0) if library is None else library.faults

    def add(self, mapped: GuardedMap, shard: int) -> None:
        """Watch a map of a shard."""
        mapped.guard(shard, self._gone)
        self._maps.add(mapped)

    @property
    def are_any(self) -> bool:
        """Whether a page of any guarded map was replaced in this process."""
        return bool(self._count.value)

    def has_hit(self, shard: int, start: int, end: int) -> bool:
        """Return whether bytes ``start`` to ``end - 1`` of a shard may have been read as zeros in any map of it."""
        if not self.are_any:
            return False
        hulls = [*self._gone, *(mapped.hull() for mapped in list(self._maps))]
        return any(number == shard and low < end and start < high for number, low, high in hulls)


class GuardedMap:
    """A read-only map of a whole file. It lives as long as any view of it.

    It keeps no descriptor, unlike Python's own, of which each shard with a sample in flight would hold one.
    """

    _slot = -1
    _shard = -1
    _gone: list[tuple[int, int, int]]
    address = 0
    """Address of its first byte in memory."""

    def __init__(self, fd: int, size: int) -> None:
        """Map the file; raises OSError."""
        self._size = size
        address: int = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if address == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.address = address

    @property
    def __array_interface__(self) -> dict[str, object]:
        return {"version": 3, "typestr": "|u1", "shape": (self._size,), "data": (self.address, True)}

    def view(self) -> memoryview:
        """Return all of its bytes."""
        return np.asarray(self).data

    def advise(self, start: int, length: int, advice: int) -> int:
        """Call ``madvise`` on the pages of a range; return 0 or the error number."""
        first = start & -mmap.PAGESIZE
        done: int = _libc.madvise(self.address + first, start + length - first, advice)
        return 0 if done == 0 else ctypes.get_errno()

    def guard(self, shard: int, gone: list[tuple[int, int, int]]) -> None:
        """Guard it, as one of shard ``shard``; what was replaced in it is put into ``gone`` when it goes."""
        library = _library()
        if library is not None:
            self._shard, self._gone = shard, gone
            self._slot = library.add(self.address, self._size, None)

    def hull(self) -> tuple[int, int, int]:
        """Shard, first byte and end of what was replaced; the end not above the first byte for nothing."""
        library = _library()
        if library is None or self._slot < 0:
            return -1, 0, 0
        hull = (ctypes.c_size_t * 2)()
        library.hull(self._slot, hull)
        return self._shard, hull[0], hull[1]

    def __del__(self) -> None:
        if self._slot >= 0 and (library := _library()) is not None:
            hull = self.hull()
            if hull[1] < hull[2]:
                self._gone.append(hull)
            library.remove(self._slot)
        if self.address:
            _libc.munmap(self.address, self._size)


class IndexGuard:
    """Names a dataset's index before the process ends where a page of it cannot be served."""

    def __init__(self, dataset: Dataset) -> None:
        library = _library()
        if library is None:
            return
        for table, name in ((dataset.index, "index.arrow"), (dataset.shards, "shards.arrow")):
            text = ctypes.c_char_p(os.fsencode(_INDEX_CUT.format(path=dataset.root / name)))
            slot = library.add(int(np.frombuffer(table.mapped, np.uint8).ctypes.data), len(table.mapped), text)
            if slot >= 0:
                weakref.finalize(table, _forget, library, slot, text)


def _forget(library: _Library, slot: int, _text: ctypes.c_char_p) -> None:
    library.remove(slot)
