"""Samples out of the tar shards that the webdataset peer wrote, without copying, for the peers that run threads."""

from __future__ import annotations

import mmap
import random
from typing import TYPE_CHECKING

from fuelrail.bench.peers.wds import NUMBER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from fuelrail.bench.peers.peer import Work

_SHUFFLE_BUFFER = 100

RawSample = tuple[bytes, list[memoryview]]
"""Packed number, encoded images."""


def shuffled_batches(
    folder: Path, work: Work, parse: Callable[[memoryview], Iterable[tuple[str, memoryview]]]
) -> Iterator[list[RawSample]]:
    """Full batches of samples without end: shards in a new order each epoch, samples through a shuffle buffer."""
    rng = random.Random(work.seed)
    shards = sorted(folder.glob("*.tar"))
    while True:
        rng.shuffle(shards)
        batch: list[RawSample] = []
        for sample in _buffered((entry for shard in shards for entry in _samples(shard, work, parse)), rng):
            batch.append(sample)
            if len(batch) == work.batch_size:
                yield batch
                batch = []


def _buffered(samples: Iterable[RawSample], rng: random.Random) -> Iterator[RawSample]:
    waiting: list[RawSample] = []
    for sample in samples:
        waiting.append(sample)
        if len(waiting) > _SHUFFLE_BUFFER:
            at = rng.randrange(len(waiting))
            waiting[at], waiting[-1] = waiting[-1], waiting[at]
            yield waiting.pop()
    rng.shuffle(waiting)
    yield from waiting


def _samples(
    shard: Path, work: Work, parse: Callable[[memoryview], Iterable[tuple[str, memoryview]]]
) -> Iterator[RawSample]:
    with shard.open("rb") as file:
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    members: dict[str, memoryview] = {}
    for name, content in parse(mapped):
        members[name.partition(".")[2]] = content
        if len(members) == len(work.cameras) + 1:
            yield bytes(members[NUMBER]), [members[f"{camera}.jpg"] for camera in work.cameras]
            members = {}
