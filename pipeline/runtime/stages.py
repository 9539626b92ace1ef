"""The stage runner: items flow through stages of threads, over bounded links, and come out in the
order they went in.

::

    source --> [stage: n threads] --link--> [stage: m threads] --link--> consumer

Every item has a sequence number, and links restore the order of the numbers
(:mod:`fuelrail.pipeline.runtime.links`). What comes out therefore does not depend on timing or
thread counts; those may change while the pipeline runs. An exception travels as an item in its
place and is raised at the consumer. Each thread keeps its clock: *busy* in the stage's work,
*starved* waiting for input, *blocked* waiting for room. The harness, the metrics and the autotuner
read these.
"""

from __future__ import annotations

import _thread
import atexit
import logging
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from fuelrail.pipeline.errors import FuelrailError, StageError
from fuelrail.pipeline.runtime.links import END, Failure, Link, Source

_JOIN_TIMEOUT_S: Final = 10.0
_LOG = logging.getLogger(__name__)

_RUNNING: Final[set[_Run]] = set()
"""Pipelines whose threads have not all been waited for."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: ``work(item) -> item``, run by ``num_threads`` threads; ``capacity`` items may
    wait behind it.

    With ``group`` the work takes a list of that many consecutive items (the last list may be
    shorter), or of as many as the function says for the first of them; such a stage has one thread.
    With ``in_bursts`` a thread that waits for room continues when half of it is free.
    """

    name: str
    work: Callable[[Any], Any]
    num_threads: int
    capacity: int
    group: int | Callable[[Any], int] | None = None
    in_bursts: bool = False

    def __post_init__(self) -> None:
        assert self.num_threads >= 1, "a stage needs a thread"
        assert self.capacity >= 1, "a stage needs room for one item"
        assert self.group is None or self.num_threads == 1, "a grouping stage has one thread"


class StageClock(msgspec.Struct, frozen=True):
    """What a stage did so far, summed over its threads; times in seconds of wall clock, up to this
    moment.

    ``items`` counts finished work calls, ``waiting`` the results that wait after the stage at this
    moment.
    """

    name: str
    num_threads: int
    items: int
    busy_s: float
    starved_s: float
    blocked_s: float
    waiting: int
    capacity: int


class Observer(Protocol):
    """Callback for every finished piece of work, on the thread that did it; times of
    ``time.perf_counter``.

    ``batch`` is the number of the pipeline's result that the item becomes a part of, from 0 (-1
    before a stage whose groups differ in size). The consumer's waits are reported too, with the
    stage name ``wait``.
    """

    def __call__(
        self,
        stage: str,
        item: int,
        batch: int,
        begin_s: float,
        end_s: float,
    ) -> None:
        """Take note that one item went through one stage."""


class _Times(NamedTuple):
    """A thread's sums, and what it has been doing since when; replaced as one, so that readers
    see one moment.
    """

    items: int = 0
    busy_s: float = 0.0
    starved_s: float = 0.0
    blocked_s: float = 0.0
    doing: str = ""
    since_s: float = 0.0

    def until(self, now_s: float) -> _Times:
        """Return the times with what is under way counted up to now."""
        name = f"{self.doing}_s"
        if not self.doing:
            return self
        return self._replace(
            **{name: getattr(self, name) + max(0.0, now_s - self.since_s)},
            since_s=now_s,
        )


