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
    with Progress("starting", Console(file=stream, width=200), every_s=0.01) as shown:
        clock.now = 150.0
        shown.update("step 7")
        stream.written.clear()
        assert stream.written.wait(30)
    assert stream.getvalue().splitlines()[-1] == "50 s: step 7"
    assert "fuelrail-progress" not in {thread.name for thread in threading.enumerate()}


def test_a_short_command_prints_nothing(clock):
    stream = io.StringIO()
    with Progress("starting", Console(file=stream)) as shown:
        shown.update("step 1", 0.5)
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("passed_s", "left"), [(10.0, "30 s"), (100.0, "5 min"), (2000.0, "1 h 40 min")]
)
def test_the_time_left_is_that_of_the_rate_so_far(clock, passed_s, left):
    stream = io.StringIO()
    with Progress("starting", Console(file=stream, force_terminal=True, width=80)) as shown:
        clock.now += 500.0  # imports count nowhere
        shown.update("step 0", 0.0)
        clock.now += passed_s
        shown.update("step 25 of 100", 0.25)
        assert shown._text == f"step 25 of 100, {left} left"
        shown.update("step 100 of 100", 1.0)
        assert shown._text == "step 100 of 100"


def test_an_update_is_due_every_ten_seconds(clock):
    shown = Progress("starting", Console(file=io.StringIO()))
    assert not shown.due()
    clock.now += 11.0
    assert shown.due()
    shown.update("more")
    assert not shown.due()
    assert Progress("starting", Console(file=io.StringIO(), force_terminal=True)).due()
