"""torchtitan's text loader, on a tokenizer that makes a sequence of each row."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
from torchtitan.hf_datasets import DatasetConfig, text_datasets

from fuelrail.bench.peers.stacks.stack import Setup, Stack

LENGTH = 4


class RowTokenizer:
    """Makes a sequence of a row's number."""

    def encode(self, text: str, **_: bool) -> list[int]:
        return [int(text)] * (LENGTH + 1)


class TitanStack(Stack):
    """Its checkpoint is one of all ranks."""

    packages = ("torchtitan", "torchdata", "datasets", "torch")
    way = "state_dict() and load_state_dict() of HuggingFaceTextDataLoader, the ranks' in one"

    @staticmethod
    def store(setup: Setup, folder: Path) -> None:
        texts = [str(row) for row in range(setup.rows)]
        dataset = datasets.Dataset.from_dict({"text": texts})
        dataset.save_to_disk(str(folder / "rows"))

    def loader(self, *, shuffle: bool = True) -> Any:  # noqa: ARG002 - the first epoch never is
        setup = self.setup
        path = str(self.job.folder / "rows")
        text_datasets.DATASETS["rows"] = DatasetConfig(
            path=path,
            loader=datasets.load_from_disk,
            sample_processor=lambda row: row["text"],
        )
        kind = text_datasets.HuggingFaceTextDataLoader
        config = kind.Config(dataset="rows", num_workers=setup.workers)
        return kind(
            config,
            dp_world_size=setup.ranks,
            dp_rank=self.rank,
            tokenizer=RowTokenizer(),
            seq_len=LENGTH,
            local_batch_size=setup.batch,
        )

    def open(self) -> None:
        super().open()
        self.iterator = iter(self.train_loader)

    def restore(self) -> None:
        merged: dict[str, Any] = {}
        for state in self.job.states:
            merged |= state
        self.train_loader.load_state_dict(merged)

    def epoch(self, _epoch: int) -> Iterable[Any]:
        for inputs, _ in itertools.islice(self.iterator, self.job.steps_left):
            yield inputs["input"][:, 0].tolist()

    def evaluate(self) -> None:
        for _ in itertools.islice(self.loader(), 5):
            pass
