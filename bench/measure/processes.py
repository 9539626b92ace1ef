"""Processes: their environment, the use of a tree of them, what storage read for one."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import fuelrail
from fuelrail.pipeline.errors import needs

_T = TypeVar("_T", int, float)

WAS_INTERRUPTED: Final = "the run was interrupted"
"""Why a report is partial after Ctrl+C or SIGTERM."""

NOTHING_MEASURED: Final = "before anything was measured whole: no report was written"
"""Message of a KeyboardInterrupt that ends a command too early for a partial report."""


def package_environment() -> dict[str, str]:
    """Return our environment, in which an interpreter imports the same `fuelrail` as this
    process.
    """
    package_root = str(Path(fuelrail.__file__).parents[1])
    paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def tree_cpu_s(root: int) -> float:
    """Return user and system time of a process, its descendants, and those of their children
    that ended [s].
    """
    return sum(_tree_figures(root, lambda process: sum(process.cpu_times()[:4])))


def tree_memory_bytes(root: int) -> int:
    """Return the memory of a process and its descendants; pages that several share are counted
    once (PSS).
    """
    return sum(_tree_figures(root, lambda process: process.memory_full_info().pss))


def _tree_figures(root: int, figure: Callable[[Any], _T]) -> Iterator[_T]:
    """Yield a figure of a process and of each of its descendants; those that end in between have
    none.
    """
    with needs("a figure of processes", "fuelrail[bench]"):
        import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        parent: Any = psutil.Process(root)
        for process in [parent, *parent.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                yield figure(process)


def storage_bytes_read() -> int | None:
    """Return the bytes that storage read for this process, with page faults; None where the
    kernel does not say.
    """
    try:
        text = Path("/proc/self/io").read_text(encoding="ascii")
    except OSError:
        return None
    match = re.search(r"^read_bytes: (\d+)", text, re.MULTILINE)
    return None if match is None else int(match.group(1))
