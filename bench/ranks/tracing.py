"""A rank's timeline: the loader's stages, the trainer's phases and what torch's profiler saw, on
one clock.

On a GPU the trainer's phases are NVTX ranges too, for Nsight Systems. Phases are the host's: on a
GPU they show when work was queued, and the profiler's kernels show when it ran.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fuelrail.pipeline.runtime.trace import NO_BATCH, TraceRecorder

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from fuelrail.bench.measure.accelerator import Accelerator
    from fuelrail.bench.measure.records import StepRecord

# Steps that torch's profiler watches, behind those in which everything is still being set up.
_STEPS_BEFORE = 4
_STEPS_PROFILED = 4
# The profiler's processes beside ours, so that the viewer shows them apart.
_PROFILER_PID_OFFSET = 1 << 24
_PHASES = ("host_to_device", "forward", "backward", "optimiser")


class RankTrace:
    """Takes down one rank's run; :meth:`write` makes a file of it in the folder."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / f"trace-{rank:05d}.json"
        self._rank = rank
        self.recorder = TraceRecorder(rank=rank)
        self._profiled: list[dict[str, Any]] = []
        self.step = 0

    def of_steps(self, steps: Iterator[StepRecord]) -> Iterator[StepRecord]:
        """Yield the steps and record them; some of them under torch's profiler."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profiled = torch.profiler.schedule(
            wait=_STEPS_BEFORE - 1,
            warmup=1,
            active=_STEPS_PROFILED,
            repeat=1,
        )
        with torch.profiler.profile(
            activities=activities,
            schedule=profiled,
            on_trace_ready=self._take,
            acc_events=True,
        ) as profiler:
            started_s = time.perf_counter()
            for record in steps:
                self.span("step", started_s, time.perf_counter())
                self.step = record.step + 1
                profiler.step()
                started_s = time.perf_counter()
                yield record

    def _take(self, profiler: torch.profiler.profile) -> None:
        # Times in microseconds since the Unix epoch, as ours have.
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "profile.json"
            profiler.export_chrome_trace(str(path))
            document = json.loads(path.read_text(encoding="utf-8"))
        base_us = document.get("baseTimeNanoseconds", 0) / 1e3
        events = []
        for event in document["traceEvents"]:
            moved = dict(event)
            # Processes of the viewer that clash neither between ranks nor with our own.
            pid = event.get("pid")
            if isinstance(pid, int):
                moved["pid"] = pid + os.getpid() + _PROFILER_PID_OFFSET
            else:
                moved["pid"] = f"{pid} {os.getpid()}"
            if "ts" in event:
                moved["ts"] = event["ts"] + base_us
            if "id" in event:
                moved["id"] = f"torch {os.getpid()} {event['id']}"
            events.append(moved)
        self._profiled = events

    def span(self, phase: str, begin_s: float, end_s: float) -> None:
        """Take down one phase of the present step."""
        self.recorder(phase, self.step, NO_BATCH, begin_s=begin_s, end_s=end_s)

    def write(self) -> None:
        """Write the rank's events."""
        events = [*self.recorder.events(), *self._profiled]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(events), encoding="utf-8")


class TracedAccelerator:
    """An accelerator whose phases are taken down on the host's clock, and marked for Nsight
    Systems on a GPU.
    """

    def __init__(self, inner: Accelerator, trace: RankTrace) -> None:
        self._inner = inner
        self._trace = trace
        self._marks = torch.cuda.is_available()
        self._reducing_since: list[float] = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if name not in _PHASES:
            return method
        phase = name.replace("_", " ")
        return partial(self._spanned, phase, method)

    @contextmanager
    def _spanned(
        self,
        phase: str,
        inner: Callable[..., AbstractContextManager[None]],
        *size: float,
    ) -> Iterator[None]:
        if self._marks:
            torch.cuda.nvtx.range_push(f"fuelrail {phase}")  # type: ignore[no-untyped-call]
        begin_s = time.perf_counter()
        try:
            with inner(*size):
                yield
        finally:
            self._trace.span(phase, begin_s, time.perf_counter())
            if self._marks:
                torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    def all_reduce_started(self) -> None:
        """Pass it on to the inner accelerator."""
        self._reducing_since.append(time.perf_counter())
        self._inner.all_reduce_started()

    def all_reduce_finished(self) -> None:
        """Pass it on to the inner accelerator; buckets are reduced in the order of their
        launches.
        """
        self._inner.all_reduce_finished()
        begin_s = self._reducing_since.pop(0)
        self._trace.span("all-reduce", begin_s, time.perf_counter())
