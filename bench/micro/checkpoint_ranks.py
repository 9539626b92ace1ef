"""One rank of a small run that saves checkpoints: the strategies, by name, and a loop that writes what it did.

Used by :mod:`fuelrail.bench.micro.checkpoint_kills`. Each rank appends a line of JSON for each step (loss, sample keys)
and for each checkpoint that became visible to a file of its own.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from fuelrail.bench.trainer.checkpoints.saver import Checkpoints
from fuelrail.bench.trainer.checkpoints.store import Store
from fuelrail.loaders import DataLoader, ImageAugment, Transforms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, MutableSequence

    from fuelrail.bench.measure.records import CheckpointSave
    from fuelrail.bench.trainer.checkpoints.state import Manifest

GLOBAL_BATCH = 8
NUM_STEPS = 30
EVERY = 3
KEEP = 2
# Where a rank is; a number in shared memory, so that the harness knows at which moment it kills.
PHASES = ("start", "load", "train", "copy", "write", "publish", "remove")
_CELLS = 8
_WARMUP_STEPS = 10
_TIMEOUT = timedelta(seconds=20)


class Mesh(NamedTuple):
    """A way to spread the run: the sizes of its axes by name, and whether the optimiser's state is shared (ZeRO-1)."""

    axes: dict[str, int]
    zero1: bool = False

    @property
    def num_ranks(self) -> int:
        """Number of processes."""
        count = 1
        for size in self.axes.values():
            count *= size
        return count


MESHES = {
    "one": Mesh({"dp_replicate": 1}),
    "ddp2": Mesh({"dp_replicate": 2}),
    "zero1x2": Mesh({"dp_replicate": 2}, zero1=True),
    "fsdp2": Mesh({"dp_shard": 2}),
    "tensor2": Mesh({"tp": 2}),
    "pipeline2": Mesh({"pp": 2}),
    "ddp4": Mesh({"dp_replicate": 4}),
    "fsdp4": Mesh({"dp_shard": 4}),
    "hsdp4": Mesh({"dp_replicate": 2, "dp_shard": 2}),
    "fsdp2tensor2": Mesh({"dp_shard": 2, "tp": 2}),
    "pipeline2ddp2": Mesh({"pp": 2, "dp_replicate": 2}),
}


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Model(nn.Module):
    """Guesses the position of the front camera from a few pixels; a stage of it has some of the blocks only."""

    def __init__(self, width: int = 96, num_blocks: int = 4) -> None:
        super().__init__()
        self.stem: nn.Module | None = nn.Linear(_CELLS * _CELLS * 3, width)
        self.blocks = nn.ModuleDict({str(number): _Block(width) for number in range(num_blocks)})
        self.head: nn.Module | None = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        """From float [B, C] to float [B, 3]; of a stage, what it gets and what the next one wants."""
        x = x if self.stem is None else self.stem(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)

    def keep_stage(self, stage: int, num_stages: int) -> None:
        """Drop what other stages have; names stay."""
        share = len(self.blocks) // num_stages
        for number in list(self.blocks):
            if int(number) // share != stage:
                del self.blocks[number]
        if stage > 0:
            self.stem = None
        if stage < num_stages - 1:
            self.head = None


@dataclass
class Trained:
    """What :mod:`fuelrail.bench.trainer.checkpoints` reads, and a function that does one step and returns the loss."""

    model: nn.Module
    optimiser: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    scaler: torch.amp.GradScaler | None
    step: Callable[[Tensor, Tensor], Tensor | None]


def parallelise(name: str, model: Model) -> tuple[Trained, DeviceMesh]:
    """Spread a model, the same on all ranks, as ``MESHES`` says; the process group is up."""
    axes, zero1 = MESHES[name]
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    stage = mesh.get_local_rank("pp") if "pp" in axes else 0
    if "pp" in axes:
        model.keep_stage(stage, axes["pp"])
    if "tp" in axes:
        for block in model.blocks.values():
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    trained: nn.Module = model
    if "dp_shard" in axes:
        data = mesh[tuple(axis for axis in axes if axis.startswith("dp"))]
        for block in model.blocks.values():
            fully_shard(block, mesh=data)
        fully_shard(model, mesh=data)
    elif "dp_replicate" in axes:
        trained = DistributedDataParallel(model, process_group=mesh["dp_replicate"].get_group())
    optimiser: torch.optim.Optimizer
    if zero1:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimiser = ZeroRedundancyOptimizer(trained.parameters(), torch.optim.AdamW, lr=1e-3)
    else:
        optimiser = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min(1.0, (step + 1) / _WARMUP_STEPS))
    if "pp" not in axes:
        return Trained(trained, optimiser, schedule, None, _plain_step(trained)), mesh
    pipeline = Schedule1F1B(
        PipelineStage(trained, stage, axes["pp"], torch.device("cpu"), group=mesh["pp"].get_group()),
        n_microbatches=2,
        loss_fn=F.mse_loss,
    )
    return Trained(trained, optimiser, schedule, None, _pipeline_step(pipeline, stage, axes["pp"])), mesh


