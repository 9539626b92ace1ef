"""Random histories of a job whose ranks die, join, repeat steps and restart, against ORDER.md's letter.

Ranks are samplers in one process. What the order shows at a position is asked of one rank alone, and for the shuffled
kind computed here; which rows of a global batch a rank has, and of balanced ones which, is computed here always.
"""

from __future__ import annotations

import copy
import hashlib
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from fuelrail import Balance, Bucket, FrameWindow, OrderSpec, Pack, World
from fuelrail.order import BatchSampler

NUM_ROWS = 150
SEED = 11
COSTS = np.random.default_rng(3).integers(1, 40, NUM_ROWS)
COLUMNS = {
    "cost": COSTS,
    "clip_id": np.arange(NUM_ROWS) // 9,
    "frame": np.arange(NUM_ROWS) % 9,
}
KINDS: dict[str, dict[str, Any]] = {
    "shuffled": {"global_batch": 20},
    "filled up": {"global_batch": 37, "drop_last": False},
    "a row a rank": {"global_batch": 64},
    "sequential": {"spec": OrderSpec(kind="sequential"), "global_batch": 48},
    "windowed": {"spec": OrderSpec(kind="windowed", window=3), "blocks": 7, "global_batch": 16},
    "lanes": {"spec": OrderSpec(kind="lanes", seed=2), "global_batch": 13},
    "frames": {"window": FrameWindow(frames=(-1, 0)), "global_batch": 31},
    "balance": {"spec": OrderSpec(balance=Balance(cost="cost")), "global_batch": 30},
    "pack": {"spec": OrderSpec(pack=Pack(budget=60, cost="cost", window=40)), "global_batch": 10},
    "bucket": {"spec": OrderSpec(bucket=Bucket(by="cost", bounds=[20, 40])), "global_batch": 25},
    "without": {"spec": OrderSpec(filter="cost > 9", seed=4), "global_batch": 9},
    "mix": {
        "data": {"a": COLUMNS, "b": COLUMNS},
        "mix": {"a": 2, "b": 1},
        "global_batch": 24,
        "drop_last": False,
    },
}


@cache
def sampler_of(kind: str) -> BatchSampler:
    """A sampler of one rank alone; ranks are copies of it that join."""
    options = {"data": COLUMNS, "spec": OrderSpec(seed=SEED), **KINDS[kind]}
    return BatchSampler(**options, world=World(), entries=True)


def permuted(n: int, epoch: int) -> list[int]:
    """ORDER.md's sections 2 and 3 for a shuffled order of up to 1024 samples."""
    purpose = b"order shuffled"
    data = b"fuelrail key 1" + len(purpose).to_bytes(8, "little") + purpose
    data += SEED.to_bytes(16, "little") + epoch.to_bytes(16, "little")
    key = hashlib.shake_128(data).digest(16)
    words = hashlib.shake_128(b"fuelrail permutation 1" + n.to_bytes(8, "little") + key)
    stream = words.digest(8 * n)
    numbers = [int.from_bytes(stream[8 * i : 8 * i + 8], "little") for i in range(n)]
    return [
        number % 1024 for number in sorted((word >> 10 << 10) | i for i, word in enumerate(numbers))
    ]


