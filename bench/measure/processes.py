"""A process in its own group, which is paused, resumed and ended with all processes that it started."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import fuelrail
from fuelrail.pipeline.errors import needs
from fuelrail.pipeline.runtime.workers import ctrl_c_waits

_T = TypeVar("_T", int, float)

_GONE_S = 2.0
_POLL_S = 0.005

WAS_INTERRUPTED: Final = "the run was interrupted"
"""Why a report is partial after Ctrl+C or SIGTERM."""

NOTHING_MEASURED: Final = "before anything was measured whole: no report was written"
"""Message of a KeyboardInterrupt that ends a command too early for a partial report."""


def package_environment() -> dict[str, str]:
    """Return our environment, in which an interpreter imports the same `fuelrail` as this process."""
    package_root = str(Path(fuelrail.__file__).parents[1])
    paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


@contextlib.contextmanager
def process_group(
    command: Sequence[str], environment: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Start it, with ``log`` for what it says; it is killed, its workers as well, when the context ends.

    If this process is killed while the group is stopped, the kernel ends it: it is left stopped and orphaned.
    """
    with contextlib.ExitStack() as ends, log.open("wb") as out:
        with ctrl_c_waits():  # one that came during the start would leave the process running
            # In this session: only such a group is looked after when its parent ends.
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment, process_group=0
            )
            ends.callback(_end, process)
        yield process


def signal_group(process: subprocess.Popen[bytes], signum: int) -> bool:
    """Send a signal to the process and all that it started; False where nothing is left of them."""
    try:
        os.killpg(process.pid, signum)
    except ProcessLookupError:
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    signal_group(process, signal.SIGKILL)
    process.wait()
    # Its workers are gone a moment later, or never in a container without an init, which would reap orphans.
    deadline_s = time.monotonic() + _GONE_S
    while signal_group(process, 0) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)


def tree_cpu_s(root: int) -> float:
    """Return user and system time of a process, its descendants, and those of their children that ended [s]."""
    return sum(_each(root, lambda process: sum(process.cpu_times()[:4])))


def tree_memory_bytes(root: int) -> int:
    """Return the memory of a process and its descendants; pages that several share are counted once (PSS)."""
    return sum(_each(root, lambda process: process.memory_full_info().pss))


def _each(root: int, of: Callable[[Any], _T]) -> Iterator[_T]:
    """Yield a figure of a process and of each of its descendants; those that end in between have none."""
    with needs("a figure of processes", "fuelrail[bench]"):
        import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        parent: Any = psutil.Process(root)
        for process in [parent, *parent.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                yield of(process)


def storage_bytes_read() -> int | None:
    """Return the bytes that storage read for this process, with page faults; None where the kernel does not say."""
    try:
        text = Path("/proc/self/io").read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(r"^read_bytes: (\d+)", text, re.MULTILINE)
    return None if found is None else int(found.group(1))
