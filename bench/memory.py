"""The memory that this process took at most."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_memory_bytes() -> int:
    """Peak resident set of this process.

    Linux: VmHWM of ``/proc/self/status``. ``ru_maxrss`` is no substitute there: a process inherits it from the one that
    it was forked from, so under a large parent a small process looks as large.
    """
    try:
        found = re.search(r"^VmHWM:\s*(\d+) kB", _STATUS.read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        found = None
    if found is not None:
        return int(found.group(1)) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
