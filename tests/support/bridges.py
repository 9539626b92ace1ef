"""Bridges of `fr.order` to other frameworks: each stops at random, continues on other ranks, and misses no row."""

from __future__ import annotations

import json
import random
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import fuelrail as fr
from support.bridged_orders import (
    GLOBAL_BATCH,
    LENGTHS,
    NUM_ROWS,
    ORDERS,
    WORLDS,
    GrainBatches,
    GrainRows,
    add_subset,
    sampler_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Run = Callable[[str, fr.World, Any, int, Path], tuple[list[list[int]], Any]]
    """Name of an order, rank, state (None: the beginning), steps, folder: to the rows of each step, and the state."""


class Rows(Dataset[int]):
    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, row: int) -> int:
        return row


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def torch_run(
    name: str,
    world: fr.World,
    state: Any,
    num_steps: int,
    _folder: Path,
    *,
    dataset: Any = None,
    rows_of: Callable[[Any], list[int]] = torch.Tensor.tolist,
    kind: type[Any] = fr.order.BatchSampler,
    **options: Any,
) -> tuple[list[list[int]], Any]:
    sampler = sampler_of(name, world, kind)
    if kind is fr.order.Sampler:
        options |= {"sampler": sampler, "batch_size": sampler.rank_batch}
    else:
        options |= {"batch_sampler": sampler}
    loader = sampler.count(DataLoader(dataset or Rows(), **options))
    if state is not None:
        loader.load_state_dict(json.loads(state))
    batch_rows = [rows_of(batch) for batch in islice(endless(loader), num_steps)]
    return batch_rows, json.dumps(loader.state_dict())


def stateful_run(
    name: str,
    world: fr.World,
    state: Any,
    num_steps: int,
    _folder: Path,
    **options: Any,
) -> tuple[list[list[int]], Any]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(
        Rows(),
        batch_sampler=sampler_of(name, world, fr.order.StatefulSampler),
        **options,
    )
    if state is not None:
        loader.load_state_dict(state)
    batch_rows = [batch.tolist() for batch in islice(endless(loader), num_steps)]
    return batch_rows, loader.state_dict()


def loop_run(
    name: str, world: fr.World, state: Any, num_steps: int, _folder: Path
) -> tuple[list[list[int]], Any]:
    sampler = sampler_of(name, world)
    first = state or 0
    return [sampler[step] for step in range(first, first + num_steps)], first + num_steps


