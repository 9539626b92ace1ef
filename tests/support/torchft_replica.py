"""A replica of configs/trainers/torchft_ddp.py, which may kill itself after the backward of one of its steps.

Arguments: folder of the example, which of its own steps is its last (0: none), and those of the example.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch.distributed as dist


def main() -> None:
    sys.path.insert(0, sys.argv.pop(1))
    last_step = int(sys.argv.pop(1))
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    os.environ["MASTER_PORT"] = str(store.port)
    import torchft_ddp

    report = torchft_ddp.report
    steps: list[int] = []

    def report_and_die(step: int, *arguments: object) -> None:
        report(step, *arguments)
        steps.append(step)
        if len(steps) == last_step:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.4)  # replicas that start late join, too

    torchft_ddp.report = report_and_die
    torchft_ddp.main()


if __name__ == "__main__":
    main()
