"""Starts the ranks of a run on this host and waits for them; nothing here imports torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from fuelrail.bench.measure.processes import package_environment
from fuelrail.pipeline.runtime.workers import sigterm_interrupts

_POLL_S = 0.2
# Torch elastic itself gives its ranks 30 s to end before it kills them.
_GRACE_S = 40


class RankExit(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that failed.

    ``exit_code`` is minus the signal's number when a signal ended it, as in `subprocess`.
    """

    rank: int
    exit_code: int


class Outcome(NamedTuple):
    """Result of the launch: the launcher's exit code, whether it was interrupted, and the ranks
    that failed.
    """

    exit_code: int
    interrupted: bool
    failed: list[RankExit]


def run_ranks(
    program: Sequence[str],
    num_ranks: int,
    log: Path,
    on_wait: Callable[[], None],
) -> Outcome:
    """Run ``python -m PROGRAM PID`` as ``num_ranks`` ranks of one world; their output goes to
    ``log``.

    PID is the process that the ranks must not outlive. ``on_wait`` is called several times a
    second. SIGINT and SIGTERM stop the ranks and are reported, not raised: what was measured until
    then is worth a report. To be called on the main thread, which alone gets signals.
    """
    exits = log.with_name("exits.json")
    command = [
        *(sys.executable, "-m", "fuelrail.bench.ranks.elastic"),
        *(str(os.getpid()), str(num_ranks), str(exits)),
        *program,
    ]
    with log.open("wb") as output:
        # A session of its own: Ctrl-C in a terminal must reach this process alone, which then ends
        # the ranks in order.
        defaults = {"OMP_NUM_THREADS": "1"}
        if sys.platform.startswith("linux"):
            # All ranks are on this host: gloo need not find out which of its interfaces reaches the
            # others.
            defaults["GLOO_SOCKET_IFNAME"] = "lo"
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**defaults, **package_environment()},
            start_new_session=True,
        )
        interrupted = False
        with sigterm_interrupts():
            try:
                while True:
                    try:
                        process.wait(_POLL_S)
                        break
                    except subprocess.TimeoutExpired:
                        on_wait()
            except KeyboardInterrupt:
                interrupted = True
            finally:
                # End the launcher, which ends its ranks; a second Ctrl-C kills it, and the kernel
                # its ranks.
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                    try:
                        process.wait(_GRACE_S)
                    except (subprocess.TimeoutExpired, KeyboardInterrupt):
                        process.kill()
                        process.wait()
    failed = msgspec.json.decode(exits.read_bytes(), type=list[RankExit]) if exits.exists() else []
    return Outcome(process.returncode, interrupted, failed)
