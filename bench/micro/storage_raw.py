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

    How large the kernel's pages are depends on who brought them into the page cache, and decides much: so all is read
    with the cache as the shards' writer left it, as a copy of them does, and as our own reading from disk leaves it.
    """
    order = np.random.default_rng(1).permutation(len(dataset.index)).tolist()
    rows = [dataset.index.row(index) for index in order]
    buffer = memoryview(bytearray(max(row.length for row in rows)))

    mapped = partial(open_storage, dataset, "mapped")
    preads = partial(open_storage, dataset, "pread")
    beyond_memory = partial(MappedShards, dataset, memory_bytes=1)

    def pread() -> None:
        files = [os.open(dataset.root / shard.name, os.O_RDONLY) for shard in dataset.manifest.shards]
        for row in rows:
            view = buffer[: row.length]
            os.preadv(files[row.shard], [view], row.offset)
            xxhash.xxh3_64_intdigest(view)
        for file in files:
            os.close(file)

    def ours(make: Callable[[], Storage], *, cold: bool = False) -> None:
        if cold:
            _empty_page_cache(dataset)
        storage = make()
        session = storage.session()
        pending: list[Callable[[], memoryview]] = []
        for at, row in enumerate(rows):
            while len(pending) < min(len(rows), at + _AHEAD):
                first = len(pending)
                asked = [(index, dataset.index.row(index)) for index in order[first : first + _AHEAD // 4]]
                pending += session.request(asked)
            take, pending[at] = pending[at], _taken
            read_members(row, take(), "")
        session.close()
        storage.close()

    def pread_cold() -> None:
        _empty_page_cache(dataset)
        pread()

    def warm(title: str) -> Comparison:
        checked = mapped()  # not longer than this: pages that are mapped stay in memory

        def later() -> None:
            for index in order:
                row = dataset.index.row(index)
                read_members(row, checked.span(index, row), "")

        candidates: dict[str, Callable[[], object]] = {
            "pread into a reused buffer + xxh3": pread,
            "fuelrail, mapped + xxh3": later,
            "fuelrail, mapped + xxh3, pages not mapped yet": partial(ours, mapped),
            "fuelrail, pread + xxh3": partial(ours, preads),
            "webdataset, nothing checked": partial(_webdataset, dataset),
        }
        return compare(title, candidates, effort)

    yield warm("raw read, every byte checked, page cache as the writer left it")
    _copy_shards(dataset)
    yield warm("raw read, every byte checked, page cache as copying in pieces of 256 KiB left it")
    from_disk: dict[str, Callable[[], object]] = {
        "pread into a reused buffer + xxh3": pread_cold,
        "fuelrail, pread + xxh3": partial(ours, preads, cold=True),
        "fuelrail, mapped + xxh3, as beyond memory": partial(ours, beyond_memory, cold=True),
        "fuelrail, mapped + xxh3": partial(ours, mapped, cold=True),
    }
    few = Effort(num_rounds=min(effort.num_rounds, 5), min_lap_s=0.0)
    yield compare("read from disk, every byte checked", from_disk, few)
    # What was read last was read mapped.
    yield warm("raw read, every byte checked, page cache as fuelrail's mapped reading left it")
    unchecked = open_storage(dataset, "mapped", verify=False)
    if importlib.util.find_spec("spdl") is None:
        return

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
    for shard in dataset.manifest.shards:
        file = os.open(dataset.root / shard.name, os.O_RDONLY)
        os.fsync(file)  # dirty pages would stay
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def _copy_shards(dataset: Dataset) -> None:
    for shard in dataset.manifest.shards:
        path, copy = dataset.root / shard.name, dataset.root / "copy"
        with path.open("rb") as source, copy.open("wb", buffering=0) as target:
            shutil.copyfileobj(source, target, 256 << 10)
        copy.replace(path)


def _touch(data: memoryview) -> object:
    return np.frombuffer(data, np.uint8)[::PAGE_BYTES].sum()


def _maps(dataset: Dataset) -> list[memoryview]:
    import mmap

    maps = []
    for shard in dataset.manifest.shards:
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

    for shard in dataset.manifest.shards:
        with (dataset.root / shard.name).open("rb") as file:
            for _ in group_by_keys({**member, "__url__": shard.name} for member in tar_file_iterator(file)):
                pass
