"""A teacher whose weights are divided over two real ranks teaches a student under DDP as a whole teacher does."""

from __future__ import annotations

import sys
from functools import partial
from itertools import islice

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fuelrail import DataLoader, ImageAugment, Transforms
from fuelrail.bench.trainer.checkpoints.saver import Checkpoints
from fuelrail.bench.trainer.distill import teacher
from fuelrail.bench.trainer.distill.student import distilled
from fuelrail.bench.trainer.distill.teacher import Teacher
from fuelrail.bench.trainer.models.build import build_model
from fuelrail.bench.trainer.models.settings import MODELS
from fuelrail.bench.trainer.strategies.parallel import parallelise
from support.datasets import build_dataset
from support.parallel_equality import train_step
from support.ranks import run_ranks

RANKS = 2
STEPS = 4
BOUND = 2e-6
PARTS = "labels=0.5,logits=1,features=0.3,targets=0.7"


@pytest.mark.process
def test_a_sharded_teacher_teaches_as_a_whole_one_does(tmp_path):
    build_dataset(tmp_path / "data", {"train": (8, 8)})
    assert run_ranks(RANKS, __file__, tmp_path).count("compared") == RANKS


def losses(folder, *, sharded):
    """Losses of a student under DDP, and the teacher's predictions of this rank's first batch."""
    place = f"{folder}/teacher"
    transforms = {"height": 64, "width": 96}
    with DataLoader(
        f"{folder}/data",
        2,
        num_workers=1,
        transforms=Transforms(image=ImageAugment(**transforms)),
    ) as loader:
        wrap, teaches = distilled(MODELS["bev-tiny"], loader, "cpu", teacher=place, weights=PARTS)
        if not sharded:
            teaches = Teacher(place)
        parallel = parallelise(lambda: wrap(build_model(MODELS["bev-tiny"])))
        parallel.teacher = teaches
        assert isinstance(parallel.models[0], DistributedDataParallel)
        batches = list(islice(loader, STEPS))
        with torch.no_grad():
            predicted = teaches(*parallel.inputs(batches[0]))
        return [train_step(parallel, batch) for batch in batches], predicted


def main(folder):
    dist.init_process_group("gloo")
    trained = parallelise(partial(build_model, MODELS["vit-tiny"]), alone=True, seed=3)
    checkpoints = Checkpoints(f"{folder}/teacher", keep=1, identity={"model": "vit-tiny"})
    checkpoints.save(1, trained, {})
    checkpoints.close()

    loaded = []
    load = teacher.load
    teacher.load = lambda tensors, **options: (
        loaded.extend(tensors.values()),
        load(tensors, **options),
    )
    sharded_teacher = Teacher(f"{folder}/teacher", shard=True)
    teacher.load = load
    parameters = list(sharded_teacher.parameters())
    assert len(loaded) == len(parameters)
    assert all(isinstance(tensor, DTensor) for tensor in loaded), (
        "no rank makes or reads the whole model"
    )
    assert sharded_teacher.model.stem.mean.flatten().tolist() == pytest.approx(
        [123.675, 116.28, 103.53], abs=0.01
    )
    assert all(isinstance(tensor, DTensor) and not tensor.requires_grad for tensor in parameters)
    assert sum(tensor.to_local().numel() for tensor in parameters) < 0.6 * sum(
        tensor.numel() for tensor in parameters
    )

    (taught, predicted), (expected, full_predictions) = (
        losses(folder, sharded=sharded) for sharded in (True, False)
    )
    assert (
        max(abs(loss - reference) for loss, reference in zip(taught, expected, strict=True)) < BOUND
    )
    for tensor, reference in zip(predicted, full_predictions, strict=True):
        assert not tensor.requires_grad
        torch.testing.assert_close(tensor, reference, rtol=0, atol=BOUND)
    assert len(set(taught)) == STEPS
    print("compared", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
