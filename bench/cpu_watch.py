"""Who used this machine's CPUs during a measurement: we, or somebody else who disturbed it."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import msgspec

from fuelrail.bench.machine import usable_cpus

_STAT = Path("/proc/stat")


class CpuUse(msgspec.Struct, frozen=True, kw_only=True):
    """Mean number of CPUs in use over a while: by this process and its ended children, and by everybody else.

    ``others`` is None where it cannot be known: without ``/proc/stat``, or where we may use only some of the CPUs that
    it counts.
    """

    seconds: float
    own: float
    others: float | None
    usable: float

    @property
    def disturbed(self) -> bool:
        """Whether others took more than a twentieth of the CPUs."""
        return self.others is not None and self.others > 0.05 * self.usable


class CpuWatch:
    """Counts from its making to :meth:`use`."""

    def __init__(self) -> None:
        self._started_s, self._own_s, self._all_s = time.monotonic(), _own_s(), all_cpu_s()

    def use(self) -> CpuUse:
        """The use of the CPUs since the watch was made."""
        seconds = max(time.monotonic() - self._started_s, 1e-9)
        own = (_own_s() - self._own_s) / seconds
        all_s = all_cpu_s()
        # In a container that may use some of the host's CPUs, the host's count says nothing about ours.
        whole_machine = usable_cpus() == os.cpu_count()
        others = None
        if self._all_s is not None and all_s is not None and whole_machine:
            others = max(0.0, (all_s - self._all_s) / seconds - own)
        return CpuUse(seconds=seconds, own=own, others=others, usable=usable_cpus())


def _own_s() -> float:
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    )


def all_cpu_s() -> float | None:
    """CPU seconds that all processes have used since the machine started: user, nice, system, irq, softirq, steal.

    None where there is no ``/proc/stat``.
    """
    return _cpu_s((1, 2, 3, 6, 7, 8))


def stolen_cpu_s() -> float | None:
    """CPU seconds that the host of a virtual machine kept back since it started; None without ``/proc/stat``."""
    return _cpu_s((8,))


def _cpu_s(columns: tuple[int, ...]) -> float | None:
    try:
        fields = _STAT.read_text(encoding="ascii").partition("\n")[0].split()
    except OSError:
        return None
    return sum(int(fields[column]) for column in columns) / os.sysconf("SC_CLK_TCK")
