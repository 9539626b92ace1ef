"""Trainers of Accelerate, transformers and Lightning over our order: their ranks on gloo are killed, and resumed on
another number of ranks.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
import signal
import socket
import time
import zipfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import fuelrail as fr
from support.forked import fork, join

NUM_ROWS = 103
GLOBAL_BATCH = 12
EPOCH_STEPS = NUM_ROWS // GLOBAL_BATCH
NUM_STEPS = 4 * EPOCH_STEPS
SIZES = (1, 2, 3, 4)


class Options(NamedTuple):
    """What a run has from its beginning to its end."""

    accumulation: int = 3  # which does not divide an epoch's steps
    dispatch: bool = False
    split: bool = False
    validate_every: int = 3


class Rows(Dataset):
    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, row):
        return {"row": row, "x": torch.tensor([row / NUM_ROWS])}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        torch.nn.init.zeros_(self.layer.weight)
        torch.nn.init.zeros_(self.layer.bias)

    def forward(self, row, x):
        return {"loss": (self.layer(x) - 3 * x + 1).square().mean(), "row": row}


class Log:
    """The steps of a rank in one attempt, each a line."""

    def __init__(self, folder, attempt, options):
        rank = int(os.environ.get("RANK", "0"))
        self.folder = folder
        self.options = options
        self.attempt = attempt
        self.file = (folder / f"log-{attempt}-{rank}.jsonl").open("ab", buffering=0)

    def write(self, line):
        self.file.write(json.dumps(line).encode() + b"\n")

    def step(self, step, batch, loss):
        self.write({"step": step, "rows": batch["row"].tolist(), "loss": loss.item()})

    def is_saved(self, step):
        """Whether to save after a step, the same on all ranks."""
        return random.Random(f"{self.attempt} {step}").random() < 0.4


def make_loader():
    sampler = fr.order.BatchSampler(NUM_ROWS, fr.OrderSpec(seed=7), global_batch=GLOBAL_BATCH)
    return sampler.count(DataLoader(Rows(), batch_sampler=sampler))


def steps_of(state):
    return state["epoch"] * EPOCH_STEPS + state["samples_consumed"] // GLOBAL_BATCH


def newest(folder, pattern, *, is_whole=Path.exists):
    """The newest whole checkpoint, or None."""
    found = [path for path in folder.glob(pattern) if is_whole(path)]
    return max(found, key=lambda path: int(path.stem.rpartition("-")[2]), default=None)


def accelerate_trainer(log):
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    from fuelrail.loaders.integrations.huggingface import prepare_loader

    config = DataLoaderConfiguration(
        dispatch_batches=log.options.dispatch, split_batches=log.options.split
    )
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=log.options.accumulation, dataloader_config=config
    )
    loader = prepare_loader(accelerator, make_loader())
    model = Model()
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    model, optimiser, prepared = accelerator.prepare(model, optimiser, loader)
    assert prepared is loader
    if checkpoint := newest(log.folder, "step-*"):
        accelerator.load_state(str(checkpoint))
    step = steps_of(loader.state_dict())
    log.write({"start": step})
    while step < NUM_STEPS:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                optimiser.step()
                optimiser.zero_grad()
            log.step(step, batch, loss)
            step += 1
            if log.is_saved(step):
                unfinished = log.folder / f"unfinished-{log.attempt}-{step}"
                accelerator.save_state(str(unfinished))
                accelerator.wait_for_everyone()
                if accelerator.is_main_process:
                    shutil.rmtree(log.folder / f"step-{step}", ignore_errors=True)
                    unfinished.rename(log.folder / f"step-{step}")
                accelerator.wait_for_everyone()


def transformers_trainer(log):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from fuelrail.loaders.integrations.huggingface import set_train_loader

    loader = make_loader()

    class Watch(TrainerCallback):
        def on_train_begin(self, *_, **__):
            self.step = steps_of(loader.state_dict())
            log.write({"start": self.step})

        def on_step_end(self, args, state, control, **_):
            control.should_save = log.is_saved(state.global_step)

        def on_save(self, args, state, control, **_):
            if torch.distributed.is_initialized():
                torch.distributed.barrier()
            (log.folder / f"checkpoint-{state.global_step}" / "whole").touch()

    class Ordered(Trainer):
        def compute_loss(self, model, inputs, **_):
            loss = model(**inputs)["loss"]
            log.step(watch.step, inputs, loss)
            watch.step += 1
            return loss

    watch = Watch()
    updates = -(-EPOCH_STEPS // log.options.accumulation) * (NUM_STEPS // EPOCH_STEPS)
    arguments = TrainingArguments(
        str(log.folder),
        max_steps=updates,
        gradient_accumulation_steps=log.options.accumulation,
        save_strategy="no",
        logging_strategy="no",
        learning_rate=0.1,
        optim="sgd",
        lr_scheduler_type="constant",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        accelerator_config={
            "dispatch_batches": log.options.dispatch,
            "split_batches": log.options.split,
        },
    )
    trainer = Ordered(Model(), arguments)
    set_train_loader(trainer, loader)
    trainer.add_callback(watch)
    checkpoint = newest(log.folder, "checkpoint-*", is_whole=lambda path: (path / "whole").exists())
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))


SAVES = (
    {"every_n_train_steps": 1},
    {"every_n_epochs": 1, "save_on_train_epoch_end": True},
    {"every_n_epochs": 1, "save_on_train_epoch_end": False},  # at each validation's end
    {"every_n_train_steps": 2},
)
"""When Lightning saves a checkpoint, of an attempt."""


def lightning_trainer(log):
    import pytorch_lightning as pl
    from pytorch_lightning.callbacks import ModelCheckpoint

    from fuelrail.loaders.integrations.lightning import exact_checkpoints

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()
            self.is_new = True

        def train_dataloader(self):
            self.loader = make_loader()
            return self.loader

        def val_dataloader(self):
            return DataLoader(Rows(), batch_size=50)

        def validation_step(self, batch):
            self.model(**batch)

        def training_step(self, batch):
            step = steps_of(self.loader.state_dict()) - 1  # it is of the batch received
            if self.is_new:
                log.write({"start": step})
                self.is_new = False
            loss = self.model(**batch)["loss"]
            log.step(step, batch, loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    size = int(os.environ.get("WORLD_SIZE", "1"))
    checkpoint = newest(log.folder, "*.ckpt", is_whole=zipfile.is_zipfile)
    saves = SAVES[log.attempt % len(SAVES)]
    trainer = pl.Trainer(
        max_epochs=NUM_STEPS // EPOCH_STEPS,
        accumulate_grad_batches=log.options.accumulation,
        val_check_interval=log.options.validate_every,
        num_sanity_val_steps=0,
        strategy="ddp",
        devices=size,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            exact_checkpoints(),
            ModelCheckpoint(
                log.folder,
                f"{log.attempt}-{{step}}",
                **saves,
                save_top_k=-1,
                auto_insert_metric_name=False,
            ),
        ],
    )
    trainer.fit(Module(), ckpt_path=checkpoint, weights_only=False)


WARM = {
    "accelerate": ("accelerate", "torch._dynamo", "fuelrail.order"),
    "transformers": ("transformers.trainer", "torch._dynamo", "fuelrail.order"),
    "pytorch_lightning": ("pytorch_lightning", "fuelrail.order"),
}
"""What is imported before ranks are forked, to spare each of them the time."""
TRAINERS = {
    "accelerate": accelerate_trainer,
    "transformers": transformers_trainer,
    "pytorch_lightning": lightning_trainer,
}


def start(train, folder, attempt, options, *, size):
    """Start the ranks of an attempt; returns their process ids."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def work(rank):
        torch.set_num_threads(1)
        if size > 1:
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size),
                "GROUP_RANK": "0",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RUN_ID": "kills",
            }
        os.chdir(folder)
        train(Log(folder, attempt, options))
        os._exit(0)  # without the teardown of a process group that others may have left

    if torch.distributed.is_initialized():  # one that a trainer left, whose threads no child has
        torch.distributed.destroy_process_group()
    return [fork(partial(work, rank)) for rank in range(size)]


