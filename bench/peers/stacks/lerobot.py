"""LeRobot's sampler of episodes and ours, in the loop of its training script."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.datasets.sampler import EpisodeAwareSampler, compute_sampler_state
from lerobot.utils.random_utils import load_rng_state, save_rng_state
from lerobot.utils.utils import cycle

from fuelrail.bench.peers.stacks.rows import Rows
from fuelrail.bench.peers.stacks.stack import NotRun, Setup, Stack
from fuelrail.loaders.integrations.lerobot import EpisodeLoader


class LeRobotStack(Stack):
    """The place in the order is computed from what `lerobot-train` saves: steps, batch and
    ranks.
    """

    packages = ("lerobot", "accelerate", "torch")
    way = (
        "as lerobot-train --resume: compute_sampler_state() for EpisodeAwareSampler, Accelerate, "
        "cycle"
    )

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
                num_rows = len(sampler)
                state = compute_sampler_state(self.steps, num_rows, saved["batch"], saved["ranks"])
                sampler.load_state_dict(state)
        return torch.utils.data.DataLoader(
            rows,
            batch_size=setup.batch,
            sampler=sampler,
            num_workers=setup.workers,
        )

    def open(self) -> None:
        if self.setup.drop_last:
            raise NotRun("lerobot-train keeps the last ones")
        accelerator = Accelerator(cpu=True)
        set_seed(3)
        self.steps = 0
        loader = self.loader()
        evaluation_loader = self.loader(shuffle=False)
        self.training, self.evaluation = accelerator.prepare(loader, evaluation_loader)
        self.batches = cycle(self.training)

    def epoch(self, _epoch: int) -> Iterable[Any]:
        setup_before = self.job.before or self.setup
        rows_left = self.setup.rows - self.job.step * setup_before.global_batch
        steps_left = -(-rows_left // self.setup.global_batch)
        for _ in range(steps_left):
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


class LeRobotOrder(LeRobotStack):
    """Our order over a dataset in LeRobot's format, as `keep_order` puts it into the script."""

    way = "as keep_order(lerobot_train) has it save and resume (docs/guides/lerobot.md)"

    @staticmethod
    def store(setup: Setup, folder: Path) -> None:
        state = {"dtype": "float32", "shape": (1,), "names": ["row"]}
        root = folder / "episodes"
        dataset = LeRobotDataset.create("me/rows", 10, {"observation.state": state}, root=root)
        for episode in setup.shards(range(setup.rows)):
            for row in episode:
                values = np.array([row], np.float32)
                dataset.add_frame({"observation.state": values, "task": "count"})
            dataset.save_episode()
        dataset.finalize()

    def loader(self, *, shuffle: bool = True) -> Any:
        setup = self.setup
        episodes = LeRobotDataset("me/rows", root=self.job.folder / "episodes")
        return torch.utils.data.DataLoader(
            episodes,
            batch_size=setup.batch,
            shuffle=shuffle,
            num_workers=setup.workers,
        )

    def open(self) -> None:
        super().open()
        saved = self.job.states[0] if self.job.states else None
        config = SimpleNamespace(
            dataset=SimpleNamespace(streaming=False),
            policy=None,
            seed=3,
            batch_size=self.setup.batch,
            resume=saved is not None,
            checkpoint_path=saved,
        )
        self.ordered = EpisodeLoader(self.training, config)
        self.batches = iter(self.ordered)

    def state(self) -> Any:
        checkpoint = self.job.folder / f"checkpoint-{self.rank}-{self.steps}"
        (checkpoint / "training_state").mkdir(parents=True)
        self.ordered.save(checkpoint)
        return str(checkpoint)
