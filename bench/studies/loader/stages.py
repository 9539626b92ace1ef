"""Cost of each loader stage on its own: the stages of a real loader, on items that it had in
flight.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from fuelrail.bench.measure.rates import Rate, measure_rate
from fuelrail.loaders.config import StorageOptions, Transforms
from fuelrail.loaders.loader import DataLoader
from fuelrail.loaders.serving.ray_workers import RemoteWorkers
from fuelrail.pipeline.order.batching import World
from fuelrail.pipeline.runtime.host import usable_cpus

if TYPE_CHECKING:
    from fuelrail.bench.studies.loader.report import LoaderOptions
    from fuelrail.pipeline.format.dataset import Dataset
    from fuelrail.pipeline.runtime.stages import Stage

_L = TypeVar("_L", bound=DataLoader)


class Recorded(NamedTuple):
    """One stage of a loader and the first items that went into it; ``per_batch``: an item is a
    batch, not a sample.
    """

    stage: Stage
    items: list[Any]
    per_batch: bool


def make_loader(dataset: Dataset, options: LoaderOptions) -> DataLoader:
    """Return the loader that is measured, in host memory, as one rank of one."""
    where: str | RemoteWorkers | None = options.where
    if where == "remote":
        num_workers = options.workers or max(1, int(usable_cpus()))
        where = RemoteWorkers(options.ray_address, num_workers=num_workers)
    elif where == "node":
        # The only rank of its host, unless a launcher says otherwise.
        os.environ.setdefault("LOCAL_RANK", "0")
        os.environ.setdefault("LOCAL_WORLD_SIZE", "1")
        os.environ.setdefault("MASTER_PORT", str(os.getpid()))
    return _make(DataLoader, dataset, options, where=where)


def record_stages(
    dataset: Dataset,
    options: LoaderOptions,
    num_batches: int,
    device: str | None = None,
) -> list[Recorded]:
    """Run a loader for some batches and keep what its stages worked on, in the order in which data
    flows.

    ``device``: where its batches go; host memory unless given.
    """
    loader = _make(_Recorder, dataset, options, device=device)
    with loader:
        batches = itertools.chain.from_iterable(itertools.repeat(loader))
        for _ in itertools.islice(batches, num_batches):
            pass
        recorded = loader.recorded
    num_samples = num_batches * options.batch_size
    stages = []
    per_batch = False
    for stage, items in recorded:
        per_batch = per_batch or stage.group is not None
        num_items = num_batches if per_batch else num_samples
        stages.append(Recorded(stage, items[:num_items], per_batch))
    return stages


def measure_stages(
    recorded: Sequence[Recorded],
    batch_size: int,
    seconds: float,
) -> list[Rate]:
    """Return the rate of each stage alone for ``seconds``, with the threads that the loader
    gives it.
    """
    rates = []
    for stage, items, per_batch in recorded:

        def work(number: int, stage: Any = stage, items: Any = items) -> None:
            stage.work(items[number % len(items)])

        rate = measure_rate(stage.name, work, stage.num_threads, seconds)
        if per_batch:
            rate = msgspec.structs.replace(
                rate,
                samples_per_s=rate.samples_per_s * batch_size,
                cpu_ms_per_sample=rate.cpu_ms_per_sample / batch_size,
            )
        rates.append(rate)
    return rates


class _Recorder(DataLoader):
    """A loader that keeps every item that goes into one of its stages."""

    recorded: list[tuple[Stage, list[Any]]]

    def stages(self) -> list[Stage]:
        stages = super().stages()
        self.recorded = [(stage, []) for stage in stages]
        lock = threading.Lock()

        def work(number: int, item: Any) -> Any:
            stage, items = self.recorded[number]
            with lock:
                items.append(item)
            return stage.work(item)

        return [
            dataclasses.replace(stage, work=partial(work, number))
            for number, stage in enumerate(stages)
        ]


def _make(
    kind: type[_L],
    dataset: Dataset,
    options: LoaderOptions,
    **keywords: Any,
) -> _L:
    return kind(
        dataset,
        options.batch_size,
        shuffle=True,
        drop_last=True,
        split=options.split,
        transforms=Transforms(image=options.image, decoder=options.decoder, points=options.points),
        seed=options.seed,
        num_workers=options.workers or max(1, int(usable_cpus())),
        storage=StorageOptions(verify=options.verify),
        world=World(rank=0, size=1),
        **keywords,
    )