def lines_of(folder, attempt, rank):
    file = folder / f"log-{attempt}-{rank}.jsonl"
    data = file.read_bytes() if file.exists() else b""
    return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]


def run_whole(train, folder, options, *, size=1):
    """The rows and loss of each step of a run that nobody kills."""
    folder.mkdir()
    assert [join(pid) for pid in start(train, folder, 0, options, size=size)] == [0] * size
    return collect(folder, [size])


def collect(folder, sizes):
    """The rows and the mean loss of each step that counts: it came before the next attempt began."""
    attempts = [
        [lines_of(folder, attempt, rank) for rank in range(size)]
        for attempt, size in enumerate(sizes)
    ]
    steps = {}
    for ranks in attempts:
        starts = {lines[0]["start"] for lines in ranks if lines}
        assert len(starts) <= 1, "the ranks begin at one step"
        for first in starts:
            steps = {step: entry for step, entry in steps.items() if step < first}
            assert sorted(steps) == list(range(first)), "no step is missing before it"
        for lines in zip(*(lines[1:] for lines in ranks), strict=False):
            (step,) = {line["step"] for line in lines}
            rows = [row for line in lines for row in line["rows"]]
            steps[step] = rows, sum(line["loss"] for line in lines) / len(lines)
    return steps


def run_kills(name, folder, num_kills, seed):
    """Kill this number of times; return the steps, each compared with a run that nobody killed."""
    pytest.importorskip(name, reason=f"{name} is not installed")
    for module in WARM[name]:
        importlib.import_module(module)
    train = TRAINERS[name]
    draw = random.Random(seed)
    kills = compared = 0
    unbroken = {}
    while kills < num_kills:
        options = Options(
            accumulation=draw.choice((1, 3)),
            dispatch=draw.random() < 0.5,
            split=draw.random() < 0.5,
            validate_every=draw.choice((3, 4)),
        )
        if options.accumulation not in unbroken:
            whole = run_whole(train, folder / f"whole-{options.accumulation}", options)
            unbroken[options.accumulation] = whole
        run = folder / f"run-{kills}"
        run.mkdir()
        sizes = []
        is_killed = True
        while is_killed:
            size = draw.choice([size for size in SIZES if size not in sizes[-1:]])
            num_lines = draw.randint(1, 16) if kills < num_kills else NUM_STEPS
            pids = start(train, run, len(sizes), options, size=size)
            is_killed = kill(pids, partial(lines_of, run, len(sizes), 0), num_lines, draw)
            kills += is_killed
            sizes.append(size)
        compared += compare(collect(run, sizes), unbroken[options.accumulation])
        shutil.rmtree(run)
    return compared


