"""Our own order and loader under the witness: killed and resumed on other ranks, no row is lost or comes again."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import fuelrail as fr
from fuelrail.loaders.witness.judge import Rules, expect, judge
from fuelrail.loaders.witness.record import merge_epochs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fuelrail.loaders.witness.witness import Witness
    from support.datasets import DatasetMaker

GLOBAL_BATCH = 12
RANKS = (1, 2, 3, 4, 6)


class History:
    """Two epochs, killed some times, each time resumed on another number of ranks.

    Args:
        expected: number of rows of an epoch, or their keys.
        kind: what the witness takes for the rows' ids.
        key: gives the ids of a batch's rows.
        open_rank: makes the loader of a rank, from the rank and the number of ranks.
    """

    def __init__(
        self,
        *,
        expected: int | list[str],
        kind: str,
        key: Callable[[Any], Any],
        drop_last: bool,
        open_rank: Callable[[int, int], Any],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        tail = "drop" if drop_last else "pad"
        self.rules = Rules(expected=expect(expected, kind), tail=tail)
        self.key = key
        self.open_rank = open_rank
        self.monkeypatch = monkeypatch

    def watch_rank(self, loader: object, rank: int, ranks: int) -> Witness:
        self.monkeypatch.setenv("RANK", str(rank))
        self.monkeypatch.setenv("WORLD_SIZE", str(ranks))
        return fr.witness(loader, on_fault="raise", key=self.key)

    def check(self, chance: np.random.Generator) -> None:
        unbroken = self.watch_rank(self.open_rank(0, 1), 0, 1)
        whole = []
        for _ in range(2):
            for _batch in unbroken:
                pass
            whole.append(unbroken._previous[0])
        place: dict | None = None
        states: list[dict] = []
        epoch = 0
        for act in range(20):
            ranks = int(chance.choice(RANKS))
            steps = int(chance.integers(1, 8)) if act < 4 else 10**6
            records = []
            new_states = []
            is_over = False
            for rank in range(ranks):
                loader = self.open_rank(rank, ranks)
                if place is not None:
                    loader.load_state_dict(place)
                watched = self.watch_rank(loader, rank, ranks)
                if states:
                    watched.load_state_dict(states)
                watched.set_epoch(epoch)
                taken = list(itertools.islice(watched, steps))
                is_over = len(taken) < steps
                if is_over:
                    records.append(watched._previous[0])
                new_states.append(watched.state_dict())
                new_place = loader.state_dict()
                if hasattr(loader, "close"):
                    loader.close()
            place = new_place
            states = [] if is_over else new_states
            if is_over:
                report = judge(records, self.rules)
                assert not report.faults, report.as_text()
                assert merge_epochs(records).steps == whole[epoch].steps
                epoch += 1
            elif place["epoch"] > epoch:  # killed at the border: this epoch is over
                states = []
                epoch = place["epoch"]
            if epoch >= 2:
                return
        pytest.fail("the history did not end")


def check_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a history of the order over a dataset of someone else."""
    chance = np.random.default_rng(seed)
    size = int(chance.integers(GLOBAL_BATCH, 48))
    drop_last = bool(chance.integers(2))
    spec = fr.OrderSpec(kind=str(chance.choice(["shuffled", "sequential"])), seed=seed)

    def open_rank(rank: int, ranks: int) -> Any:
        sampler = fr.order.BatchSampler(
            size,
            spec,
            global_batch=GLOBAL_BATCH,
            world=fr.World(rank, ranks),
            drop_last=drop_last,
        )
        return sampler.count()

    history = History(
        expected=size,
        kind="integer",
        key=lambda ids: ids,
        drop_last=drop_last,
        open_rank=open_rank,
        monkeypatch=monkeypatch,
    )
    history.check(chance)


def check_loader(seed: int, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a history of the loader over a dataset on disk."""
    chance = np.random.default_rng(seed)
    drop_last = bool(chance.integers(2))
    shuffle = bool(chance.integers(2))
    workers = int(chance.integers(1, 4))

    def open_rank(rank: int, ranks: int) -> fr.DataLoader:
        return fr.DataLoader(
            root,
            batch_size=GLOBAL_BATCH // ranks,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            num_workers=workers,
            world=fr.World(rank, ranks),
        )

    history = History(
        expected=[sample.key for sample in fr.open(root)],
        kind="text",
        key=lambda batch: batch["sample_key"],
        drop_last=drop_last,
        open_rank=open_rank,
        monkeypatch=monkeypatch,
    )
    history.check(chance)


@pytest.mark.costly
def test_histories_of_our_order_have_no_fault(monkeypatch) -> None:
    for seed in range(10_000, 10_020):
        check_order(seed, monkeypatch)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(20))
def test_100000_histories_of_our_order_have_no_fault(part, monkeypatch) -> None:
    for seed in range(1_000_000 + part * 5_000, 1_000_000 + (part + 1) * 5_000):
        check_order(seed, monkeypatch)


@pytest.mark.costly
def test_histories_of_our_loader_have_no_fault(tiny_dataset: DatasetMaker, monkeypatch) -> None:
    root = tiny_dataset({"train": (13, 18)}, size=(64, 48)).root
    for seed in (0, 107):  # 107 is resumed after an epoch's last batch, which was filled up
        check_loader(seed, root, monkeypatch)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_1000_histories_of_our_loader_have_no_fault(
    tiny_dataset: DatasetMaker, monkeypatch
) -> None:
    root = tiny_dataset({"train": (13, 18)}, size=(64, 48)).root
    for seed in range(100, 1_100):
        check_loader(seed, root, monkeypatch)


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
