"""Random histories of a job whose ranks die, join, lag, repeat steps and restart, against ORDER.md's letter.

Ranks are samplers in one process. What a rank has of a step is computed by `support.written_orders`, which shares
nothing with the product; a witness counts the rows of the committed steps.
"""

from __future__ import annotations

import copy
from functools import cache, partial
from itertools import count, pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import fuelrail as fr
from fuelrail import Balance, Bucket, FrameWindow, OrderSpec, Pack, World
from fuelrail.order import BatchSampler
from support import written_orders as written

if TYPE_CHECKING:
    from random import Random

    from support.written_orders import Position, Row

NUM_ROWS = 150
SEED = 11
MOST_RANKS = 64
COSTS = np.random.default_rng(3).integers(1, 40, NUM_ROWS)
CLIPS = [9] * 16 + [6]
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
    "lanes": {
        "spec": OrderSpec(kind="lanes", seed=2, pieces_per_clip=2),
        "global_batch": 13,
    },
    "frames": {"window": FrameWindow(frames=(-1, 0)), "global_batch": 31},
    "balance": {"spec": OrderSpec(balance=Balance(cost="cost")), "global_batch": 30},
    "pack": {"spec": OrderSpec(pack=Pack(budget=60, cost="cost", window=40)), "global_batch": 10},
    "bucket": {
        "spec": OrderSpec(bucket=Bucket(by="cost", bounds=[20, 40], window=60)),
        "global_batch": 25,
    },
    "filtered": {"spec": OrderSpec(filter="cost > 9", seed=4), "global_batch": 9},
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


@cache
def positions(kind: str, epoch: int) -> list[Position]:
    """An epoch of a kind, by ORDER.md."""
    rows = range(NUM_ROWS)
    costs = COSTS.tolist()
    match kind:
        case "shuffled" | "filled up" | "a row a rank":
            return written.plain(written.shuffled(rows, SEED, epoch))
        case "balance":
            return written.plain(written.shuffled(rows, 0, epoch))
        case "frames":
            shuffled = written.plain(written.shuffled(rows, SEED, epoch))
            return written.with_frames(shuffled, CLIPS)
        case "filtered":
            kept = [row for row in rows if costs[row] > 9]
            return written.plain(written.shuffled(kept, 4, epoch))
        case "sequential":
            return written.plain(rows)
        case "windowed":
            return written.plain(written.windowed(NUM_ROWS, shard=7, window=3, seed=0, epoch=epoch))
        case "lanes":
            return written.lanes(CLIPS, num_lanes=13, pieces_per_clip=2, seed=2, epoch=epoch)
        case "pack":
            shown = written.shuffled(rows, 0, epoch)
            return written.packed(shown, costs, budget=60, window=40, seed=0, epoch=epoch)
        case "bucket":
            shown = written.shuffled(rows, 0, epoch)
            bounds = (20, 40)
            return written.bucketed(shown, costs, bounds, window=60, size=25, seed=0, epoch=epoch)
        case _:
            return written.plain(written.mixed([NUM_ROWS] * 2, [2, 1], SEED, epoch))


