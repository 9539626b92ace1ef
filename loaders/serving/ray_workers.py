"""Batches made by Ray actors on other machines, ``where=RemoteWorkers(...)``.

An actor makes one whole step of a rank from the order's place and the number of the step, and keeps
nothing: whichever actor makes it, the batch is the same. So a step that is lost with its actor or
node is asked of another one, a late one of two, and each step is handed out once, in its turn.
Batches come through Ray's object store and are copied into the loader's memory.
"""

from __future__ import annotations

import contextlib
import pickle
import statistics
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import numpy as np
import torch
from msgspec import Meta

from fuelrail.loaders.batch.buffer_pool import page_locked
from fuelrail.loaders.batch.processes import content_of
from fuelrail.loaders.serving.memory import KEEP_BYTES, dump, load_with
from fuelrail.loaders.serving.server import RankServer
from fuelrail.loaders.storage.buffers import Buffers, pageable
from fuelrail.pipeline.errors import needs
from fuelrail.pipeline.runtime.clusters import connect_ray
from fuelrail.pipeline.runtime.host import num_usable_cpus
from fuelrail.pipeline.runtime.workers import pickled_error
from fuelrail.pipeline.settings import CheckedSettings, must_be

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fuelrail.loaders.autotune import Tuning
    from fuelrail.loaders.serving.counts import Counts, Facts
    from fuelrail.pipeline.order.batching import Cursor, Walk

_COUNT = must_be("an integer >= 1")
_POLL_S: Final = 0.1
_AHEAD: Final = 2
"""Steps that are asked of an actor at once: it starts the next one when it has made one."""
_LATE: Final = 3.0
"""Times the usual duration after which a step is asked of another actor too."""
_LATE_S: Final = 1.0
_START_S: Final = 30.0
"""What is late before any step was made: actors import torch first, and a cluster may lack CPUs
for one of them.
"""
_TIMES: Final = 32
_ATTEMPTS: Final = 10
_HUNGRY: Final = 0.05
_WINDOW: Final = 16
"""Steps after which the number of actors is changed, by one: up if the trainer waited, down if
all steps were ready.
"""


class RemoteWorkers(CheckedSettings, frozen=True):
    """Actors of a Ray cluster that make a rank's batches. Needs the extra ``ray``.

    Attributes:
        address: the cluster, as ``ray.init`` takes it ("auto", "ray://HOST:10001"); None: a local
            one that is started. A process that is connected to a cluster stays with that one.
        num_workers: number of actors, the largest one if ``min_workers`` is smaller.
        min_workers: smallest number of actors: more of them are started while the trainer waits for
            batches.
        cpus: CPUs of each actor, and its decoding threads.

    Raises ConfigError for values that are not allowed.
    """

    address: Annotated[str | None, must_be("a text or None")] = None
    num_workers: Annotated[int, Meta(ge=1), _COUNT] = 2
    min_workers: Annotated[
        Annotated[int, Meta(ge=1)] | None, must_be("an integer >= 1, or None")
    ] = None
    cpus: Annotated[int, Meta(ge=1), _COUNT] = 1


class _Result(NamedTuple):
    """A step: a pickle without its tensors, their bytes, dtypes and shapes; or a pickled error."""

    payload: bytes
    tensors: list[tuple[Any, torch.dtype, tuple[int, ...]]]
    facts: Facts | None
    seconds: float = 0.0


