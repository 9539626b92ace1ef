"""LeRobot's sampler of episodes, in the loop of its training script."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from lerobot.datasets.sampler import EpisodeAwareSampler, compute_sampler_state
from lerobot.utils.random_utils import load_rng_state, save_rng_state
from lerobot.utils.utils import cycle

from fuelrail.bench.peers.stacks.rows import Rows
from fuelrail.bench.peers.stacks.stack import NotRun, Stack


class LeRobotStack(Stack):
    """The place in the order is computed from what `lerobot-train` saves: steps, batch and ranks."""

    packages = ("lerobot", "accelerate", "torch")
    way = "as lerobot-train --resume: compute_sampler_state() for EpisodeAwareSampler, Accelerate, cycle"

    def loader(self, *, shuffle: bool = True) -> Any:
        setup = self.setup
        rows = Rows(range(setup.rows))
        sampler = None
        if shuffle:
            episodes = setup.shards(range(setup.rows))
            sampler = EpisodeAwareSampler(
                [episode.start for episode in episodes],
                [episode.stop for episode in episodes],
                shuffle=True,
                seed=3,
            )
            if self.job.states:
                saved = self.job.states[0]
                load_rng_state(Path(saved["folder"]))
                self.steps = saved["steps"]
                sampler.load_state_dict(
                    compute_sampler_state(self.steps, len(sampler), saved["batch"], saved["ranks"])
                )
        return torch.utils.data.DataLoader(
            rows, batch_size=setup.batch, sampler=sampler, num_workers=setup.workers
        )

    def open(self) -> None:
        if self.setup.drop_last:
            raise NotRun("lerobot-train keeps the last ones")
        accelerator = Accelerator(cpu=True)
        set_seed(3)
        self.steps = 0
        training, self.evaluation = accelerator.prepare(self.loader(), self.loader(shuffle=False))
        self.batches = cycle(training)

    def epoch(self, _epoch: int) -> Iterable[Any]:
        rows = self.setup.rows - self.job.step * (self.job.before or self.setup).global_batch
        for _ in range(-(-rows // self.setup.global_batch)):
            self.steps += 1
            yield next(self.batches)

    def state(self) -> Any:
        folder = self.job.folder / f"state-{self.rank}-{self.steps}"
        folder.mkdir()
        save_rng_state(folder)
        setup = self.setup
        return {
            "folder": str(folder),
            "steps": self.steps,
            "batch": setup.batch,
            "ranks": setup.ranks,
        }

    def evaluate(self) -> None:
        for _ in self.evaluation:
            pass
