"""The stage runner: items flow through stages of threads, over bounded links, and come out in the order they went in.

::

    source --> [stage: n threads] --link--> [stage: m threads] --link--> consumer

Every item has a sequence number. A link admits number s only while ``s < next_out + capacity``, so it is bounded,
and the oldest item in flight can always move on: no deadlock, whatever the thread counts. An exception travels as an
item in its place and is raised at the consumer, so the outcome does not depend on timing. Each thread keeps its
clock: *busy* in the stage's work, *starved* waiting for input, *blocked* waiting for room. The harness reads these.
"""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fuelrail.pipeline.errors import FuelrailError, StageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_END: Final = object()
_JOIN_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: ``work(item) -> item``, run by ``num_threads`` threads; ``capacity`` items may wait behind it.

    With ``group`` the work takes a list of that many consecutive items (the last list may be shorter);
    such a stage has one thread.
    """

    name: str
    work: Callable[[Any], Any]
    num_threads: int
    capacity: int
    group: int | None = None

    def __post_init__(self) -> None:
        assert self.num_threads >= 1, "a stage needs a thread"
        assert self.capacity >= 1, "a stage needs room for one item"
        assert self.group is None or self.num_threads == 1, "a grouping stage has one thread"


class StageClock(NamedTuple):
    """What a stage did so far, summed over its threads; times in seconds of wall clock.

    ``items`` counts finished work calls, ``waiting`` the results that stand behind the stage at this moment.
    """

    name: str
    num_threads: int
    items: int
    busy_s: float
    starved_s: float
    blocked_s: float
    waiting: int
    capacity: int


class _Failure(NamedTuple):
    """An exception on its way to the consumer."""

    error: BaseException


class _Link:
    """A bounded, order-restoring link between two stages; see the module's docstring for its rule."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._filled = threading.Condition(self._lock)
        self._freed = threading.Condition(self._lock)
        self._items: dict[int, Any] = {}
        self._next_out = 0
        self._total: int | None = None
        self._stopped = False

    def put(self, number: int, item: Any) -> bool:  # noqa: ANN401
        """Hand in item ``number``, waiting for room; False if the pipeline was stopped meanwhile."""
        with self._lock:
            while not self._stopped and number >= self._next_out + self._capacity:
                self._freed.wait()
            if self._stopped:
                return False
            self._items[number] = item
            if number == self._next_out:
                self._filled.notify()
            return True

    def get(self) -> tuple[int, Any]:
        """Take the next item in order, waiting for it; (total, _END) after the last one or when stopped."""
        with self._lock:
            while not self._stopped and self._next_out not in self._items and self._next_out != self._total:
                self._filled.wait()
            if self._stopped or self._next_out == self._total:
                return self._next_out, _END
            number = self._next_out
            self._next_out += 1
            if self._next_out in self._items:
                # put() wakes one taker, for the item that was due then; the follower may lie here already.
                self._filled.notify()
            self._freed.notify_all()
            return number, self._items.pop(number)

    def finish(self, total: int) -> None:
        """Say that there are ``total`` items in all; may be said more than once."""
        with self._lock:
            self._total = total
            self._filled.notify_all()

    def stop(self) -> None:
        """Let go everyone who waits, drop what is here."""
        with self._lock:
            self._stopped = True
            self._items.clear()
            self._filled.notify_all()
            self._freed.notify_all()

    def waiting(self) -> int:
        """Number of items that lie here now."""
        return len(self._items)


class _Source:
    """The iterator at the head, numbered; pulled by whichever thread of the first stage is free."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self._lock = threading.Lock()
        self._next = 0
        self._ended = False

    def get(self) -> tuple[int, Any]:
        with self._lock:
            if self._ended:
                return self._next, _END
            number = self._next
            try:
                item = next(self._items)
            except StopIteration:
                self._ended = True
                return number, _END
            except BaseException as error:  # noqa: BLE001 - carried to the consumer, who raises it
                self._ended = True
                item = _Failure(error)
            self._next += 1
            return number, item

    def stop(self) -> None:
        """Make the next pull the end; an iterator that is being pulled finishes that pull."""
        self._ended = True


class _Clock:
    """One thread's times; written by that thread alone."""

    __slots__ = ("blocked_s", "busy_s", "items", "starved_s")

    def __init__(self) -> None:
        self.items = 0
        self.busy_s = self.starved_s = self.blocked_s = 0.0