class StepMaker:
    """What an actor runs: a loader whose steps are made one by one."""

    def __init__(self, setup: bytes) -> None:
        self._server = RankServer(pickle.loads(setup), pageable)

    def make(self, place: Cursor, number: int) -> _Result:
        """Make the step with this number after a place of the order."""
        begin_s = time.monotonic()
        try:
            payload, tensors = dump(self._server.make(place, number))
        except BaseException as error:  # noqa: BLE001 - the consumer must see any error, sys.exit() too
            return _Result(pickled_error(error), [], None)
        sent = [(content_of(tensor), tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
        return _Result(payload, sent, self._server.facts(), time.monotonic() - begin_s)


class _Step:
    """A step that was asked for, of one actor or more."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.attempts = 0
        self.asked: dict[Any, _Actor] = {}


class _Actor:
    """An actor, and the steps that are asked of it."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.num_asked = 0
        self.has_made = False


class StepClient:
    """Batches of a loader that Ray actors make; they are started at the first iteration.

    See `BatchClient`.
    """

    def __init__(
        self, options: RemoteWorkers, setup: bytes, counts: Counts, *, pinned: bool
    ) -> None:
        with needs("where=RemoteWorkers(...)", "fuelrail[ray]"):
            import ray
        self._ray: Any = ray
        self._options = options
        self._setup = setup
        self.counts = counts
        self._buffers = Buffers(page_locked if pinned else pageable, keep_bytes=KEEP_BYTES)
        self._is_stopped = threading.Event()
        self._actors: list[_Actor] = []
        self._wanted = min(options.num_workers, options.min_workers or options.num_workers)
        self._times: deque[float] = deque(maxlen=_TIMES)
        self._late: dict[Any, _Actor] = {}
        """Steps that another actor made first, which keep theirs busy: it may even lack a node
        with a free CPU.
        """

    def items(self, walk: Walk) -> Iterator[Any]:
        """Yield the batches of a walk without end; raise what an actor raises for them."""
        options = self._options
        connect_ray(
            self._ray,
            options.address,
            max(options.num_workers * options.cpus, num_usable_cpus()),
        )
        self._is_stopped = threading.Event()
        return self._items(walk, self._is_stopped)

    def _items(self, walk: Walk, is_stopped: threading.Event) -> Iterator[Any]:
        steps: deque[_Step] = deque()
        number = 0
        num_taken = 0
        waits = 0.0
        ready = 0
        begin_s = time.monotonic()
        while not is_stopped.is_set():
            if steps:
                done, _ = self._ray.wait(list(steps[-1].asked), timeout=0)
                ready += bool(done)
            while len(steps) < _AHEAD * self._wanted:
                steps.append(_Step(number))
                self._ask(steps[-1], walk.start)
                number += 1
            asked_s = time.monotonic()
            result = self._result(steps[0], walk.start, is_stopped)
            if result is None:
                break
            waits += time.monotonic() - asked_s
            steps.popleft()
            if result.facts is None:
                error, cause = pickle.loads(result.payload)
                raise error from cause
            self.counts.note(result.facts)
            batch = self._open(result)
            del result
            yield batch
            del batch
            num_taken += 1
            if num_taken == _WINDOW:
                self._adapt(waits / max(time.monotonic() - begin_s, 1e-9), ready)
                num_taken = 0
                waits = 0.0
                ready = 0
                begin_s = time.monotonic()
        for step in steps:
            for reference in step.asked:
                with contextlib.suppress(self._ray.exceptions.RayError):
                    self._ray.cancel(reference)
                step.asked[reference].num_asked -= 1

    def _actor(self, step: _Step) -> _Actor | None:
        """Return the actor with the fewest steps of those that were not asked for this one; start
        what is missing.

        One that has made none may have no node: it gets a second step only where all are such.
        """
        if len(self._actors) < self._wanted:
            kind = self._ray.remote(StepMaker).options(
                num_cpus=self._options.cpus, scheduling_strategy="SPREAD"
            )
            self._actors.append(_Actor(kind.remote(self._setup)))
        if self._late:
            for reference in self._ray.wait(
                list(self._late), num_returns=len(self._late), timeout=0
            )[0]:
                self._late.pop(reference).num_asked -= 1
        busy = list(step.asked.values())
        rank = lambda actor: (not actor.has_made and actor.num_asked > 0, actor.num_asked)  # noqa: E731
        return min((actor for actor in self._actors if actor not in busy), key=rank, default=None)

    def _ask(self, step: _Step, place: Cursor) -> None:
        if (actor := self._actor(step)) is not None:
            step.asked[actor.handle.make.remote(place, step.number)] = actor
            actor.num_asked += 1

    def _result(self, step: _Step, place: Cursor, is_stopped: threading.Event) -> _Result | None:
        """Wait for a step; ask for it again where it is lost or late.

        None when the iteration was stopped.
        """
        ray = self._ray
        waiting_s = time.monotonic()
        while not is_stopped.is_set():
            done, _ = ray.wait(list(step.asked), timeout=_POLL_S)
            late_s = (
                max(_LATE_S, _LATE * statistics.median(self._times)) if self._times else _START_S
            )
            if not done and time.monotonic() - waiting_s > late_s * len(step.asked):
                self._ask(step, place)
            for reference in done:
                try:
                    result: _Result = ray.get(reference)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from error
                except ray.exceptions.RayError as error:
                    self._lost(step, reference, error)
                    if not step.asked:
                        self._ask(step, place)
                    continue
                actor = step.asked.pop(reference)
                actor.num_asked = actor.num_asked - 1
                actor.has_made = True
                self._late |= step.asked
                self._times.append(result.seconds)
                return result
        return None

    def _lost(self, step: _Step, reference: Any, error: Exception) -> None:
        """Forget an actor that is gone, whose steps are asked for again in their turn."""
        actor = step.asked.pop(reference)
        actor.num_asked -= 1
        if isinstance(error, self._ray.exceptions.RayActorError) and actor in self._actors:
            self._actors.remove(actor)
        step.attempts += 1
        if step.attempts >= _ATTEMPTS:
            raise ChildProcessError(
                f"step {step.number} of this iteration was lost {_ATTEMPTS} times, with its "
                f"actor, its node or for want of memory ({' '.join(str(error).split())[:300]})"
            ) from error

    def _adapt(self, waited: float, ready: int) -> None:
        max_workers = self._options.num_workers
        if waited > _HUNGRY and self._wanted < max_workers:
            self._wanted += 1
        elif ready >= _WINDOW and self._wanted > (self._options.min_workers or max_workers):
            self._wanted -= 1
            self._actors.remove(min(self._actors, key=lambda actor: actor.num_asked))

    def _open(self, result: _Result) -> Any:
        """Copy a batch's tensors into the loader's memory, for the object store's is read-only."""
        tensors: list[torch.Tensor] = []
        for content, dtype, shape in result.tensors:
            memory = self._buffers.take(content.nbytes)
            np.copyto(memory, content)
            tensors.append(torch.from_numpy(memory).view(dtype).view(shape))
        return load_with(result.payload, tensors)

    def tune(self, tuning: Tuning) -> None:
        """Do nothing: actors have the threads of their CPUs."""

    def close(self) -> None:
        """End the iteration under way, so that no thread waits for it; the actors wait for the
        next one.
        """
        self._is_stopped.set()

    def end(self) -> None:
        """End the actors; the next iteration starts others."""
        for actor in self._actors:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor.handle)
        self._actors.clear()
        self._late.clear()
