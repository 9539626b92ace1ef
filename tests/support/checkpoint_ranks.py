"""One rank of a small run that saves checkpoints: the reference trainer's model and strategies, and a log of its steps.

Used by :mod:`support.checkpoint_kills`. Each rank appends a line of JSON for each step (loss,
sample keys) and for each checkpoint that became visible to a file of its own.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, MutableSequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist

from fuelrail import DataLoader, ImageAugment, Transforms
from fuelrail.bench.trainer.checkpoints.saver import Checkpoints
from fuelrail.bench.trainer.checkpoints.store import Store
from fuelrail.bench.trainer.loop import batches
from fuelrail.bench.trainer.models.build import build_model
from fuelrail.bench.trainer.models.settings import MODELS
from fuelrail.bench.trainer.strategies.parallel import parallelise
from fuelrail.bench.trainer.strategies.settings import (
    ParallelSettings,
    degrees_of,
)
from support import own_model
from support.parallel_equality import train_step

if TYPE_CHECKING:
    from fuelrail.bench.measure.records import CheckpointSave
    from fuelrail.bench.trainer.checkpoints.store import Manifest
    from fuelrail.bench.trainer.strategies.settings import Strategy
    from fuelrail.bench.trainer.strategies.step import Parallel

MODEL = "vit-tiny"
GLOBAL_BATCH = 8
NUM_STEPS = 18
EVERY = 3
KEEP = 2
# Where a rank is; a number in shared memory, so that the harness knows at which moment it kills.
PHASES = ("start", "load", "train", "copy", "write", "publish", "remove")
_TIMEOUT = timedelta(seconds=20)


class Mesh(NamedTuple):
    """A number of processes, and how they share the model."""

    num_ranks: int
    settings: ParallelSettings


def _mesh(num_ranks: int, strategy: Strategy = "ddp", mesh: str | None = None) -> Mesh:
    # A warm-up, so that the schedule's state counts.
    return Mesh(
        num_ranks,
        ParallelSettings(strategy=strategy, mesh=mesh, rate_warmup=10, clip_norm=1.0),
    )


MESHES = {
    "one": _mesh(1),
    "ddp2": _mesh(2),
    "zero1x2": _mesh(2, "zero1"),
    "fsdp2": _mesh(2, "fsdp2"),
    "tensor2": _mesh(2, "tensor"),
    "pipeline2": _mesh(2, "pipeline"),
    "ddp4": _mesh(4),
    "fsdp4": _mesh(4, "fsdp2"),
    "hsdp4": _mesh(4, "hsdp"),
    "fsdp2tensor2": _mesh(4, mesh="dp_shard=2,tp=2"),
    "pipeline2fsdp2": _mesh(4, mesh="pp=2,dp_shard=2"),
    "pipeline2tensor2": _mesh(4, mesh="pp=2,tp=2"),
}


# Of a model without stages and plan.
OWN_MESHES = {
    name: mesh
    for name, mesh in MESHES.items()
    if mesh.settings.strategy in own_model.STRATEGIES and not mesh.settings.mesh
}


class _WatchedStore(Store):
    enter: Callable[[str], None]

    def publish(self, folder: str, manifest: Manifest) -> None:
        self.enter("publish")
        super().publish(folder, manifest)

    def prune(self, keep: int) -> None:
        self.enter("remove")
        super().prune(keep)


class _Watched(Checkpoints):
    """Checkpoints that say where they are."""

    def __init__(self, place: str, enter: Callable[[str], None]) -> None:
        super().__init__(place, keep=KEEP, identity={"model": MODEL})
        self._store = _WatchedStore(place)
        self._store.enter = self._enter = enter

    def save(
        self, step: int, parallel: Parallel, loader_state: Mapping[str, Any]
    ) -> CheckpointSave | None:
        self._enter("copy")
        return super().save(step, parallel, loader_state)

    def _finish(self, *arguments: Any, **keywords: Any) -> CheckpointSave:
        done = super()._finish(*arguments, **keywords)
        self._enter("train")
        return done


def divided(name: str, *, own: bool) -> Parallel:
    """Divide the trainer's model, or one from outside, whose batch norm must not depend on the mesh."""
    settings = MESHES[name].settings
    if own:
        return own_model.divided(settings=settings, batch_norm="frozen")
    share = GLOBAL_BATCH // degrees_of(settings, MESHES[name].num_ranks).data
    return parallelise(
        partial(build_model, MODELS[MODEL]),
        msgspec.structs.replace(settings, micro_batches=share),
    )


def run_rank(
    name: str,
    rank: int,
    meeting: str,
    files: Mapping[str, str],
    phases: MutableSequence[int],
    *,
    own: bool,
) -> None:
    """Train from the newest checkpoint to the last step, and append what was done to a file.

    ``files`` are the dataset, the place of checkpoints and the file of lines.
    """
    dataset, place, lines = (files[name_of_file] for name_of_file in ("dataset", "place", "lines"))
    started_s = time.monotonic()

    def enter(phase: str) -> None:
        phases[rank] = PHASES.index(phase)

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=MESHES[name].num_ranks,
        timeout=_TIMEOUT,
    )
    share = GLOBAL_BATCH // degrees_of(MESHES[name].settings, MESHES[name].num_ranks).data
    parallel = divided(name, own=own)
    image = ImageAugment(height=64, width=64)
    with (
        Path(lines).open("a", buffering=1) as out,
        DataLoader(
            dataset,
            share,
            shuffle=True,
            drop_last=True,
            seed=5,
            transforms=Transforms(image=image),
            num_workers=1,
            world=parallel.mesh,
            check_ranks=False,
        ) as loader,
    ):
        enter("load")
        checkpoints = _Watched(place, enter)
        restored = checkpoints.restore(parallel, loader)
        first = 0 if restored is None else restored.step
        out.write(json.dumps({"restored": first, "took_s": time.monotonic() - started_s}) + "\n")
        enter("train")
        for step, batch in zip(range(first, NUM_STEPS), batches(loader, None), strict=False):
            loss = train_step(parallel, batch)
            out.write(
                json.dumps(
                    {
                        "step": step,
                        "loss": loss,
                        "keys": list(batch["sample_key"]),
                    }
                )
                + "\n"
            )
            if (step + 1) % EVERY == 0:
                done = checkpoints.save(step + 1, parallel, loader.state_dict())
                enter("write")
                _note(out, done)
        _note(out, checkpoints.close())
    # ZeRO-1 aborts the process where a rank leaves the group before another one.
    dist.barrier()
    dist.destroy_process_group()


def _note(out: Any, done: CheckpointSave | None) -> None:
    if done is not None:
        out.write(json.dumps({"visible": done.step}) + "\n")
