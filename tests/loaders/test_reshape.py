"""A job changes its ranks while it runs: reshape, commit and rollback of loaders, beside the letter of ORDER.md."""

from __future__ import annotations

import pickle
from itertools import chain, islice, repeat

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

import fuelrail as fr
from fuelrail import Balance, Bucket, Cost, OrderSpec, Pack, World
from fuelrail.pipeline.errors import ConfigError, OrderError, WorldError
from support.batches import TINY, copied, load, unlike
from support.elastic_histories import Histories
from support.ranks import TESTS, run_ranks
from support.transforms import everything

G = 12
NUM_STEPS = 5
"""Of 40 samples: an epoch of three steps, and two of the next one."""


@pytest.fixture(scope="module")
def root(build_once):
    return build_once({"train": (15, 25)})[0]


def rows_of(rank, num_ranks):
    return range(rank * G // num_ranks, (rank + 1) * G // num_ranks)


class Job:
    """The ranks of a job in one process, which take steps together."""

    def __init__(self, root, num_ranks, **options):
        self.root, self.options = root, options
        self.loaders = [self.make(World(rank, num_ranks)) for rank in range(num_ranks)]
        self.iterators = [iter(loader) for loader in self.loaders]

    def make(self, world):
        """A rank's loader: of another number of ranks than divides G by reshape."""
        loader = load(self.root, G, **self.options)
        loader.commit()
        loader.reshape(world)
        return loader

    def reshape(self, num_ranks):
        kept = min(num_ranks, len(self.loaders))
        for loader in self.loaders[kept:]:
            loader.close()
        del self.loaders[kept:], self.iterators[kept:]
        state = self.loaders[0].state_dict()
        for rank, loader in enumerate(self.loaders):
            loader.reshape(World(rank, num_ranks))
        for rank in range(kept, num_ranks):
            self.loaders.append(self.make(World(rank, num_ranks)))
            self.loaders[-1].load_state_dict(state)
            self.iterators.append(iter(self.loaders[-1]))

    def take(self):
        """A step's batches, of each rank one."""
        batches = []
        for rank, loader in enumerate(self.loaders):
            batch = next(self.iterators[rank], None)
            if batch is None:
                self.iterators[rank] = iter(loader)
                batch = next(self.iterators[rank])
            batches.append(copied(batch))
        return batches

    def close(self):
        for loader in self.loaders:
            loader.close()


def check_step(batches, expected, second_view=False):
    """Each rank has its rows of the global batch, with all that is in them, and its weight."""
    num_ranks = len(batches)
    for rank, batch in enumerate(batches):
        rows = [*rows_of(rank, num_ranks)]
        if second_view:
            rows += [G + row for row in rows]
        for name, value in batch.items():
            if name == "weight":
                continue
            whole = expected[name]
            if isinstance(value, torch.Tensor):
                whole = whole[rows]
            elif isinstance(value, list):
                whole = [whole[row] for row in rows]
            assert unlike([{name: whole}], [{name: value}]) == [], (rank, name)
        weight = len(rows_of(rank, num_ranks)) * num_ranks / G
        assert fr.rank_weight(batch) == weight
        assert ("weight" in batch) == (G % num_ranks != 0)


OPTIONS = {
    "shuffled": {"seed": 5},
    "filled up": {"seed": 5, "drop_last": False},
    "augmented": {"seed": 5, "two_views": True},
    "frames": {"seed": 5, "window": {"frames": [-1, 0]}},
    "lanes": {"order": OrderSpec(kind="lanes", pieces_per_clip=9)},
    "process": {"seed": 5, "where": "process"},
    "transform in processes": {"seed": 5, "transform": everything, "transform_in": "process"},
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_steps_go_on_as_they_would_have(root, kind):
    options = OPTIONS[kind]
    with load(root, G, **options) as alone:
        expected = [copied(batch) for _ in range(2) for batch in alone][:NUM_STEPS]
    job = Job(root, 2, **options)
    views = bool(options.get("two_views"))
    check_step(job.take(), expected[0], views)
    for loader in job.loaders:
        loader.commit()
    check_step(job.take(), expected[1], views)  # all die but the first, before they commit
    job.reshape(1)
    check_step(job.take(), expected[1], views)
    for loader in job.loaders:
        loader.commit()
    for step, num_ranks in ((2, 5), (3, 3), (4, 1)):
        job.reshape(num_ranks)
        check_step(job.take(), expected[step], views)
        for loader in job.loaders:
            loader.rollback()
        check_step(job.take(), expected[step], views)
        for loader in job.loaders:
            loader.commit()
    job.close()


LENGTH = Cost(constant=1, linear={"frame": 1})
REGROUPED = {
    "packs": OrderSpec(seed=3, pack=Pack(budget=5, cost=LENGTH, window=30)),
    "buckets": OrderSpec(seed=3, bucket=Bucket(by="frame", bounds=(1, 30))),
    "balance": OrderSpec(seed=3, balance=Balance(cost=LENGTH)),
    "packs, balance": OrderSpec(
        seed=3, pack=Pack(budget=5, cost=LENGTH, window=30), balance=Balance(cost=LENGTH)
    ),
}


@pytest.mark.parametrize("kind", REGROUPED)
def test_packs_buckets_and_balance_take_any_number_of_ranks(root, kind):
    options = {"order": REGROUPED[kind], "image": TINY}
    size = 6
    with load(root, size, **options) as alone:
        steps = chain.from_iterable(repeat(alone))
        expected = [batch["sample_key"] for batch in islice(steps, 3)]
    loader = load(root, size, **options)
    loader.commit()
    for step, num_ranks in enumerate((4, 1, 5)):
        rows = []
        for rank in range(num_ranks):
            loader.reshape(World(rank, num_ranks))
            batches = iter(loader)
            batch = next(batches)
            rows += batch["sample_key"]
            own = len(range(rank * size // num_ranks, (rank + 1) * size // num_ranks))
            assert fr.rank_weight(batch) == own * num_ranks / size
            if rank < num_ranks - 1:
                loader.rollback()
        loader.commit()
        if "balance" in kind:  # dealt to ranks by cost
            rows.sort()
            expected[step].sort()
        assert rows == expected[step]
    loader.close()


def test_random_histories_of_samplers_are_exact():
    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=25,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=[*HealthCheck],
        ),
    )


def test_a_sampler_reshaped_at_an_epochs_end_ends_its_iteration():
    sampler = fr.order.BatchSampler(24, OrderSpec(seed=1), global_batch=12, world=World())
    batches = iter(sampler.count())
    next(batches)
    last = next(batches)
    sampler.reshape(World(1, 2))
    assert next(batches, None) is None
    batches = iter(sampler.count())
    assert next(batches) == sampler[2], "the next epoch is the next iteration's"
    sampler.reshape(World(0, 1))
    sampler.load_state_dict(sampler.state_dict())
    batches = iter(sampler.count())
    sampler.commit()
    assert next(batches) == sampler[3]
    sampler.rollback()
    assert next(batches) == sampler[3] != last


def test_a_loader_that_never_commits_goes_on_from_where_it_is(root):
    with load(root, G, seed=5) as alone:
        expected = [copied(batch) for batch in alone]
    loader = load(root, 6, rank=1, size=2, seed=5)
    batches = iter(loader)
    next(batches)
    loader.reshape(World(2, 5))
    batch = next(batches)
    assert batch["sample_key"] == expected[1]["sample_key"][4:7]
    assert loader.batch_size == 3 and loader.rank_weight == 3 * 5 / 12 == batch["weight"]
    copy = pickle.loads(pickle.dumps(loader))
    assert copy.world == World(2, 5) and copy.state_dict() == loader.state_dict()
    loader.rollback()
    assert next(batches)["sample_key"] == batch["sample_key"], (
        "of the iteration all, from its place"
    )
    assert next(batches)["sample_key"] == expected[2]["sample_key"][4:7]
    assert next(batches, None) is None
    loader.reshape(World(0, 1))
    assert len(next(iter(loader))["sample_key"]) == G
    loader.close()


@pytest.mark.parametrize("is_repeated", [False, True], ids=["taken", "repeated"])
def test_a_state_loaded_in_an_iteration_is_where_it_goes_on(root, is_repeated):
    """As a replica that lags is healed: its loop's iteration takes the others' next step."""
    with load(root, G, seed=5) as alone:
        expected = [batch["sample_key"] for batch in alone]
    others = load(root, G, seed=5)
    others.commit()
    steps = iter(others)
    next(steps)
    next(steps)
    others.commit()
    loader = load(root, G, seed=5)
    loader.commit()
    batches = iter(loader)
    next(batches)
    if is_repeated:
        loader.rollback()
    loader.load_state_dict(others.state_dict())
    loader.reshape(World(1, 2))
    assert next(batches)["sample_key"] == expected[2][G // 2 :]
    assert next(batches, None) is None
    loader.close()
    others.close()


def test_a_batch_that_the_trainer_holds_is_not_overwritten(root):
    loader = load(root, 4, size=3, seed=5, prefetch_factor=2)
    batches = iter(loader)
    held = next(batches)
    before = copied(held)
    for num_ranks in (3, 4, 3, 2):
        loader.rollback()
        loader.reshape(World(0, num_ranks))
        next(batches)
    assert unlike([before], [held]) == []
    loader.close()


def test_an_uncommitted_step_is_not_saved_and_not_in_the_ledger(root, tmp_path):
    ledger = tmp_path / "run.ledger"
    loader = load(root, 6, size=2, seed=5, ledger={"path": ledger, "digest_every": 1})
    loader.commit()
    batches = iter(loader)
    next(batches)
    assert loader.state_dict()["samples_consumed"] == 0
    loader.commit()
    assert loader.state_dict()["samples_consumed"] == G
    second = next(batches)["sample_key"]
    loader.rollback()
    assert next(batches)["sample_key"] == second
    loader.reshape(World(0, 5))
    assert next(batches)["sample_key"] == second[:2]
    loader.commit()
    assert loader.state_dict()["samples_consumed"] == 2 * G
    next(batches)
    loader.close()
    report = fr.bench.run_history(ledger)
    assert report.num_steps == 2
    assert [part.ranks for part in report.stretches] == [2, 5]


def test_what_reshape_cannot_keep_is_refused_by_name(root, monkeypatch):
    loader = load(root, 4, size=3)
    with pytest.raises(WorldError, match="12 has no row for some of 13 ranks"):
        loader.reshape(World(0, 13))
    loader.take_share(0, 2)
    with pytest.raises(ConfigError, match="made for several"):
        loader.reshape(World(0, 3))
    static = load(root, 4, size=3, static=True)
    static.reshape(World(2, 3))
    with pytest.raises(ConfigError, match="would have 3 rows in the place of 4"):
        static.reshape(World(0, 4))
    dealt = load(
        root,
        4,
        size=3,
        order=OrderSpec(
            balance=Balance(cost=Cost(constant=1, linear={"frame": 1}), micro_batches=2)
        ),
    )
    with pytest.raises(WorldError, match="12 on 5 ranks cannot be cut into 2 micro-batches"):
        dealt.reshape(World(0, 5))
    for kind, words in (
        (fr.order.Sampler, "use BatchSampler"),
        (fr.order.StatefulSampler, "StatefulDataLoader"),
    ):
        with pytest.raises(OrderError, match=words):
            kind(40, global_batch=12).reshape(World(0, 5))
    drawn = fr.order.BatchSampler(40, global_batch=12)
    next(iter(drawn))
    with pytest.raises(OrderError, match="position is not known"):
        drawn.reshape(World(0, 5))


@pytest.mark.process
def test_weighted_gradients_of_uneven_ranks_average_to_the_global_batchs():
    weighted, plain = map(float, run_ranks(3, TESTS / "support" / "weighted_ranks.py").split())
    assert weighted < 1e-12
    assert plain > 1e-3, "without the weights the average is another one"
