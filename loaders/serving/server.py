"""The process that makes batches for others: a loader for each data-parallel rank, and its trainers
as clients.

All clients of one data-parallel rank get the same batches from one decode: there is one with
``where="process"``, and as many as the rank has model-parallel parts on this node with
``where="node"``; Ray's actors serve one client each. Wherever batches are made, a client sends a
`StepRequest` for one step after the other, and gets a `StepResult` for each: a step's batch is the
same whoever makes it.

A process on this host has more messages, for it makes the steps after the one asked for in advance,
and its batches lie in memory that it shares. A client sends `Stop`, so that no more are made,
`Free`, and `Tuning`, the numbers of threads and of ready batches. The server sends a `Block` and
its file descriptor for memory that the client does not know, and `Forget` for memory that is gone.
It keeps nothing but batches that are not free yet.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import socket
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fuelrail.loaders.serving.memory import SharedMemory
from fuelrail.pipeline.runtime.workers import pickled_error, set_up_worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fuelrail.loaders.autotune import Tuning
    from fuelrail.loaders.storage.buffers import Memory
    from fuelrail.loaders.storage.protocol import StorageStats
    from fuelrail.pipeline.order.batching import Cursor, World
    from fuelrail.pipeline.runtime.stages import StageClock


class Setup(NamedTuple):
    """What a loader is made of in the process that runs it."""

    make: Callable[..., Any]
    arguments: tuple[Any, ...]
    finishes: bool
    """Whether the batches are normalised and transformed here; else the trainer does it on its
    device.
    """
    num_threads: int
    """Threads of torch in the trainer's process: sums may depend on it."""
    memory_bytes: int
    """Limit of the shared memory, for each client."""
    shares_cpus: bool
    """Whether the number of threads is one client's share of the CPUs."""
    is_traced: bool


class StepRequest(NamedTuple):
    """Ask for a step: the one with this number after a place of the order."""

    iteration: int
    place: Cursor
    number: int
    free: Sequence[int] = ()
    """Blocks of shared memory whose tensors are gone in the trainer."""
    world: World | None = None
    """The rank that it is a step of; None: as the loader was made."""


class Facts(NamedTuple):
    """What the server did so far, and what happened since the last batch."""

    process: str
    """A name of its own."""
    clocks: tuple[StageClock, ...]
    storage: StorageStats
    refused_images: int
    bad: frozenset[int]
    """Numbers of the bad samples so far."""
    replaced: list[tuple[int, int, str | None, str]]
    """Arguments of `BadSamples.note`."""
    events: list[tuple[str, int, int, float, float]]
    """Arguments of an `Observer`."""


class StepResult(NamedTuple):
    """A step that was made: its batch, in the form of its transport, or what was raised for it."""

    iteration: int
    number: int
    batch: Any = None
    facts: Facts | None = None
    error: bytes | None = None
    """A pickle of what was raised and its cause."""


class Stop(NamedTuple):
    """Ask for no more steps of this iteration."""


class Free(NamedTuple):
    """Blocks of shared memory whose tensors are gone in the trainer."""

    numbers: Sequence[int]


class Block(NamedTuple):
    """A block of memory that the client does not know yet; its file descriptor follows."""

    number: int
    num_bytes: int


class Forget(NamedTuple):
    """Blocks that are gone."""

    numbers: list[int]


