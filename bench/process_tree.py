"""CPU time and memory of a process with all that it started, read from ``/proc``."""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc")


def tree_pids(root: int) -> list[int]:
    """The process and all its descendants that live."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo += children.get(pid, [])
    return found


def tree_cpu_s(root: int) -> float:
    """User and system time of a process, its descendants, and those of their children that ended [s]."""
    ticks = 0
    for pid in tree_pids(root):
        if fields := _stat(pid):
            # utime, stime, cutime, cstime: fields 14 to 17 of proc(5), here from the third on
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def tree_memory_bytes(root: int) -> int:
    """Memory of a process and its descendants; pages that several share are counted once (PSS)."""
    total = 0
    for pid in tree_pids(root):
        try:
            text = (_PROC / str(pid) / "smaps_rollup").read_text(encoding="ascii")
        except OSError:  # ended meanwhile
            continue
        total += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) * 1024
    return total


def _stat(pid: int) -> list[str] | None:
    """``/proc/PID/stat`` behind the name, which may hold anything."""
    try:
        return (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")[2].split()
    except OSError:
        return None
