"""One rank of an example of configs/trainers, killed after a step. Arguments: EXAMPLE STEP, then the example's."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "configs" / "trainers"))


def main(name: str, last: int, *words: str) -> None:
    example = importlib.import_module(name)

    def end(record, losses):
        if record.step == last and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    example.main(words, on_step=end)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
