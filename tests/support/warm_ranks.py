"""The ranks of `fuelrail bench` without their start-up time: forks of a process that has torch loaded.

The launcher and torch elastic do their work as ever; only the interpreters that they would start are forks. What starts
for real is tested in ``tests/bench/test_cut_off.py`` and ``tests/test_main_path.py``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import (
    subprocess_handler,
)

from support.forked import fork
from support.ranks import run_program, warm

if TYPE_CHECKING:
    from collections.abc import Sequence

_POLL_S = 0.02


class _Started:
    """A process as `subprocess.Popen` has it; ``poll`` is a subclass's."""

    pid: int
    returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        ends_s = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if ends_s is not None and time.monotonic() > ends_s:
                raise subprocess.TimeoutExpired("a fork", timeout)
            time.sleep(_POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Launcher(_Started):
    """``python -m fuelrail.bench.ranks.elastic ...`` in a fork of the server's."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdout: IO[bytes],
        env: dict[str, str],
        **_: Any,
    ) -> None:
        self._process = warm().Process(
            target=_launch, args=(command[1:], stdout.name, env, Path.cwd())
        )
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        self.returncode = self._process.exitcode
        return self.returncode


def _launch(words: Sequence[str], log: str, env: dict[str, str], folder: Path) -> None:
    os.setsid()
    os.chdir(folder)
    subprocess_handler.Popen = Rank
    module, _, *rest = words[1:]
    run_program(["-m", module, str(os.getppid()), *rest], env, log)  # its parent is the server


class Rank(_Started):
    """A rank in a fork of the launcher."""

    def __init__(self, *, args: Sequence[str], env: dict[str, str], **_: Any) -> None:
        def work() -> None:
            os.setsid()
            for number in (
                signal.SIGTERM,
                signal.SIGHUP,
                signal.SIGQUIT,
            ):  # the launcher's, which a program never has
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            run_program(args[1:], env, None)

        self.pid = fork(work)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class Warm:
    """What `fuelrail.bench.ranks.launch` takes from `subprocess`."""

    Popen = Launcher
    STDOUT = subprocess.STDOUT
    TimeoutExpired = subprocess.TimeoutExpired
