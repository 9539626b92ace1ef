"""Loaders, checkpoints and logs of other packages are known to a watch that is told nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from fuelrail.bench.measure.hooks import Hooks
from fuelrail.bench.measure.recorder import Recorder
from fuelrail.bench.measure.records import rank_path, read_rank
from fuelrail.bench.studies.watch.startup._fuelrail_after_import import AfterImport
from fuelrail.bench.studies.watch.watch import watch_packages

NUM_BATCHES = 12


class Watched:
    """A training in this process, watched as by the command."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recorder = Recorder(folder, rank=0, world=1)
        self.hooks = Hooks(self.recorder)
        watch_packages(self.hooks)
        self.model = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)

    def train(self, loader) -> None:
        for _ in loader:
            self.model(torch.ones(2, 4)).sum().backward()
            self.optimizer.step()

    def close(self):
        self.hooks.remove()
        self.recorder.close()
        return read_rank(rank_path(self.folder, 0))


@pytest.fixture
def watched(tmp_path):
    made = Watched(tmp_path / "records")
    yield made
    made.close()


def rows():
    return [torch.full((4,), float(row)) for row in range(2 * NUM_BATCHES)]


def torchdata_loader():
    package = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata")
    return package.StatefulDataLoader(rows(), batch_size=2, num_workers=1)


def webdataset_loader():
    package = pytest.importorskip("webdataset", reason="webdataset is not installed")
    return package.WebLoader(rows(), batch_size=2, num_workers=1)


def torch_loader():
    return torch.utils.data.DataLoader(rows(), batch_size=2, num_workers=1)


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata with a new torch
@pytest.mark.parametrize("make", [torch_loader, torchdata_loader, webdataset_loader])
def test_a_loader_says_when_it_is_asked_and_is_left_as_it_was(watched, make) -> None:
    loader = make()
    kind = type(loader)
    watched.train(loader)
    log = watched.close()
    assert len(log.steps) == NUM_BATCHES
    assert log.header.num_workers == 1
    assert {step.num_samples for step in log.steps} == {2}
    assert all(step.data_wait_ns for step in log.steps)
    assert not hasattr(kind.__iter__, "__wrapped__")


def test_our_own_loader_says_so_too(watched, tiny_dataset) -> None:
    import fuelrail as fr

    data = tiny_dataset({"train": (4, 3)}, size=(64, 48)).root
    with fr.DataLoader(data, batch_size=2, num_workers=1) as loader:
        watched.train(loader)
        num_batches = len(loader)
    steps = watched.close().steps
    assert len(steps) == num_batches
    assert {step.num_samples for step in steps} == {2}


def test_a_save_of_safetensors_is_a_checkpoint(watched, tmp_path) -> None:
    package = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    watched.train(torch_loader())
    package.save_file(watched.model.state_dict(), tmp_path / "weights")
    watched.train(torch_loader())
    assert sum(step.details.checkpoint_ns > 0 for step in watched.close().steps) == 1


def test_a_module_is_watched_once_it_is_imported_and_one_that_fails_is_said(
    tmp_path, monkeypatch, capsys
) -> None:
    (tmp_path / "imported_late.py").write_text("value = 3")
    monkeypatch.syspath_prepend(tmp_path)
    values: list[int] = []
    waiting = AfterImport("imported_late", lambda module: values.append(module.value))
    assert not values
    import imported_late  # type: ignore[import-not-found]

    assert values == [3]
    assert waiting not in sys.meta_path
    assert imported_late.__spec__.loader is imported_late.__loader__ is not waiting
    AfterImport("imported_late", lambda module: module.missing)
    assert "imported_late is not watched" in capsys.readouterr().err
