"""CPU time that a watch adds to a step of training, and its share of a step of 50 ms."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import fuelrail as fr

STEPS = 400
ROUNDS = 5
STEP_MS = 50
NUM_MODULES = 200


def measure_step_us(
    watch: fr.watch | None,
    model: nn.Module,
    batches: list[torch.Tensor],
) -> float:
    """Return the least CPU time of several epochs, in microseconds a step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    spent = []
    for _ in range(ROUNDS):
        started = time.thread_time()
        for batch in batches if watch is None else watch:
            loss = model(batch).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        spent.append(time.thread_time() - started)
    return min(spent) / len(batches) * 1e6


def main() -> None:
    """Print what a watch adds, with and without the model being given."""
    torch.set_num_threads(1)
    further_modules = [nn.Identity() for _ in range(NUM_MODULES)]
    model = nn.Sequential(nn.Linear(8, 8), *further_modules)
    batches = [torch.ones(4, 8)] * STEPS
    for watched_model in (model, None):
        plain_us = measure_step_us(None, model, batches)
        with tempfile.TemporaryDirectory() as folder:
            watch = fr.watch(batches, model=watched_model, out=Path(folder))
            watched_us = measure_step_us(watch, model, batches)
            watch.finish()
        added_us = watched_us - plain_us
        percent = added_us / STEP_MS / 10
        name = "model given" if watched_model is not None else "model found"
        print(f"{name}: {added_us:.0f} us a step, {percent:.2f} % of {STEP_MS} ms")  # noqa: T201


if __name__ == "__main__":
    main()
