"""LitData's StreamingDataLoader over optimized chunks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import litdata

from fuelrail.bench.peers.stacks.rows import Rows
from fuelrail.bench.peers.stacks.stack import Setup, Stack

SEED = 3


def read_row(row: int) -> dict[str, Any]:
    """Return what is stored of a row."""
    return Rows(range(row, row + 1))[0]


class LitdataStack(Stack):
    """The loader's state, which each rank is given."""

    packages = ("litdata", "torch")
    way = (
        "state_dict() and load_state_dict() of StreamingDataLoader, that of the first rank for all"
    )
    offers = frozenset({"mix"})
    is_shared = True

    @staticmethod
    def store(setup: Setup, folder: Path) -> None:
        parts = setup.parts if setup.is_mixed else [range(setup.rows)]
        for number, part in enumerate(parts):
            litdata.optimize(
                fn=read_row,
                inputs=list(part),
                output_dir=str(folder / str(number)),
                num_workers=1,
                chunk_size=len(setup.shards(part)[0]),
            )

    def loader(self, *, shuffle: bool = True) -> Any:
        setup = self.setup
        os.environ |= {"GLOBAL_RANK": str(self.rank), "NNODES": "1"}
        options: dict[str, Any] = {
            "shuffle": shuffle,
            "seed": SEED,
            "drop_last": setup.drop_last,
        }
        folders = sorted(folder for folder in self.job.folder.iterdir() if folder.name.isdigit())
        parts = [litdata.StreamingDataset(str(folder), **options) for folder in folders]
        rows = parts[0]
        if setup.is_mixed:
            rows = litdata.CombinedStreamingDataset(
                parts,
                seed=SEED,
                weights=[2 / 3, 1 / 3],
                iterate_over_all=False,
            )
        return litdata.StreamingDataLoader(
            rows,
            batch_size=setup.batch,
            num_workers=setup.workers,
            drop_last=setup.drop_last,
        )

    def restore(self) -> None:
        super().restore()
        # After an epoch's last batch it yields the rows of the next epoch.
        self.job.epoch += not self.job.steps_left