class Client:
    """The server's end of one connection."""

    def __init__(self, connection: Any, changed: threading.Condition) -> None:
        self.connection = connection
        self._changed = changed
        self.step: StepRequest | None = None
        """The newest step that the client asks for; None: it has stopped its iteration."""
        self.is_connected = True
        self._held: dict[int, torch.Tensor] = {}
        self._known: set[int] = set()

    def listen(self, tune: Callable[[Tuning], None]) -> None:
        """Take messages until the client is gone."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = self.connection.recv()
                with self._changed:
                    if isinstance(message, StepRequest):
                        self.step = message
                        self._release(message.free)
                    elif isinstance(message, Free):
                        self._release(message.numbers)
                    elif isinstance(message, Stop):
                        self.step = None
                    else:
                        tune(message)
                    self._changed.notify_all()
        with self._changed:
            self.is_connected = False
            self.step = None
            self._held.clear()
            self._changed.notify_all()

    def _release(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._held.pop(number, None)

    def send(
        self,
        result: StepResult,
        held: dict[int, torch.Tensor],
        memory: SharedMemory,
    ) -> None:
        """Send a step, and the blocks of its batch that the client does not know yet."""
        with self._changed:
            self._held.update(held)
        with contextlib.suppress(OSError):  # a client that is gone is seen by its reader
            gone = sorted(self._known - memory.files.keys())
            if gone:
                self.connection.send(Forget(gone))
                self._known.difference_update(gone)
            for number in sorted(result.batch.blocks() - self._known):
                file, num_bytes = memory.files[number]
                self.connection.send(Block(number, num_bytes))
                # Not multiprocessing's: from Python 3.14 on that reads an answer, as `listen` does.
                family = socket.AF_UNIX
                with socket.fromfd(self.connection.fileno(), family, socket.SOCK_STREAM) as link:
                    socket.send_fds(link, [b"F"], [file])
                self._known.add(number)
            self.connection.send(result)


class RankServer:
    """Makes the batches of one data-parallel rank for its clients, in the thread that calls
    :meth:`serve`.
    """

    def __init__(self, setup: Setup, memory: Memory | None = None) -> None:
        """Make the loader; its batches are in ``memory``, else in shared memory."""
        torch.set_num_threads(setup.num_threads)
        self._memory = SharedMemory(setup.memory_bytes)
        self._events: list[tuple[str, int, int, float, float]] = []
        self._replaced: list[tuple[int, int, str | None, str]] = []

        def trace(
            stage: str,
            item: int,
            batch: int,
            begin_s: float,
            end_s: float,
        ) -> None:
            if stage != "wait":  # the trainer's own wait is what counts
                self._events.append((stage, item, batch, begin_s, end_s))

        def note(*event: Any) -> None:
            self._replaced.append(event)

        self._loader = setup.make(
            *setup.arguments,
            trace=trace if setup.is_traced else None,
        )
        self._bad = self._loader.serve(
            memory or self._memory.new,
            note,
            finishes=setup.finishes,
        )
        self.changed = threading.Condition()
        self.clients: list[Client] = []
        self._memory_bytes = setup.memory_bytes
        self._name = secrets.token_hex(8)
        self._done = 0
        """The last iteration that was ended."""

    def join(self, connection: Any) -> Client:
        """Make a connection a client, and return that."""
        client = Client(connection, self.changed)
        with self.changed:
            self.clients.append(client)
            self._memory.limit_bytes = self._memory_bytes * len(self.clients)
        threading.Thread(target=client.listen, args=(self.tune,), daemon=True).start()
        return client

    def leave(self, client: Client) -> None:
        """Forget a client, before any batch is made."""
        with self.changed:
            self.clients.remove(client)

    def close(self) -> None:
        """Let go of the loader's files and threads, before any batch is made."""
        self._loader.close()

    def serve(self) -> None:
        """Make steps until no client is connected."""
        while True:
            with self.changed:
                self.changed.wait_for(
                    lambda: self._find_due_step() is not None or not self._list_connected()
                )
                first = self._find_due_step()
            if first is None:
                return
            self._make_from(first)
            self._done = first.iteration

    def _list_connected(self) -> list[Client]:
        return [client for client in self.clients if client.is_connected]

    def _find_due_step(self) -> StepRequest | None:
        """Return the first step of the next iteration that all clients have asked for: the
        slowest's.
        """
        steps = [client.step for client in self._list_connected()]
        pending = [step for step in steps if step is not None and step.iteration > self._done]
        if not pending or len(pending) < len(steps):
            return None
        return min(pending, key=lambda step: (step.iteration, step.number))

    def _make_from(self, first: StepRequest) -> None:
        """Make an iteration's steps from this one on, until no client asks for more."""
        number = first.number
        try:
            self._reshape(first)
            with contextlib.closing(self._loader.batches_from(first.place, number)) as batches:
                for batch in batches:
                    exported, held = self._memory.export(batch)
                    del batch
                    result = StepResult(first.iteration, number, exported, self.facts())
                    if not self._send_step(result, held):
                        return
                    del held
                    number += 1
        except BaseException as error:  # noqa: BLE001 - any error, sys.exit() too
            failed = StepResult(first.iteration, number, error=pickled_error(error))
            for client in self._list_connected():
                with contextlib.suppress(OSError):
                    client.connection.send(failed)

    def _send_step(self, result: StepResult, held: dict[int, torch.Tensor]) -> bool:
        """Send a step when all clients of the iteration ask for it, or have it already; return
        whether there are any.
        """

        def steps() -> list[tuple[int, Client]]:
            return [
                (client.step.number, client)
                for client in self._list_connected()
                if client.step is not None and client.step.iteration == result.iteration
            ]

        with self.changed:
            self.changed.wait_for(lambda: all(number >= result.number for number, _ in steps()))
            clients = steps()
        for number, client in clients:
            if number == result.number:
                client.send(result, held, self._memory)
        return bool(clients)

    def make(self, step: StepRequest) -> Any:
        """Return the batch of a step, and make no other."""
        self._reshape(step)
        (batch,) = self._loader.make_steps(step.place, step.number)
        return batch

    def _reshape(self, step: StepRequest) -> None:
        if step.world not in (None, self._loader.world):
            self._loader.reshape(step.world)

    def facts(self) -> Facts:
        """Return what was done so far, and what happened since the last call."""
        stats = self._loader.stats()
        replaced = self._replaced[:]
        events = self._events[:]
        del self._replaced[: len(replaced)], self._events[: len(events)]
        return Facts(
            process=self._name,
            clocks=stats.stages,
            storage=stats.storage,
            refused_images=stats.refused_images,
            bad=self._bad.numbers,
            replaced=replaced,
            events=events,
        )

    def tune(self, tuning: Tuning) -> None:
        """Change the loader's numbers of threads and of ready batches."""
        self._loader.tune(tuning)


def serve_one(connection: Any) -> None:
    """Run in the process of ``where="process"``: serve the one client that started it."""
    set_up_worker()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with contextlib.suppress(EOFError, OSError):
        try:
            server = RankServer(pickle.loads(connection.recv_bytes()))
        except Exception as error:  # noqa: BLE001 - its trainer says what is wrong
            connection.send(pickled_error(error))
        else:
            connection.send(None)
            server.join(connection)
            server.serve()
    os._exit(0)
