"""How a sharding run shows itself: a bar on a terminal, JSON lines for machines, or nothing."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import TYPE_CHECKING, Any, Self

from fuelrail.pipeline.command import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from fuelrail.pipeline.manifest import ShardEntry
    from fuelrail.sharding.plan import Plan
    from fuelrail.sharding.source import ScanInfo
    from fuelrail.sharding.writer import ShardDone

_TICK_S = 1.0


class Quiet:
    """Shows nothing."""

    def scanned(self, info: ScanInfo) -> None:
        """Ignored."""

    def planned(self, plan: Plan, num_bytes: int) -> None:
        """Ignored."""

    def advanced(self, num_bytes: int) -> None:
        """Ignored."""

    def shard_done(self, shard: ShardDone) -> None:
        """Ignored."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the display down."""


class JsonLines(Quiet):
    """One JSON object a line on stdout for each event, and one a second for the bytes."""

    def __init__(self) -> None:
        self._written = 0
        self._last = time.monotonic()

    def scanned(self, info: ScanInfo) -> None:
        """Counts of the source."""
        self.emit("scanned", clips=len(info.clips), samples=info.num_samples)

    def planned(self, plan: Plan, num_bytes: int) -> None:
        """Counts of the plan."""
        self.emit("planned", samples=len(plan.rows), shards=len(plan.shards), bytes=num_bytes)

    def advanced(self, num_bytes: int) -> None:
        """Bytes so far, once a second."""
        self._written += num_bytes
        if time.monotonic() - self._last >= _TICK_S:
            self._last = time.monotonic()
            self.emit("progress", bytes=self._written)

    def shard_done(self, shard: ShardDone) -> None:
        """Name and size of a shard."""
        self.emit("shard", name=shard.name, bytes=shard.num_bytes, kept=shard.kept)

    @staticmethod
    def emit(event: str, **values: Any) -> None:  # noqa: ANN401 - whatever JSON takes
        """Print one event."""
        sys.stdout.write(json.dumps({"event": event, **values}) + "\n")
        sys.stdout.flush()


class Bar(Quiet):
    """A progress bar on stderr with rate, time to go and the shard that was finished last."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.progress import TransferSpeedColumn as Speed

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), Speed(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("scanning", total=None)
        self._num_shards = self._num_done = 0

    def scanned(self, info: ScanInfo) -> None:
        """Say what was found."""
        self._bar.console.print(
            f"scanned {counted(info.num_samples, 'sample')} in {counted(len(info.clips), 'clip')}, "
            f"{counted(len(info.cameras), 'camera')}, {counted(len(info.lidars), 'lidar')}",
            highlight=False,
        )

    def planned(self, plan: Plan, num_bytes: int) -> None:
        """Begin the bar."""
        self._num_shards = len(plan.shards)
        self._bar.reset(self._task, total=num_bytes, description=f"0/{self._num_shards} shards")

    def advanced(self, num_bytes: int) -> None:
        """Move the bar."""
        self._bar.advance(self._task, num_bytes)

    def shard_done(self, shard: ShardDone) -> None:
        """Count the shard."""
        self._num_done += 1
        text = f"{self._num_done}/{self._num_shards} shards, {'kept' if shard.kept else 'wrote'} {shard.name}"
        self._bar.update(self._task, description=text)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the bar down."""
        self._bar.stop()


def make_progress(*, as_json: bool) -> Quiet:
    """JSON lines where asked for, a bar where stderr is a terminal, else nothing."""
    if as_json:
        return JsonLines()
    return Bar() if sys.stderr.isatty() else Quiet()


@contextlib.contextmanager
def checking() -> Iterator[Callable[[ShardEntry, int], None]]:
    """A bar on stderr for `fuelrail verify`, where that is a terminal; yields what to call for each shard."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("checking", total=None)

        def checked(shard: ShardEntry, num_shards: int) -> None:
            bar.update(task, total=num_shards, advance=1, description=f"checked {shard.name}")

        yield checked
