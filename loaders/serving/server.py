"""The process that makes batches for others: a loader for each data-parallel rank, and its trainers
as clients.

All clients of one data-parallel rank get the same batches from one decode: there is one with
``where="process"``, and as many as the rank has model-parallel parts on this node with
``where="node"``. What a client sends:

===========
====================================================================================================
message     meaning
===========
====================================================================================================
`Start`     make batches for an iteration from this place; all clients of a rank iterate alike
`Stop`      make no more of them
`Received`  batches taken, and blocks of memory that are free again
`Tuning`    numbers of threads and of ready batches
===========
====================================================================================================

The server sends `ServedBatch` for a batch, after a `Block` and its file descriptor for memory that
the client does not know, `Forget` for memory that is gone, and `Failed`. It keeps nothing but
batches that are not free yet.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import threading
from multiprocessing import reduction
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fuelrail.loaders.serving.counts import Facts
from fuelrail.loaders.serving.memory import Exported, SharedMemory
from fuelrail.pipeline.runtime.workers import pickled_error, set_up_worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from fuelrail.loaders.autotune import Tuning
    from fuelrail.loaders.storage.buffers import Memory
    from fuelrail.pipeline.order.batching import Cursor


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


class Start(NamedTuple):
    """Make the batches of an iteration from ``place`` on, of which the client has ``received``
    some already.
    """

    number: int
    place: Cursor
    received: int


class Stop(NamedTuple):
    """Make no more batches."""


class Received(NamedTuple):
    """Batches that the client has taken, and numbers of blocks whose tensors are gone there."""

    batches: int
    free: list[int]


class ServedBatch(NamedTuple):
    """A batch; ``number`` counts from the place of the start ``start``."""

    start: int
    number: int
    batch: Exported
    facts: Facts


class Failed(NamedTuple):
    """What was raised in an iteration, as a pickle of itself and its cause."""

    start: int
    error: bytes


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
        self.start: Start | None = None
        self.room = 1
        """Batches that may be sent."""
        self.is_connected = True
        self._held: dict[int, torch.Tensor] = {}
        self._known: set[int] = set()

    def listen(self, tune: Any) -> None:
        """Take messages until the client is gone."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = self.connection.recv()
                with self._changed:
                    if isinstance(message, Start):
                        self.start = message
                        self.room = 1
                    elif isinstance(message, Stop):
                        self.start = None
                    elif isinstance(message, Received):
                        self.room += message.batches
                        for number in message.free:
                            self._held.pop(number, None)
                    else:
                        tune(message)
                    self._changed.notify_all()
        with self._changed:
            self.is_connected = False
            self.start = None
            self._held.clear()
            self._changed.notify_all()

    def send(
        self, message: ServedBatch, held: dict[int, torch.Tensor], memory: SharedMemory
    ) -> None:
        """Send a batch, and the blocks that the client does not know yet."""
        with self._changed:
            self._held.update(held)
            self.room -= 1
        with contextlib.suppress(OSError):  # a client that is gone is seen by its reader
            if gone := sorted(self._known - memory.files.keys()):
                self.connection.send(Forget(gone))
                self._known.difference_update(gone)
            for number in sorted(message.batch.blocks() - self._known):
                file, num_bytes = memory.files[number]
                self.connection.send(Block(number, num_bytes))
                reduction.send_handle(self.connection, file, 0)
                self._known.add(number)
            self.connection.send(message)


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
        trace = self._note if setup.is_traced else None
        self._loader = setup.make(*setup.arguments, trace=trace)
        note = lambda *event: self._replaced.append(event)  # noqa: E731
        self._bad = self._loader.serve(memory or self._memory.new, note, finishes=setup.finishes)
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

    def _note(self, stage: str, item: int, batch: int, begin_s: float, end_s: float) -> None:
        if stage != "wait":  # the trainer's own wait is what counts
            self._events.append((stage, item, batch, begin_s, end_s))

    def serve(self) -> None:
        """Make batches until no client is connected."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self._due() is not None or not self._connected())
                start = self._due()
            if start is None:
                return
            self._run(start)
            self._done = start.number

    def _connected(self) -> list[Client]:
        return [client for client in self.clients if client.is_connected]

    def _due(self) -> Start | None:
        """Return the next iteration, when all clients have asked for one: from the slowest's
        place.
        """
        starts = [client.start for client in self._connected()]
        pending = [start for start in starts if start is not None and start.number > self._done]
        if not pending or len(pending) < len(starts):
            return None
        return min(pending, key=lambda start: (start.number, start.received))

    def _run(self, start: Start) -> None:
        number = start.received
        try:
            with contextlib.closing(
                self._loader.batches_from(start.place, start.received)
            ) as batches:
                for batch in batches:
                    exported, held = self._memory.export(batch)
                    del batch
                    if not self._send(
                        ServedBatch(start.number, number, exported, self.facts()), held
                    ):
                        return
                    del held
                    number += 1
        except BaseException as error:  # noqa: BLE001 - the consumer must see any error, sys.exit() too
            for client in self._connected():
                with contextlib.suppress(OSError):
                    client.connection.send(Failed(start.number, pickled_error(error)))

    def _send(self, message: ServedBatch, held: dict[int, torch.Tensor]) -> bool:
        """Send a batch to all who have asked for it, when each has room; return whether anybody
        still has.
        """

        def receivers() -> list[Client]:
            return [
                receiver
                for receiver in self._connected()
                if receiver.start is not None and receiver.start.number == message.start
            ]

        with self.changed:
            self.changed.wait_for(lambda: all(client.room > 0 for client in receivers()))
            clients = receivers()
        for client in clients:
            client.send(message, held, self._memory)
        return bool(clients)

    def make(self, place: Cursor, number: int) -> Any:
        """Make the step with this number after a place of the order, and no other."""
        (step,) = self._loader.make_steps(place, number)
        return step

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
