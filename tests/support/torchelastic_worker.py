"""A worker of configs/trainers/torchelastic_ddp.py on a node that may die: SIGKILL of the worker and of its torchrun.

Arguments: folder of the example, folder of a line of JSON for each step, number of the node, after how many steps of
its own the node dies (0: never), and those of the example.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

STEP_S = 0.4
"""Pause after each step: nodes that start late join in time."""


def main() -> None:
    examples, folder, node, num_steps = sys.argv[1:5]
    del sys.argv[1:5]
    sys.path.insert(0, examples)
    import example
    import torchelastic_ddp

    steps = []

    def note(step: int, loss: float, batch: dict[str, Any]) -> None:
        steps.append(step)
        line = [step, generation, dist.get_world_size(), dist.get_rank(), batch["sample_key"]]
        with Path(folder, f"{node}.jsonl").open("a") as lines:
            lines.write(json.dumps(line) + "\n")
        if len(steps) == int(num_steps):
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(STEP_S)

    torchelastic_ddp.report = note
    example.join_group()
    generations = [time.time_ns()]
    dist.broadcast_object_list(generations)
    [generation] = generations  # the same on all workers, later ones are greater
    torchelastic_ddp.main()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
