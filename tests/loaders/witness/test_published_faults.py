"""Faults that were published of other loaders, rebuilt small: each is named with its kind, rows and ranks.

Reports of users stand behind them: ranks and workers that were not told apart, resumes that began again or one batch
off, modules of one model that read other batches, shuffle buffers that lost their rest, random numbers that repeat.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
)

import fuelrail as fr

if TYPE_CHECKING:
    from fuelrail.loaders.witness.witness import Witness

pytestmark = pytest.mark.process  # two start workers

SIZE = 48
GROUPED = ("same_order", "same_rows", "uneven", "different_rows")
BATCH = 4


class Rows(Dataset):
    """Rows with their numbers; ``noise`` makes random numbers for one."""

    def __init__(self, size: int = SIZE, noise: Callable[[int], np.ndarray] | None = None) -> None:
        self.size = size
        self.noise = noise

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: int) -> dict[str, object]:
        if not 0 <= row < self.size:
            raise IndexError(row)
        return {"index": row} if self.noise is None else {"index": row, "x": self.noise(row)}


class Stream(IterableDataset):
    """All rows, in each worker of each rank."""

    def __iter__(self) -> Iterator[dict[str, object]]:
        return ({"index": row} for row in range(SIZE))


class Fault(NamedTuple):
    """A fault: what each rank iterates in an epoch, and what the witness must say.

    ``states``: after how many batches each rank's state is taken, and what it iterates from there.
    """

    loader: Callable[[int], Iterable]
    kinds: set[str]
    ranks: int = 2
    epochs: int = 1
    options: dict = {}  # noqa: RUF012 - read only
    named: list[list[int]] = []  # noqa: RUF012 - ranks of each fault of `GROUPED`
    resumes: tuple[tuple[int, Callable[[int], Iterable]], ...] = ()


def batches(rows: Iterable[int], batch: int = BATCH) -> list[dict]:
    rows = list(rows)
    return [{"index": rows[at : at + batch]} for at in range(0, len(rows), batch)]


def distributed(
    rank: int, *, ranks: int = 2, dataset: Dataset | None = None, **options
) -> DataLoader:
    dataset = dataset or Rows()
    sampler = DistributedSampler(dataset, ranks, rank, **options)
    return DataLoader(dataset, BATCH, sampler=sampler)


def permuted(seed: int) -> list[int]:
    return np.random.default_rng(seed).permutation(SIZE).tolist()


def seeded_workers(_: int) -> None:
    np.random.seed(0)


def buffered(rank: int) -> list[dict]:
    """A shuffle buffer that is not emptied at the end."""
    buffer: list[int] = []
    shown = []
    chance = np.random.default_rng(rank)
    for row in range(rank, SIZE, 2):
        buffer.append(row)
        if len(buffer) > 5:
            shown.append(buffer.pop(int(chance.integers(len(buffer)))))
    return batches(shown, 1)


class FetchedAhead:
    """A loader that fetches two batches ahead, and forgets them when its iterator is made again."""

    def __init__(self) -> None:
        self.source = iter(batches(permuted(0)))

    def __iter__(self) -> Iterator[dict]:
        ahead: list[dict] = []
        for batch in self.source:
            ahead.append(batch)
            if len(ahead) > 2:
                yield ahead.pop(0)
        yield from ahead


class Twice:
    """What a training loop sees that breaks out of the epoch once, and goes on."""

    def __init__(self, loader: Iterable) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[dict]:
        yield from itertools.islice(iter(self.loader), 3)
        yield from iter(self.loader)


class Concatenated(Rows):
    """Two parts of which the second is read from one row too early."""

    def __getitem__(self, row: int) -> dict[str, object]:
        return super().__getitem__(row if row < SIZE // 2 else row - 1)


class SeededInEachEpoch:
    """A loader that makes its generator anew."""

    sampler = RandomSampler(Rows())

    def __iter__(self) -> Iterator[dict]:
        generator = torch.Generator().manual_seed(1)
        yield from DataLoader(Rows(), BATCH, shuffle=True, generator=generator)


class OneBuffer:
    """Batches in one buffer, which is filled again while the trainer still reads it."""

    def __iter__(self) -> Iterator[dict]:
        x = np.zeros((BATCH, 3))
        for number, batch in enumerate(batches(range(SIZE))):
            x[:] = number
            yield {**batch, "x": x}
            if number == 4:  # what came late stands in the rows of the next one
                yield {"index": batch["index"], "x": x + 1}


FAULTS = {
    "no set_epoch": Fault(distributed, {"same_order"}, epochs=2, named=[[0, 1]]),
    "generator seeded in each epoch": Fault(
        lambda _: SeededInEachEpoch(),
        {"same_order"},
        ranks=1,
        epochs=2,
        named=[[0]],
    ),
    "no sampler of ranks": Fault(
        lambda _: DataLoader(Rows(), BATCH),
        {"same_rows", "repeated"},
        named=[[0, 1]],
    ),
    "stream not shared over ranks": Fault(
        lambda _: DataLoader(Stream(), BATCH),
        {"same_rows", "repeated"},
        options={"expected": SIZE},
        named=[[0, 1]],
    ),
    "stream not shared over workers": Fault(
        lambda _: DataLoader(Stream(), BATCH, num_workers=2),
        {"repeated"},
        ranks=1,
    ),
    "sampler seeded by rank": Fault(
        lambda rank: distributed(rank, seed=rank), {"missing", "repeated"}
    ),
    "shuffled before it is shared, by rank": Fault(
        lambda rank: batches(permuted(rank)[rank::2]),
        {"missing", "repeated"},
        options={"expected": SIZE},
    ),
    "loader prepared twice": Fault(
        lambda rank: distributed(rank, dataset=Subset(Rows(), range(rank, SIZE, 2))),
        {"missing"},
        options={"expected": SIZE},
    ),
    "rank of the node in place of the world's": Fault(
        lambda rank: distributed(rank % 2, ranks=4),
        {"same_rows", "missing", "repeated"},
        ranks=4,
        named=[[0, 2], [1, 3]],
    ),
    "remainder left out": Fault(
        lambda rank: batches(permuted(1)[rank * 9 : rank * 9 + 9]),
        {"missing"},
        ranks=5,
        options={"expected": SIZE},
    ),
    "shards of workers overlap": Fault(
        lambda rank: batches(range(rank * 12 - (rank > 1), rank * 12 + 12)),
        {"repeated", "uneven"},
        ranks=4,
        options={"expected": SIZE},
        named=[[2, 3]],
    ),
    "uneven shards": Fault(
        lambda rank: batches([*range(36)][rank::2] + [*range(36, 48)] * rank),
        {"uneven"},
        options={"expected": SIZE},
        named=[[1]],
    ),
    "part of a mix read one row early": Fault(
        lambda rank: distributed(rank, dataset=Concatenated()),
        {"missing", "repeated"},
    ),
    "rows of a dataset that ends earlier": Fault(
        lambda rank: distributed(rank, dataset=Rows(SIZE + 4)),
        {"unexpected"},
        options={"expected": SIZE},
    ),
    "padding counted as rows": Fault(
        lambda rank: distributed(rank, dataset=Rows(SIZE - 1)),
        {"repeated"},
        options={"tail": "exact"},
    ),
    "last batches left out of an evaluation": Fault(
        lambda rank: DataLoader(Subset(Rows(), range(rank, SIZE, 2)), 5, drop_last=True),
        {"missing"},
        options={"expected": SIZE, "tail": "exact"},
    ),
    "shuffle buffer loses its rest": Fault(buffered, {"missing"}, options={"expected": SIZE}),
    "batches fetched ahead are lost at a break": Fault(
        lambda _: Twice(FetchedAhead()),
        {"missing"},
        ranks=1,
        options={"expected": SIZE},
    ),
    "modules of one model shuffle by their rank": Fault(
        lambda rank: distributed(0, ranks=1, seed=rank),
        {"different_rows"},
        options={"groups": [[0, 1]]},
        named=[[1]],
    ),
    "tensor-parallel ranks share rows out": Fault(
        lambda rank: distributed(rank, ranks=4),
        {"different_rows", "missing"},
        ranks=4,
        options={"groups": [[0, 1], [2, 3]]},
        named=[[1], [3]],
    ),
    "workers with one seed": Fault(
        lambda _: DataLoader(
            Rows(noise=lambda _: np.random.rand(6)),
            BATCH,
            num_workers=2,
            worker_init_fn=seeded_workers,
        ),
        {"shared_noise"},
        ranks=1,
        options={"content": "random"},
    ),
    "augmentation that repeats in each epoch": Fault(
        lambda _: DataLoader(
            Rows(noise=lambda row: np.random.default_rng(row).random(6)),
            BATCH,
            shuffle=True,
        ),
        {"same_content"},
        ranks=1,
        epochs=2,
        options={"content": "random"},
    ),
    "buffer that is filled again": Fault(
        lambda _: OneBuffer(),
        {"content", "repeated"},
        ranks=1,
        options={"content": "equal", "expected": SIZE},
    ),
    "resume starts over": Fault(
        lambda rank: batches(permuted(0)[rank::2]),
        {"repeated"},
        options={"expected": SIZE},
        resumes=((3, lambda rank: batches(permuted(0)[rank::2])),),
    ),
    "resume of a stream starts over": Fault(
        lambda rank: batches(permuted(0)[rank::2]),
        {"repeated"},
        resumes=((3, lambda rank: batches(permuted(0)[rank::2])),),
    ),
    "resume skips one batch too many": Fault(
        lambda rank: batches(permuted(0)[rank::2]),
        {"missing"},
        options={"expected": SIZE},
        resumes=((3, lambda rank: batches(permuted(0)[rank::2])[4:]),),
    ),
    "resume skips one batch too few": Fault(
        lambda rank: batches(permuted(0)[rank::2]),
        {"repeated"},
        options={"expected": SIZE},
        resumes=((3, lambda rank: batches(permuted(0)[rank::2])[2:]),),
    ),
    "resume with another shuffle": Fault(
        lambda rank: batches(permuted(0)[rank::2]),
        {"missing", "repeated"},
        options={"expected": SIZE},
        resumes=((3, lambda rank: batches(permuted(7)[rank::2])[3:]),),
    ),
    "second resume counts from the first": Fault(
        lambda rank: batches(permuted(0)[rank::2]),
        {"repeated"},
        options={"expected": SIZE},
        resumes=(
            (2, lambda rank: batches(permuted(0)[rank::2])[2:]),
            (2, lambda rank: batches(permuted(0)[rank::2])[2:]),
        ),
    ),
    "last batch lost at a resume": Fault(
        lambda rank: batches(permuted(0)[rank : SIZE - 2 : 2]),
        {"missing"},
        options={"expected": [*permuted(0)[: SIZE - 2]]},
        resumes=((3, lambda rank: batches(permuted(0)[rank : SIZE - 2 : 2])[3:-1]),),
    ),
    "resume of one rank only": Fault(
        lambda rank: batches(permuted(0)[rank::2]),
        {"repeated", "uneven"},
        options={"expected": SIZE},
        resumes=((3, lambda rank: batches(permuted(0)[rank::2])[3 * (1 - rank) :]),),
        named=[[1]],
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_published_fault_is_named(name, monkeypatch) -> None:
    fault = FAULTS[name]
    reports, by_rank = run(fault, monkeypatch)
    seen = sum(by_rank.values(), Counter())
    report = reports[-1]
    found = {one.kind: one for one in report.faults}
    assert found.keys() == fault.kinds, report.as_text()
    assert all(not report.faults for report in reports[:-1])
    assert [one.ranks for one in report.faults if one.kind in GROUPED] == fault.named
    expected = fault.options.get(
        "expected", SIZE if name != "padding counted as rows" else SIZE - 1
    )
    expected = Counter(range(expected) if isinstance(expected, int) else expected)
    if "missing" in found:
        assert set(found["missing"].rows) == set(expected - seen)
    if "repeated" in found:
        again = {row for row, count in seen.items() if count > 1 and row in expected}
        assert set(found["repeated"].rows) == again
        assert found["repeated"].count == sum(seen[row] - 1 for row in again)
        assert found["repeated"].ranks == [
            rank for rank in sorted(by_rank) if again & by_rank[rank].keys()
        ]
    if "unexpected" in found:
        foreign = set(seen - expected)
        assert set(found["unexpected"].rows) == foreign
        assert found["unexpected"].ranks == [
            rank for rank in sorted(by_rank) if foreign & by_rank[rank].keys()
        ]


def run(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> tuple[list, dict[int, Counter]]:
    """Return the reports of the epochs, and the rows that each rank saw in the last one."""
    watched = []
    seen: list[list[Counter]] = []
    groups = fault.options.get("groups") or [[rank] for rank in range(fault.ranks)]
    counted = {group[0] for group in groups}
    states: list[list[dict]] = [[] for _ in fault.resumes]
    records: list[list] = [[] for _ in range(fault.epochs)]
    monkeypatch.setenv("WORLD_SIZE", str(fault.ranks))

    def alone(witness: Witness) -> None:
        """Let a rank judge nothing: all are judged together."""
        monkeypatch.setattr(witness, "_judge", lambda _: SimpleNamespace(faults=[]))

    for rank in range(fault.ranks):
        monkeypatch.setenv("RANK", str(rank))
        witness = fr.witness(fault.loader(rank), on_fault="ignore", **fault.options)
        watched.append(witness)
        rows = [Counter() for _ in range(fault.epochs)]
        seen.append(rows)
        parts = [*fault.resumes, (None, None)]
        alone(witness)
        for epoch in range(fault.epochs):
            for number, (steps, rest) in enumerate(parts):
                for batch in itertools.islice(iter(witness), steps):
                    rows[epoch].update(int(row) for row in batch["index"])
                if rest is not None:
                    state = witness.state_dict()
                    states[number].append(state)
                    witness = fr.witness(rest(rank), on_fault="ignore", **fault.options)
                    alone(witness)
                    witness.load_state_dict(state)
            records[epoch].append(witness._previous[0])
    first = watched[0]
    reports = []
    first._previous = []
    for of_ranks in records:
        reports.append(type(first)._judge(first, of_ranks))
        first._previous = of_ranks
    return reports, {rank: seen[rank][-1] for rank in counted}


def test_at_least_25_faults_are_rebuilt() -> None:
    assert len(FAULTS) >= 25
