"""One rank of a small training, in one of six trainers' loops or on a simulated GPU, with one injected cause.

``SCRIPT TRAINER CAUSE FOLDER [hooks | watch | traceml | plain]``: the last word says what the script does to be
watched. Work is sleep, so that a loaded host changes little; what shall compute spins for its own CPU time.
"""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, default_collate

WORK_S = 0.008
LOST_S = 0.03
BATCH = 4
EVERY = 10
"""Steps between checkpoints, or evaluations."""
NUM_STEPS = {"memory leak": 320, "interpreter lock": 180, "threads": 40, "garbage collection": 50}
DEFAULT_STEPS = 90
EPOCH = {"cold cache": 30}
"""Steps of an epoch, where a run has several."""


def num_steps(cause: str) -> int:
    """Return the steps of a run, of which ten are warm-up."""
    return NUM_STEPS.get(cause, DEFAULT_STEPS)


def spin(seconds: float) -> None:
    ends_s = time.thread_time() + seconds
    while time.thread_time() < ends_s:
        pass


class Rows(Dataset):
    """Rows of which the storage, the transform or the cache may be slow."""

    def __init__(self, cause: str, rank: int, world: int) -> None:
        self.cause = cause
        self.is_slow = rank == 1 or "one rank" not in cause
        self.world = world
        self.made = 0
        self.size = EPOCH.get(cause, num_steps(cause) + 2) * BATCH * world

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self.is_slow and self.cause.startswith("slow storage"):
            time.sleep(LOST_S / BATCH)
        if self.is_slow and self.cause.startswith("slow transform"):
            spin(LOST_S / BATCH)
        if self.cause == "too few workers":
            time.sleep(2 * LOST_S / BATCH)
        self.made += 1
        if self.cause == "stalling worker" and self.made % 50 == 0:
            time.sleep(10 * LOST_S)
        if self.cause == "cold cache" and self.made <= self.size // self.world:
            time.sleep(LOST_S / BATCH)
        return {"x": torch.randn(8, generator=torch.Generator().manual_seed(index))}


def collate_slowly(rows: list[Any]) -> Any:
    spin(LOST_S)
    return default_collate(rows)


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(WORK_S)
        return gradient


class Model(nn.Module):
    """Layers whose passes take some time; its loss is the mean square of what it predicts."""

    def __init__(self, cause: str, rank: int, world: int) -> None:
        super().__init__()
        self.cause = cause
        self.rank = rank
        self.world = world
        self.calls = 0
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        self.calls += 1
        if self.cause == "CPU quota":
            spin(WORK_S)
        else:
            time.sleep(WORK_S)
        if self.cause == "heavy layer" and self.rank == 1:
            time.sleep(LOST_S)
        if self.cause == "uneven batches" and self.calls % self.world == self.rank:
            time.sleep(2 * LOST_S)
        if self.cause == "threads":
            product = torch.ones(512, 512)
            for _ in range(6):
                product = product @ product / 512
        predicted = Backward.apply(self.layers(x))
        return {"loss": predicted.square().mean(), "logits": predicted}


