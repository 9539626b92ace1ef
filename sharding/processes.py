"""Worker processes of a pool: Ctrl-C is their parent's business, and none outlives it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def ctrl_c_waits() -> Iterator[None]:
    """Hold SIGINT back while processes may be started: they inherit that, and it's this process's business alone.

    A Ctrl-C meanwhile comes at the end, so that no child is left with half of what its parent had to tell it.
    """
    held: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    # The mask is this thread's and its children's. Another thread may get the signal all the same, and then its handler
    # runs on the main thread: so that waits too.
    replaced = handler is not None and threading.current_thread() is threading.main_thread()
    if replaced:
        signal.signal(signal.SIGINT, lambda number, _: held.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if replaced:
            signal.signal(signal.SIGINT, handler)
        if held and callable(handler):
            handler(signal.SIGINT, None)


def set_up_worker() -> None:
    """To be called first in a worker process: it ignores Ctrl-C, and ends when its parent does, however that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        with contextlib.suppress(OSError):
            parent.join()
        os._exit(1)
