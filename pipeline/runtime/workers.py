"""Work in threads or processes with results in order, which an exception or Ctrl-C ends soon."""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import (
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
)
from concurrent.futures.process import BrokenProcessPool
from types import FrameType
from typing import TYPE_CHECKING, Final, TypeVar

from fuelrail.pipeline.errors import ConfigError, FuelrailError
from fuelrail.pipeline.runtime.stages import RemoteError, origin_of

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

LARGE_BYTES: Final = 64 << 20
"""A sample of more is worked on by one thread of a process at a time."""

A = TypeVar("A")

B = TypeVar("B")

_large = threading.Lock()

_ANY_TIME: Final = contextlib.nullcontext()

GRACE_S: Final = 3.0


def one_at_a_time(num_bytes: int) -> AbstractContextManager[object]:
    """Return a context to work on a sample of this size in: a process works on one large sample
    at a time.
    """
    return _large if num_bytes > LARGE_BYTES else _ANY_TIME


def in_threads(
    work: Callable[[A], B],
    items: Iterable[A],
    num_threads: int,
) -> Iterator[B]:
    """Yield ``work(item)`` for each item, in order; items that are not started when the caller
    stops never are.

    No more than twice as many items as threads are under way, so results do not pile up.
    """
    with ThreadPoolExecutor(num_threads) as pool:
        yield from _in_order(pool, work, items, num_threads)


def in_processes(
    work: Callable[[A], B],
    items: Iterable[A],
    num_processes: int,
) -> Iterator[B]:
    """Yield ``work(item)`` for each item, in order, as `in_threads` does; ``work``, items and
    results are pickled.

    A script that calls this needs a main guard (`check_main_guard`). Raises FuelrailError where a
    process dies.
    """
    check_main_guard()
    # A fork would have locks of threads that it lacks.
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(num_processes, context, set_up_worker) as pool:
            yield from _in_order(
                pool,
                work,
                items,
                num_processes,
                starting=ctrl_c_waits,
            )
    except BrokenProcessPool as error:
        raise FuelrailError(
            "a worker process died: it was killed, perhaps for lack of memory (use fewer "
            "workers), or the calling script lacks `if __name__ == '__main__':`"
        ) from error


def _in_order(
    pool: Executor,
    work: Callable[[A], B],
    items: Iterable[A],
    num_workers: int,
    starting: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
) -> Iterator[B]:
    """Yield results in order; an item is given to the pool, which may start a worker then,
    inside ``starting()``.
    """
    pending: deque[Future[B]] = deque()
    try:
        for item in items:
            with starting():
                pending.append(pool.submit(work, item))
            if len(pending) >= 2 * num_workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM while inside: batch systems and Kubernetes send SIGTERM
    before they kill.

    Does nothing on another thread than the main one, which alone gets signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def check_main_guard() -> None:
    """Raise ConfigError in a worker process that runs the caller's script again because it has no
    main guard.

    A spawned process imports the script that started it, under another name, before it can work.
    """
    for frame, line in traceback.walk_stack(inspect.currentframe()):
        code = frame.f_code
        if code.co_name == "<module>" and frame.f_globals.get("__name__") == "__mp_main__":
            raise ConfigError(
                f"{code.co_filename}:{line}: this call starts worker processes, and "
                "each of them runs the script "
                'again: put the call below `if __name__ == "__main__":`'
            )


@contextlib.contextmanager
def ctrl_c_waits() -> Iterator[None]:
    """Hold SIGINT back while processes may be started: they inherit that, and it's this process's
    business alone.

    A Ctrl-C meanwhile comes at the end, so that no child is left with half of what its parent had
    to tell it; so does SIGTERM where it has a handler.
    """
    held: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    # The mask is this thread's and its children's. Another thread may get the signal all the same,
    # and then its handler runs on the main thread: so that waits too. SIGTERM is not masked,
    # because children must die of it.
    if threading.current_thread() is not threading.main_thread():
        handlers = {}
    for number in handlers:
        signal.signal(number, lambda number, _: held.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if held:
            handler = handlers[signal.Signals(held[0])]
            assert callable(handler)
            handler(held[0], None)


def set_up_worker() -> None:
    """Set up a worker process, before all else: it ignores Ctrl-C, and ends when its parent ends
    for any reason.

    A SIGTERM that all processes of a run get leaves the parent ``GRACE_S`` to end it between two
    samples.
    """

    def end_soon(_: int, __: FrameType | None) -> None:
        timer = threading.Timer(GRACE_S, os._exit, (128 + signal.SIGTERM,))
        timer.daemon = True
        timer.start()

    def follow_parent() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            with contextlib.suppress(OSError):
                parent.join()
            os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end_soon)
    threading.Thread(target=follow_parent, daemon=True).start()


def pickled_error(error: BaseException) -> bytes:
    """Return an error that was caught here as a pickle of itself and its cause: its place and
    traceback here.
    """
    failed = RemoteError(origin_of(error), "".join(traceback.format_exception(error)))
    try:
        answer = pickle.dumps((error, failed))
        pickle.loads(answer)
    except Exception:  # noqa: BLE001 - a foreign class that does not survive the way
        answer = pickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), failed))
    return answer