class SlowUpdate(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        time.sleep(2 * LOST_S)
        return super().step(closure)


class SlowState:
    """Takes long to be saved, as large states do."""

    def __reduce__(self) -> Any:
        time.sleep(8 * LOST_S)
        return str, ("state",)


class SlowFile(io.StringIO):
    def write(self, text: str) -> int:
        time.sleep(1.5 * LOST_S)
        return super().write(text)


class Training:
    """What all trainers are given."""

    def __init__(self, cause: str, folder: Path) -> None:
        self.cause = cause
        self.folder = folder
        self.rank = int(os.environ.get("RANK", "0"))
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.steps = num_steps(cause)
        torch.manual_seed(7)
        torch.set_num_threads(8 if cause == "threads" else 1)
        self.model = Model(cause, self.rank, self.world)
        self.rows = Rows(cause, self.rank, self.world)
        self.held = Subset(self.rows, range(self.world * BATCH * 8))
        self.workers = int("worker" in cause)
        self.collate = collate_slowly if cause == "collate" else default_collate
        self.kept: list[Any] = []
        self.done = 0
        handler = logging.StreamHandler(SlowFile())
        logging.getLogger("training").addHandler(handler)
        logging.getLogger("training").setLevel(logging.INFO)
        logging.getLogger("training").propagate = False
        if cause == "garbage collection":
            self.kept = [[number] for number in range(200_000)]
        if cause == "interpreter lock":
            threading.Thread(target=hold_lock, daemon=True).start()
        if cause == "CPU quota" and self.rank == 1:
            start_quota()

    @property
    def checkpoint_every(self) -> int:
        """Steps between checkpoints; 0: none."""
        return EVERY if self.cause == "checkpoints" else 0

    @property
    def evaluate_every(self) -> int:
        """Steps between evaluations; 0: none."""
        return EVERY if self.cause == "evaluation" else 0

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        kind = SlowUpdate if self.cause == "slow optimiser" else torch.optim.SGD
        made = kind(model.parameters(), lr=0.05, momentum=0.9)
        if self.cause == "checkpoints" and self.rank == 0:
            made.state[next(model.parameters())]["slow"] = SlowState()
        return made

    def loader(self, **options: Any) -> DataLoader[Any]:
        return DataLoader(
            self.rows, BATCH, num_workers=self.workers, collate_fn=self.collate, **options
        )

    def sampler(self) -> Any:
        return DistributedSampler(self.rows, self.world, self.rank) if self.world > 1 else None

    def after_step(self) -> bool:
        """Do what the loop does after an update; return whether it is to end."""
        self.done += 1
        if self.cause == "logging" or (self.cause == "logging of one rank" and self.rank == 0):
            logging.getLogger("training").info("step %d", self.done)
        if self.cause == "garbage collection":
            gc.collect()
        if self.cause == "memory leak" and self.rank == 1:
            self.kept.append(bytearray(os.urandom(1)) * 2_000_000)
        if self.cause == "small all-reduces":
            for _ in range(60):
                dist.all_reduce(torch.ones(1))
        if self.cause == "host work":
            time.sleep(LOST_S)
        return self.done >= self.steps

    def is_due(self, every: int) -> bool:
        """Return whether this step is one of those after which something is done."""
        return bool(every) and self.done % every == 0


def hold_lock() -> None:
    while True:
        spin(0.02)
        time.sleep(0.005)


def start_quota() -> None:
    """Stop this process for 12 of each 20 ms, as a CPU quota does in each of its periods."""
    parent = os.getpid()
    if os.fork():
        return
    while os.getppid() == parent:
        os.kill(parent, signal.SIGSTOP)
        time.sleep(0.012)
        os.kill(parent, signal.SIGCONT)
        time.sleep(0.008)
    os._exit(0)


def no_trace(_: Any) -> Any:
    return contextlib.nullcontext()


def train_plain(training: Training, trace: Any, watch: Any = None) -> None:
    model: nn.Module = training.model
    if training.world > 1:
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = training.optimizer(model)
    loader: Any = training.loader(sampler=training.sampler(), shuffle=training.world == 1)
    if watch is not None:
        loader = watch(loader, out=training.folder)
    is_over = False
    while not is_over:
        for batch in loader:
            with trace(model):
                loss = model(batch["x"])["loss"]
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                is_over = training.after_step()
                if training.is_due(training.evaluate_every):
                    evaluate(training)
                if training.is_due(training.checkpoint_every) and training.rank == 0:
                    states = [training.model.state_dict(), optimizer.state_dict()]
                    torch.save(states, training.folder / "checkpoint.pt")
            if is_over:
                break


def evaluate(training: Training) -> None:
    training.model.eval()
    with torch.no_grad():
        for batch in DataLoader(training.held, BATCH):
            training.model(batch["x"])
    training.model.train()


def train_transformers(training: Training, _: Any) -> None:
    import transformers

    class After(transformers.TrainerCallback):
        def on_step_end(self, _: Any, __: Any, control: Any, **___: Any) -> None:
            control.should_training_stop = training.after_step()

    class Trainer(transformers.Trainer):
        def create_optimizer(self, *_: Any) -> Any:
            self.optimizer = training.optimizer(self.model)
            return self.optimizer

    def when(every: int) -> tuple[str, int]:
        return ("steps" if every else "no"), every or 1

    evaluation, evaluation_steps = when(training.evaluate_every)
    saving, save_steps = when(training.checkpoint_every)
    arguments = transformers.TrainingArguments(
        output_dir=str(training.folder / "trainer"),
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        max_steps=training.steps,
        dataloader_num_workers=training.workers,
        eval_strategy=evaluation,
        eval_steps=evaluation_steps,
        save_strategy=saving,
        save_steps=save_steps,
        save_total_limit=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        label_names=["x"],
    )
    trainer = Trainer(
        training.model,
        arguments,
        train_dataset=training.rows,
        eval_dataset=training.held,
        data_collator=training.collate,
        callbacks=[After()],
    )
    trainer.train()


def train_lightning(training: Training, _: Any) -> None:
    import pytorch_lightning as lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = training.model

        def training_step(self, batch: Any, _: int) -> Any:
            return self.model(batch["x"])["loss"]

        def validation_step(self, batch: Any, _: int) -> None:
            self.model(batch["x"])

        def configure_optimizers(self) -> Any:
            return training.optimizer(self)

    class After(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = training.after_step()
            if training.is_due(training.checkpoint_every):
                trainer.save_checkpoint(training.folder / "lightning.ckpt")

    every = training.evaluate_every
    trainer = lightning.Trainer(
        max_steps=training.steps,
        accelerator="cpu",
        devices=training.world,
        strategy="ddp",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        val_check_interval=every or None,
        limit_val_batches=8 if every else 0,
        default_root_dir=training.folder,
        callbacks=[After()],
    )
    trainer.fit(Module(), training.loader(shuffle=True), DataLoader(training.held, BATCH))


def train_accelerate(training: Training, trace: Any) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(
        training.model, training.optimizer(training.model), training.loader(shuffle=True)
    )
    is_over = False
    while not is_over:
        for batch in loader:
            with trace(model), accelerator.accumulate(model):
                accelerator.backward(model(batch["x"])["loss"])
                optimizer.step()
                optimizer.zero_grad()
                is_over = training.after_step()
                if training.is_due(training.evaluate_every):
                    evaluate(training)
                if training.is_due(training.checkpoint_every):
                    accelerator.save_state(str(training.folder / "state"))
            if is_over:
                break
    accelerator.end_training()


def train_mmengine(training: Training, trace: Any) -> None:
    from mmengine.hooks import Hook
    from mmengine.model import BaseModel, MMDistributedDataParallel
    from mmengine.runner import Runner

    class Wrapped(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.model = training.model

        def forward(self, x: Any, mode: str = "tensor") -> Any:
            return {"loss": self.model(x)["loss"]}

    class After(Hook):
        traced = contextlib.ExitStack()

        def before_train_iter(self, runner: Any, *_: Any, **__: Any) -> None:
            self.traced.enter_context(trace(runner.model))

        def after_train_iter(self, runner: Any, *_: Any, **__: Any) -> None:
            training.after_step()
            if training.is_due(training.checkpoint_every):
                runner.save_checkpoint(str(training.folder), "mmengine.pth", by_epoch=False)
            self.traced.close()

    dist.init_process_group("gloo")
    wrapped = Wrapped()
    runner = Runner(
        model=MMDistributedDataParallel(module=wrapped, broadcast_buffers=False),
        work_dir=str(training.folder),
        train_dataloader={
            "dataset": training.rows,
            "batch_size": BATCH,
            "num_workers": training.workers,
            "sampler": {"type": "InfiniteSampler", "shuffle": True, "seed": 3},
            "collate_fn": training.collate,
        },
        train_cfg={"type": "IterBasedTrainLoop", "max_iters": training.steps},
        optim_wrapper={"optimizer": training.optimizer(wrapped)},
        custom_hooks=[After()],
        default_hooks={"checkpoint": None, "logger": None},
        randomness={"seed": 3},
        experiment_name="run",
    )
    runner.train()


def train_lerobot(training: Training, trace: Any) -> None:
    from accelerate import Accelerator
    from lerobot.datasets.sampler import EpisodeAwareSampler
    from lerobot.datasets.utils import cycle
    from lerobot.scripts.lerobot_train import update_policy
    from lerobot.utils.logging_utils import AverageMeter, MetricsTracker

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = training.model

        def forward(self, batch: Any) -> Any:
            return self.model(batch["x"])["loss"], {}

    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    rows = len(training.rows)
    sampler = EpisodeAwareSampler([0, rows // 2], [rows // 2, rows], shuffle=True)
    policy = Policy()
    policy, optimizer, loader = accelerator.prepare(
        policy, training.optimizer(policy), training.loader(sampler=sampler)
    )
    meters = {name: AverageMeter(name, ":.3f") for name in ("loss", "grad_norm", "lr", "update_s")}
    tracker = MetricsTracker(BATCH, rows, 2, meters, accelerator=accelerator)
    batches = cycle(loader)
    policy.train()
    is_over = False
    while not is_over:
        batch = next(batches)
        with trace(policy):
            tracker, _ = update_policy(tracker, policy, batch, optimizer, 1.0, accelerator)
            tracker.step()
            is_over = training.after_step()
    accelerator.end_training()


def train_cuda(training: Training, trace: Any) -> None:
    """Train on a simulated GPU, which works through its queue while the host goes on."""
    import pytest

    from support.fake_cuda import FakeCuda
    from support.watched.timed_device import TimedDevice

    with pytest.MonkeyPatch.context() as patch, FakeCuda(patch) as fake:
        device = TimedDevice(patch, fake)
        weight = nn.Parameter(torch.ones(8, 1, device="cuda"))

        class OnDevice(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = weight

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                device.launch(2 * WORK_S)
                return Launch.apply(x @ self.weight)

        class Launch(Backward):
            @staticmethod
            def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
                device.launch(2 * WORK_S)
                return gradient

        model = OnDevice()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        for batch in training.loader(shuffle=True):
            with trace(model):
                x = batch["x"].to("cuda", non_blocking=training.cause != "copies")
                device.launch(2 * LOST_S if training.cause == "copies" else 1e-4)
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                device.launch(1e-3)
                optimizer.zero_grad()
            time.sleep(WORK_S)  # of the host, which the device's queue hides
            if training.cause == "item":
                loss.item()
                time.sleep(WORK_S)
            if training.after_step():
                break
        device.synchronize()
        end_watch()  # while there is the device


def end_watch() -> None:
    """End a watch that the command would end with the process."""
    from fuelrail.bench.studies.watch.watch import Session

    if Session.current is not None:
        Session.current.close()


TRAINERS = {
    "plain": train_plain,
    "transformers": train_transformers,
    "lightning": train_lightning,
    "accelerate": train_accelerate,
    "mmengine": train_mmengine,
    "lerobot": train_lerobot,
    "cuda": train_cuda,
}


def main(trainer: str, cause: str, folder: str, tool: str = "") -> None:
    trace = no_trace
    if tool == "traceml" and trainer not in ("transformers", "lightning"):  # which it knows itself
        import traceml_ai

        traceml_ai.init(mode="auto")
        trace = traceml_ai.trace_step
    if tool == "hooks":  # those of the command, which a fork of a process with torch does not start
        from fuelrail.bench.studies.watch.command import FOLDER_VARIABLE
        from fuelrail.bench.studies.watch.watch import start_by_environment

        gc.freeze()  # what that process has loaded
        os.environ[FOLDER_VARIABLE] = folder
        start_by_environment()
    training = Training(cause, Path(folder))
    if tool == "watch":
        import fuelrail as fr

        train_plain(training, trace, fr.watch)
    else:
        TRAINERS[trainer](training, trace)
    end_watch()
    if tool != "traceml":
        weights = torch.cat([part.detach().flatten() for part in training.model.parameters()])
        sys.stdout.write(f"weights {weights.double().sum().item()!r} {torch.rand(1).item()}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
