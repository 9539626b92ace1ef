"""Run a command on hostile input in a fork, and see what it took, said and wrote."""

from __future__ import annotations

import hashlib
import mmap
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from support.forked import fork, join, resident_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

SECONDS = 10  # without those in which it stood in line for a CPU
STUCK_SECONDS = 120
MEMORY_BYTES = 1024 << 20  # beyond what the fork begins with


class Outcome(NamedTuple):
    """How one command ended: exit status (minus a signal), seconds (without those in which it stood in
    line for a CPU), memory that it took [bytes], what it printed.
    """

    status: int
    seconds: float
    memory_bytes: int
    text: str

    def faults(self, memory_bytes: int = MEMORY_BYTES) -> list[str]:
        """What must not be."""
        problems = []
        if self.status not in (0, 1, 2):
            problems.append(f"ended with {self.status}")
        if "Traceback" in self.text:
            problems.append("a traceback: " + self.text.strip().rpartition("\n")[2][:200])
        if self.seconds > SECONDS:
            problems.append(f"took {self.seconds:.1f} s")
        if self.memory_bytes > memory_bytes:
            problems.append(f"took {self.memory_bytes >> 20} MiB")
        if any(not (char.isprintable() or char == "\n") for char in self.text):
            problems.append(f"printed control characters: {self.text[:200]!r}")
        longest = max(map(len, self.text.split("\n")))
        if longest > 12_000:
            problems.append(f"printed a line of {longest} characters")
        return problems


def run(command: list[str] | Callable[[], int], place: Path) -> Outcome:
    """A command line, or a function, in a fork whose home and current folder are ``place``."""
    output = place / "output.txt"
    start_s = time.monotonic()
    at_first = mmap.mmap(-1, 8)  # shared with the fork

    def work() -> None:
        at_first[:] = resident_bytes().to_bytes(8, "little")
        handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8") for number in (1, 2))
        os.chdir(place)
        os.environ.update(
            HOME=str(place),
            TMPDIR=str(place / "tmp"),
            XDG_CACHE_HOME=str(place / "tmp"),
        )
        tempfile.tempdir = None
        from fuelrail.__main__ import main

        try:
            status = main(command) if isinstance(command, list) else command()
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 70
        except BaseException:  # noqa: BLE001 - reported by traceback and status
            traceback.print_exc()
            status = 70
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    sys.stdout.flush()
    pid = fork(work)
    ended = None
    while ended is None and time.monotonic() - start_s < STUCK_SECONDS:
        seconds = time.monotonic() - start_s - _seconds_in_line(pid)
        if seconds > 2 * SECONDS:
            break
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        time.sleep(0.002)
    seconds = time.monotonic() - start_s - _seconds_in_line(pid)
    if ended is None:
        os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    text = output.read_text(errors="replace") if output.exists() else ""
    memory_bytes = (usage.ru_maxrss << 10) - int.from_bytes(at_first, "little")
    return Outcome(os.waitstatus_to_exitcode(status), seconds, memory_bytes, text)


def _seconds_in_line(pid: int) -> float:
    """How long the process was ready to run while others had the CPUs: its first thread's, which
    the kernel keeps until the process is waited for.
    """
    delay_ns = Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[1]
    return int(delay_ns) / 1e9


def in_fork(work: Callable[[], object]) -> None:
    """Run it in a fork, so that this process has neither its threads nor its memory."""
    assert join(fork(work)) == 0, "the dataset could not be made"


def footprint(place: Path) -> dict[str, str]:
    """Every path under ``place`` but OUT, temporary files and our own record, with its kind and
    content.
    """
    contents = {}
    for path in sorted(place.rglob("*")):
        name = str(path.relative_to(place))
        if name.partition("/")[0] in ("out", "tmp", "output.txt"):
            continue
        regular = path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 30
        contents[name] = (
            hashlib.sha256(path.read_bytes()).hexdigest() if regular else str(path.lstat().st_mode)
        )
    return contents