class _Crew:
    """A stage's threads and what they share: its links, its times, and how many threads it should
    have.

    Thread k serves while k < ``target``; a larger target starts the missing ones.
    """

    def __init__(
        self,
        name: str,
        stage: Stage,
        inbox: Source | Link,
        outbox: Link,
        per_batch: int,
        observer: Observer | None,
    ) -> None:
        self.stage = stage
        self.inbox = inbox
        self.outbox = outbox
        self.per_batch = per_batch
        self.observer = observer
        self.target = 0
        self.times: list[_Times] = []
        """Those of each thread, written by that thread alone."""
        self.threads: dict[int, threading.Thread] = {}
        self._name = f"{name}-{stage.name}"
        self._lock = threading.Lock()

    def resize(self, num_threads: int) -> list[threading.Thread]:
        """Set the number of threads and return those that must be started."""
        with self._lock:
            self.target = num_threads
            missing = [number for number in range(num_threads) if number not in self.threads]
            for number in missing:
                while len(self.times) <= number:
                    self.times.append(_Times())
                self.threads[number] = threading.Thread(
                    target=_run,
                    args=(self, number),
                    name=f"{self._name}-{number}",
                    daemon=True,
                )
            return [self.threads[number] for number in missing]

    def dismissed(self, number: int) -> bool:
        """Return whether thread ``number`` is one too many and must end now."""
        if number < self.target:
            return False
        with self._lock:
            if number < self.target:  # wanted again in between
                return False
            del self.threads[number]
            return True

    def clock(self, now_s: float) -> StageClock:
        times = [thread_times.until(now_s) for thread_times in list(self.times)]
        return StageClock(
            name=self.stage.name,
            num_threads=self.target,
            items=sum(t.items for t in times),
            busy_s=sum(t.busy_s for t in times),
            starved_s=sum(t.starved_s for t in times),
            blocked_s=sum(t.blocked_s for t in times),
            waiting=self.outbox.waiting(),
            capacity=self.outbox.capacity,
        )


class _Run:
    """The threads of one pipeline, and what they wait at; never the pipeline itself."""

    def __init__(
        self,
        pid: int,
        parts: Sequence[Source | Link],
        crews: Sequence[_Crew],
    ) -> None:
        self.pid = pid
        self.parts = parts
        self.crews = crews

    def threads(self) -> list[threading.Thread]:
        return [thread for crew in self.crews for thread in list(crew.threads.values())]


def add_clocks(before: Sequence[StageClock], now: Sequence[StageClock]) -> tuple[StageClock, ...]:
    """Return the clocks of one chain of stages over two runs; ``before`` may be empty."""
    if not before:
        return tuple(now)
    return tuple(
        msgspec.structs.replace(
            new,
            items=old.items + new.items,
            busy_s=old.busy_s + new.busy_s,
            starved_s=old.starved_s + new.starved_s,
            blocked_s=old.blocked_s + new.blocked_s,
        )
        for old, new in zip(before, now, strict=True)
    )