def kill(pids, lines, num_lines, draw):
    """Kill ranks a moment after the first of them has this number of lines; return whether they were killed."""
    while len(lines()) < num_lines and any(map(is_running, pids)):
        time.sleep(0.002)
    time.sleep(draw.uniform(0, 0.02))
    for pid in draw.sample(pids, len(pids)):
        with suppress(ProcessLookupError):
            if num_lines < NUM_STEPS:
                os.kill(pid, signal.SIGKILL)
    statuses = [join(pid) for pid in pids]
    assert set(statuses) <= {0, -signal.SIGKILL}, statuses
    return -signal.SIGKILL in statuses


def is_running(pid):
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def compare(steps, unbroken):
    """Compare each step with those of a run that nobody killed, and let a witness judge each epoch."""
    order = fr.order.BatchSampler(
        NUM_ROWS, fr.OrderSpec(seed=7), global_batch=GLOBAL_BATCH, world=fr.World()
    )
    witness = fr.witness((), expected=NUM_ROWS, tail="drop", on_fault="ignore")
    assert sorted(steps) == list(range(NUM_STEPS))
    for step in range(NUM_STEPS):
        rows, loss = steps[step]
        assert rows == order[step], step
        assert loss == pytest.approx(unbroken[step][1], rel=1e-4), step
        if step % EPOCH_STEPS == 0:
            witness.set_epoch(step // EPOCH_STEPS)
        witness.note({"index": rows})
        if (step + 1) % EPOCH_STEPS == 0:
            report = witness.end_epoch()
            assert not report.faults, report.as_text()
    return len(steps)
