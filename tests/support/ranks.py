"""Runs a script of the tests as several ranks, under the real launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def run_ranks(num_ranks: int, *arguments: object, timeout_s: float = 280) -> str:
    """``torchrun --nproc-per-node NUM ARGUMENTS``; returns what the ranks printed, fails with it if one failed."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)),
        *map(str, arguments),
    ]
    done = subprocess.run(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, done.stdout[:6000]
    return done.stdout


def environment() -> dict[str, str]:
    """Ours, with the package and the tests' support importable, and gloo on the loopback interface."""
    paths = [str(TESTS.parent / ".src"), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return {**os.environ, **quiet, "PYTHONPATH": os.pathsep.join(paths)}