class Pipeline:
    """A running chain of stages; iterate it for the results.

    Close it, or let it be collected, to end its threads.

    A process that was forked off by someone else has no copy of the threads; iterating there raises
    a StageError.
    """

    def __init__(
        self,
        source: Iterator[Any],
        stages: Sequence[Stage],
        *,
        name: str = "fuelrail",
        observer: Observer | None = None,
    ) -> None:
        self._links = [Link(stage.capacity, in_bursts=stage.in_bursts) for stage in stages]
        head = Source(source)
        inboxes: list[Source | Link] = [head, *self._links[:-1]]
        # Threads know their crew, never this object: dropping the last reference to it stops them.
        self._crews: list[_Crew] = []
        per_batch = 1  # outputs of a stage that become one result of the last; 0: they differ
        for stage, inbox, outbox in reversed([*zip(stages, inboxes, self._links, strict=True)]):
            crew = _Crew(
                name=name,
                stage=stage,
                inbox=inbox,
                outbox=outbox,
                per_batch=per_batch,
                observer=observer,
            )
            self._crews.insert(0, crew)
            if stage.group is not None:
                per_batch *= stage.group if isinstance(stage.group, int) else 0
        self._observer = observer
        self._pid = os.getpid()
        self._taken = 0
        self.waited_s = 0.0
        """Seconds that the consumer has waited for results so far."""
        self._parts: list[Source | Link] = [head, *self._links]
        run = _Run(self._pid, self._parts, self._crews)
        _RUNNING.add(run)
        self._finalizer = weakref.finalize(self, _shut_down, run)
        for crew in self._crews:
            for thread in crew.resize(crew.stage.num_threads):
                thread.start()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Return the next result in order; raises what a stage raised for it, and stops the
        pipeline then.

        Threads still at work are not waited for, so that the error comes at once: :meth:`close`
        does.
        """
        if os.getpid() != self._pid:
            raise StageError(
                f"this iteration was started in process {self._pid} and cannot continue in "
                f"process {os.getpid()}, which was forked from it without its threads: "
                "start iterating in the child, or use the spawn start method"
            )
        started = time.perf_counter()
        _, item = self._links[-1].get()
        done = time.perf_counter()
        self.waited_s += done - started
        if item is END:
            self.close()
            raise StopIteration
        if self._observer is not None:
            item = _observe(
                self._observer,
                stage="wait",
                position=self._taken,
                batch=self._taken,
                begin_s=started,
                end_s=done,
                item=item,
            )
        self._taken += 1
        if isinstance(item, Failure):
            _stop(self._parts)
            raise item.error
        return item

    @property
    def is_running(self) -> bool:
        """Whether results can still come: not closed, and the process is the one that started
        it.
        """
        return self._finalizer.alive and os.getpid() == self._pid

    def close(self) -> None:
        """Stop all threads and wait until they are gone; may be called twice."""
        self._finalizer()

    def set_num_threads(self, stage: str, num_threads: int) -> None:
        """Let ``num_threads`` threads serve a stage from now on; ones too many end after the
        item they are at.
        """
        crew = self._crew(stage)
        assert num_threads >= 1, "a stage needs a thread"
        assert crew.stage.group is None or num_threads == 1, "a grouping stage has one thread"
        if self._finalizer.alive:
            for thread in crew.resize(num_threads):
                thread.start()

    def set_capacity(self, stage: str, capacity: int) -> None:
        """Let ``capacity`` items wait behind a stage from now on."""
        self._crew(stage).outbox.set_capacity(capacity)

    def clocks(self) -> tuple[StageClock, ...]:
        """Return the stages' clocks as of now, in flow order."""
        now_s = time.perf_counter()
        return tuple(crew.clock(now_s) for crew in self._crews)

    def _crew(self, stage: str) -> _Crew:
        return next(crew for crew in self._crews if crew.stage.name == stage)


def _run(crew: _Crew, number: int) -> None:
    """Run one thread of one stage."""
    now = time.perf_counter
    stage = crew.stage
    inbox = crew.inbox
    outbox = crew.outbox
    times = crew.times
    items, busy_s, starved_s, blocked_s = times[number][:4]

    def note(doing: str, since_s: float) -> None:
        times[number] = _Times(
            items=items,
            busy_s=busy_s,
            starved_s=starved_s,
            blocked_s=blocked_s,
            doing=doing,
            since_s=since_s,
        )

    free_s = now()
    while not crew.dismissed(number):
        note("starved", free_s)
        position, item = (
            inbox.get() if stage.group is None else _take_group(inbox, stage.group, items)
        )
        taken_s = now()
        starved_s += taken_s - free_s
        if item is END:
            note("", taken_s)
            outbox.finish(position)
            return
        note("busy", taken_s)
        if not isinstance(item, Failure):
            item = _attempt(stage, item)
        done_s = now()
        busy_s += done_s - taken_s
        items += 1
        note("blocked", done_s)
        if crew.observer is not None:
            batch = position // crew.per_batch if crew.per_batch else -1
            item = _observe(
                crew.observer,
                stage=stage.name,
                position=position,
                batch=batch,
                begin_s=taken_s,
                end_s=done_s,
                item=item,
            )
        admitted = outbox.put(position, item)
        free_s = now()
        blocked_s += free_s - done_s
        if not admitted or (stage.group is not None and isinstance(item, Failure)):
            break
        del item  # a result must not live on in a waiting thread's frame
    note("", free_s)


def _take_group(
    inbox: Source | Link,
    size: int | Callable[[Any], int],
    number: int,
) -> tuple[int, Any]:
    """Take group ``number``, of up to ``size`` items, with its number.

    The first failure is that of the whole group.

    The rest of that group is left where it is: each may take as long to fail, and no result after
    it is used.
    """
    items: list[Any] = []
    limit = 1
    while len(items) < limit:
        _, item = inbox.get()
        if isinstance(item, Failure):
            return number, item
        if item is END:
            if items:
                return number, items
            return number, END
        items.append(item)
        limit = size if isinstance(size, int) else size(items[0])
    return number, items


