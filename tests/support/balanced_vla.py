"""One rank of the example of a vision-language-action model, in one order and balanced. Arguments: DATASET FOLDER.

It has no dropout, whose draws would depend on which rank has a sample. Each rank writes for each run and step its own
loss and the means over ranks.
"""

from __future__ import annotations

import importlib
import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "configs" / "trainers"))


def main(dataset: str, folder: str) -> None:
    torch.set_num_threads(1)
    example = importlib.import_module("vla")
    example.divide = partial(example.divide, partial(example.Vla, dropout=0.0))
    losses_by_run: dict[str, list[tuple[float | None, dict[str, float]]]] = {
        "plain": [],
        "balanced": [],
    }
    for name, words in (
        ("plain", []),
        ("balanced", ["--balance=timestamp_ns"]),
    ):
        options = [
            "--strategy=ddp",
            *words,
            dataset,
            "--steps",
            "3",
            "--checkpoint",
            f"{folder}/{name}",
        ]
        example.main(
            options,
            on_step=lambda record, losses, name=name: losses_by_run[name].append(
                (record.loss, losses)
            ),
        )
    Path(folder, f"rank-{dist.get_rank()}.json").write_text(json.dumps(losses_by_run))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
