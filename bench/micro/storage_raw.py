"""Reading local shards, beside plain ``pread``, webdataset and SPDL."""

from __future__ import annotations

import importlib.util
import os
import shutil
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from fuelrail.bench.micro.timing import Effort, compare
from fuelrail.loaders.storage import open_storage
from fuelrail.loaders.storage.mapped import MappedShards
from fuelrail.pipeline.format.dataset import read_members

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fuelrail.bench.micro.timing import Comparison
    from fuelrail.loaders.storage import Storage
    from fuelrail.pipeline.format.dataset import Dataset

PAGE_BYTES = 4096
_AHEAD = 64


def measure_raw(effort: Effort, dataset: Dataset) -> Iterator[Comparison]:
    """In a seeded random order; beside readers that only go forward, in stored order.

    How large the kernel's pages are depends on what brought them into the page cache, and has a large effect. So all
    readers run with the cache as the shards' writer left it, as a copy leaves it, and as our reading from disk does.
    """
    readers = _Readers(dataset)
    yield readers.warm("raw read, every byte checked, page cache as the writer left it", effort)
    _copy_shards(dataset)
    yield readers.warm("raw read, every byte checked, page cache as copying in pieces of 256 KiB left it", effort)
    few = Effort(num_rounds=min(effort.num_rounds, 5), min_lap_s=0.0)
    yield readers.from_disk("read from disk, every byte checked", few)
    # What was read last was read mapped.
    yield readers.warm("raw read, every byte checked, page cache as fuelrail's mapped reading left it", effort)
    if importlib.util.find_spec("spdl") is not None:
        yield from _unchecked(dataset, effort)


class _Readers:
    """Ways to read all samples in one random order."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._order = np.random.default_rng(1).permutation(len(dataset.index)).tolist()
        self._rows = [dataset.index.row(index) for index in self._order]
        self._buffer = memoryview(bytearray(max(row.length for row in self._rows)))
        self._mapped = partial(open_storage, dataset, "mapped")
        self._preads = partial(open_storage, dataset, "pread")

    def warm(self, title: str, effort: Effort) -> Comparison:
        """Compare the readers on what is in the page cache."""
        checked = self._mapped()  # not longer than this: pages that are mapped stay in memory

        def later() -> None:
            for index in self._order:
                row = self._dataset.index.row(index)
                read_members(row, checked.span(index, row), "")

        candidates: dict[str, Callable[[], object]] = {
            "pread into a reused buffer + xxh3": self._pread,
            "fuelrail, mapped + xxh3": later,
            "fuelrail, mapped + xxh3, pages not mapped yet": partial(self._ours, self._mapped),
            "fuelrail, pread + xxh3": partial(self._ours, self._preads),
            "webdataset, nothing checked": partial(_webdataset, self._dataset),
        }
        return compare(title, candidates, effort)

    def from_disk(self, title: str, effort: Effort) -> Comparison:
        """Compare the readers with an empty page cache."""
        beyond_memory = partial(MappedShards, self._dataset, memory_bytes=1)
        candidates: dict[str, Callable[[], object]] = {
            "pread into a reused buffer + xxh3": partial(self._pread, cold=True),
            "fuelrail, pread + xxh3": partial(self._ours, self._preads, cold=True),
            "fuelrail, mapped + xxh3, as beyond memory": partial(self._ours, beyond_memory, cold=True),
            "fuelrail, mapped + xxh3": partial(self._ours, self._mapped, cold=True),
        }
        return compare(title, candidates, effort)

    def _pread(self, *, cold: bool = False) -> None:
        if cold:
            _empty_page_cache(self._dataset)
        files = [os.open(self._dataset.root / shard.name, os.O_RDONLY) for shard in self._dataset.shards]
        for row in self._rows:
            view = self._buffer[: row.length]
            os.preadv(files[row.shard], [view], row.offset)
            xxhash.xxh3_64_intdigest(view)
        for file in files:
            os.close(file)

    def _ours(self, make: Callable[[], Storage], *, cold: bool = False) -> None:
        if cold:
            _empty_page_cache(self._dataset)
        storage = make()
        session = storage.session()
        pending: list[Callable[[], memoryview]] = []
        for at, row in enumerate(self._rows):
            while len(pending) < min(len(self._rows), at + _AHEAD):
                first = len(pending)
                wanted = self._order[first : first + _AHEAD // 4]
                pending += session.request([(index, self._dataset.index.row(index)) for index in wanted])
            take, pending[at] = pending[at], _taken
            read_members(row, take(), "")
        session.close()
        storage.close()


def _unchecked(dataset: Dataset, effort: Effort) -> Iterator[Comparison]:
    """Compare with SPDL, in stored order, without checksums."""
    unchecked = open_storage(dataset, "mapped", verify=False)

    def unchecked_members(touch: Callable[[memoryview], object] | None) -> None:
        for index in range(len(dataset.index)):
            row = dataset.index.row(index)
            for data in read_members(row, unchecked.span(index, row), "", verify=False).values():
                if touch is not None:
                    touch(data)

    for title, touch in (("one byte of every page touched", _touch), ("views only", None)):
        yield compare(
            f"raw read, check off, {title}",
            {
                "SPDL iter_tarfile on maps": partial(_spdl, _maps(dataset), touch),
                "fuelrail": partial(unchecked_members, touch),
            },
            effort,
        )


def _taken() -> memoryview:
    raise AssertionError("a span is taken once")


def _empty_page_cache(dataset: Dataset) -> None:
    for shard in dataset.shards:
        file = os.open(dataset.root / shard.name, os.O_RDONLY)
        os.fsync(file)  # dirty pages would stay
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def _copy_shards(dataset: Dataset) -> None:
    for shard in dataset.shards:
        path, copy = dataset.root / shard.name, dataset.root / "copy"
        with path.open("rb") as source, copy.open("wb", buffering=0) as target:
            shutil.copyfileobj(source, target, 256 << 10)
        copy.replace(path)


def _touch(data: memoryview) -> object:
    return np.frombuffer(data, np.uint8)[::PAGE_BYTES].sum()


def _maps(dataset: Dataset) -> list[memoryview]:
    import mmap

    maps = []
    for shard in dataset.shards:
        with (dataset.root / shard.name).open("rb") as file:
            maps.append(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
    return maps


def _spdl(maps: list[memoryview], touch: Callable[[memoryview], object] | None) -> None:
    from spdl.io import iter_tarfile

    for shard in maps:
        for _, data in iter_tarfile(shard):
            if touch is not None:
                touch(data)


def _webdataset(dataset: Dataset) -> None:
    from webdataset.tariterators import group_by_keys, tar_file_iterator

    for shard in dataset.shards:
        with (dataset.root / shard.name).open("rb") as file:
            for _ in group_by_keys({**member, "__url__": shard.name} for member in tar_file_iterator(file)):
                pass
