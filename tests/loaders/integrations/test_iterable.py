"""The view for torch's own DataLoader and torchdata's, in this process and in workers."""

from __future__ import annotations

import pickle
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from fuelrail import IterableView, World
from support.batches import load, unlike
from support.ranks import warm

pytestmark = [
    pytest.mark.process,
    # Of more worker processes than this machine has cores.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    # torchdata 0.11 uses what torch has deprecated since.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]


def keys(batches):
    return [batch["sample_key"] for batch in batches]


@pytest.mark.parametrize(("num_processes", "batch_size"), [(0, 2), (1, 7), (2, 2), (3, 10)])
def test_torchs_loader_gives_the_same_batches_with_any_number_of_worker_processes(
    tiny, num_processes, batch_size
):
    """Also with more processes than steps."""
    view = IterableView(load(tiny, batch_size))
    plain = load(tiny, batch_size)
    outer = TorchLoader(view, batch_size=None, num_workers=num_processes)
    assert len(outer) == 21 // batch_size
    for epoch in range(2):
        view.set_epoch(epoch)
        assert unlike(list(outer), list(plain)) == []


@pytest.mark.parametrize("num_processes", [0, 2])
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_each_iteration_is_an_epoch_of_its_own_in_new_workers_too(tiny, num_processes, method):
    view = IterableView(load(tiny, 4))
    plain = load(tiny, 4)
    context = None
    if num_processes > 0:
        context = warm() if method == "forkserver" else method
    outer = TorchLoader(
        view,
        batch_size=None,
        num_workers=num_processes,
        multiprocessing_context=context,
    )
    epochs = [keys(plain) for _ in range(4)]
    assert keys(islice(outer, 2)) == epochs[0][:2]
    assert keys(outer) == epochs[1]
    view.set_epoch(0)
    assert keys(outer) == epochs[0]
    view.load_state_dict(plain.state_dict() | {"epoch": 2, "samples_consumed": 8})
    assert keys(islice(outer, 2)) == epochs[2][2:4]
    assert keys(outer) == epochs[3]


def test_persistent_workers_continue_to_the_next_epoch_together(tiny):
    outer = TorchLoader(
        IterableView(load(tiny, 4)),
        batch_size=None,
        num_workers=2,
        persistent_workers=True,
    )
    plain = load(tiny, 4)
    assert [keys(outer), keys(outer), keys(outer)] == [
        keys(plain),
        keys(plain),
        keys(plain),
    ]
    del outer


def test_spawned_workers_get_a_pickled_loader(tiny):
    outer = TorchLoader(
        IterableView(load(tiny)),
        batch_size=None,
        num_workers=1,
        multiprocessing_context="spawn",
    )
    assert keys(outer) == keys(load(tiny))


@pytest.mark.parametrize("num_processes", [0, 2])
def test_torchdata_resumes_exactly_from_every_step(tiny, num_processes):
    def outer():
        return StatefulDataLoader(
            IterableView(load(tiny)), batch_size=None, num_workers=num_processes
        )

    epoch_keys = keys(load(tiny))
    for stop in (1, 4) if num_processes else (1, 2, 4, 6):
        loader = outer()
        assert keys(islice(loader, stop)) == epoch_keys[:stop]
        state = pickle.loads(pickle.dumps(loader.state_dict()))
        restored = outer()
        restored.load_state_dict(state)
        assert keys(restored) == epoch_keys[stop:]


class Plain(torch.utils.data.IterableDataset):
    """A loader itself, as a user might hand it to torch's DataLoader."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)


class TestL8WorkersWithoutTheView:
    @pytest.mark.parametrize("num_processes", [0, 1])
    def test_one_iteration_is_not_a_reason_to_warn(self, tiny, num_processes):
        outer = TorchLoader(Plain(load(tiny, 2)), batch_size=None, num_workers=num_processes)
        assert keys(outer) == keys(load(tiny, 2))

    def test_several_workers_that_each_give_every_batch_warn(self, tiny):
        """Warnings are errors here, and torch hands a worker's error to the main process."""
        outer = TorchLoader(Plain(load(tiny, 2)), batch_size=None, num_workers=2)
        with pytest.raises(
            UserWarning,
            match=r"gives every batch, 2 times in all; wrap it in .*IterableView",
        ):
            next(iter(outer))

    def test_the_view_does_not_warn(self, tiny):
        assert keys(
            TorchLoader(IterableView(load(tiny, 2)), batch_size=None, num_workers=2)
        ) == keys(load(tiny, 2))


class TestPickle:
    def test_rank_arguments_and_position_travel(self, tiny):
        loader = load(tiny, 2, rank=1, size=2, seed=5, drop_last=False)
        list(islice(loader, 2))
        loader.close()
        copy = pickle.loads(pickle.dumps(loader))
        assert copy.world == World(1, 2)
        assert copy.state_dict() == loader.state_dict()
        assert [batch["epoch"] for batch in copy] == [1] * len(loader), (
            "as the loader itself would continue"
        )
        assert unlike(list(pickle.loads(pickle.dumps(loader))), list(loader)) == []

    def test_a_restored_position_travels(self, tiny):
        loader = load(tiny)
        epoch_keys = keys(load(tiny))
        loader.load_state_dict(loader.state_dict() | {"samples_consumed": 6})
        assert keys(pickle.loads(pickle.dumps(loader))) == epoch_keys[2:]

    def test_an_epoch_that_was_set_stays_set(self, tiny):
        loader = load(tiny)
        loader.set_epoch(4)
        assert [b["epoch"] for b in islice(pickle.loads(pickle.dumps(loader)), 1)] == [4]
