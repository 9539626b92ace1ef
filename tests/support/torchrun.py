"""torchrun without the start-up time of its ranks: they are forks of one process that has torch loaded::

python -m support.torchrun --standalone --nproc-per-node NUM SCRIPT ...
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys

from support.forked import fork
from support.ranks import run_program


def main(num_ranks: int, words: list[str]) -> int:
    """Run a script as ranks; when one fails, the others are killed."""
    importlib.import_module("torch._dynamo")  # which an optimiser imports at its first step
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    running = set()
    for rank in range(num_ranks):
        environment = world | {"RANK": rank, "LOCAL_RANK": rank}
        running.add(fork(lambda env=environment: run_program(words, env, None)))
    has_failed = False
    while running:
        pid, status = os.wait()
        running.remove(pid)
        if status and not has_failed:
            has_failed = True
            for other in running:
                os.kill(other, signal.SIGKILL)
    return int(has_failed)


if __name__ == "__main__":
    _, _, _, num, *script = sys.argv
    sys.exit(main(int(num), script))
