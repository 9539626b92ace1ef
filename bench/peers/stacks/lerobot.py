"""LeRobot's sampler of episodes, in the loop of its training script."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from lerobot.datasets.sampler import EpisodeAwareSampler
from lerobot.datasets.utils import cycle
from lerobot.utils.random_utils import load_rng_state, save_rng_state

from fuelrail.bench.peers.stacks.rows import Rows
from fuelrail.bench.peers.stacks.stack import NotRun, Stack


class LeRobotStack(Stack):
    """The state of the random numbers is saved and loaded, as by `lerobot-train`."""

    packages = ("lerobot", "accelerate", "torch")
    way = "as lerobot-train --resume: step and random state; EpisodeAwareSampler, Accelerate, cycle"

    def open(self) -> None:
        setup = self.setup
        if setup.evaluation:
            raise NotRun("lerobot-train evaluates in a simulation, and reads no rows there")
        accelerator = Accelerator(cpu=True)
        set_seed(3)
        if self.job.states:
            load_rng_state(Path(self.job.states[0]))
        episodes = setup.shards(range(setup.rows))
        rows = Rows(range(setup.rows))
        loader = torch.utils.data.DataLoader(
            rows,
            batch_size=setup.batch,
            sampler=EpisodeAwareSampler(
                [episode.start for episode in episodes],
                [episode.stop for episode in episodes],
                shuffle=True,
            ),
            num_workers=setup.workers,
            drop_last=setup.drop_last,
        )
        self.batches = cycle(accelerator.prepare(loader))

    def epoch(self, _epoch: int) -> Iterable[Any]:
        for _ in range(self.job.steps_left):
            yield next(self.batches)

    def state(self) -> Any:
        folder = self.job.folder / f"state-{self.rank}-{self.job.epoch}-{self.job.step}"
        folder.mkdir()
        save_rng_state(folder)
        return str(folder)
