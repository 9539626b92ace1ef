"""A process in its own group, which is paused, resumed and ended with all processes that it
started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fuelrail.pipeline.runtime.workers import ctrl_c_waits

_GONE_S = 2.0
_POLL_S = 0.005


@contextlib.contextmanager
def process_group(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start it, with ``log`` for what it says; it is killed, its workers as well, when the context
    ends.

    If this process is killed while the group is stopped, the kernel ends it: it is left stopped and
    orphaned.
    """
    with contextlib.ExitStack() as ends, log.open("wb") as out:
        with ctrl_c_waits():  # one that came during the start would leave the process running
            # In this session: only such a group is looked after when its parent ends.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=environment,
                process_group=0,
            )

            def end() -> None:
                signal_group(process, signal.SIGKILL)
                process.wait()
                # Its workers are gone a moment later, or never in a container without an init,
                # which would reap orphans.
                deadline_s = time.monotonic() + _GONE_S
                while signal_group(process, 0) and time.monotonic() < deadline_s:
                    time.sleep(_POLL_S)

            ends.callback(end)
        yield process


def signal_group(process: subprocess.Popen[bytes], signum: int) -> bool:
    """Send a signal to the process and all that it started; False where nothing is left of them."""
    try:
        os.killpg(process.pid, signum)
    except ProcessLookupError:
        return False
    return True
