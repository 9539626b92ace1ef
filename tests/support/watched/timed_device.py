"""Gives the fake CUDA devices time: a queue of work that takes its seconds while the host goes on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from support.fake_streams import FakeEvent

if TYPE_CHECKING:
    import pytest

    from support.fake_cuda import FakeCuda

_QUEUE_S = 0.1


class TimedDevice:
    """One queue; events pass when the work before them is done."""

    def __init__(self, patch: pytest.MonkeyPatch, fake: FakeCuda) -> None:
        self.free_at_s = 0.0

        def wait(clock: Any, known: Any = fake.host_learns) -> None:
            self.synchronize()
            known(clock)

        patch.setattr(fake, "host_learns", wait)
        patch.setattr(FakeEvent, "record", lambda event, *_: self._record(event))
        patch.setattr(FakeEvent, "query", lambda event: event.at_s <= time.monotonic())
        patch.setattr(FakeEvent, "elapsed_time", lambda start, end: (end.at_s - start.at_s) * 1e3)
        patch.setattr(FakeEvent, "synchronize", lambda event: self.synchronize(event))

    def launch(self, seconds: float) -> None:
        """Queue work; wait where the queue is full."""
        time.sleep(max(0.0, self.free_at_s - time.monotonic() - _QUEUE_S))
        self.free_at_s = max(self.free_at_s, time.monotonic()) + seconds

    def synchronize(self, event: Any = None) -> None:
        """Wait until the work is done, up to an event."""
        until_s = self.free_at_s if event is None else event.at_s
        time.sleep(max(0.0, until_s - time.monotonic()))

    def _record(self, event: Any) -> None:
        self.free_at_s = event.at_s = max(self.free_at_s, time.monotonic())
