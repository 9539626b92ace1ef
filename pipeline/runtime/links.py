"""Between stages: the bounded, order-restoring link, the numbered source at the head, and the
items.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

END: Final = object()
"""Comes out of a source or link when no more items will."""


class Failure(NamedTuple):
    """An exception on its way to the consumer, in its item's place."""

    error: BaseException


class Link:
    """A bounded, order-restoring link between two stages.

    Item s is admitted only while ``s < next_out + capacity``, so the link is bounded, and the
    oldest item in flight can always move on: no deadlock for any number of threads. With
    ``in_bursts`` a thread that had to wait is admitted once there is room for half of the capacity:
    it then makes several items in a row, with warm caches, and threads change places less often.
    """

    def __init__(self, capacity: int, *, in_bursts: bool = False) -> None:
        self.capacity = capacity
        self._in_bursts = in_bursts
        self._first_blocked = sys.maxsize
        self._lock = threading.Lock()
        self._filled = threading.Condition(self._lock)
        self._freed = threading.Condition(self._lock)
        self._items: dict[int, Any] = {}
        self._next_out = 0
        self._total: int | None = None
        self._stopped = False

    def set_capacity(self, capacity: int) -> None:
        """Change the bound; items that are here beyond a smaller one stay until they are taken."""
        assert capacity >= 1, "a link needs room for one item"
        with self._lock:
            self.capacity = capacity
            self._freed.notify_all()

    def put(self, number: int, item: Any) -> bool:
        """Hand in item ``number``, waiting for room; False if the pipeline was stopped."""
        with self._lock:
            if number >= self._next_out + self.capacity:
                while not self._stopped and number >= self._reopens_at():
                    self._first_blocked = min(self._first_blocked, number)
                    self._freed.wait()
            if self._stopped:
                return False
            self._items[number] = item
            if number == self._next_out:
                self._filled.notify()
            return True

    def get(self) -> tuple[int, Any]:
        """Take the next item in order, waiting for it; (total, END) after the last one or when
        stopped.
        """
        with self._lock:
            while (
                not self._stopped
                and self._next_out not in self._items
                and self._next_out != self._total
            ):
                self._filled.wait()
            if self._stopped or self._next_out == self._total:
                return self._next_out, END
            number = self._next_out
            self._next_out += 1
            if self._next_out in self._items:
                # put() wakes one taker, for the item that was due then; the follower may lie here
                # already.
                self._filled.notify()
            if self._first_blocked < self._reopens_at():
                self._first_blocked = sys.maxsize
                self._freed.notify_all()
            return number, self._items.pop(number)

    def _reopens_at(self) -> int:
        """Return the first item that is not admitted after a wait."""
        room = max(1, self.capacity // 2) if self._in_bursts else 1
        return self._next_out + self.capacity - room + 1

    def finish(self, total: int) -> None:
        """Set the number of all items; may be called more than once."""
        with self._lock:
            self._total = total
            self._filled.notify_all()

    def stop(self) -> None:
        """Release all threads that wait, and drop the items."""
        with self._lock:
            self._stopped = True
            dropped = list(self._items.values())
            self._items.clear()
            self._filled.notify_all()
            self._freed.notify_all()
        # Only now, without the lock: what the items' finalisers do is not ours to know.
        del dropped

    def waiting(self) -> int:
        """Return the number of items that lie here now."""
        return len(self._items)


class Source:
    """The iterator at the head, numbered; pulled by whichever thread of the first stage is free."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self._lock = threading.Lock()
        self._next = 0
        self._ended = False

    def get(self) -> tuple[int, Any]:
        """Pull the next item; (total, END) after the last one, or when stopped."""
        with self._lock:
            if self._ended:
                return self._next, END
            number = self._next
            try:
                item = next(self._items)
            except StopIteration:
                self._ended = True
                return number, END
            except BaseException as error:  # noqa: BLE001 - carried to the consumer, who raises it
                self._ended = True
                item = Failure(error)
            self._next += 1
            return number, item

    def stop(self) -> None:
        """Make the next pull the end; an iterator that is being pulled finishes that pull."""
        self._ended = True
