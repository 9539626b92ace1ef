"""Shards made on this machine: in this process for one worker, in threads of it for a few, in processes for more.

The bytes are the same; so is what is on disk after any of them is killed.
"""

from __future__ import annotations

import itertools
import multiprocessing
import threading
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any, Final

from fuelrail.pipeline.errors import ConfigError, FuelrailError
from fuelrail.pipeline.runtime.workers import ctrl_c_waits, set_up_worker
from fuelrail.sharding.write.shard_writer import RunStoppedError, ShardDone, ShardWriter, WriteJob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_POLL_S: Final = 0.1


_TASKS_AHEAD: Final = 2  # submitted for each worker, so that none waits for the next one


class LocalEngine:
    """A number of workers on this machine; ``kind`` is ``threads`` or ``processes``, None: chosen by the number."""

    def __init__(self, num_workers: int, kind: str | None = None) -> None:
        self._num_workers = num_workers
        if num_workers < 1:
            raise ConfigError(f"workers must be >= 1, got {num_workers}")
        self._kind = kind or ("threads" if self._num_workers <= MAX_THREADS else "processes")

    def make_shards(self, job: WriteJob, numbers: Sequence[int], advance: Callable[[int], None]) -> Iterator[ShardDone]:
        """Make these shards of the plan."""
        num_workers = min(self._num_workers, len(numbers))
        if self._kind == "processes" and num_workers:
            yield from _in_processes(job, iter(numbers), num_workers, advance)
        elif num_workers > 1:
            yield from make_shards(job, numbers, num_workers, advance)
        elif num_workers == 1:
            writer = ShardWriter(job)
            for number in numbers:
                yield writer.make(number, advance)


def _in_processes(
    job: WriteJob, numbers: Iterator[int], num_workers: int, advance: Callable[[int], None]
) -> Iterator[ShardDone]:
    # Spawned, not forked: threads of Arrow and of the progress bar run here, and the lock must stay with this process.
    context = multiprocessing.get_context("spawn")
    seen = 0
    try:
        written, stop = context.Value("q", 0), context.Event()
        workers = ProcessPoolExecutor(num_workers, context, _start_worker, (job, written, stop))
    except OSError as error:
        raise FuelrailError(
            f"worker processes cannot be prepared: {error.strerror or error}; they need some shared memory of this "
            "machine (/dev/shm): free some, or use --engine threads"
        ) from error
    with workers as pool:
        pending: set[Future[ShardDone]] = set()
        try:
            while True:
                with ctrl_c_waits():
                    for number in numbers:
                        pending.add(pool.submit(_make, number))
                        if len(pending) >= num_workers * _TASKS_AHEAD:
                            break
                if not pending:
                    return
                done, pending = wait(pending, _POLL_S, FIRST_COMPLETED)
                advance(written.value - seen)
                seen = written.value
                for future in done:
                    yield future.result()
        except BrokenProcessPool as error:
            raise FuelrailError(
                "a worker process died: it was killed, perhaps for lack of memory (use fewer workers), or the calling "
                "script lacks `if __name__ == '__main__':`; run the same command again to resume"
            ) from error
        finally:
            stop.set()
            # Cancelled by the pool's own thread: one that we cancelled would make it stumble over a worker's death.
            pool.shutdown(cancel_futures=True)


_writer: ShardWriter


_pulse: Callable[[int], None]


def _start_worker(job: WriteJob, written: Any, stop: Any) -> None:  # noqa: ANN401 - multiprocessing's are unnamed
    """Set up a worker process: its writer, its progress counter, and its stop signal."""
    global _writer, _pulse
    set_up_worker()
    _writer = ShardWriter(job)

    def pulse(num_bytes: int) -> None:
        with written.get_lock():
            written.value += num_bytes
        if stop.is_set():
            raise RunStoppedError("stopped")

    _pulse = pulse


def _make(number: int) -> ShardDone:
    return _writer.make(number, _pulse)


MAX_THREADS: Final = 4


_THREADS_POLL_S: Final = 0.1


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
                done, pending = wait(pending, _THREADS_POLL_S, FIRST_COMPLETED)
                advance(written - seen)
                seen = written
                for future in done:
                    yield future.result()
        finally:
            stop.set()
            for future in pending:
                future.cancel()
