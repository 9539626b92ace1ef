"""Progress: the time left on a terminal, and a line each period elsewhere."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from fuelrail.pipeline.runtime import progress
from fuelrail.pipeline.runtime.progress import Progress


class Lines(io.StringIO):
    """A stream that reports when something was written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def write(self, text: str) -> int:
        count = super().write(text)
        self.written.set()
        return count


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

    monkeypatch.setattr(progress.time, "monotonic", lambda: Clock.now)
    return Clock


def test_without_a_terminal_a_line_a_period_shows_the_last_text(clock):
    stream = Lines()
    with Progress("starting", Console(file=stream, width=200), every_s=0.01) as progress:
        clock.now = 150.0
        progress.update("step 7")
        stream.written.clear()
        assert stream.written.wait(30)
    assert stream.getvalue().splitlines()[-1] == "50 s: step 7"
    assert "fuelrail-progress" not in {thread.name for thread in threading.enumerate()}


def test_a_short_command_prints_nothing(clock):
    stream = io.StringIO()
    with Progress("starting", Console(file=stream)) as progress:
        progress.update("step 1", 0.5)
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("passed_s", "remaining"),
    [(10.0, "30 s"), (100.0, "5 min"), (2000.0, "1 h 40 min")],
)
def test_the_time_left_is_that_of_the_rate_so_far(clock, passed_s, remaining):
    stream = io.StringIO()
    with Progress("starting", Console(file=stream, force_terminal=True, width=80)) as progress:
        clock.now += 500.0  # imports count nowhere
        progress.update("step 0", 0.0)
        clock.now += passed_s
        progress.update("step 25 of 100", 0.25)
        assert progress._text == f"step 25 of 100, {remaining} left"
        progress.update("step 100 of 100", 1.0)
        assert progress._text == "step 100 of 100"


def test_an_update_is_due_every_ten_seconds(clock):
    progress = Progress("starting", Console(file=io.StringIO()))
    assert not progress.due()
    clock.now += 11.0
    assert progress.due()
    progress.update("more")
    assert not progress.due()
    assert Progress("starting", Console(file=io.StringIO(), force_terminal=True)).due()
