"""A contestant's process with its workers, stopped between its laps, so that two can take turns on
the same CPUs.

A virtual machine's speed changes within seconds, by more than loaders differ. Two runs of some
seconds, one behind the other, see different machines; laps of a second, in turns, see nearly the
same one. A stopped process keeps its place: what is in its queues, and half a picture decoded, are
there when it resumes.
"""

from __future__ import annotations

import array
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fuelrail.bench.measure.machine import all_cpu_s, stolen_cpu_s
from fuelrail.bench.measure.processes import tree_cpu_s, tree_memory_bytes
from fuelrail.bench.studies.compare.group import signal_group

if TYPE_CHECKING:
    import subprocess

_POLL_S = 0.02
_READ_THROUGH_LIMIT_BYTES = 4 << 30
_BLOCK_BYTES = 1 << 20
_ITEM_BYTES = 8


class Timed(NamedTuple):
    """Arrivals and costs of laps.

    Times are a process's running time [s]: they stand still while it is stopped.

    ``arrival_s``: when batches came. ``others_cpus``: how many CPUs were busy with something else
    or kept back by the host, ``stolen_cpus``: how many the host kept back; None where that cannot
    be known. ``clock_jump_s``: by how much the wall clock and the monotonic one disagree.
    """

    first_batch_s: float
    arrival_s: list[float]
    cpu_s: float
    others_cpus: float | None
    stolen_cpus: float | None
    clock_jump_s: float
    peak_memory_bytes: int


class _Lap(NamedTuple):
    """Start and end of a lap on the monotonic clock, and its costs."""

    begin_s: float
    end_s: float
    cpu_s: float
    all_cpu_s: float | None
    stolen_cpu_s: float | None
    clock_jump_s: float
    memory_bytes: int


class LapProcess:
    """A process group that writes when its batches come to the file ``arrivals``: native doubles,
    monotonic clock.

    The first is the time at which it asked for its first batch.
    """

    def __init__(self, process: subprocess.Popen[bytes], arrivals: Path) -> None:
        self._process = process
        self._arrivals = arrivals
        self._laps: list[_Lap] = []

    @property
    def num_laps(self) -> int:
        """Number of laps so far."""
        return len(self._laps)

    def begin(self, warm_up_s: float, limit_s: float) -> bool:
        """Let it run to its first batch and ``warm_up_s`` longer, then stop it; whether it lives
        and has come so far.

        False as well when its first batch takes longer than ``limit_s``.
        """
        deadline_s = time.monotonic() + limit_s
        while not self._arrivals.exists() or self._arrivals.stat().st_size < 2 * _ITEM_BYTES:
            if not self.is_alive() or time.monotonic() > deadline_s:
                return False
            time.sleep(_POLL_S)
        time.sleep(warm_up_s)
        signal_group(self._process, signal.SIGSTOP)
        return self.is_alive()

    def is_alive(self) -> bool:
        """Return whether it is running."""
        return self._process.poll() is None

    def lap(self, seconds: float) -> None:
        """Resume it for this time."""
        pid = self._process.pid
        jump_s = clock_jump_s()
        own_s = tree_cpu_s(pid)
        all_s = all_cpu_s()
        stolen_s = stolen_cpu_s()
        begin_s = time.monotonic()
        signal_group(self._process, signal.SIGCONT)
        time.sleep(seconds)
        signal_group(self._process, signal.SIGSTOP)
        end_s = time.monotonic()
        all_s = _since(all_s, all_cpu_s())
        stolen_s = _since(stolen_s, stolen_cpu_s())
        lap = _Lap(
            begin_s=begin_s,
            end_s=end_s,
            cpu_s=tree_cpu_s(pid) - own_s,
            all_cpu_s=all_s,
            stolen_cpu_s=stolen_s,
            clock_jump_s=clock_jump_s() - jump_s,
            memory_bytes=tree_memory_bytes(pid),
        )
        self._laps.append(lap)

    def timed(self, first_lap: int = 0) -> Timed:
        """Return the measurements from ``first_lap`` on; there must be at least one lap."""
        laps = self._laps[first_lap:]
        data = self._arrivals.read_bytes()
        times = array.array("d")
        times.frombytes(data[: len(data) // _ITEM_BYTES * _ITEM_BYTES])
        asked_s, first_s, *later_s = times
        arrival_s = []
        ran_s = 0.0
        for lap in laps:
            arrival_s += [
                ran_s + at_s - lap.begin_s for at_s in later_s if lap.begin_s <= at_s < lap.end_s
            ]
            ran_s += lap.end_s - lap.begin_s
        cpu_s = sum(lap.cpu_s for lap in laps)
        all_s = _sum([lap.all_cpu_s for lap in laps])
        stolen_s = _sum([lap.stolen_cpu_s for lap in laps])
        return Timed(
            first_batch_s=first_s - asked_s,
            arrival_s=arrival_s,
            cpu_s=cpu_s,
            others_cpus=None if all_s is None else max(0.0, all_s - cpu_s) / ran_s,
            stolen_cpus=None if stolen_s is None else stolen_s / ran_s,
            clock_jump_s=max((lap.clock_jump_s for lap in laps), key=abs),
            peak_memory_bytes=max(lap.memory_bytes for lap in laps),
        )


def read_through(folder: Path) -> None:
    """Read a folder's files, so that they come from the page cache; not those of a folder of
    more than 4 GiB.
    """
    files = [path for path in folder.rglob("*") if path.is_file()]
    if sum(path.stat().st_size for path in files) > _READ_THROUGH_LIMIT_BYTES:
        return
    block = bytearray(_BLOCK_BYTES)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass


def clock_jump_s() -> float:
    """Return how far the wall clock is ahead of the monotonic one [s].

    The difference between two calls is by how much the wall clock was set in between, or how long
    the machine slept: the monotonic clock of Linux stops then. What was measured across a sleep is
    not a measurement.
    """
    return time.time() - time.monotonic()


def _since(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def _sum(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) if len(numbers) == len(values) else None
