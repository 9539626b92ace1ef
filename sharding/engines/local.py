"""Shards made on this machine: in this process for one worker, in threads of it for a few, in processes for more.

The bytes are the same; so is what is on disk after any of them is killed.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any, Final

from fuelrail.pipeline.errors import ConfigError, FuelrailError
from fuelrail.sharding.engines import threads
from fuelrail.sharding.processes import ctrl_c_waits, set_up_worker
from fuelrail.sharding.writer import RunStoppedError, ShardDone, ShardWriter, WriteJob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_POLL_S: Final = 0.1
_TASKS_AHEAD: Final = 2  # submitted for each worker, so that none waits for the next one


class LocalEngine:
    """So many workers on this machine; ``kind`` ``threads`` or ``processes``, None for what suits their number."""

    def __init__(self, num_workers: int, kind: str | None = None) -> None:
        self._num_workers = num_workers
        if num_workers < 1:
            raise ConfigError(f"{num_workers} workers are too few: 1 at least")
        self._kind = kind or ("threads" if self._num_workers <= threads.MAX_THREADS else "processes")

    def make_shards(self, job: WriteJob, numbers: Sequence[int], advance: Callable[[int], None]) -> Iterator[ShardDone]:
        """Make these shards of the plan."""
        num_workers = min(self._num_workers, len(numbers))
        if self._kind == "processes" and num_workers:
            yield from _in_processes(job, iter(numbers), num_workers, advance)
        elif num_workers > 1:
            yield from threads.make_shards(job, numbers, num_workers, advance)
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
                "a worker process died: killed, perhaps for want of memory (fewer workers need less), or the calling "
                "program lacks `if __name__ == '__main__':`; the same command goes on with what is not finished"
            ) from error
        finally:
            stop.set()
            # Cancelled by the pool's own thread: one that we cancelled would make it stumble over a worker's death.
            pool.shutdown(cancel_futures=True)


_writer: ShardWriter
_pulse: Callable[[int], None]


def _start_worker(job: WriteJob, written: Any, stop: Any) -> None:  # noqa: ANN401 - multiprocessing's are unnamed
    """Set up a worker process: its writer, and how it tells of its progress and learns that it is to stop."""
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
