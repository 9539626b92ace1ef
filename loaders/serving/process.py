"""Steps that a process of this host makes, in memory that it shares: of this loader alone, or of
all ranks of the host (`fuelrail.loaders.serving.node`).

The process is started at the first iteration, and again when it ends, for whatever reason.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.util
import os
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from fuelrail.loaders.batch.processes import start_process
from fuelrail.loaders.serving.memory import MappedMemory
from fuelrail.loaders.serving.server import (
    Block,
    Forget,
    Free,
    StepRequest,
    StepResult,
    Stop,
    serve_one,
)
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.runtime.workers import check_main_guard

if TYPE_CHECKING:
    from fuelrail.loaders.autotune import Tuning

_LOG = logging.getLogger(__name__)
_POLL_S: Final = 0.1
_JOIN_S: Final = 5.0
_ATTEMPTS: Final = 3
"""Processes that may end one after another without a batch."""

Connect = Callable[[], "tuple[Any, Any]"]
"""Returns a new process, or None, and a connection to the one that makes the steps."""


def connect_process() -> tuple[Any, Any]:
    """Start a process for this loader alone."""
    check_main_guard()
    if multiprocessing.current_process().daemon:
        raise ConfigError(
            "where='process' cannot be used in a process that may have no children: leave "
            "it out there"
        )
    return start_process(serve_one, "fuelrail-batches")


class _LostError(Exception):
    """The process at the other end is gone."""


@contextlib.contextmanager
def _losses() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError) as error:
        raise _LostError from error


class _Link:
    """A connection, the process behind it, and the memory that it shares; of one process of the
    trainer's.
    """

    def __init__(self, connect: Connect, setup: bytes, *, pinned: bool) -> None:
        self.pid = os.getpid()
        self.process, self.connection = connect()
        self.memory = MappedMemory(pinned=pinned)
        self.lock = threading.Lock()
        self.newest = (0, 0)
        """Iteration and number of the newest step that was asked for."""
        # Before multiprocessing terminates what is left, and only in the process that started it.
        self.end = multiprocessing.util.Finalize(
            self,
            _end_process,
            (self.process, self.connection),
            exitpriority=10,
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

    def ask(self, step: StepRequest) -> None:
        """Ask for a step, unless it was asked for already."""
        if self.newest != (step.iteration, step.number):
            self.send(step._replace(free=self.memory.returned()))
            self.newest = step.iteration, step.number

    def receive(self, step: StepRequest, is_stopped: threading.Event) -> StepResult | None:
        """Return a step that was asked for; map new blocks, and give those back that are free.

        None when the iteration was stopped.
        """
        with _losses():
            while not is_stopped.is_set():
                if not self.connection.poll(_POLL_S):
                    free = self.memory.returned()
                    if free:
                        self.send(Free(free))
                    continue
                message: object = self.connection.recv()
                if isinstance(message, Block):
                    number = self.connection.fileno()
                    with socket.fromfd(number, socket.AF_UNIX, socket.SOCK_STREAM) as link:
                        _, files, _, _ = socket.recv_fds(link, 1, 1)
                    if not files:
                        raise EOFError
                    self.memory.add(message.number, files[0], message.num_bytes)
                elif isinstance(message, Forget):
                    self.memory.forget(message.numbers)
                elif not isinstance(message, StepResult):
                    continue
                elif message.iteration == step.iteration:
                    if message.error is not None:
                        return message
                    return message._replace(batch=self.memory.open(message.batch))
                elif message.error is None:  # of an iteration that was left early
                    self.send(Free(sorted(message.batch.blocks())))
        return None


def _end_process(process: Any, connection: Any) -> None:
    connection.close()
    if process is not None:
        process.join(_JOIN_S)
        if process.exitcode is None:
            process.kill()
            process.join()


class ProcessTransport:
    """Makes steps in a process of this host; see `fuelrail.loaders.serving.client.Transport`."""

    def __init__(self, setup: bytes, connect: Connect, *, pinned: bool) -> None:
        self._setup = setup
        self._connect = connect
        self._pinned = pinned
        self.link: _Link | None = None
        """The process of now; None before the first step, and between two processes."""

    def open(self) -> None:
        """Do nothing: the first step starts the process."""

    def make(self, step: StepRequest, is_stopped: threading.Event) -> StepResult | None:
        """Return a step, for which another process is started where one ends; ask for the next."""
        attempts = 0
        while not is_stopped.is_set():
            try:
                link = self.link
                # A fork cannot talk to its parent's process.
                if link is None or link.pid != os.getpid():
                    link = _Link(self._connect, self._setup, pinned=self._pinned)
                    self.link = link
                link.ask(step)
                result = link.receive(step, is_stopped)
                if result is not None and result.error is None and not is_stopped.is_set():
                    link.ask(step._replace(number=step.number + 1))
                return result
            except _LostError as error:
                attempts += 1
                event = f"the process that makes the batches ended before batch {step.number} "
                event += "of this iteration"
                link = self.link
                self.link = None
                if link is not None:
                    link.end()
                if link is not None and link.process is not None:
                    event += (
                        f" with exit code {link.process.exitcode} (negative: killed by that "
                        "signal, as -9 for lack of memory)"
                    )
                if attempts >= _ATTEMPTS:
                    raise ChildProcessError(f"{event}, {attempts} times in a row") from error
                _LOG.warning("%s; another one is started", event)
        return None

    def tune(self, tuning: Tuning) -> None:
        """Change the numbers of threads and of ready batches in the process."""
        if self.link is not None:
            with contextlib.suppress(_LostError):
                self.link.send(tuning)

    def stop(self) -> None:
        """Ask for no more steps; the process waits for the next iteration."""
        if self.link is not None:
            with contextlib.suppress(_LostError):
                self.link.send(Stop())

    def end(self) -> None:
        """End the process."""
        link = self.link
        self.link = None
        if link is not None and link.pid == os.getpid():
            link.end()
