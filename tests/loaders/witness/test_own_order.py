"""Our own order and loader under the witness: killed and resumed on other ranks, no row is lost or comes again."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest

import fuelrail as fr
from fuelrail.loaders.witness.judge import Rules, expect, judge
from fuelrail.loaders.witness.record import merge_epochs

if TYPE_CHECKING:
    from fuelrail.loaders.witness.witness import Witness
    from support.datasets import DatasetMaker

GLOBAL_BATCH = 12
RANKS = (1, 2, 3, 4, 6)


def watch_rank(loader: object, rank: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> Witness:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    return fr.witness(loader, on_fault="raise", key=lambda ids: ids)


def check_history(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two epochs, killed some times, each time resumed on another number of ranks."""
    chance = np.random.default_rng(seed)
    size = int(chance.integers(GLOBAL_BATCH, 150))
    drop_last = bool(chance.integers(2))
    kind = str(chance.choice(["shuffled", "sequential"]))
    spec = fr.OrderSpec(kind=kind, seed=seed)
    tail = "drop" if drop_last else "pad"
    place: dict | None = None
    states: list[dict] = []
    epoch = 0
    for act in range(20):
        ranks = int(chance.choice(RANKS))
        steps = int(chance.integers(1, 8)) if act < 6 else 10**6
        records = []
        new_states = []
        is_over = False
        for rank in range(ranks):
            sampler = fr.order.BatchSampler(
                size,
                spec,
                global_batch=GLOBAL_BATCH,
                world=fr.World(rank, ranks),
                drop_last=drop_last,
            )
            if place is not None:
                sampler.load_state_dict(place)
            counted = sampler.count()
            watched = watch_rank(counted, rank, ranks, monkeypatch)
            if states:
                watched.load_state_dict(states)
            watched.set_epoch(epoch)
            taken = list(itertools.islice(watched, steps))
            is_over = len(taken) < steps
            if is_over:
                records.append(watched._previous[0])
            new_states.append(watched.state_dict())
        place = counted.state_dict()
        states = [] if is_over else new_states
        if is_over:
            rules = Rules(expected=expect(size, "integer"), tail=tail)
            report = judge(records, rules)
            assert not report.faults, f"{seed=}\n{report.as_text()}"
            unbroken = whole_epoch(size, spec, epoch, drop_last=drop_last, monkeypatch=monkeypatch)
            assert merge_epochs(records).steps == unbroken.steps, f"{seed=}"
            epoch += 1
        elif place["epoch"] > epoch:  # killed at the border: this epoch is over
            states = []
            epoch = place["epoch"]
        if epoch >= 2:
            return
    pytest.fail("the history did not end")


def whole_epoch(size: int, spec: fr.OrderSpec, epoch: int, *, drop_last: bool, monkeypatch):
    """Return the record of an epoch that nothing interrupted, on one rank."""
    sampler = fr.order.BatchSampler(
        size,
        spec,
        global_batch=GLOBAL_BATCH,
        world=fr.World(0, 1),
        drop_last=drop_last,
    )
    watched = watch_rank((), 0, 1, monkeypatch)
    steps = sampler.steps_per_epoch
    for step in range(epoch * steps, (epoch + 1) * steps):
        watched.note(sampler[step])
    return watched._epoch


@pytest.mark.slow
def test_1000_histories_of_our_order_have_no_fault(monkeypatch) -> None:
    for seed in range(1_000):
        check_history(seed, monkeypatch)


@pytest.mark.costly
def test_histories_of_our_order_have_no_fault(monkeypatch) -> None:
    for seed in range(10_000, 10_020):
        check_history(seed, monkeypatch)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(20))
def test_100000_histories_of_our_order_have_no_fault(part, monkeypatch) -> None:
    for seed in range(1_000_000 + part * 5_000, 1_000_000 + (part + 1) * 5_000):
        check_history(seed, monkeypatch)


@pytest.mark.costly
def test_our_loader_resumes_without_a_fault(tiny_dataset: DatasetMaker, tmp_path) -> None:
    root = tiny_dataset({"train": (4, 6)}, size=(64, 48)).root

    def loader() -> fr.DataLoader:
        return fr.DataLoader(root, split="train", batch_size=4, shuffle=True, seed=3)

    keys = [sample.key for sample in fr.open(root)]
    with loader() as whole:
        watched = fr.witness(whole, expected=keys, on_fault="raise", folder=tmp_path / "whole")
        for _ in watched:
            pass
    with loader() as first:
        watched = fr.witness(first, expected=keys, on_fault="raise")
        for batch in itertools.islice(watched, 1):
            assert "sample_key" in batch
        place = first.state_dict()
        state = watched.state_dict()
    with loader() as rest:
        rest.load_state_dict(place)
        resumed = fr.witness(rest, expected=keys, on_fault="raise", folder=tmp_path / "resumed")
        resumed.load_state_dict(state)
        for _ in resumed:
            pass
    assert resumed.reports[0].rows == -(-len(keys) // 4) * 4
    from fuelrail.loaders.witness.witness import compare_records

    assert compare_records(tmp_path / "resumed", tmp_path / "whole") == []