@cache
def global_batch(kind: str, step: int) -> list[list[tuple[Any, ...]]]:
    """What the rows of a step of the run show, over all ranks: in packs the samples of each pack."""
    entries = sampler_of(kind)[step]
    rows = [entry[:-2] for entry in entries]
    if kind == "shuffled":
        epoch, step = divmod(step, NUM_ROWS // 20)
        assert [row[0] for row in rows] == permuted(NUM_ROWS, epoch)[step * 20 : step * 20 + 20]
    if kind != "pack":
        return [[row] for row in rows]
    packs: dict[int, list[Any]] = {}
    for entry, row in zip(entries, rows, strict=True):
        packs.setdefault(entry.pack, []).append(row)
    return list(packs.values())


def shares(kind: str, step: int, num_ranks: int) -> list[list[tuple[Any, ...]]]:
    """What each rank has of a step, by sections 1 and 10."""
    rows = global_batch(kind, step)
    size = len(rows)
    bounds = [rank * size // num_ranks for rank in range(num_ranks + 1)]
    dealt = list(range(size))
    if kind == "balance":
        costs = [int(COSTS[row[0][0]]) for row in rows]
        groups: list[list[int]] = [[] for _ in range(num_ranks)]
        for j in sorted(range(size), key=lambda j: (-costs[j], j)):
            open_groups = [
                group
                for rank, group in enumerate(groups)
                if len(group) < bounds[rank + 1] - bounds[rank]
            ]
            min(open_groups, key=lambda group: sum(costs[i] for i in group)).append(j)
        dealt = [j for group in groups for j in sorted(group)]
    return [
        [sample for j in dealt[first:end] for sample in rows[j]] for first, end in pairwise(bounds)
    ]


class Histories(RuleBasedStateMachine):
    """A job of 1 to 64 ranks; every step is checked as a whole, on every rank."""

    @initialize(kind=st.sampled_from(sorted(KINDS)), size=st.integers(1, 64))
    def start(self, kind: str, size: int) -> None:
        self.kind = kind
        self.most = KINDS[kind]["global_batch"]
        self.committed = 0
        self.pending = 0
        self.saved: tuple[Any, int] = (sampler_of(kind).state_dict(), 0)
        self.ranks: list[SimpleNamespace] = []
        self.restart(size)

    def joined(self, state: Any) -> SimpleNamespace:
        sampler = copy.copy(sampler_of(self.kind))
        sampler._ledger = copy.copy(sampler._ledger)
        sampler.load_state_dict(state)
        sampler.commit()
        return SimpleNamespace(sampler=sampler, batches=iter(()))

    @rule(size=st.integers(1, 64))
    def restart(self, size: int) -> None:
        """All die; a new job continues from the newest saved state."""
        state, self.committed = self.saved
        self.pending = 0
        num = min(size, self.most)
        self.ranks = [self.joined(state) for _ in range(num)]
        for rank, job in enumerate(self.ranks):
            job.sampler.reshape(World(rank, num))

    @rule()
    def save(self) -> None:
        states = [job.sampler.state_dict() for job in self.ranks]
        assert all(state == states[0] for state in states), "a state is the same on every rank"
        self.saved = states[0], self.committed

    @rule()
    def take(self) -> None:
        """A step, on all ranks."""
        received = []
        for job in self.ranks:
            batch = next(job.batches, None)
            if batch is None:  # an epoch's end, or a rank that has just joined
                job.batches = iter(job.sampler.count())
                batch = next(job.batches)
            received.append(batch)
        expected = shares(self.kind, self.committed + self.pending, len(self.ranks))
        assert [[entry[:-2] for entry in batch] for batch in received] == expected
        weights = [job.sampler.rank_weight for job in self.ranks]
        size = len(self.ranks)
        assert weights == [
            ((rank + 1) * self.most // size - rank * self.most // size) * size / self.most
            for rank in range(size)
        ]
        self.pending += 1

    @rule()
    def commit(self) -> None:
        for job in self.ranks:
            job.sampler.commit()
        self.committed += self.pending
        self.pending = 0

    @rule()
    def take_and_commit(self) -> None:
        self.take()
        self.commit()

    @precondition(lambda self: self.pending)
    @rule()
    def rollback(self) -> None:
        for job in self.ranks:
            job.sampler.rollback()
        self.pending = 0

    @rule(random=st.randoms(use_true_random=False), num_joined=st.integers(0, 40))
    def reshape(self, random: Any, num_joined: int) -> None:
        """Some die, some join, perhaps in the middle of a step; who stays may get another rank."""
        survivors = random.sample(self.ranks, random.randint(1, len(self.ranks)))
        state = survivors[0].sampler.state_dict()
        num_joined = min(num_joined, self.most - len(survivors))
        self.ranks = survivors + [self.joined(state) for _ in range(num_joined)]
        for rank, job in enumerate(self.ranks):
            job.sampler.reshape(World(rank, len(self.ranks)))
        self.pending = 0
