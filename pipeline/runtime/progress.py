"""What a long command is doing: one line with the time left on a terminal, a line each minute
elsewhere. To stderr.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from typing import TYPE_CHECKING, Self

from fuelrail.pipeline.text import message

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

_FRESH_S = 10.0


class PlainStatus:
    """What `Progress` uses of rich's status, where rich is not installed: a line of a terminal."""

    def start(self) -> None:
        """Show nothing before the first text."""

    def update(self, text: str) -> None:
        """Write another text over the line."""
        width = shutil.get_terminal_size().columns - 1
        sys.stderr.write(f"\r\x1b[2K{message(text)[:width]}")
        sys.stderr.flush()

    def stop(self) -> None:
        """Take the line down."""
        sys.stderr.write("\r\x1b[2K")
        sys.stderr.flush()


class Progress:
    """Shows the last text that :meth:`update` was given, until the end of the ``with`` block.

    Where stderr is not a terminal (CI, a batch job's log) it is printed every ``every_s`` seconds,
    with the time since the start, so that a run that takes minutes is seen to live. Rich is
    imported for a terminal alone.
    """

    def __init__(
        self,
        text: str,
        console: Console | None = None,
        every_s: float = 60.0,
    ) -> None:
        self._file = sys.stderr
        is_terminal = sys.stderr.isatty()
        if console is not None:
            self._file = console.file
            is_terminal = console.is_terminal
        self._status: Status | PlainStatus | None = None
        if is_terminal:
            try:
                from rich.console import Console

                console = console or Console(stderr=True, soft_wrap=True)
                self._status = console.status(text)
            except ModuleNotFoundError:
                self._status = PlainStatus()
        self._text = text
        self._every_s = every_s
        now = time.monotonic()
        self._start = now
        self._updated = now
        self._first: tuple[float, float] | None = None
        """When the first update came from which the time left is estimated, and its share."""
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._print,
            name="fuelrail-progress",
            daemon=True,
        )

    def due(self) -> bool:
        """Return whether an update is due: always on a terminal, every 10 s elsewhere."""
        if self._status is not None:
            return True
        return time.monotonic() - self._updated >= _FRESH_S

    def update(self, text: str, done: float = 0.0) -> None:
        """Show another text; ``done`` is the share of the work that is done, which the time left
        is estimated from.
        """
        now = time.monotonic()
        self._updated = now
        if self._first is None or done < self._first[1]:
            self._first = now, done
        first_time, first_share = self._first
        if first_share < done < 1.0:
            elapsed_s = now - first_time
            remaining_s = elapsed_s * (1.0 - done) / (done - first_share)
            text = f"{text}, {_duration(remaining_s)} left"
        self._text = text
        if self._status is not None:
            self._status.update(text)

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        else:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _print(self) -> None:
        while not self._ended.wait(self._every_s):
            elapsed_s = time.monotonic() - self._start
            self._file.write(f"{_duration(elapsed_s)}: {self._text}\n")
            self._file.flush()


def _duration(seconds: float) -> str:
    """Return a time as ``40 s``, ``3 min`` or ``1 h 20 min``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"
