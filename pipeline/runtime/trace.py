"""A timeline of what every stage did, as a trace that https://ui.perfetto.dev opens.

The format is Chrome's Trace Event JSON: one complete event (``"ph": "X"``) for each piece of work
on its thread's track, with the item's and the batch's number, and one flow of arrows a batch from
its first fetch to the trainer.
"""

from __future__ import annotations

import collections
import json
import os
import threading
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

MAX_SPANS: Final = 1_000_000
"""Spans that a recorder keeps, the latest ones; about 150 bytes each."""

NO_BATCH: Final = -1


class Span(NamedTuple):
    """One piece of work: the stage, its item and batch, begin and end on ``time.perf_counter`` [s],
    and the thread.

    A phase of a trainer's step has the step as its item, and the batch :data:`NO_BATCH`.
    """

    stage: str
    item: int
    batch: int
    begin_s: float
    end_s: float
    thread: str


class TraceRecorder:
    """Takes down the work of one or more loaders, in memory; :meth:`write` makes a file of it.

    ::

        trace = TraceRecorder()
        loader = DataLoader("OUT", batch_size=8, shuffle=True, drop_last=True, trace=trace)
        ...
        trace.write("loader.json")

    A span costs well under a microsecond. Thread-safe. With several ranks each writes a file of its
    own; ``rank`` becomes the process's name in the viewer.
    """

    def __init__(self, *, rank: int = 0, max_spans: int = MAX_SPANS) -> None:
        self._rank = rank
        self._spans: collections.deque[Span] = collections.deque(maxlen=max_spans)
        # One moment on both clocks, so that traces of several processes fall into place beside each
        # other.
        self._wall_s = time.time()
        self._start_s = time.perf_counter()

    def __call__(
        self,
        stage: str,
        item: int,
        batch: int,
        begin_s: float,
        end_s: float,
    ) -> None:
        """Take down one span; the signature of the stage runner's observers."""
        self._spans.append(
            Span(
                stage=stage,
                item=item,
                batch=batch,
                begin_s=begin_s,
                end_s=end_s,
                thread=threading.current_thread().name,
            )
        )

    def spans(self) -> list[Span]:
        """Return the events so far, in the order of their ends."""
        return list(self._spans)

    def write(self, path: str | Path) -> None:
        """Write the trace, replacing an existing file."""
        with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123 - a path or its text
            json.dump({"traceEvents": self.events(), "displayTimeUnit": "ms"}, file)

    def events(self) -> list[dict[str, Any]]:
        """Return the trace as Trace Event objects; times in microseconds since the Unix epoch."""
        pid = os.getpid()
        spans = self.spans()
        tracks = {
            name: number
            for number, name in enumerate(dict.fromkeys(span.thread for span in spans), 1)
        }
        events: list[dict[str, Any]] = [
            {
                "ph": "M",
                "name": "process_name",
                "pid": pid,
                "args": {"name": f"fuelrail rank {self._rank}"},
            },
            *(
                {
                    "ph": "M",
                    "name": "thread_name",
                    "pid": pid,
                    "tid": tid,
                    "args": {"name": name},
                }
                for name, tid in tracks.items()
            ),
        ]
        started: set[int] = set()
        for span in sorted(spans, key=lambda span: span.begin_s):
            place = {"pid": pid, "tid": tracks[span.thread]}
            begin_us = self._microseconds(span.begin_s)
            end_us = self._microseconds(span.end_s)
            work = {
                "ph": "X",
                "name": span.stage,
                "ts": begin_us,
                "dur": round(end_us - begin_us, 3),
                **place,
            }
            if span.batch == NO_BATCH:
                events.append({**work, "cat": "trainer", "args": {"step": span.item}})
                continue
            events.append(
                {
                    **work,
                    "cat": "loader",
                    "args": {"item": span.item, "batch": span.batch},
                }
            )
            arrow: dict[str, Any] = {
                "name": "batch",
                "cat": "batch",
                "id": span.batch,
                **place,
            }
            if span.stage == "wait":
                # Viewers tie an arrow to the work that encloses it, and at its very end that is
                # over.
                events.append(
                    {
                        **arrow,
                        "ph": "f",
                        "bp": "e",
                        "ts": max(begin_us, end_us - 1.0),
                    }
                )
            else:
                events.append(
                    {
                        **arrow,
                        "ph": "t" if span.batch in started else "s",
                        "ts": begin_us,
                    }
                )
                started.add(span.batch)
        return events

    def _microseconds(self, time_s: float) -> float:
        return round(1e6 * (self._wall_s + time_s - self._start_s), 3)