def _attempt(stage: Stage, item: Any) -> Any:
    # A function of its own: an error's traceback holds this frame, not that of the thread.
    try:
        return stage.work(item)
    except FuelrailError as error:  # says itself what and where
        return Failure(error)
    except BaseException as error:  # noqa: BLE001 - the consumer must see any error, sys.exit() too
        subject = (
            f"{_text(item[0])} .. {_text(item[-1])}" if stage.group is not None else _text(item)
        )
        return _failure(f"stage '{stage.name}' failed on {subject:.300}", error)


def _observe(
    observer: Observer,
    stage: str,
    position: int,
    batch: int,
    begin_s: float,
    end_s: float,
    item: Any,
) -> Any:
    """Call the observer; return the item, or the observer's failure in its place."""
    try:
        observer(stage, position, batch, begin_s, end_s)
    except BaseException as error:  # noqa: BLE001 - else the consumer would wait for ever
        if isinstance(item, Failure):
            return item
        return _failure(f"the observer failed at stage '{stage}'", error)
    return item


def _failure(context: str, error: BaseException) -> Failure:
    return Failure(stage_error(context, error))


def stage_error(context: str, error: BaseException) -> StageError:
    """Return the error of a function that raised, with the place where it did."""
    wrapped = StageError(f"{context}: {type(error).__name__}: {_text(error)} ({origin_of(error)})")
    wrapped.__cause__ = error
    return wrapped


class RemoteError(Exception):
    """The cause of an error that came from another process: its place there, and its traceback
    as text.
    """

    def __init__(self, origin: str, text: str) -> None:
        super().__init__(origin, text)
        self.origin = origin

    def __str__(self) -> str:
        return f"\n{self.args[1]}"


def origin_of(error: BaseException) -> str:
    """Return the last line of an error's traceback outside installed packages, or the last at
    all.
    """
    if isinstance(error.__cause__, RemoteError):
        return error.__cause__.origin
    lines = traceback.extract_tb(error.__traceback__)
    own_lines = [line for line in lines if "site-packages" not in line.filename]
    origin = (own_lines or lines)[-1]
    return f"{origin.filename}:{origin.lineno} in {origin.name}"


def _text(subject: object) -> str:
    try:
        return str(subject)
    except Exception:  # noqa: BLE001 - a foreign __str__ must not hide the error
        return f"a {type(subject).__name__} without a text"


def _shut_down(run: _Run) -> None:
    if os.getpid() != run.pid:
        # in a fork the threads do not exist, and locks may be held for ever by those that held them
        return
    if threading.current_thread() in run.threads():
        # Garbage collection ran this inside one of the threads, which may hold a link's lock at
        # this moment.
        _thread.start_new_thread(_end, (run,))
        return
    try:
        _end(run)
    except KeyboardInterrupt:
        _end(run)  # this function is called once
        raise


@atexit.register
def _end_all() -> None:
    """End what Ctrl-C left running, wherever it struck: after a start without its join, or in the
    middle of a join.

    A thread that outlives the interpreter is torn out of C++ code, and the process aborts.
    """
    for run in list(_RUNNING):
        if run.pid == os.getpid():
            _end(run)


def _end(run: _Run) -> None:
    """Release all threads and wait for them; work that was started and cancelled can be done
    again.
    """
    _stop(run.parts)
    deadline_s = time.monotonic() + _JOIN_TIMEOUT_S
    threads = run.threads()
    for thread in threads:
        if thread.ident is not None:
            thread.join(max(0.0, deadline_s - time.monotonic()))
    stuck = [thread.name for thread in threads if thread.is_alive()]
    if stuck:
        _LOG.warning(
            "threads still at work %g s after the pipeline was closed: %s",
            _JOIN_TIMEOUT_S,
            ", ".join(stuck),
        )
    _RUNNING.discard(run)


def _stop(parts: Sequence[Source | Link]) -> None:
    for part in parts:
        part.stop()
