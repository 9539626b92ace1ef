"""MosaicML Streaming over MDS shards."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import streaming
import torch.distributed as dist
from streaming.base.util import clean_stale_shared_memory

from fuelrail.bench.peers.stacks.stack import Setup, Stack


class MosaicStack(Stack):
    """The state of the first rank's loader is loaded by all."""

    packages = ("mosaicml-streaming", "torch")
    way = "state_dict() and load_state_dict() of StreamingDataLoader"
    offers = frozenset({"mix"})
    is_shared = True

    @staticmethod
    def store(setup: Setup, folder: Path) -> None:
        parts = setup.parts if setup.is_mixed else [range(setup.rows)]
        for number, part in enumerate(parts):
            out = str(folder / str(number))
            with streaming.MDSWriter(out=out, columns={"index": "int"}, size_limit=300) as writer:
                for row in part:
                    writer.write({"index": row})
        shutil.copytree(folder / "0", folder / "evaluation")

    def loader(self, *, shuffle: bool = True) -> Any:
        setup = self.setup
        folders = sorted(map(str, self.job.folder.glob("[0-9]" if shuffle else "evaluation")))
        options: dict[str, Any] = {"local": folders[0]}
        if len(folders) > 1:
            shares = zip(folders, (2 / 3, 1 / 3), strict=True)
            streams = [streaming.Stream(local=place, proportion=share) for place, share in shares]
            options = {"streams": streams, "epoch_size": setup.rows}
        rows = streaming.StreamingDataset(
            shuffle=shuffle,
            shuffle_seed=3,
            batch_size=setup.batch,
            **options,
        )
        return streaming.StreamingDataLoader(
            rows,
            batch_size=setup.batch,
            num_workers=setup.workers,
            drop_last=setup.drop_last,
        )

    def open(self) -> None:
        dist.init_process_group("gloo")
        clean_stale_shared_memory()  # of ranks that were killed
        super().open()

    def restore(self) -> None:
        super().restore()
        self.job.epoch = self.saved["epoch"]  # before its end is passed, the loop yields nothing
