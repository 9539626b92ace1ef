"""Pieces of work made by a Ray cluster, an existing one or a local one that this run starts:
shards, rows of a layer.

A task makes one piece and writes it to OUT itself; what goes through Ray is the job (small), a
piece's number, and a line of result. So nothing of a dataset's size enters the object store, and
nothing is ever spilled from it. A task that dies with its process or node, or is killed for want of
memory, is tried again elsewhere: it is a pure function, and a half-written piece has no name. A
process keeps what it needs for the pieces of a run, such as a model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import os
import pickle
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from fuelrail.pipeline.errors import (
    ConfigError,
    DatasetError,
    FuelrailError,
    SourceError,
    needs,
)
from fuelrail.pipeline.format.manifest import WORK_FOLDER
from fuelrail.pipeline.runtime.clusters import connect_ray
from fuelrail.pipeline.runtime.host import num_usable_cpus
from fuelrail.pipeline.runtime.workers import pickled_error
from fuelrail.pipeline.storage.files import (
    check_plain_tree,
    open_lock,
    published,
    read_file,
)
from fuelrail.pipeline.storage.filesystem import default_cache_folder, is_url
from fuelrail.sharding.output.folder import open_output
from fuelrail.sharding.write.shard_writer import (
    ShardDone,
    ShardWriter,
    WriteJob,
)

TASK_MEMORY_BYTES: Final = 512 << 20
"""Memory that a task requests: a sample's bytes, the rows of one shard's record, and the
interpreter.
"""

_MAX_RETRIES: Final = 10

_POLL_S: Final = 0.5

_STOP_S: Final = 30.0

# Submitted for each CPU of the cluster, so that none waits for the next one.
_TASKS_AHEAD: Final = 2

_LOOK_S: Final = 5.0

NO_NODE_S: Final = 300.0
"""Longest time without a node that a task fits on, while a lost one is replaced or the cluster
scales up.
"""

_RESULT_S: Final = 120.0  # for the line of result of a task that is done

Start = Callable[[str], Callable[[int], Any]]
"""Called once in each process with the address of its node; returns what makes a piece from its
number.
"""

_started: tuple[str, Callable[[int], Any]] | None = None

_INPUTS: Final = f"{WORK_FOLDER}/inputs"

_RUN: Final = "run"

_FIELDS: Final = ("scan_table", "plan_rows", "selection")


class RayEngine:
    """A cluster. ``num_workers`` bounds how many pieces are made at once; 0 for as many as its
    nodes have room for.

    Each piece takes ``cpus`` and ``gpus`` of one node.
    """

    def __init__(
        self,
        address: str | None,
        num_workers: int = 0,
        *,
        cpus: int = 1,
        gpus: int = 0,
    ) -> None:
        """Check that Ray is installed; raise ConfigError otherwise."""
        with needs("--engine ray", "fuelrail[ray]"):
            import ray
        self._ray: Any = ray
        self._address = address
        self._num_workers = num_workers
        self._cpus = cpus
        self._gpus = gpus

    def make_shards(
        self,
        job: WriteJob,
        numbers: Sequence[int],
        advance: Callable[[int], None],
    ) -> Iterator[ShardDone]:
        """Make these shards of the plan, each in a task."""
        if not len(numbers):
            return
        with self.connected():
            run = uuid.uuid4().hex
            share_inputs(job, run)
            try:
                for done in self.make(
                    partial(_start_writer, job, run),
                    numbers,
                    partial(advance, 0),
                ):
                    advance(done.num_bytes)
                    yield done
            finally:
                if "://" in job.out:
                    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

                    ray = self._ray
                    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
                    tidy = []
                    for node in nodes:
                        strategy = NodeAffinitySchedulingStrategy(node, soft=True)
                        task = ray.remote(forget_inputs)
                        task = task.options(num_cpus=0, scheduling_strategy=strategy)
                        tidy.append(task.remote(job.out))
                    with contextlib.suppress(ray.exceptions.RayError):
                        ray.wait(tidy, num_returns=len(tidy), timeout=_STOP_S)

    def make(
        self,
        start: Start,
        numbers: Sequence[int],
        look: Callable[[], None] = lambda: None,
    ) -> Iterator[Any]:
        """Yield what becomes of these pieces, each made by a task, in any order; call ``look``
        twice a second.

        Raises the first error of a task, and FuelrailError where a task is lost again and again.
        """
        ray = self._ray
        nodes = _Nodes(
            ray,
            {"CPU": self._cpus, "GPU": self._gpus, "memory": TASK_MEMORY_BYTES},
        )
        # A task that takes a GPU would end its process else, and the model that is loaded there.
        task = ray.remote(
            num_cpus=self._cpus,
            num_gpus=self._gpus,
            memory=TASK_MEMORY_BYTES,
            max_calls=0,
            max_retries=_MAX_RETRIES,
            scheduling_strategy="SPREAD",
        )(_run_task)
        shared = ray.put(start)
        run = uuid.uuid4().hex
        waiting = iter(numbers)
        pending: list[Any] = []
        try:
            while True:
                num_wanted = self._num_workers or nodes.room() * _TASKS_AHEAD
                # Fewer than are under way are wanted, once a node has died.
                more = max(num_wanted - len(pending), 0)
                pending += [task.remote(shared, run, n) for n in itertools.islice(waiting, more)]
                if not pending:
                    return
                done, pending = ray.wait(pending, timeout=_POLL_S)
                look()
                if not done:
                    nodes.check()
                for reference in done:
                    try:
                        result = ray.get(reference, timeout=_RESULT_S)
                    except ray.exceptions.RayTaskError as error:
                        raise error.cause from error
                    except ray.exceptions.GetTimeoutError as error:
                        raise FuelrailError(
                            "the Ray cluster did not hand over a finished task's result within "
                            f"{_RESULT_S:.0f} s; run the same command again to resume"
                        ) from error
                    except ray.exceptions.RayError as error:
                        reason = " ".join(str(error).split())[:300]
                        raise FuelrailError(
                            f"a task was lost {_MAX_RETRIES} times, with its node or for want of "
                            f"memory ({reason}); run the same command again to resume"
                        ) from error
                    if isinstance(result, bytes):
                        refusal, cause = pickle.loads(result)
                        raise refusal from cause
                    yield result
        finally:
            # Tell tasks to end, and wait until they have.
            for reference in pending:
                with contextlib.suppress(self._ray.exceptions.RayError):
                    self._ray.cancel(reference)
            if pending:
                with contextlib.suppress(self._ray.exceptions.RayError):
                    self._ray.wait(pending, num_returns=len(pending), timeout=_STOP_S)

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        """Be connected to the cluster, which is started where there is no address; raise
        ConfigError otherwise.
        """
        is_ours = connect_ray(self._ray, self._address, self._num_workers or num_usable_cpus())
        try:
            yield
        finally:
            if is_ours:
                self._ray.shutdown()


class _Nodes:
    """What is on the cluster's nodes, read every few seconds because each read is a call."""

    def __init__(self, ray: Any, resources: dict[str, int]) -> None:
        self._ray = ray
        self._resources = resources
        self._looked_s = self._fitting_s = time.monotonic()
        self._room = 0
        self._look()

    def room(self) -> int:
        """Return how many tasks fit on the nodes that are up, 1 at least."""
        if time.monotonic() - self._looked_s > _LOOK_S:
            self._look()
        return max(self._room, 1)

    def check(self) -> None:
        """Raise FuelrailError where for a long time no node has been there that could take a
        task.
        """
        self.room()
        if not self._room and time.monotonic() - self._fitting_s > NO_NODE_S:
            units = " and ".join(
                f"{amount:,} {name}" for name, amount in self._resources.items() if amount
            )
            raise FuelrailError(
                f"the Ray cluster has had no node with {units} for {NO_NODE_S:.0f} s, which "
                "each task needs; add nodes, then run the same command again to resume"
            )

    def _look(self) -> None:
        self._looked_s = time.monotonic()
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        fitting = [
            [node.get(name, 0) // amount for name, amount in self._resources.items() if amount]
            for node in nodes
        ]
        self._room = sum(int(min(room)) for room in fitting)
        if self._room:
            self._fitting_s = self._looked_s


def _run_task(start: Start, run: str, number: int) -> Any:
    """Run the task. Return a permanent error as bytes; raise an error after which Ray is to try
    again.
    """
    global _started
    import ray

    node = ray.util.get_node_ip_address()
    try:
        if _started is None or _started[0] != run:
            _started = None  # before another model is loaded
            _started = run, start(node)
        return _started[1](number)
    except SourceError as error:
        return pickled_error(
            SourceError(f"{error} (on node {node})").with_traceback(error.__traceback__)
        )
    except FuelrailError as error:
        return pickled_error(error)


def _start_writer(job: WriteJob, run: str, node: str) -> Callable[[int], ShardDone]:
    # Nobody counts bytes before a shard is done, and Ray interrupts a task that is to end.
    return partial(
        ShardWriter(inputs_here(job, run, node)).make,
        pulse=lambda num_bytes: None,  # noqa: ARG005
    )


def share_inputs(job: WriteJob, run: str) -> None:
    """Make a run's inputs reachable for its tasks elsewhere; ``run`` is the number drawn for it."""
    out = open_output(job.out)
    with published(job.scan_table.parent / _RUN, sync=False) as marker:
        marker.write(run.encode())
    if is_url(job.out):
        with out.writing():
            for name in _FIELDS:
                file: Path = getattr(job, name)
                with (
                    file.open("rb") as source,
                    out.publish(f"{_INPUTS}/{file.name}") as target,
                ):
                    shutil.copyfileobj(source, target, 8 << 20)


def inputs_here(job: WriteJob, run: str, node: str) -> WriteJob:
    """Return the job with paths that are valid on this node, fetched where they must be.

    Raises DatasetError or ConfigError naming the node that cannot read output or source.
    """
    from fuelrail.sharding.output.url import UrlOutput

    if not is_url(job.source.location) and not all(
        Path(place).exists() for place in job.source.location.split("\n")
    ):
        raise ConfigError(
            f"node {node} cannot read the source '{job.source.location}': it must be on a "
            "file system that all nodes share, at the same path, or at a URL"
        )
    with contextlib.suppress(OSError):
        path = job.scan_table.parent / _RUN
        if read_file(path, len(run)) == run.encode():
            return job
    if not is_url(job.out):
        raise DatasetError(
            f"node {node} cannot read the output folder '{job.out}' of the machine that "
            "runs the command: it must lie on a file system that all nodes share, at the "
            "same path, or at a URL such as s3://bucket/prefix"
        )
    folder = _prepare_node_folder(job.out) / run
    lock = folder.parent / "lock"
    try:
        descriptor = open_lock(lock)
    except PermissionError as error:
        raise DatasetError(f"'{lock}' cannot be used: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if not folder.exists():
            for stale in folder.parent.iterdir():
                if stale.is_dir():
                    shutil.rmtree(stale, ignore_errors=True)  # of a run that was killed
            out = UrlOutput(job.out)
            half = folder.with_name(f"{folder.name}.half")
            half.mkdir()
            for name in _FIELDS:
                file: Path = getattr(job, name)
                out.fetch(f"{_INPUTS}/{file.name}", half / file.name)
            half.rename(folder)
    finally:
        os.close(descriptor)
    return dataclasses.replace(job, **{name: folder / getattr(job, name).name for name in _FIELDS})


def forget_inputs(location: str) -> None:
    """Remove from this node what was fetched for a run's tasks."""
    shutil.rmtree(_prepare_node_folder(location), ignore_errors=True)


def _prepare_node_folder(location: str) -> Path:
    name = f"{hashlib.sha256(location.encode()).hexdigest()[:16]}-node"
    folder = default_cache_folder() / "sharding" / name
    try:
        check_plain_tree(folder)
    except OSError as error:
        where = error.filename or folder
        raise DatasetError(f"'{where}' cannot be used: {error.strerror or error}") from error
    folder.mkdir(parents=True, exist_ok=True)
    return folder
