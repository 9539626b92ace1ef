from __future__ import annotations

from itertools import islice

import msgspec
import pytest
import torch

from fuelrail import ImageAugment
from fuelrail.bench.measure.records import RankWriter, rank_path, read_rank
from fuelrail.bench.studies.train.experiment import from_memory
from fuelrail.bench.studies.train.worker import parameters_digest, run_rank
from fuelrail.bench.trainer.loop import batches
from fuelrail.bench.trainer.models.settings import MODELS
from fuelrail.bench.trainer.strategies.step import Parallel
from support.bench_runs import PROFILE, SETTINGS
from support.datasets import build_dataset
from support.loaders import make_loader
from support.models import build

IMAGE = ImageAugment(height=32, width=64)
QUICK = msgspec.structs.replace(PROFILE, forward_ms=0.1, backward_ms=0.1, optimiser_ms=0.1)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "tiny"
    build_dataset(folder, {"train": (5, 4)})
    return folder


def loader_of(dataset, batch_size=2):
    return make_loader(dataset, batch_size, image=IMAGE, num_workers=1)


def test_epochs_follow_each_other(dataset):
    with loader_of(dataset) as loader:
        steps = [(batch["epoch"], batch["step"]) for batch in batches(loader, 2)]
        assert steps == [(epoch, step) for epoch in (0, 1) for step in range(4)]
        endless = [batch["epoch"] for batch in islice(batches(loader, None), 10)]
        assert endless == [2] * 4 + [3] * 4 + [4] * 2  # from where the loader is


def test_batches_from_memory_come_in_turns_and_end_like_the_loaders(dataset):
    with loader_of(dataset) as loader:
        repeated = list(from_memory(batches(loader, 2), 6))
    assert [batch["step"] for batch in repeated] == [0, 1, 2, 3, 0, 1]
    assert repeated[0] is repeated[4]


@pytest.mark.slow
def test_a_rank_leaves_its_whole_record(dataset, tmp_path):
    settings = msgspec.structs.replace(SETTINGS, steps=6, warmup=2, profile=QUICK)
    with (
        loader_of(dataset) as loader,
        RankWriter(rank_path(tmp_path, 0)) as writer,
    ):
        run_rank(settings, loader, writer)
    log = read_rank(rank_path(tmp_path, 0))
    assert log.header.backend is None
    assert (log.input.num_cameras, log.input.height, log.input.width) == (
        2,
        32,
        64,
    )
    assert [record.step for record in log.steps] == list(range(6))
    assert [record.epoch for record in log.steps] == [0] * 4 + [1] * 2
    assert all((record.num_samples, record.num_images) == (2, 4) for record in log.steps)
    assert len(log.snapshots) == 2
    parameters = 4 * log.header.num_parameters
    assert log.end.state_bytes["model"] == log.end.state_bytes["gradients"] == parameters
    counters = 4 * len(
        list(_fresh_model(settings).models[0].parameters())
    )  # of steps, one for each tensor
    assert log.end.state_bytes["optimiser"] == 2 * parameters + counters
    assert log.end.parameters_xxh3 != parameters_digest(_fresh_model(settings))
    assert log.failure is None


def test_the_seed_decides_the_weights():
    digests = [
        parameters_digest(_fresh_model(msgspec.structs.replace(SETTINGS, seed=seed)))
        for seed in (0, 0, 1)
    ]
    assert digests[0] == digests[1] != digests[2]


def _fresh_model(settings):
    model = build(MODELS[settings.model], "cpu", settings.seed)
    return Parallel([model], torch.optim.SGD(model.parameters()), model.inputs)
