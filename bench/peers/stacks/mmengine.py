"""MMEngine's Runner, in a loop that counts steps."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.runner import Runner

from fuelrail.bench.peers.stacks.rows import Rows
from fuelrail.bench.peers.stacks.stack import EPOCHS, Job, NotRun, Stack


class MMEngineModel(BaseModel):  # type: ignore[misc]
    """A layer that tells which rows it is trained on."""

    def __init__(self, job: Job, steps: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.job = job
        self.steps = steps
        self.done = 0

    def forward(self, index: Any, x: Any, mode: str = "tensor") -> Any:
        if mode == "loss":
            self.job.see(self.done // self.steps, index.tolist())
            self.done += 1
        outputs = self.layer(x)
        return {"loss": outputs.square().mean()}


class MMEngineSave(Hook):  # type: ignore[misc]
    """Saves where CheckpointHook does."""

    def before_train(self, runner: Any) -> None:
        self.model = runner.model
        self.model.done = runner.iter

    def after_train_iter(self, runner: Any, *_: Any, **__: Any) -> None:
        job = self.model.job
        if job.is_saving:
            name = f"iter-{runner.iter + 1}.pth"
            runner.save_checkpoint(str(job.folder), name, by_epoch=False)
            dist.barrier()
            epoch = (self.model.done - 1) // self.model.steps
            path = str(job.folder / name)
            if job.is_border:
                job.save(epoch + 1, 0, path)
            else:
                job.save(epoch, job.step, path)


class MMEngineStack(Stack):
    """`resume=True`, which reads the batches before and passes over them."""

    packages = ("mmengine", "torch")
    way = "Runner(resume=True, load_from=...) with IterBasedTrainLoop and InfiniteSampler"

    def train(self) -> None:
        job = self.job
        setup = self.setup
        if job.leaves_loop:
            raise NotRun("the loop is the Runner's")
        if setup.evaluation:
            raise NotRun("an evaluation of its Runner needs a metric, and was not written")
        steps = -(-setup.rows // setup.global_batch)
        loader = {
            "dataset": Rows(range(setup.rows)),
            "batch_size": setup.batch,
            "num_workers": setup.workers,
            "drop_last": setup.drop_last,
            "sampler": {"type": "InfiniteSampler", "shuffle": True, "seed": 3},
            "collate_fn": {"type": "default_collate"},
        }
        # Its checkpoints hold more than torch.load takes by default since 2.6.
        os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
        # Its launchers take a GPU; of a group that is there its samplers take rank and world.
        dist.init_process_group("gloo")
        runner = Runner(
            model=MMEngineModel(job, steps),
            work_dir=str(job.folder),
            train_dataloader=loader,
            train_cfg={"type": "IterBasedTrainLoop", "max_iters": EPOCHS * steps},
            optim_wrapper={"optimizer": {"type": "SGD", "lr": 1e-3}},
            custom_hooks=[MMEngineSave()],
            default_hooks={"checkpoint": None, "logger": None},
            randomness={"seed": 3},
            resume=bool(job.states),
            load_from=job.states[0] if job.states else None,
            experiment_name="run",
        )
        runner.train()
