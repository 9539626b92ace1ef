"""One rank that runs some of configs/trainers: each to step 3, then again from its checkpoint to step 8.

Arguments: DATASET OUT EXAMPLE[:KEY=VALUE] ...; what an example prints goes to OUT/EXAMPLE-RANK.txt.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from pathlib import Path

import torch.distributed as dist

EXAMPLES = Path(__file__).parents[2] / "configs" / "trainers"
BRING_THEIR_OWN_GROUP = {"lightning_ddp", "accelerate_ddp", "deepspeed_zero", "mmengine_runner"}


def run(dataset: str, out: Path, example: str) -> None:
    name, _, setting = example.partition(":")
    key, _, value = setting.partition("=")
    options = {key: int(value)} if key else {}
    module = importlib.import_module(name)
    checkpoint = str(out / f"{name}{value}")
    with (out / f"{name}{value}-{os.environ['RANK']}.txt").open("w") as file, contextlib.redirect_stdout(file):
        for steps in ("3", "8"):
            module.main([dataset, "--steps", steps, "--checkpoint", checkpoint], **options)


def main(dataset: str, out: str, *examples: str) -> None:
    sys.path.insert(0, str(EXAMPLES))
    if not BRING_THEIR_OWN_GROUP.intersection(example.partition(":")[0] for example in examples):
        dist.init_process_group("gloo")
    for example in examples:
        run(dataset, Path(out), example)
    if dist.is_initialized():
        dist.destroy_process_group()


main(*sys.argv[1:])