def _plain_step(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss.detach()

    return step


def _pipeline_step(pipeline: Schedule1F1B, stage: int, num_stages: int) -> Callable[[Tensor, Tensor], Tensor | None]:
    def step(x: Tensor, y: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        pipeline.step(*([x] if stage == 0 else []), target=y, losses=losses)
        return torch.stack(losses).mean().detach() if stage == num_stages - 1 else None

    return step


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
        super().__init__(place, keep=KEEP, identity={"model": "checkpoint_ranks"})
        self._store = _WatchedStore(place)
        self._store.enter = self._enter = enter

    def save(self, step: int, parallel: Trained, loader_state: Mapping[str, Any]) -> CheckpointSave | None:
        self._enter("copy")
        return super().save(step, parallel, loader_state)

    def _finish(self, *arguments: Any) -> CheckpointSave:  # noqa: ANN401 - passed on
        done = super()._finish(*arguments)
        self._enter("train")
        return done


def run_rank(
    name: str, rank: int, meeting: str, dataset: str, place: str, lines: str, phases: MutableSequence[int]
) -> None:
    """Train from the newest checkpoint to the last step, and append what was done to the file ``lines``."""
    started_s = time.monotonic()

    def enter(phase: str) -> None:
        phases[rank] = PHASES.index(phase)

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=MESHES[name].num_ranks, timeout=_TIMEOUT
    )
    torch.manual_seed(0)
    parallel, mesh = parallelise(name, Model())
    share = GLOBAL_BATCH
    for axis, size in MESHES[name].axes.items():
        share //= size if axis.startswith("dp") else 1
    image = ImageAugment(height=32, width=48, resize=0.5)
    with (
        Path(lines).open("a", buffering=1) as out,
        DataLoader(
            dataset, share, seed=5, transforms=Transforms(image=image), num_workers=1, world=mesh, check_ranks=False
        ) as loader,
    ):
        enter("load")
        checkpoints = _Watched(place, enter)
        restored = checkpoints.restore(parallel, loader)
        first = 0 if restored is None else restored.step
        out.write(json.dumps({"restored": first, "took_s": time.monotonic() - started_s}) + "\n")
        enter("train")
        for step, batch in zip(range(first, NUM_STEPS), _forever(loader), strict=False):
            loss = _global_loss(parallel.step(*_tensors(batch)))
            parallel.optimiser.step()
            parallel.optimiser.zero_grad()
            parallel.schedule.step()
            out.write(json.dumps({"step": step, "loss": loss, "keys": list(batch["sample_key"])}) + "\n")
            if (step + 1) % EVERY == 0:
                done = checkpoints.save(step + 1, parallel, loader.state_dict())
                enter("write")
                _note(out, done)
        _note(out, checkpoints.close())
    # ZeRO-1 aborts the process where a rank leaves the group before another one.
    dist.barrier()
    dist.destroy_process_group()


def _note(out: Any, done: CheckpointSave | None) -> None:  # noqa: ANN401 - a text file
    if done is not None:
        out.write(json.dumps({"visible": done.step}) + "\n")


def _forever(loader: DataLoader) -> Iterator[Any]:
    while True:
        yield from loader


def _tensors(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Some pixels of the first camera, float [B, C], and three numbers that are in the geometry, float [B, 3]."""
    pixels = F.adaptive_avg_pool2d(batch["img"][:, 0].float() / 255, _CELLS).flatten(1)
    return pixels, batch["ego2global"][:, :3, 3].float() / 1000


def _global_loss(loss: Tensor | None) -> float:
    """Mean over the ranks that have a loss: those of the last stage, each with an equal share of the batch."""
    total = torch.tensor([0.0, 0.0]) if loss is None else torch.stack([loss, torch.ones(())])
    dist.all_reduce(total)
    return float(total[0] / total[1])
