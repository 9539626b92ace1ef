"""Child processes without start-up time: a function run in a fork, whose outcome is its exit status."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from pathlib import Path


def fork(work) -> int:
    """Run ``work()`` in a child; returns its process id. The child exits with 0, or 1 after an exception."""
    with warnings.catch_warnings():
        # The child uses no thread and no lock of the parent, which is what newer Pythons warn of.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    except BaseException:  # noqa: BLE001 - reported by traceback and status
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def resident_bytes() -> int:
    """What this process has in memory. A fork begins with its parent's, and so does `ru_maxrss`, even beyond exec."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf(
        "SC_PAGE_SIZE"
    )


def join(pid: int) -> int:
    """Wait for the child; its exit status, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
