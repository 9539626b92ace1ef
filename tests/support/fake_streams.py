"""Streams, events and blocks of the fake CUDA devices: what of each stream is known to be complete, and where."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from support.fake_cuda import FakeCuda

Clock = dict[int, int]
"""How many operations of each stream, by its number, are known to be complete."""


class Access(NamedTuple):
    """One use of a block: by which stream, the number of its operation, and what it was."""

    stream: FakeStream
    tick: int
    operation: str


class Block:
    """Memory of a device, from one allocation to its release."""

    def __init__(self, fake: FakeCuda, home: FakeStream | None, label: str) -> None:
        self.home = home
        self.label = label
        self.reads: list[Access] = []
        self.writes: list[Access] = []
        self.recorded: set[int] = set()
        weakref.finalize(
            self,
            fake.released,
            home,
            label,
            self.reads,
            self.writes,
            self.recorded,
        ).atexit = False


class FakeStream:
    """A stand-in for `torch.cuda.Stream`."""

    numbers = itertools.count(1)
    fake: FakeCuda

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.stream_id = self.cuda_stream = next(self.numbers)
        self.device = self.fake.device(device)
        self.device_index = self.device.index
        self.priority = priority
        self.clock: Clock = {}
        self.fake.streams.append(self)

    def __repr__(self) -> str:
        return f"stream {self.stream_id} of {self.device}"

    def synchronize(self) -> None:
        self.fake.host_learns(self.clock)

    def query(self) -> bool:
        return all(self.fake.host.get(number, 0) >= tick for number, tick in self.clock.items())

    def wait_stream(self, stream: FakeStream) -> None:
        join(self.clock, stream.clock)

    def wait_event(self, event: FakeEvent) -> None:
        join(self.clock, event.clock)

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent()
        event.record(self)
        return event


class FakeEvent:
    """A stand-in for `torch.cuda.Event`."""

    fake: FakeCuda

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
    ) -> None:
        self.clock: Clock = {}

    def record(self, stream: FakeStream | None = None) -> None:
        self.clock = dict((stream or self.fake.current_stream()).clock)

    def wait(self, stream: FakeStream | None = None) -> None:
        join((stream or self.fake.current_stream()).clock, self.clock)

    def synchronize(self) -> None:
        self.fake.host_learns(self.clock)

    def query(self) -> bool:
        return all(self.fake.host.get(number, 0) >= tick for number, tick in self.clock.items())

    def elapsed_time(self, end_event: FakeEvent) -> float:
        return 1.0


def join(clock: Clock, source: Clock) -> None:
    for number, tick in list(source.items()):
        clock[number] = max(tick, clock.get(number, 0))
