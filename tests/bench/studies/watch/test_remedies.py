"""Remedies are tried on a loader, at a training's pace, and nothing of the training changes."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

import fuelrail as fr
from fuelrail.bench.measure.records import (
    RankLog,
    Remedy,
    StepDetails,
    StepRecord,
    rank_path,
    read_rank,
    step_table,
)
from fuelrail.bench.studies.watch import remedies as module
from fuelrail.bench.studies.watch.remedies import Pace, try_channels_last, try_loader, with_waits
from fuelrail.bench.studies.watch.report import build_report

pytestmark = pytest.mark.process

MS = 1_000_000
SECONDS = 0.02


def steps(count=12, *, wait_ms=30, work_ms=3, **changes):
    return [
        StepRecord(
            step=number,
            epoch=0,
            num_samples=2,
            num_images=0,
            loss=None,
            start_ns=number * (wait_ms + work_ms) * MS,
            end_ns=(number + 1) * (wait_ms + work_ms) * MS,
            data_wait_ns=wait_ms * MS,
            other_ns=0,
            forward_ns=work_ms * MS,
            **changes,
        )
        for number in range(count)
    ]


def table(count=12, **times):
    return step_table([steps(count, **times)])[0]


class Rows(Dataset[torch.Tensor]):
    """Draws from generators of all kinds, and counts."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)
        self.num_read = 0

    def __len__(self) -> int:
        return 400

    def __getitem__(self, row: int) -> torch.Tensor:
        self.num_read += 1
        noise = self.generator.random() + random.random() + np.random.random()
        return torch.rand(3, 8, 8) + noise + row


class Photos(Dataset[torch.Tensor]):
    def __init__(self, folder: Path) -> None:
        self.items = []
        for number in range(8):
            path = folder / f"{number}.jpg"
            Image.new("RGB", (64, 48), (number * 20, 90, 0)).save(path)
            self.items.append((str(path), 0))

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, row: int) -> torch.Tensor:
        image = Image.open(self.items[row][0]).convert("RGB").resize((32, 24))
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def test_a_pace_is_a_step_without_its_wait_and_without_what_it_queued():
    details = StepDetails(
        process_cpu_ns=20 * MS, cpu_wall_ns=100 * MS, trainer_queued_ns=20 * MS, data_cpu_ns=2 * MS
    )
    # Of 60 ms a CPU computes 12 ms, 2 of them while it waits for data, and 12 ms are queued.
    pace = Pace.of_steps(table(wait_ms=30, work_ms=30, details=details))
    assert pace.num_threads == 1
    assert (pace.cpu_ns, pace.idle_ns) == pytest.approx((10 * MS, (30 - 12 - 10) * MS))


def test_a_pace_has_no_wait_for_late_ranks():
    early = steps(6, wait_ms=10, work_ms=3 + 21, all_reduce_ns=21 * MS)
    late = steps(5, wait_ms=30, work_ms=3 + 1, all_reduce_ns=1 * MS)
    given = with_waits(early, [late])
    assert given["data_wait_ns"].tolist() == [30 * MS] * 5
    pace = Pace.of_steps(given)
    assert pace.cpu_ns + pace.idle_ns == pytest.approx(4 * MS)


def names(loader, given=None):
    return {
        remedy.name
        for remedy in try_loader(loader, table() if given is None else given, seconds=SECONDS)
    }


def test_what_applies_to_a_loader_is_tried(monkeypatch):
    monkeypatch.setattr(module, "default_num_workers", lambda: 2)
    assert {"num_workers=2", "num_workers=4"} == names(DataLoader(Rows(), 2))
    found = names(DataLoader(Rows(), 2, num_workers=1, prefetch_factor=3))
    assert found - {"one thread"} == {
        "num_workers=2",
        "num_workers=4",
        "prefetch_factor=6",
    }


def test_workers_that_stay_are_tried_where_epochs_are_short():
    short = torch.utils.data.Subset(Rows(), range(4))
    loader = DataLoader(short, 2, num_workers=1)
    assert "persistent_workers=True" in {
        trial.name for trial in module._trials(loader, 2, Path("unused"))
    }


def test_images_in_files_are_tried_by_our_decoder_and_from_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "default_num_workers", lambda: 1)
    opened = Image.open
    assert {"fr.decode_jpeg", "Fuelrail shards"} <= names(DataLoader(Photos(tmp_path), 2))
    assert Image.open is opened


def test_nothing_is_tried_where_the_loader_takes_no_time_or_is_none_of_torchs():
    assert not names(DataLoader(Rows(), 2), table(wait_ms=0))
    assert not names([torch.ones(2, 1)])


def test_a_trial_that_fails_is_said_and_the_others_are_made(monkeypatch, capfd):
    monkeypatch.setattr(module, "default_num_workers", lambda: 2)

    def refuse(worker):
        raise ValueError("no worker")

    assert not names(DataLoader(Rows(), 2, worker_init_fn=refuse, num_workers=1))
    assert "as it is was not tried" in capfd.readouterr().err
    assert names(DataLoader(Rows(), 2, worker_init_fn=refuse)) == set()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(144, 1)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images + np.random.random())


def train(out: Path | None, num_workers: int) -> tuple[list[float], int, bytes]:
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rows = Rows()
    loader = DataLoader(rows, 4, shuffle=True, num_workers=num_workers)
    batches = loader
    if out is not None:
        batches = fr.watch(loader, model=model, optimizer=optimizer, out=out)
        batches.try_remedies(seconds=SECONDS)
    losses = []
    for batch in batches:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if out is not None:
        batches.finish()
    return losses, rows.num_read, torch.get_rng_state().numpy().tobytes()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_training_is_bit_for_bit_the_same_with_trials_in_it(num_workers, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "default_num_workers", lambda: 1)
    monkeypatch.setattr(module, "_NOTABLE", 0.0)  # also on a fast machine
    num_threads = torch.get_num_threads()
    plain = train(None, num_workers)
    tried = train(tmp_path, num_workers)
    remedies = read_rank(rank_path(tmp_path / "records", 0)).remedies
    found = {remedy.name for remedy in remedies}
    assert {"channels_last", "num_workers=4"} <= found
    assert tried == plain
    assert len(plain[0]) == 100
    assert torch.get_num_threads() == num_threads


def test_a_memory_format_is_tried_on_a_copy():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    shapes = [(torch.Size((2, 3, 8, 8)), torch.float32, torch.device("cpu"))]
    (found,) = try_channels_last(model, shapes, table())
    assert found.name == "channels_last"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model[0].weight.grad is None
    assert not try_channels_last(model.to(memory_format=torch.channels_last), shapes, table())
    assert not try_channels_last(nn.Linear(2, 2), shapes, table())


def test_of_several_ranks_the_one_that_gains_least_counts():
    def remedy(gain, name="num_workers=4"):
        return Remedy(name=name, line="x", step_ms=1.0, gain=gain, low=gain - 0.1, high=gain + 0.1)

    tried = [[remedy(0.5), remedy(0.3, "other")], [remedy(0.05)]]
    logs = {rank: RankLog(remedies=remedies) for rank, remedies in enumerate(tried)}
    report = build_report(logs)
    assert [entry.gain for entry in report.remedies] == [0.05]
    assert "tried: saves nothing certain (-5.0% to 15.0%): x" in report.as_text()
