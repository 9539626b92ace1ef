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
import time
from collections import deque
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import numpy as np
import torch
from msgspec import Meta

from fuelrail.loaders.batch.buffer_pool import page_locked
from fuelrail.loaders.batch.processes import content_of
from fuelrail.loaders.serving.memory import KEEP_BYTES, dump, load_with
from fuelrail.loaders.serving.server import RankServer, StepRequest, StepResult
from fuelrail.loaders.storage.buffers import Buffers, pageable
from fuelrail.pipeline.errors import needs
from fuelrail.pipeline.runtime.clusters import connect_ray
from fuelrail.pipeline.runtime.host import num_usable_cpus
from fuelrail.pipeline.runtime.workers import pickled_error
from fuelrail.pipeline.settings import CheckedSettings, must_be

if TYPE_CHECKING:
    import threading

    from fuelrail.loaders.autotune import Tuning

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


class StepMaker:
    """What an actor runs: a loader whose steps are made one by one."""

    def __init__(self, setup: bytes) -> None:
        self._server = RankServer(pickle.loads(setup), pageable)

    def make(self, step: StepRequest) -> tuple[StepResult, float]:
        """Return a step, its batch as a `Dumped`, and the seconds that making it took."""
        begin_s = time.monotonic()
        try:
            payload, tensors = dump(self._server.make(step))
        except BaseException as error:  # noqa: BLE001 - any error, sys.exit() too
            return StepResult(step.iteration, step.number, error=pickled_error(error)), 0.0
        contents = []
        for tensor in tensors:
            shape = tuple(tensor.shape)
            contents.append((content_of(tensor), tensor.dtype, shape))
        result = StepResult(
            step.iteration,
            step.number,
            Dumped(payload, contents),
            self._server.facts(),
        )
        return result, time.monotonic() - begin_s


class Dumped(NamedTuple):
    """A batch as a pickle without its tensors, and their bytes, dtypes and shapes."""

    payload: bytes
    tensors: list[tuple[Any, torch.dtype, tuple[int, ...]]]


class _Step:
    """A step that was asked for, of one actor or more."""

    def __init__(self, step: StepRequest) -> None:
        self.step = step
        self.attempts = 0
        self.actors_asked: dict[Any, _Actor] = {}
        """The actors by the references of what they return."""


