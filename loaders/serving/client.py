"""The trainer's end of a process that makes batches: it starts that process, and again when it
ends.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.util
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from multiprocessing import reduction
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch

from fuelrail.loaders.batch.processes import start_process
from fuelrail.loaders.serving.counts import Counts
from fuelrail.loaders.serving.memory import MappedMemory
from fuelrail.loaders.serving.node import connect_node
from fuelrail.loaders.serving.ray_workers import RemoteWorkers, StepClient
from fuelrail.loaders.serving.server import (
    Block,
    Failed,
    Forget,
    Received,
    ServedBatch,
    Setup,
    Start,
    Stop,
    serve_one,
)
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.runtime.host import default_memory_bytes
from fuelrail.pipeline.runtime.workers import check_main_guard

if TYPE_CHECKING:
    from fuelrail.loaders.autotune import Tuning
    from fuelrail.loaders.config import Arguments
    from fuelrail.loaders.schedule.bad_samples import BadSamples
    from fuelrail.pipeline.order.batching import Walk
    from fuelrail.pipeline.runtime.stages import Observer

_LOG = logging.getLogger(__name__)
_POLL_S: Final = 0.1
_JOIN_S: Final = 5.0
_ATTEMPTS: Final = 3
"""Processes that may end one after another without a batch."""

Connect = Callable[[], "tuple[Any, Any]"]
"""Returns a new process, and a connection to it."""


def serve_elsewhere(
    make: Callable[..., Any],
    parts: tuple[Arguments, Any],
    tuning: Tuning,
    bad: BadSamples,
    *,
    finishes: bool,
    pinned: bool,
) -> BatchClient | StepClient | None:
    """Return the client of a process that runs the loader ``make(*parts)``, on the CPU; None where
    it runs here.

    Unless it ``finishes`` the batches, they are normalised and transformed here. Raises
    ConfigError.
    """
    arguments, datasets = parts
    if arguments.where is None:
        return None
    if arguments.where == "node" and arguments.budget is not None:
        raise ConfigError(
            "where='node' has one number of threads for several ranks: give num_workers a number"
        )
    remote_arguments = msgspec.structs.replace(
        arguments,
        **dict.fromkeys(("device", "trace", "ledger", "where")),
        check_ranks=False,
        pin_memory=False,
        num_workers=tuning.num_workers,
        prefetch_factor=tuning.ready,
        batch_transform=arguments.batch_transform if finishes else None,
    )
    setup = Setup(
        make,
        (remote_arguments, datasets),
        finishes,
        torch.get_num_threads(),
        memory_bytes=default_memory_bytes(),
        shares_cpus=arguments.num_workers is None,
        is_traced=arguments.trace is not None,
    )
    if isinstance(arguments.where, RemoteWorkers):
        return StepClient(
            arguments.where, pickled_setup(setup), Counts(bad, arguments.trace), pinned=pinned
        )
    connect = connect_own if arguments.where == "process" else connect_node()
    return BatchClient(setup, connect, bad, arguments.trace, pinned=pinned)


def connect_own() -> tuple[Any, Any]:
    """Start a process for this loader alone."""
    check_main_guard()
    if multiprocessing.current_process().daemon:
        raise ConfigError(
            "where='process' cannot be used in a process that may have no children: leave "
            "it out there"
        )
    return start_process(serve_one, "fuelrail-batches")


class _Link:
    """A connection, the process behind it, and the memory that it shares; of one process of the
    trainer's.
    """

    def __init__(self, connect: Connect, setup: bytes, *, pinned: bool) -> None:
        self.pid = os.getpid()
        self.process, self.connection = connect()
        self.memory = MappedMemory(pinned=pinned)
        self.lock = threading.Lock()
        # Before multiprocessing terminates what is left, and only in the process that started it.
        self.end = multiprocessing.util.Finalize(
            self, _end, (self.process, self.connection), exitpriority=10
        )
        with _losses():
            self.connection.send_bytes(setup)
            refused = self.connection.recv()
        if refused is not None:
            self.end()
            error, cause = pickle.loads(refused)
            raise error from cause

    def send(self, message: object) -> None:
        with _losses(), self.lock:
            self.connection.send(message)

    def receive(self) -> Any:
        """Return the next message, with the file descriptor of a new block; None for none for
        some time.
        """
        with _losses():
            if not self.connection.poll(_POLL_S):
                return None
            message = self.connection.recv()
            if isinstance(message, Block):
                self.memory.add(
                    message.number, reduction.recv_handle(self.connection), message.num_bytes
                )
            return message


class _LostError(Exception):
    """The process at the other end is gone."""


@contextlib.contextmanager
def _losses() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError) as error:
        raise _LostError from error


def _end(process: Any, connection: Any) -> None:
    connection.close()
    if process is not None:
        process.join(_JOIN_S)
        if process.exitcode is None:
            process.kill()
            process.join()


def pickled_setup(setup: Setup) -> bytes:
    """Pickle a setup; raise ConfigError for one that cannot be."""
    try:
        return pickle.dumps(setup)
    except Exception as error:
        raise ConfigError(
            "where= makes batches in another process, and an argument of the loader cannot "
            f"be pickled ({error}): make functions those of a module, or objects of a class "
            "of a module that hold plain values"
        ) from error


class BatchClient:
    """Batches of a loader that are made in another process, which is started at the first
    iteration.

    Raises ConfigError for a setup that cannot be pickled.
    """

    def __init__(
        self,
        setup: Setup,
        connect: Connect,
        bad: BadSamples,
        observer: Observer | None,
        *,
        pinned: bool,
    ) -> None:
        self._setup = pickled_setup(setup)
        self._connect = connect
        self._pinned = pinned
        self.counts = Counts(bad, observer)
        self._link: _Link | None = None
        self._iterations = 0
        self._is_stopped = threading.Event()

    def items(self, walk: Walk) -> Iterator[Any]:
        """Yield the batches of a walk without end; raise what is raised for them in the process.

        The next one continues at the same place when the process ends, for whatever reason.
        """
        self._is_stopped = is_stopped = threading.Event()
        self._iterations += 1
        received = attempts = 0
        while not is_stopped.is_set():
            try:
                link = self._link
                # A fork cannot talk to its parent's process.
                if link is None or link.pid != os.getpid():
                    link = _Link(self._connect, self._setup, pinned=self._pinned)
                    self._link = link
                link.send(Start(self._iterations, walk.start, received))
                for message in self._messages(link, is_stopped):
                    if message.number < received:
                        # Made for a rank that shares the batch and had not received it.
                        link.send(Received(1, sorted(message.batch.blocks())))
                        continue
                    batch = link.memory.open(message.batch)
                    link.send(Received(1, link.memory.returned()))
                    received = received + 1
                    attempts = 0
                    yield batch
                    del batch
            except _LostError as error:
                attempts += 1
                self._lost(received, attempts, error)

    def _messages(self, link: _Link, is_stopped: threading.Event) -> Iterator[ServedBatch]:
        """Yield what is made for this iteration; map new blocks, and give those back that are
        free.
        """
        while not is_stopped.is_set():
            message = link.receive()
            if message is None:
                if free := link.memory.returned():
                    link.send(Received(0, free))
            elif isinstance(message, Forget):
                link.memory.forget(message.numbers)
            elif isinstance(message, ServedBatch):
                if message.start == self._iterations:
                    self.counts.note(message.facts)
                    yield message
                else:  # of an iteration that was left early
                    link.send(Received(0, sorted(message.batch.blocks())))
            elif isinstance(message, Failed) and message.start == self._iterations:
                error, cause = pickle.loads(message.error)
                raise error from cause

    def _lost(self, received: int, attempts: int, error: Exception) -> None:
        """Forget a process that ended; raise ChildProcessError if no batch came from the last
        ones.
        """
        link = self._link
        self._link = None
        if link is not None:
            link.end()
        event = (
            f"the process that makes the batches ended before batch {received} of this iteration"
        )
        if link is not None and link.process is not None:
            event += (
                f" with exit code {link.process.exitcode} (negative: killed by that signal, as -9 "
                "for lack of memory)"
            )
        if attempts >= _ATTEMPTS:
            raise ChildProcessError(f"{event}, {attempts} times in a row") from error
        _LOG.warning("%s; another one is started", event)

    def tune(self, tuning: Tuning) -> None:
        """Change the numbers of threads and of ready batches in the process."""
        if self._link is not None:
            with contextlib.suppress(_LostError):
                self._link.send(tuning)

    def close(self) -> None:
        """End the iteration under way, so that no thread waits for it; the process waits for the
        next one.
        """
        self._is_stopped.set()
        if self._link is not None:
            with contextlib.suppress(_LostError):
                self._link.send(Stop())

    def end(self) -> None:
        """End the process; the next iteration starts another one."""
        link = self._link
        self._link = None
        if link is not None and link.pid == os.getpid():
            link.end()
