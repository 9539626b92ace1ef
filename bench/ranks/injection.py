"""Faults of known size put into a run on purpose: the harness's own error is what it makes of them."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from fuelrail.bench.measure.clock import NS_PER_MS, MonotonicClock
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.settings import Settings

if TYPE_CHECKING:
    from fuelrail.bench.measure.accelerator import Accelerator
    from fuelrail.bench.measure.clock import Clock
    from fuelrail.bench.measure.records import DeviceTimes
    from fuelrail.pipeline.runtime.stages import Stage

_BLOCK = bytes(1 << 16)  # hashed without the interpreter's lock, in well under a millisecond
_PAGE = 4096
# What this process has read slowly so far, as (inode, page): a cache keeps it from one run to the next.
_READ: set[tuple[int, int]] = set()


class Injection(Settings, frozen=True):
    """Faults put into a run on purpose, to see what the harness makes of them; all in milliseconds, 0: none.

    ``stage_lasts`` makes each call of a loader stage (by its name) last that long in all, ``stage_cpu`` and
    ``stage_python`` make it compute more, in C code, or in Python, which holds the interpreter's lock. ``read`` delays
    every read of a local shard (with ``cold_only`` the first one of each place). ``data_wait``, ``host_to_device``,
    ``all_reduce`` and ``other`` stall that phase of every step; ``forward`` is what the host takes for it at least.
    With ``rank`` the phases of that rank alone.
    """

    stage_lasts: dict[str, float] = msgspec.field(default_factory=dict)
    stage_cpu: dict[str, float] = msgspec.field(default_factory=dict)
    stage_python: dict[str, float] = msgspec.field(default_factory=dict)
    read: float = 0.0
    cold_only: bool = False
    data_wait: float = 0.0
    host_to_device: float = 0.0
    forward: float = 0.0
    all_reduce: float = 0.0
    other: float = 0.0
    rank: int | None = None


def delayed_stages(stages: Sequence[Stage], inject: Injection) -> list[Stage]:
    """Wrap the stages with the delays to inject into each call of their work. Raise ConfigError for unknown stages."""
    wanted = {*inject.stage_lasts, *inject.stage_cpu, *inject.stage_python}
    names = [stage.name for stage in stages]
    if unknown := sorted(wanted - {*names}):
        raise ConfigError(f"the loader has no stage '{unknown[0]}' to delay; its stages: {', '.join(names)}")
    return [_delayed(stage, inject) if stage.name in wanted else stage for stage in stages]


def _delayed(stage: Stage, inject: Injection) -> Stage:
    kinds = (inject.stage_lasts, inject.stage_cpu, inject.stage_python)
    lasts_ms, cpu_ms, python_ms = (kind.get(stage.name, 0.0) for kind in kinds)
    clock = MonotonicClock()

    def work(item: Any) -> Any:  # noqa: ANN401
        started_ns = clock.now_ns()
        _compute(cpu_ms, lambda: hashlib.blake2b(_BLOCK))
        _compute(python_ms, lambda: sum(range(200)))
        result = stage.work(item)
        clock.wait_until(started_ns + round(lasts_ms * NS_PER_MS))
        return result

    return replace(stage, work=work)


def _compute(cpu_ms: float, once: Callable[[], object]) -> None:
    """Take that much CPU time of this thread with something that takes well under a millisecond."""
    until_s = time.thread_time() + cpu_ms / 1e3
    while cpu_ms and time.thread_time() < until_s:
        once()


@contextmanager
def slow_reads(inject: Injection) -> Iterator[None]:
    """Delay, while inside, reads of this process (``os.preadv``, which the `pread` storage calls) by that time."""
    if not inject.read:
        yield
        return
    fast, seen, lock = os.preadv, _READ, threading.Lock()

    def slow(fd: int, buffers: Any, offset: int, *rest: int) -> int:  # noqa: ANN401
        place = (os.fstat(fd).st_ino, offset // _PAGE)
        with lock:  # one device serves one read at a time
            if place not in seen or not inject.cold_only:
                time.sleep(inject.read / 1e3)
            seen.add(place)
        return fast(fd, buffers, offset, *rest)

    os.preadv = slow
    try:
        yield
    finally:
        os.preadv = fast


def late_batches(batches: Iterable[Mapping[str, Any]], stall_ms: float, clock: Clock) -> Iterator[Mapping[str, Any]]:
    """Yield the batches, each handed over that much after it was asked for, however long the loader itself takes."""
    for batch in batches:
        clock.wait_until(clock.now_ns() + round(stall_ms * NS_PER_MS))
        yield batch


class StallingAccelerator:
    """An accelerator whose phases are stalled on the host by what is injected; everything else is the inner one's."""

    def __init__(self, inner: Accelerator, inject: Injection, clock: Clock) -> None:
        self._inner, self._inject, self._clock = inner, inject, clock

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the inner one's
        return getattr(self._inner, name)

    @contextmanager
    def host_to_device(self, num_bytes: int) -> Iterator[None]:
        """Surround the copy as the inner accelerator does, but take longer."""
        with self._inner.host_to_device(num_bytes):
            yield
            self._stall(self._inject.host_to_device)

    @contextmanager
    def forward(self, num_samples: float, num_images: float) -> Iterator[None]:
        """Surround the forward pass, with the injected time of the host, which may outlast the emulated phase."""
        with self._inner.forward(num_samples, num_images):
            started_ns = self._clock.now_ns()
            yield
            self._clock.wait_until(started_ns + round(self._inject.forward * NS_PER_MS))

    def gradients_ready(self, share: float) -> None:
        """Pass it on to the inner accelerator; start the last bucket's all-reduce late."""
        self._inner.gradients_ready(share)
        if share >= 1.0:
            self._stall(self._inject.all_reduce)

    def finish_step(self) -> DeviceTimes:
        """Finish the step of the inner accelerator, then stall before the next one."""
        times = self._inner.finish_step()
        self._stall(self._inject.other)
        return times

    def _stall(self, stall_ms: float) -> None:
        if stall_ms:
            self._clock.wait_until(self._clock.now_ns() + round(stall_ms * NS_PER_MS))