class _Actor:
    """An actor, and the steps that are asked of it."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.num_asked = 0
        self.has_made = False


class _Window:
    """Some steps in a row: how long the trainer waited for them, and how many were ready."""

    def __init__(self) -> None:
        self.begin_s = time.monotonic()
        self.waited_s = 0.0
        self.num_ready = 0
        self.num_taken = 0


class RayTransport:
    """Makes steps by Ray's actors; see `fuelrail.loaders.serving.client.Transport`."""

    def __init__(
        self,
        options: RemoteWorkers,
        setup: bytes,
        *,
        pinned: bool,
    ) -> None:
        with needs("where=RemoteWorkers(...)", "fuelrail[ray]"):
            import ray
        self._ray: Any = ray
        self._options = options
        self._setup = setup
        self._buffers = Buffers(page_locked if pinned else pageable, keep_bytes=KEEP_BYTES)
        self.actors: list[_Actor] = []
        self.num_wanted = min(options.num_workers, options.min_workers or options.num_workers)
        """The number of actors that the trainer's waiting asks for."""
        self._steps: deque[_Step] = deque()
        """The steps of the iteration that were asked for and not returned yet, in their order."""
        self._window = _Window()
        self._times: deque[float] = deque(maxlen=_TIMES)
        self._late: dict[Any, _Actor] = {}
        """Steps that another actor made first, which keep theirs busy: it may even lack a node
        with a free CPU.
        """

    def open(self) -> None:
        """Connect to the cluster, in a thread that outlives the iteration."""
        options = self._options
        num_cpus = max(options.num_workers * options.cpus, num_usable_cpus())
        connect_ray(self._ray, options.address, num_cpus)

    def make(self, step: StepRequest, is_stopped: threading.Event) -> StepResult | None:
        """Return a step that an actor made; ask for those that follow it."""
        steps = self._steps
        if is_stopped.is_set() or not steps or steps[0].step.iteration != step.iteration:
            self._cancel()
            self._window = _Window()
        if self._window.num_taken == _WINDOW:
            # Want one actor more where the trainer waited, one less where all steps were ready.
            elapsed_s = time.monotonic() - self._window.begin_s
            waited = self._window.waited_s / max(elapsed_s, 1e-9)
            max_workers = self._options.num_workers
            min_workers = self._options.min_workers or max_workers
            if waited > _HUNGRY and self.num_wanted < max_workers:
                self.num_wanted += 1
            elif self._window.num_ready >= _WINDOW and self.num_wanted > min_workers:
                self.num_wanted -= 1
                idlest = min(self.actors, key=lambda actor: actor.num_asked)
                self.actors.remove(idlest)
            self._window = _Window()
        if steps:
            references = list(steps[-1].actors_asked)
            done, _ = self._ray.wait(references, timeout=0)
            self._window.num_ready += bool(done)
        while not is_stopped.is_set() and len(steps) < _AHEAD * self.num_wanted:
            number = step.number + len(steps)
            following = _Step(step._replace(number=number))
            steps.append(following)
            self._ask_for_step(following)
        begin_s = time.monotonic()
        result = self._wait_for_step(steps[0], is_stopped) if steps else None
        if result is None:
            self._cancel()
            return None
        self._window.waited_s += time.monotonic() - begin_s
        self._window.num_taken += 1
        steps.popleft()
        if result.error is not None:
            return result
        # Copied into the loader's memory, for the object store's is read-only.
        tensors: list[torch.Tensor] = []
        for content, dtype, shape in result.batch.tensors:
            memory = self._buffers.take(content.nbytes)
            np.copyto(memory, content)
            tensors.append(torch.from_numpy(memory).view(dtype).view(shape))
        return result._replace(batch=load_with(result.batch.payload, tensors))

    def _cancel(self) -> None:
        """Ask for no step any more."""
        for step in self._steps:
            for reference, actor in step.actors_asked.items():
                with contextlib.suppress(self._ray.exceptions.RayError):
                    self._ray.cancel(reference)
                actor.num_asked -= 1
        self._steps.clear()

    def _ask_for_step(self, step: _Step) -> None:
        """Ask the actor with the fewest steps of those that were not asked for this one; start
        what is missing.

        One that has made none may have no node: it gets a second step only where all are such.
        """
        if len(self.actors) < self.num_wanted:
            kind = self._ray.remote(StepMaker).options(
                num_cpus=self._options.cpus,
                scheduling_strategy="SPREAD",
            )
            handle = kind.remote(self._setup)
            self.actors.append(_Actor(handle))
        if self._late:
            late = list(self._late)
            done, _ = self._ray.wait(late, num_returns=len(late), timeout=0)
            for reference in done:
                self._late.pop(reference).num_asked -= 1
        idle = [actor for actor in self.actors if actor not in step.actors_asked.values()]
        if not idle:
            return

        def load(actor: _Actor) -> tuple[bool, int]:
            return not actor.has_made and actor.num_asked > 0, actor.num_asked

        chosen = min(idle, key=load)
        reference = chosen.handle.make.remote(step.step)
        step.actors_asked[reference] = chosen
        chosen.num_asked += 1

    def _wait_for_step(self, step: _Step, is_stopped: threading.Event) -> StepResult | None:
        """Wait for a step; ask for it again where it is lost or late.

        None when the iteration was stopped.
        """
        ray = self._ray
        waiting_s = time.monotonic()
        while not is_stopped.is_set():
            done, _ = ray.wait(list(step.actors_asked), timeout=_POLL_S)
            late_s = _START_S
            if self._times:
                usual_s = statistics.median(self._times)
                late_s = max(_LATE_S, _LATE * usual_s)
            if not done and time.monotonic() - waiting_s > late_s * len(step.actors_asked):
                self._ask_for_step(step)
            for reference in done:
                try:
                    result: StepResult
                    result, seconds = ray.get(reference)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from error
                except ray.exceptions.RayError as error:
                    lost = step.actors_asked.pop(reference)
                    lost.num_asked -= 1
                    if isinstance(error, ray.exceptions.RayActorError) and lost in self.actors:
                        self.actors.remove(lost)
                    step.attempts += 1
                    if step.attempts >= _ATTEMPTS:
                        reason = " ".join(str(error).split())[:300]
                        raise ChildProcessError(
                            f"step {step.step.number} of this iteration was lost {_ATTEMPTS} "
                            f"times, with its actor, its node or for want of memory ({reason})"
                        ) from error
                    if not step.actors_asked:
                        self._ask_for_step(step)
                    continue
                actor = step.actors_asked.pop(reference)
                actor.num_asked -= 1
                actor.has_made = True
                self._late |= step.actors_asked
                self._times.append(seconds)
                return result
        return None

    def tune(self, tuning: Tuning) -> None:
        """Do nothing: actors have the threads of their CPUs."""

    def stop(self) -> None:
        """Do nothing: actors make what they were asked for, and wait."""

    def end(self) -> None:
        """End the actors."""
        for actor in self.actors:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor.handle)
        self.actors.clear()
        self._late.clear()
