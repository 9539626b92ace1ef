"""One rank of a small DDP training with one injected cause: ``SCRIPT CAUSE OUT [plain]``; prints its weights' digest.

Work is sleep, so that a loaded host changes little; what shall compute spins for its own CPU time.
"""

from __future__ import annotations

import io
import os
import sys
import time

import torch
import torch.distributed as dist
import xxhash
from torch import nn

import fuelrail as fr

WORK_S = 0.008
LOST_S = 0.02
NUM_STEPS = 44
BATCH = 4


def spin(seconds: float) -> None:
    ends_s = time.thread_time() + seconds
    while time.thread_time() < ends_s:
        pass


class Rows(torch.utils.data.Dataset):
    def __init__(self, cause: str, rank: int) -> None:
        self.cause = cause
        self.rank = rank

    def __len__(self) -> int:
        return 4 * BATCH * NUM_STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self.cause == "slow-storage":
            time.sleep(LOST_S / BATCH)
        if self.cause == "slow-storage-of-workers" or (
            self.cause == "slow-storage-of-one-worker" and self.rank == 1
        ):
            time.sleep(3 * LOST_S / BATCH)
        if self.cause == "slow-transform" or (
            self.cause == "slow-transform-of-one-rank" and self.rank == 1
        ):
            spin(LOST_S / BATCH)
        if self.cause == "slow-storage-of-one-rank" and self.rank == 1:
            time.sleep(LOST_S / BATCH)
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(8, generator=generator)}


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x.view_as(x)

    @staticmethod
    def backward(_, gradient):
        time.sleep(WORK_S)
        return gradient


class Model(nn.Module):
    def __init__(self, cause: str, rank: int) -> None:
        super().__init__()
        self.cause = cause
        self.rank = rank
        self.calls = 0
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)
        )

    def forward(self, x):
        self.calls += 1
        time.sleep(WORK_S)
        if self.cause == "slow-rank" and self.rank == 1:
            time.sleep(LOST_S)
        if self.cause == "uneven-batches" and self.calls % 2 == self.rank:
            time.sleep(2 * LOST_S)
        return Backward.apply(self.layers(x))


class SlowUpdate(torch.optim.SGD):
    def step(self, closure=None):
        time.sleep(3 * LOST_S)
        return super().step(closure)


class SlowFile(io.BytesIO):
    def write(self, data):
        time.sleep(0.004)
        return super().write(data)


def main(cause: str, out: str, *, is_watched: bool = True) -> None:
    torch.manual_seed(7)
    torch.set_num_threads(1)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    inner = Model(cause, rank)
    model: nn.Module = inner
    if world > 1:
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(inner)
    kind = SlowUpdate if cause == "slow-optimiser" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.05, momentum=0.9)
    rows = Rows(cause, rank)
    sampler = torch.utils.data.DistributedSampler(rows, world, rank) if world > 1 else None
    loader = torch.utils.data.DataLoader(
        rows,
        BATCH,
        sampler=sampler,
        shuffle=sampler is None,
        num_workers=int("worker" in cause),
    )
    batches = fr.watch(loader, out=out) if is_watched else loader
    accumulation = 2 if cause == "accumulation" else 1
    for number, batch in enumerate(batches):
        if number == NUM_STEPS * accumulation:
            break
        loss = model(batch["x"]).square().mean()
        loss.backward()
        if (number + 1) % accumulation:
            continue
        optimizer.step()
        optimizer.zero_grad()
        if cause == "slow-logging" or (cause == "slow-logging-of-one-rank" and rank == 0):
            time.sleep(LOST_S)
        is_evaluating = cause == "evaluation" or (cause == "evaluation-of-one-rank" and rank == 0)
        if is_evaluating and number % 6 == 5:
            evaluate(inner, rows)
        if cause == "checkpoint" and number % 4 == 3 and rank == 0:
            torch.save(inner.state_dict(), SlowFile())
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    digest = xxhash.xxh3_64_hexdigest(weights.numpy().tobytes())
    sys.stdout.write(f"weights {digest} {torch.rand(1).item()}\n")  # whole beside other ranks


def evaluate(model: nn.Module, rows: Rows) -> None:
    model.eval()
    with torch.no_grad():
        for batch in torch.utils.data.DataLoader(torch.utils.data.Subset(rows, range(40)), BATCH):
            model(batch["x"])
    model.train()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], is_watched=len(sys.argv) < 4)
