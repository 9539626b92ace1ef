"""The whole loader as fast as it goes, with a consumer that takes batches and does nothing with them."""

from __future__ import annotations

import resource
import time
from typing import TYPE_CHECKING

import msgspec

from fuelrail.bench.clock import clock_jump_s
from fuelrail.bench.cpu_watch import CpuUse, CpuWatch
from fuelrail.bench.records import Stage, snapshot
from fuelrail.bench.stages import make_loader
from fuelrail.bench.steady import warm_up_length

if TYPE_CHECKING:
    from fuelrail.bench.stages import LoaderChoice
    from fuelrail.pipeline.augment import ImageAugment
    from fuelrail.pipeline.dataset import Dataset

MIN_STEADY_BATCHES = 8
_QUEUE_EVERY_S = 0.02


class QueueDepths(msgspec.Struct, frozen=True, kw_only=True):
    """How many results stood behind each stage, in the stages' order, when a batch was taken."""

    at_s: float
    waiting: list[int]


class LoaderRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Rates are of the steady part, after ``num_warm_up_batches``; stage clocks and CPU use of the whole run.

    ``num_storage_faults`` counts the pages that were not in memory when they were touched.
    ``batch_s`` is the time between batches, the first from the loader's making. ``samples_per_s`` is None when fewer
    than ``MIN_STEADY_BATCHES`` were steady. ``clock_jump_s``: by how much wall clock and monotonic clock disagree about
    the run's length.
    """

    first_batch_s: float
    num_warm_up_batches: int
    batch_s: list[float]
    samples_per_s: float | None
    cpu_ms_per_sample: float
    cpu: CpuUse
    stages: list[Stage]
    num_storage_faults: int
    queues: list[QueueDepths]
    clock_jump_s: float


def run_loader(dataset: Dataset, image: ImageAugment, choice: LoaderChoice, seconds: float) -> LoaderRun:
    """Make a loader and take batches for ``seconds``, epoch after epoch; always one batch at least."""
    watch, faults, jump_s = CpuWatch(), _storage_faults(), clock_jump_s()
    started_s = taken_s = time.perf_counter()
    batch_s: list[float] = []
    queues: list[QueueDepths] = []
    with make_loader(dataset, image, choice) as loader:
        while not batch_s or taken_s - started_s < seconds:
            for _ in loader:
                now_s = time.perf_counter()
                batch_s.append(now_s - taken_s)
                taken_s = now_s
                if not queues or now_s - started_s - queues[-1].at_s >= _QUEUE_EVERY_S:
                    waiting = [clock.waiting for clock in loader.stats().stages]
                    queues.append(QueueDepths(at_s=now_s - started_s, waiting=waiting))
                if now_s - started_s >= seconds:
                    break
        stages = snapshot(len(batch_s), loader.stats().stages).stages
    cpu = watch.use()
    # The first batch waits for threads to start and queues to fill; it is told by itself.
    warm_up = 1 + warm_up_length(batch_s[1:])
    steady = batch_s[warm_up:]
    num_loaded = stages[-1].items * choice.batch_size
    return LoaderRun(
        first_batch_s=batch_s[0],
        num_warm_up_batches=warm_up,
        batch_s=batch_s,
        samples_per_s=len(steady) * choice.batch_size / sum(steady) if len(steady) >= MIN_STEADY_BATCHES else None,
        cpu_ms_per_sample=1e3 * cpu.own * cpu.seconds / num_loaded,
        cpu=cpu,
        stages=stages,
        num_storage_faults=_storage_faults() - faults,
        queues=queues,
        clock_jump_s=clock_jump_s() - jump_s,
    )


def _storage_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