def accelerate_run(
    name: str, world: fr.World, state: Any, num_steps: int, folder: Path
) -> tuple[list[list[int]], Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    sampler = sampler_of(name, world)
    loader = sampler.count(DataLoader(Rows(), batch_sampler=sampler))
    accelerator.register_for_checkpointing(loader)
    if state is not None:
        accelerator.load_state(state)
    batch_rows = [batch.tolist() for batch in islice(endless(loader), num_steps)]
    accelerator.save_state(str(folder / "accelerate"))
    return batch_rows, str(folder / "accelerate")


def lightning_run(
    name: str, world: fr.World, state: Any, num_steps: int, folder: Path
) -> tuple[list[list[int]], Any]:
    import lightning.pytorch as pl

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.seen = []  # type: ignore[var-annotated]

        def train_dataloader(self) -> Any:
            sampler = sampler_of(name, world)
            return sampler.count(DataLoader(Rows(), batch_sampler=sampler))

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            self.seen.append(batch.tolist())
            return self.layer(batch.float()[:, None]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-9)

    steps_done, file = state or (0, None)
    trainer = pl.Trainer(
        max_steps=steps_done + num_steps,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    trainer.fit(model, ckpt_path=file, weights_only=False)
    trainer.save_checkpoint(folder / "lightning.ckpt")
    return model.seen, (steps_done + num_steps, str(folder / "lightning.ckpt"))


def trainer_run(
    name: str, world: fr.World, state: Any, num_steps: int, folder: Path
) -> tuple[list[list[int]], Any]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    sampler = sampler_of(name, world)
    batch_rows = []
    loader = sampler.count(
        DataLoader(
            Rows(),
            batch_sampler=sampler,
            collate_fn=lambda rows: {"row": torch.tensor(rows)},
        )
    )
    steps_done, checkpoint = state or (0, None)
    if checkpoint is not None:
        loader.load_state_dict(json.loads(Path(checkpoint, "order.json").read_text()))

    class Position(TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, _control: Any, **_options: Any) -> None:
            saved = Path(args.output_dir, f"checkpoint-{state.global_step}", "order.json")
            saved.write_text(json.dumps(loader.state_dict()))

    class Ordered(Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return loader

        def compute_loss(self, model: Any, inputs: Any, **_options: Any) -> Any:
            batch_rows.append(inputs["row"].tolist())
            return model(inputs["row"].float()[:, None]).square().mean()

    until = steps_done + num_steps
    arguments = TrainingArguments(
        str(folder),
        max_steps=until,
        save_steps=until,
        ignore_data_skip=True,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        save_total_limit=1,
        learning_rate=1e-9,
        logging_strategy="no",
    )
    Ordered(torch.nn.Linear(1, 1), arguments, callbacks=[Position()]).train(
        resume_from_checkpoint=checkpoint
    )
    return batch_rows, (until, str(folder / f"checkpoint-{until}"))


def grain_run(
    name: str,
    world: fr.World,
    state: Any,
    num_steps: int,
    _folder: Path,
    *,
    workers: int = 0,
) -> tuple[list[list[int]], Any]:
    import grain

    loader = grain.DataLoader(
        data_source=GrainRows(),
        sampler=GrainBatches(name, world),
        shard_options=grain.sharding.NoSharding(),
        worker_count=workers,
    )
    iterator = iter(loader)
    if state is not None:
        iterator.set_state(state)
    batch_rows = [next(iterator).tolist() for _ in range(num_steps)]
    return batch_rows, iterator.get_state()


@cache
def hugging_face() -> Any:
    import datasets

    return datasets.Dataset.from_dict({"row": list(range(NUM_ROWS))})


@cache
def lance_rows(folder: Path) -> Any:
    import lance
    import pyarrow as pa

    stored = lance.write_dataset(
        pa.table({"row": range(NUM_ROWS)}),
        str(folder / "rows.lance"),
        max_rows_per_file=100,
    )

    class LanceRows(Rows):
        def __getitems__(self, rows: list[int]) -> Any:
            return [record["row"] for record in stored.take(rows).to_pylist()]

    return LanceRows()


@cache
def lerobot_episodes(folder: Path) -> Any:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    features = {
        "observation.state": {
            "dtype": "float32",
            "shape": (2,),
            "names": ["episode", "frame"],
        }
    }
    dataset = LeRobotDataset.create(
        "me/episodes", 10, features, root=folder / "episodes", use_videos=False
    )
    for episode, length in enumerate(LENGTHS):
        for frame in range(length):
            dataset.add_frame(
                {
                    "observation.state": np.array([episode, frame], np.float32),
                    "task": "move",
                }
            )
        dataset.save_episode()
    dataset.finalize()
    return LeRobotDataset("me/episodes", root=folder / "episodes")


@cache
def image_folder(folder: Path) -> Any:
    from PIL import Image
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import PILToTensor

    (folder / "images" / "all").mkdir(parents=True)
    for row in range(NUM_ROWS):
        Image.new("RGB", (1, 1), (row // 256, row % 256, 0)).save(
            folder / "images" / "all" / f"{row:04d}.png"
        )
    return ImageFolder(str(folder / "images"), transform=PILToTensor())


def over_data(make_dataset: Callable[[Path], Any], rows_of: Callable[[Any], list[int]]) -> Run:
    def run(
        name: str, world: fr.World, state: Any, num_steps: int, folder: Path
    ) -> tuple[list[list[int]], Any]:
        return torch_run(
            name,
            world=world,
            state=state,
            num_steps=num_steps,
            _folder=folder,
            dataset=make_dataset(folder),
            rows_of=rows_of,
        )

    return run


TWO = {"num_workers": 2, "prefetch_factor": 3}
BRIDGES: dict[str, tuple[str, Run]] = {
    "torch": ("torch", torch_run),
    "torch, rows": ("torch", partial(torch_run, kind=fr.order.Sampler)),
    "torch, 2 workers": ("torch", partial(torch_run, **TWO)),
    "torchdata": ("torchdata", stateful_run),
    "torchdata, 2 workers": ("torchdata", partial(stateful_run, **TWO)),
    "torchdata, every 4th step": (
        "torchdata",
        partial(stateful_run, snapshot_every_n_steps=4),
    ),
    "Trainer": ("transformers", trainer_run),
    "Accelerate": ("accelerate", accelerate_run),
    "Lightning": ("lightning", lightning_run),
    "Grain": ("grain", grain_run),
    "Grain, 2 workers": ("grain", partial(grain_run, workers=2)),
    "a loop": ("numpy", loop_run),
    "Datasets": (
        "datasets",
        over_data(lambda _: hugging_face(), lambda batch: batch["row"].tolist()),
    ),
    "Lance": ("lance", over_data(lance_rows, torch.Tensor.tolist)),
    "LeRobot": (
        "lerobot",
        over_data(lerobot_episodes, lambda batch: batch["index"].tolist()),
    ),
    "torchvision": (
        "torchvision",
        over_data(
            image_folder,
            lambda batch: [256 * r + g for r, g, _ in batch[0].flatten(1).tolist()],
        ),
    ),
}


def stop_and_continue(run: Run, num_stops: int, folder: Path, seed: int) -> int:
    """Stop this number of times, over all orders; return the steps, each compared with the uninterrupted run."""
    draw = random.Random(seed)
    compared = 0
    add_subset(folder)
    references = {name: sampler_of(name, fr.World()) for name in ORDERS}
    positions: dict[str, tuple[Any, int]] = dict.fromkeys(ORDERS, (None, 0))
    for stop in range(num_stops):
        name = list(ORDERS)[stop % len(ORDERS)]
        state, step = positions[name]
        size = draw.choice(WORLDS)
        num_steps = draw.randrange(1, 12)
        world = fr.World(draw.randrange(size), size)
        order_folder = folder / name
        order_folder.mkdir(exist_ok=True)
        batch_rows, state = run(name, world, state, num_steps, order_folder)
        part = GLOBAL_BATCH // size
        expected = [
            references[name][step + k][world.rank * part :][:part] for k in range(num_steps)
        ]
        assert batch_rows == expected, (name, stop, step, world)
        compared = compared + num_steps
        positions[name] = (state, step + num_steps)
    return compared
