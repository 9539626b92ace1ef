"""The trainer's end of what makes batches elsewhere: it asks for one step after the other."""

from __future__ import annotations

import functools
import pickle
import threading
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import torch

from fuelrail.loaders.serving.node import connect_node
from fuelrail.loaders.serving.process import ProcessTransport, connect_process
from fuelrail.loaders.serving.ray_workers import RayTransport, RemoteWorkers
from fuelrail.loaders.serving.server import (
    Facts,
    Setup,
    StepRequest,
    StepResult,
)
from fuelrail.loaders.storage.protocol import StorageStats, add_stats
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.runtime.host import default_memory_bytes
from fuelrail.pipeline.runtime.stages import Observer, StageClock, add_clocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fuelrail.loaders.autotune import Tuning
    from fuelrail.loaders.config import Arguments
    from fuelrail.loaders.schedule.bad_samples import BadSamples
    from fuelrail.pipeline.order.batching import Walk


class Transport(Protocol):
    """The way to what makes steps: a process of this loader, one of the host, or Ray's actors."""

    def open(self) -> None:
        """Prepare for an iteration, in the thread that starts it."""

    def make(self, step: StepRequest, is_stopped: threading.Event) -> StepResult | None:
        """Return a step, with its batch or the error; None where the iteration is stopped.

        Steps of an iteration are asked for in turn, so those that follow may be made in advance. A
        step that is lost on the way is made again; raises ChildProcessError where that does not
        help.
        """

    def tune(self, tuning: Tuning) -> None:
        """Change the numbers of threads and of ready batches there."""

    def stop(self) -> None:
        """Ask for no more steps of this iteration."""

    def end(self) -> None:
        """End what makes the steps; the next iteration starts it again."""


class StepClient:
    """Batches of a loader that are made elsewhere, and what was done there."""

    def __init__(
        self,
        transport: Transport,
        bad: BadSamples,
        observer: Observer | None,
    ) -> None:
        self.transport = transport
        self._bad = bad
        self._observer = observer
        self._newest: dict[str, Facts] = {}
        self._num_iterations = 0
        self._is_stopped = threading.Event()

    def items(self, walk: Walk) -> Iterator[Any]:
        """Yield the batches of a walk without end; raise what is raised for them there."""
        is_stopped = self._is_stopped = threading.Event()
        self._num_iterations += 1
        self.transport.open()
        first = StepRequest(self._num_iterations, walk.start, 0, world=walk.batching.world)

        def batches(step: StepRequest) -> Iterator[Any]:
            while (result := self.transport.make(step, is_stopped)) is not None:
                if result.error is not None:
                    error, cause = pickle.loads(result.error)
                    raise error from cause
                facts = result.facts
                if facts is not None:
                    self._newest[facts.process] = facts
                    self._bad.add(facts.bad, facts.replaced)
                    if self._observer is not None:
                        for event in facts.events:
                            self._observer(*event)
                batch = result.batch
                del result
                yield batch
                del batch
                step = step._replace(number=step.number + 1)

        return batches(first)

    def clocks(self) -> tuple[StageClock, ...]:
        """Return the clocks of the stages that ran there."""
        nothing: tuple[StageClock, ...] = ()
        return functools.reduce(
            add_clocks,
            [facts.clocks for facts in self._newest.values()],
            nothing,
        )

    def storage(self) -> list[StorageStats]:
        """Return what storages did there, in one or no record."""
        stats = [facts.storage for facts in self._newest.values()]
        return [add_stats(stats)] if stats else []

    @property
    def refused_images(self) -> int:
        """Images that were decoded another way than the one chosen."""
        return sum(facts.refused_images for facts in self._newest.values())

    def tune(self, tuning: Tuning) -> None:
        """Change the numbers of threads and of ready batches there."""
        self.transport.tune(tuning)

    def close(self) -> None:
        """End the iteration under way, so that no thread waits for it."""
        self._is_stopped.set()
        self.transport.stop()

    def end(self) -> None:
        """End what makes the batches; the next iteration starts it again."""
        self.transport.end()


def serve_elsewhere(
    make: Callable[..., Any],
    parts: tuple[Arguments, Any],
    tuning: Tuning,
    bad: BadSamples,
    *,
    finishes: bool,
    pinned: bool,
) -> StepClient | None:
    """Return the client of what runs the loader ``make(*parts)`` elsewhere, on the CPU; None where
    it runs here.

    Unless it ``finishes`` the batches, they are normalised and transformed here. Raises
    ConfigError, also for a loader that cannot be pickled.
    """
    arguments, datasets = parts
    where = arguments.where
    if where is None:
        return None
    if where == "node" and arguments.budget is not None:
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
    try:
        content = pickle.dumps(setup)
    except Exception as error:
        raise ConfigError(
            "where= makes batches in another process, and an argument of the loader cannot "
            f"be pickled ({error}): make functions those of a module, or objects of a class "
            "of a module that hold plain values"
        ) from error
    transport: Transport
    if isinstance(where, RemoteWorkers):
        transport = RayTransport(where, content, pinned=pinned)
    else:
        connect = connect_process if where == "process" else connect_node()
        transport = ProcessTransport(content, connect, pinned=pinned)
    return StepClient(transport, bad, arguments.trace)
