"""Progress displays of a sharding run: a bar on a terminal, a line each minute elsewhere, JSON
lines for machines.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from fuelrail.pipeline.cli import counted
from fuelrail.pipeline.format.zstd_frames import shard_stem
from fuelrail.pipeline.runtime.progress import Progress

if TYPE_CHECKING:
    from fuelrail.sharding.sources.source import ScanInfo
    from fuelrail.sharding.write.shard_writer import ShardDone

_TICK_S = 1.0


class Quiet:
    """The callbacks of a run, which count what is done and show nothing; a display is a subclass
    with `show`.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, None] = {}
        self.num_shards = self.num_done = self.num_bytes = self.total_bytes = 0
        self._start = time.monotonic()

    @property
    def current(self) -> str | None:
        """The first shard that is not done: engines start them in order, several at a time.

        None at the end.
        """
        return next(iter(self._waiting), None)

    @property
    def rate(self) -> float:
        """Bytes a second since the shards were started."""
        return self.num_bytes / max(time.monotonic() - self._start, 1e-3)

    def scanned(self, info: ScanInfo) -> None:
        """Take the result of the source's scan."""
        report = None if info.report is None else info.report.builtins()
        self.show(
            "scanned",
            clips=len(info.clips),
            samples=info.num_samples,
            report=report,
        )

    def planned(self, num_samples: int, shards: Sequence[str], num_bytes: int) -> None:
        """Take the shards that will be made, in this order, and their approximate size in bytes."""
        self._waiting = dict.fromkeys(shards)
        self.num_shards = len(shards)
        self.total_bytes = num_bytes
        self._start = time.monotonic()
        self.show(
            "planned",
            samples=num_samples,
            shards=len(shards),
            bytes=num_bytes,
        )

    def advanced(self, num_bytes: int) -> None:
        """Take the number of bytes written since the last call."""
        self.num_bytes += num_bytes
        self.show("progress", bytes=self.num_bytes, total_bytes=self.total_bytes)

    def shard_done(self, shard: ShardDone) -> None:
        """Take a finished shard."""
        self.num_done += 1
        self._waiting.pop(shard_stem(shard.name), None)
        self.show(
            "shard",
            name=shard.name,
            bytes=shard.num_bytes,
            kept=shard.is_kept,
        )

    def show(self, event: str, **values: Any) -> None:  # values that JSON takes
        """Show what happened."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Take the display down."""


class JsonLines(Quiet):
    """One JSON object a line on stdout for each event, and one a second for the bytes."""

    def __init__(self) -> None:
        super().__init__()
        self._last = time.monotonic()

    def show(self, event: str, **values: Any) -> None:
        """Print an event; of progress also rate, seconds to go and the current shard, once a
        second.
        """
        if event == "progress":
            if time.monotonic() - self._last < _TICK_S:
                return
            remaining = max(self.total_bytes - self.num_bytes, 0)
            self._last = time.monotonic()
            values |= {
                "bytes_per_s": round(self.rate),
                "eta_s": round(remaining / self.rate, 1) if self.num_bytes else None,
                "shards": self.num_done,
                "total_shards": self.num_shards,
                "current": self.current,
            }
        line = json.dumps({"event": event, **values})
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


class Bar(Quiet):
    """A progress bar on stderr with rate, time to go and the current shard."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.progress import TransferSpeedColumn as Speed

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            Speed(),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("scanning", total=None)

    def scanned(self, info: ScanInfo) -> None:
        """Say what was found."""
        self._bar.console.print(
            f"scanned {counted(info.num_samples, 'sample')} in {counted(len(info.clips), 'clip')}, "
            f"{counted(len(info.cameras), 'camera')}, {counted(len(info.lidars), 'lidar')}",
            highlight=False,
        )

    def show(self, event: str, **values: Any) -> None:
        """Move the bar."""
        doing = "finishing" if self.current is None else f"making {self.current}"
        text = f"{self.num_done}/{self.num_shards} shards, {doing}"
        if event == "planned":
            self._bar.reset(self._task, total=values["bytes"], description=text)
        else:
            self._bar.update(self._task, completed=self.num_bytes, description=text)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Take the bar down."""
        self._bar.stop()


class Lines(Quiet):
    """A line on stderr each minute with the shards that are done, the current one and the time
    left.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines = Progress("scanning")

    def show(self, event: str, **_: Any) -> None:
        """Take the text of the next line."""
        if event == "scanned":
            self._lines.update("planning")
            return
        doing = "finishing" if self.current is None else f"making {self.current}"
        share = self.num_bytes / max(self.total_bytes, 1)
        self._lines.update(f"{self.num_done}/{self.num_shards} shards, {doing}", share)

    def __enter__(self) -> Self:
        self._lines.__enter__()
        return self

    def __exit__(self, *reason: object) -> None:
        """End the lines."""
        self._lines.__exit__(*reason)


def make_progress(*, as_json: bool) -> Quiet:
    """Make JSON lines where asked for, a bar where stderr is a terminal and rich is installed, else
    what `Progress` shows.
    """
    if as_json:
        return JsonLines()
    return Bar() if _has_bars() else Lines()


def _has_bars() -> bool:
    return sys.stderr.isatty() and importlib.util.find_spec("rich") is not None


@contextlib.contextmanager
def bar(title: str) -> Iterator[Callable[..., None]]:
    """Show a bar on stderr where that is a terminal, else a line each minute.

    Yields what updates it, with the keywords of rich's ``update``: ``completed`` or ``advance``,
    ``total`` and ``description``.
    """
    if not _has_bars():
        with Progress(title) as lines:
            done = 0

            def update(
                *,
                total: int,
                completed: int | None = None,
                advance: int = 0,
                description: str = "",
            ) -> None:
                nonlocal done
                done = done + advance if completed is None else completed
                text = f"{description or title}: {done:,} of {total:,}"
                lines.update(text, done / max(total, 1))

            yield update
        return
    from rich.console import Console
    from rich.progress import Progress as Bars

    with Bars(console=Console(stderr=True), transient=True) as bars:
        yield partial(bars.update, bars.add_task(title, total=None))
