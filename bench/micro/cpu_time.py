"""CPU time of a client and of its server, each on cores of its own where there are enough."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator


@contextlib.contextmanager
def apart(*servers: int) -> Iterator[bool]:
    """Keep these processes on the last core and this one on the others meanwhile; False where there is one core only.

    Threads that begin meanwhile stay where their creator is.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        yield False
        return
    for server in servers:
        pin(server, cores[-1:])
    pin(os.getpid(), cores[:-1])
    try:
        yield True
    finally:
        pin(os.getpid(), cores)


def pin(process: int, cores: Collection[int]) -> None:
    """Let all threads of a process run on these cores only."""
    for thread in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)


def cpu_s(process: int) -> float:
    """CPU seconds that a process took so far, by the kernel's clock ticks."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
