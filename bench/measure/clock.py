"""Time for measurements: one monotonic nanosecond clock, precise waiting that leaves the CPU
free, and percentiles.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000

# The kernel wakes a sleeper late by its timer slack (50 us by default) and more under load; the
# last stretch is spun.
SPIN_NS = 100_000

# CPU time, time on a run queue and number of time slices (Documentation/scheduler/sched-stats.rst).
_THREAD_STATISTICS = "/proc/thread-self/schedstat"


class ThreadTimes(NamedTuple):
    """CPU time of a thread since its start, and time in the queue for a CPU [ns]."""

    cpu_ns: int
    queued_ns: int


class _OpenFile(io.FileIO):
    """A file that its last owner closes."""

    def __del__(self) -> None:
        self.close()


_OPEN = threading.local()
"""The statistics of each thread: to open them takes longer than to read them."""


def thread_times() -> ThreadTimes:
    """Return what the calling thread took; 0 in the queue where the kernel says nothing."""
    thread = threading.get_native_id()
    if getattr(_OPEN, "thread", None) != thread:  # or this process was forked from one with it
        _OPEN.thread = thread
        _OPEN.file = None
        with contextlib.suppress(OSError):
            _OPEN.file = _OpenFile(_THREAD_STATISTICS)
    queued_ns = 0
    if _OPEN.file is not None:
        queued_ns = int(os.pread(_OPEN.file.fileno(), 64, 0).split()[1])
    return ThreadTimes(time.thread_time_ns(), queued_ns)


def record_event() -> Any:
    """Return a ``torch.cuda.Event`` that the compute stream passes here."""
    import torch

    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class Clock:
    """The system's monotonic clock: unmoved by clock corrections, and on Linux common to all
    processes of a host.

    Tests replace it and need not wait.
    """

    def now_ns(self) -> int:
        """Return nanoseconds since an arbitrary start; they never decrease."""
        return time.monotonic_ns()

    def wait_until(self, deadline_ns: int) -> int:
        """Return once ``now_ns() >= deadline_ns``; the value is the overshoot in ns, also for a
        deadline passed.

        It sleeps to within ``SPIN_NS`` of the deadline, then spins.
        """
        remaining_ns = deadline_ns - time.monotonic_ns()
        if remaining_ns > SPIN_NS:
            time.sleep((remaining_ns - SPIN_NS) / NS_PER_S)
        while (now_ns := time.monotonic_ns()) < deadline_ns:
            pass
        return now_ns - deadline_ns


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Mean and percentiles of durations, in milliseconds.

    Percentiles interpolate linearly (numpy's default).
    """

    mean_ms: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    count: int


def summarise_ns(durations_ns: Sequence[int]) -> Summary:
    """Summarise at least one duration given in nanoseconds."""
    values_ms = np.asarray(durations_ns, dtype=np.float64) / NS_PER_MS
    assert values_ms.size, "nothing to summarise"
    p50, p99 = np.percentile(values_ms, (50, 99))
    return Summary(
        mean_ms=float(values_ms.mean()),
        p50_ms=float(p50),
        p99_ms=float(p99),
        max_ms=float(values_ms.max()),
        count=int(values_ms.size),
    )
