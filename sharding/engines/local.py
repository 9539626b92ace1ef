"""Shards made on this machine: in this process for one worker, in threads of it for a few, in
processes for more.

Threads start at once, processes after a second or more each; beyond a few threads Python's lock
holds them up. One loop serves both pools. The bytes are the same; so is what is on disk after any
of them is killed.
"""

from __future__ import annotations

import multiprocessing.dummy
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from typing import Any, Final

from fuelrail.pipeline.errors import ConfigError, FuelrailError
from fuelrail.pipeline.runtime.workers import ctrl_c_waits, set_up_worker
from fuelrail.sharding.write.shard_writer import (
    RunStoppedError,
    ShardDone,
    ShardWriter,
    WriteJob,
)

MAX_THREADS: Final = 4
"""Workers that are threads where the options do not say; more of them are processes."""
_POLL_S: Final = 0.1
_TASKS_AHEAD: Final = 2  # submitted for each worker, so that none waits for the next one

_worker_state = threading.local()
"""The state of each worker: its writer's maker, as readers of the scan table must not be shared,
and its ``pulse``.
"""


class LocalEngine:
    """A number of workers on this machine; ``kind`` is ``threads`` or ``processes``, None:
    chosen by the number.
    """

    def __init__(self, num_workers: int, kind: str | None = None) -> None:
        if num_workers < 1:
            raise ConfigError(f"workers must be >= 1, got {num_workers}")
        self._num_workers = num_workers
        self._kind = kind or ("threads" if num_workers <= MAX_THREADS else "processes")

    def make_shards(
        self,
        job: WriteJob,
        numbers: Sequence[int],
        advance: Callable[[int], None],
    ) -> Iterator[ShardDone]:
        """Make these shards of the plan."""
        num_workers = min(self._num_workers, len(numbers))
        if not num_workers:
            return
        if num_workers == 1 and self._kind != "processes":
            with ThreadPoolExecutor(self._num_workers, "images") as images:
                writer = ShardWriter(job, images if self._num_workers > 1 else None)
                for number in numbers:
                    yield writer.make(number, advance, digest_apart=True)
            return
        # Spawned, not forked: threads of Arrow and of the progress bar run here, and the lock must
        # stay with this process.
        context = multiprocessing.get_context("spawn")
        kit: Any = multiprocessing.dummy if self._kind == "threads" else context
        reported = 0
        # Threads for images keep all CPUs busy while the last shards are written.
        images = ThreadPoolExecutor(self._num_workers, "images")
        workers: ThreadPoolExecutor | ProcessPoolExecutor
        try:
            written = kit.Value("q", 0, lock=False)
            shared = (job, written, kit.Lock(), stop := kit.Event())
            if self._kind == "threads":
                workers = ThreadPoolExecutor(num_workers, "shard", _start_worker, (*shared, images))
            else:
                workers = ProcessPoolExecutor(num_workers, context, _set_up_process, shared)
        except OSError as error:
            raise FuelrailError(
                f"worker processes cannot be prepared: {error.strerror or error}; they need "
                "some shared memory of this machine (/dev/shm): free some, or use --engine threads"
            ) from error
        with images, workers as pool:
            pending: set[Future[ShardDone]] = set()
            # The last shards, fewer than workers, leave CPUs idle: the digest is computed there. When
            # all workers are at work, the change between threads costs more than it gains.
            num_last = len(numbers) % num_workers
            last = set(numbers[len(numbers) - num_last :])
            waiting = iter(numbers)
            try:
                while True:
                    # A Ctrl-C inside wait() would leave locks of futures held, and threads that
                    # make shards hang there.
                    with ctrl_c_waits():
                        for number in waiting:
                            is_last = number in last
                            pending.add(pool.submit(_make_shard, number, digest_apart=is_last))
                            if len(pending) >= num_workers * _TASKS_AHEAD:
                                break
                        done, pending = wait(pending, _POLL_S, FIRST_COMPLETED)
                    if not (done or pending):
                        return
                    advance(written.value - reported)
                    reported = written.value
                    for future in done:
                        yield future.result()
            except BrokenProcessPool as error:
                raise FuelrailError(
                    "a worker process died: it was killed, perhaps for lack of memory (use "
                    "fewer workers), or the calling script lacks `if __name__ == "
                    "'__main__':`; run the same command again to resume"
                ) from error
            finally:
                stop.set()
                # Cancelled by the pool's own thread: one that we cancelled would make it stumble
                # over a worker's death.
                pool.shutdown(cancel_futures=True)


def _start_worker(
    job: WriteJob,
    written: Any,
    lock: Any,
    stop: Any,
    images: ThreadPoolExecutor | None = None,
) -> None:
    """Set up a worker: its writer, its progress counter, its stop signal, and threads for
    images.
    """

    def pulse(num_bytes: int) -> None:
        with lock:
            written.value += num_bytes
        if stop.is_set():
            raise RunStoppedError("stopped")

    # The writer is made by the first task: an error is that task's then.
    _worker_state.writer = lru_cache(1)(lambda: ShardWriter(job, images))
    _worker_state.pulse = pulse


def _set_up_process(*shared: Any) -> None:
    set_up_worker()
    _start_worker(*shared)


def _make_shard(number: int, *, digest_apart: bool) -> ShardDone:
    done: ShardDone = _worker_state.writer().make(
        number,
        _worker_state.pulse,
        digest_apart=digest_apart,
    )
    return done
