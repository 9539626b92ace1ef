"""The view for torch's own DataLoader and torchdata's, in this process and in workers."""

from __future__ import annotations

import pickle
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from fuelrail.loaders import ImageAugment, IterableView, World
from support.datasets import build_dataset
from support.loaders import make_loader

pytestmark = [
    pytest.mark.process,
    # Of more worker processes than this machine has cores.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    # torchdata 0.11 uses what torch has deprecated since.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]

FULL = ImageAugment(height=64, width=96, resize=1.0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    root = tmp_path_factory.mktemp("datasets") / "tiny"
    build_dataset(root, {"train": (5, 7, 9)})
    return root


def make(root, batch_size=3, *, rank=0, size=1, num_workers=2, **options):
    return make_loader(root, batch_size, world=World(rank, size), image=FULL, num_workers=num_workers, **options)


def keys(batches):
    return [batch["sample_key"] for batch in batches]


@pytest.mark.parametrize("num_processes", [0, 1, 2, 3])
def test_torchs_loader_gives_the_same_batches_with_any_number_of_worker_processes(tiny, num_processes):
    view = IterableView(make(tiny, 2))
    outer = TorchLoader(view, batch_size=None, num_workers=num_processes)
    assert len(outer) == 10
    for epoch in range(2):
        view.set_epoch(epoch)
        plain = make(tiny, 2)
        plain.set_epoch(epoch)
        for ours, theirs in zip(outer, plain, strict=True):
            assert ours["sample_key"] == theirs["sample_key"]
            assert torch.equal(ours["img"], theirs["img"])
            assert (ours["epoch"], ours["step"]) == (theirs["epoch"], theirs["step"])


def test_more_processes_than_steps(tiny):
    outer = TorchLoader(IterableView(make(tiny, 7)), batch_size=None, num_workers=5)
    assert keys(outer) == keys(make(tiny, 7))


def test_persistent_workers_continue_to_the_next_epoch_together(tiny):
    outer = TorchLoader(IterableView(make(tiny, 4)), batch_size=None, num_workers=2, persistent_workers=True)
    plain = make(tiny, 4)
    assert [keys(outer), keys(outer), keys(outer)] == [keys(plain), keys(plain), keys(plain)]
    del outer


def test_spawned_workers_get_a_pickled_loader(tiny):
    outer = TorchLoader(IterableView(make(tiny)), batch_size=None, num_workers=1, multiprocessing_context="spawn")
    assert keys(outer) == keys(make(tiny))


@pytest.mark.parametrize("num_processes", [0, 2])
def test_torchdata_resumes_exactly_from_every_step(tiny, num_processes):
    def outer():
        return StatefulDataLoader(IterableView(make(tiny)), batch_size=None, num_workers=num_processes)

    whole = keys(make(tiny))
    for stop in (1, 2, 4, 6):
        loader = outer()
        assert keys(islice(loader, stop)) == whole[:stop]
        state = pickle.loads(pickle.dumps(loader.state_dict()))
        restored = outer()
        restored.load_state_dict(state)
        assert keys(restored) == whole[stop:]


class Plain(torch.utils.data.IterableDataset):
    """A loader itself, as a user might hand it to torch's DataLoader."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)


class TestL8WorkersWithoutTheView:
    @pytest.mark.parametrize("num_processes", [0, 1])
    def test_l8_one_iteration_is_no_reason_to_warn(self, tiny, num_processes):
        outer = TorchLoader(Plain(make(tiny, 2)), batch_size=None, num_workers=num_processes)
        assert keys(outer) == keys(make(tiny, 2))

    def test_l8_several_workers_that_each_give_every_batch_warn(self, tiny):
        """Warnings are errors here, and torch hands a worker's error to the main process."""
        outer = TorchLoader(Plain(make(tiny, 2)), batch_size=None, num_workers=2)
        with pytest.raises(UserWarning, match=r"gives every batch, 2 times in all; wrap it in .*IterableView"):
            next(iter(outer))

    def test_l8_the_view_does_not_warn(self, tiny):
        assert keys(TorchLoader(IterableView(make(tiny, 2)), batch_size=None, num_workers=2)) == keys(make(tiny, 2))


class TestPickle:
    def test_rank_arguments_and_position_travel(self, tiny):
        loader = make(tiny, 2, rank=1, size=2, seed=5, drop_last=False)
        list(islice(loader, 2))
        loader.close()
        copy = pickle.loads(pickle.dumps(loader))
        assert copy.world == World(1, 2)
        assert copy.state_dict() == loader.state_dict()
        rest = make(tiny, 2, rank=1, size=2, seed=5, drop_last=False)
        assert keys(copy) == keys(rest)[2:]

    def test_an_epoch_that_was_set_stays_set(self, tiny):
        loader = make(tiny)
        loader.set_epoch(4)
        assert [b["epoch"] for b in islice(pickle.loads(pickle.dumps(loader)), 1)] == [4]