@cache
def shares(kind: str, step: int, num_ranks: int) -> list[list[Row]]:
    """What each rank has of a step of the run, by sections 1 and 10."""
    size = KINDS[kind]["global_batch"]
    drop_last = KINDS[kind].get("drop_last", True)
    batch = written.batch_of_run(partial(positions, kind), step, size, drop_last)
    if kind == "balance":
        costs = [int(COSTS[row[0]]) for [row] in batch]
        batch = [batch[j] for j in written.dealt(costs, num_ranks)]
    bounds = [rank * size // num_ranks for rank in range(num_ranks + 1)]
    return [[row for rows in batch[first:end] for row in rows] for first, end in pairwise(bounds)]


class Job:
    """A job of 1 to 64 ranks; every step is checked as a whole, on every rank."""

    def __init__(self, kind: str, size: int) -> None:
        self.kind = kind
        self.most = KINDS[kind]["global_batch"]
        self.committed = 0
        self.pending = 0
        self.num_taken = 0
        self.shown: dict[int, list[int]] = {}
        """The valid rows of each step, as it came last."""
        self.saved: tuple[Any, int] = (sampler_of(kind).state_dict(), 0)
        self.ranks: list[SimpleNamespace] = []
        self.restart(size)

    def joined(self, state: Any) -> SimpleNamespace:
        sampler = copy.copy(sampler_of(self.kind))
        sampler._ledger = copy.copy(sampler._ledger)
        sampler.load_state_dict(state)
        sampler.commit()
        return SimpleNamespace(sampler=sampler, batches=iter(()))

    def restart(self, size: int) -> None:
        """All die; a new job continues from the newest saved state."""
        state, self.committed = self.saved
        self.deal([self.joined(state) for _ in range(min(size, self.most))])

    def deal(self, ranks: list[SimpleNamespace]) -> None:
        """Go on with these, at the position after the last committed step."""
        self.ranks = ranks
        for rank, job in enumerate(ranks):
            job.sampler.reshape(World(rank, len(ranks)))
        self.pending = 0

    def save(self) -> None:
        states = [job.sampler.state_dict() for job in self.ranks]
        assert all(state == states[0] for state in states), "a state is the same on every rank"
        self.saved = states[0], self.committed

    def draw(self, job: SimpleNamespace) -> list[Any]:
        batch = next(job.batches, None)
        if batch is None:  # an epoch's end, or a rank that has just joined
            job.batches = iter(job.sampler.count())
            batch = next(job.batches)
        return [tuple(entry[:-2]) for entry in batch]

    def take(self) -> None:
        """A step, on all ranks."""
        step = self.committed + self.pending
        batches = [self.draw(job) for job in self.ranks]
        assert batches == shares(self.kind, step, len(self.ranks))
        self.shown[step] = [row for batch in batches for row, valid, *_ in batch if valid]
        self.num_taken += 1
        size = len(self.ranks)
        for rank, job in enumerate(self.ranks):
            num_rows = (rank + 1) * self.most // size - rank * self.most // size
            assert job.sampler.rank_weight == num_rows * size / self.most
        self.pending += 1

    def commit(self) -> None:
        for job in self.ranks:
            job.sampler.commit()
        self.committed += self.pending
        self.pending = 0

    def rollback(self) -> None:
        for job in self.ranks:
            job.sampler.rollback()
        self.pending = 0

    def reshape(self, random: Random, num_joined: int) -> None:
        """Some die, some join, perhaps in the middle of a step; who stays may get another rank.

        Some of those that stay may have taken the step that is lost, others not.
        """
        for job in random.sample(self.ranks, random.randint(0, len(self.ranks))):
            self.draw(job)  # a batch that is stale once ranks change
        survivors = random.sample(self.ranks, random.randint(1, len(self.ranks)))
        state = survivors[0].sampler.state_dict()
        num_joined = min(num_joined, self.most - len(survivors))
        self.deal(survivors + [self.joined(state) for _ in range(num_joined)])

    def commit_on_some(self, random: Random) -> None:
        """Some hear that the steps are committed; the others give them up, lag, and are healed."""
        newest = random.sample(self.ranks, random.randint(1, len(self.ranks)))
        for job in self.ranks:
            if job in newest:
                job.sampler.commit()
            else:
                job.sampler.rollback()
        self.committed += self.pending
        state = newest[0].sampler.state_dict()
        for job in self.ranks:
            if job not in newest:
                job.sampler.load_state_dict(state)
                job.batches = iter(())
        self.deal(random.sample(self.ranks, len(self.ranks)))

    def witness(self) -> None:
        """Have a witness count the rows of the epochs that were committed whole."""
        if self.kind == "mix":
            return  # its epochs repeat rows
        ends = 0
        for epoch in count():
            shown = positions(self.kind, epoch)
            num_steps, rest = divmod(len(shown), self.most)
            num_steps += bool(rest) and not KINDS[self.kind].get("drop_last", True)
            first = ends
            ends += num_steps
            if ends > self.committed:
                return
            rows = sorted({row[0] for position in shown for row in position})
            watched = fr.witness([], expected=rows, tail="drop", on_fault="raise")
            for step in range(first, ends):
                watched.note({"index": self.shown[step]})
            watched.end_epoch()


class Histories(RuleBasedStateMachine):
    """What Hypothesis does to a job."""

    @initialize(kind=st.sampled_from(sorted(KINDS)), size=st.integers(1, MOST_RANKS))
    def start(self, kind: str, size: int) -> None:
        self.job = Job(kind, size)

    @rule(size=st.integers(1, MOST_RANKS))
    def restart(self, size: int) -> None:
        self.job.restart(size)

    @rule()
    def save(self) -> None:
        self.job.save()

    @rule()
    def take(self) -> None:
        self.job.take()

    @rule()
    def commit(self) -> None:
        self.job.commit()

    @rule()
    def take_and_commit(self) -> None:
        self.job.take()
        self.job.commit()

    @precondition(lambda self: self.job.pending)
    @rule()
    def rollback(self) -> None:
        self.job.rollback()

    @precondition(lambda self: self.job.pending)
    @rule(random=st.randoms(use_true_random=False))
    def commit_on_some(self, random: Random) -> None:
        self.job.commit_on_some(random)

    @rule(random=st.randoms(use_true_random=False), num_joined=st.integers(0, 40))
    def reshape(self, random: Random, num_joined: int) -> None:
        self.job.reshape(random, num_joined)


EVENTS = {
    "take": 3,
    "take and commit": 6,
    "commit": 1,
    "rollback": 2,
    "save": 1,
    "restart": 1,
    "reshape": 3,
    "commit on some": 1,
}
"""What may happen in a random history, and how often."""


def draw_size(random: Random) -> int:
    """A number of ranks from 1 to 64, more often of few than of many."""
    return int(2 ** (6.02 * random.random() ** 2))


def run_history(random: Random, kind: str) -> int:
    """Let chance decide what happens to a job; the number of steps that it took."""
    job = Job(kind, draw_size(random))
    for event in random.choices([*EVENTS], [*EVENTS.values()], k=random.randint(4, 12)):
        match event:
            case "restart":
                job.restart(draw_size(random))
            case "take and commit":
                job.take()
                job.commit()
            case "reshape":
                job.reshape(random, draw_size(random) - 1)
            case "commit on some":
                job.take()
                job.commit_on_some(random)
            case _:
                getattr(job, event)()
    job.witness()
    return job.num_taken