class Pipeline:
    """A running chain of stages; iterate it for the results. Close it, or let it be collected, to end its threads."""

    def __init__(self, source: Iterator[Any], stages: Sequence[Stage], *, name: str = "fuelrail") -> None:
        self._stages = tuple(stages)
        self._clocks = [[_Clock() for _ in range(stage.num_threads)] for stage in self._stages]
        self._links = [_Link(stage.capacity) for stage in self._stages]
        head = _Source(source)
        inboxes: list[_Source | _Link] = [head, *self._links[:-1]]
        threads = [
            threading.Thread(
                target=_run, args=(stage, inbox, link, clock), name=f"{name}-{stage.name}-{number}", daemon=True
            )
            for stage, inbox, link, clocks in zip(self._stages, inboxes, self._links, self._clocks, strict=True)
            for number, clock in enumerate(clocks)
        ]
        # The threads know links, stages and clocks, never this object: dropping the last reference to it stops them.
        self._finalizer = weakref.finalize(self, _shut_down, [head, *self._links], threads)
        for thread in threads:
            thread.start()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:  # noqa: ANN401
        """The next result in order; raises what a stage raised for it, and ends the pipeline then."""
        _, item = self._links[-1].get()
        if item is _END:
            self.close()
            raise StopIteration
        if isinstance(item, _Failure):
            self.close()
            raise item.error
        return item

    def close(self) -> None:
        """Stop all threads and wait until they are gone; may be called twice."""
        self._finalizer()

    def clocks(self) -> tuple[StageClock, ...]:
        """The stages' clocks as of now, in flow order."""
        return tuple(
            StageClock(
                stage.name,
                stage.num_threads,
                sum(clock.items for clock in clocks),
                sum(clock.busy_s for clock in clocks),
                sum(clock.starved_s for clock in clocks),
                sum(clock.blocked_s for clock in clocks),
                link.waiting(),
                stage.capacity,
            )
            for stage, clocks, link in zip(self._stages, self._clocks, self._links, strict=True)
        )


def _run(stage: Stage, inbox: _Source | _Link, outbox: _Link, clock: _Clock) -> None:
    """One thread of one stage."""
    now = time.perf_counter
    while True:
        started = now()
        number, item = inbox.get() if stage.group is None else _take_group(inbox, stage.group)
        taken = now()
        clock.starved_s += taken - started
        if item is _END:
            outbox.finish(number)
            return
        if not isinstance(item, _Failure):
            item = _attempt(stage, item)
        done = now()
        clock.busy_s += done - taken
        clock.items += 1
        admitted = outbox.put(number, item)
        clock.blocked_s += now() - done
        if not admitted:
            return
        del item  # a result must not live on in a waiting thread's frame


def _take_group(inbox: _Source | _Link, size: int) -> tuple[int, Any]:
    """Take up to ``size`` items; the group's number counts groups. A failure among them stands for the whole group."""
    items: list[Any] = []
    failure: _Failure | None = None
    for _ in range(size):
        number, item = inbox.get()
        if item is _END:
            if items or failure:
                break
            return -(-number // size), _END
        # The group is taken to its end all the same, or what is left of it would count as one more of this number.
        if isinstance(item, _Failure):
            failure = failure or item
        else:
            items.append(item)
    return number // size, failure or items


def _attempt(stage: Stage, item: Any) -> Any:  # noqa: ANN401
    try:
        return stage.work(item)
    except FuelrailError as error:  # says itself what and where
        return _Failure(error)
    except Exception as error:  # noqa: BLE001 - whatever it is, the consumer must see it
        wrapped = StageError(f"stage '{stage.name}' failed on {item!r:.200}: {type(error).__name__}: {error}")
        wrapped.__cause__ = error
        return _Failure(wrapped)


def _shut_down(parts: Sequence[_Source | _Link], threads: Sequence[threading.Thread]) -> None:
    for part in parts:
        part.stop()
    for thread in threads:
        # Garbage collection may run this inside one of the threads themselves.
        if thread.is_alive() and thread is not threading.current_thread():
            thread.join(_JOIN_TIMEOUT_S)
