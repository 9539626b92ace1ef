"""Shards made in threads of this process: a worker begins at once and shares what is loaded.

Reading, writing, digests and compression run without the interpreter's lock; what needs it is about a seventh of the
work, so that a process has room for ``MAX_THREADS`` of them.
"""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Final

from fuelrail.sharding.writer import RunStoppedError, ShardDone, ShardWriter, WriteJob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

MAX_THREADS: Final = 4
_POLL_S: Final = 0.1


def make_shards(
    job: WriteJob, numbers: Sequence[int], num_threads: int, advance: Callable[[int], None]
) -> Iterator[ShardDone]:
    """Make these shards of the plan; yields them as they are done, in any order.

    ``advance`` gets the bytes written since it was last called, in the calling thread. Raises what a worker raised
    first; the others are stopped between two samples.
    """
    stop, lock = threading.Event(), threading.Lock()
    written = seen = 0
    own = threading.local()

    def pulse(num_bytes: int) -> None:
        nonlocal written
        with lock:
            written += num_bytes
        if stop.is_set():
            raise RunStoppedError("stopped")

    def make(number: int) -> ShardDone:
        if not hasattr(own, "writer"):
            own.writer = ShardWriter(job)  # readers of the scan table must not be shared
        done: ShardDone = own.writer.make(number, pulse)
        return done

    waiting = iter(numbers)
    with ThreadPoolExecutor(num_threads, "shard") as pool:
        pending: set[Future[ShardDone]] = set()
        try:
            while True:
                pending |= {pool.submit(make, n) for n in itertools.islice(waiting, num_threads - len(pending))}
                if not pending:
                    return
                done, pending = wait(pending, _POLL_S, FIRST_COMPLETED)
                advance(written - seen)
                seen = written
                for future in done:
                    yield future.result()
        finally:
            stop.set()
            for future in pending:
                future.cancel()
