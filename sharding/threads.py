"""Work in threads whose results come in order, and which an exception, Ctrl-C among them, ends soon."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

LARGE_BYTES: Final = 64 << 20
"""A sample of more is worked on by one thread of a process at a time."""

A = TypeVar("A")
B = TypeVar("B")


_large = threading.Lock()


def one_at_a_time(num_bytes: int) -> AbstractContextManager[object]:
    """Enter to work on a sample of so many bytes: the memory of a process is bounded by one large sample."""
    return _large if num_bytes > LARGE_BYTES else _ANY_TIME


_ANY_TIME: Final = contextlib.nullcontext()


def in_threads(work: Callable[[A], B], items: Iterable[A], num_threads: int) -> Iterator[B]:
    """``work(item)`` for each item, in the order of the items; what is not begun when the caller stops never is.

    No more than twice as many items as threads are under way, so results do not pile up.
    """
    pending: deque[Future[B]] = deque()
    with ThreadPoolExecutor(num_threads) as pool:
        try:
            for item in items:
                pending.append(pool.submit(work, item))
                if len(pending) >= 2 * num_threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
