"""One rank of configs/trainers/vla.py, which is killed after a step. Arguments: STEP, then those of the example."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "configs" / "trainers"))


def main(last: int, *words: str) -> None:
    import vla

    def end(record, losses):
        if record.step == last and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    vla.main(words, on_step=end)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
