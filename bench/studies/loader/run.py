"""Run the whole loader at full speed, with a consumer that drops the batches."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from fuelrail.bench.measure.cuda import pinned_copy
from fuelrail.bench.measure.limits import measure_limits
from fuelrail.bench.measure.machine import CpuWatch, peak_memory_bytes
from fuelrail.bench.measure.processes import NOTHING_MEASURED, tree_cpu_s
from fuelrail.bench.measure.rates import Rate, warm_up_length
from fuelrail.bench.studies.loader.report import MIN_STEADY_BATCHES, LoaderRun
from fuelrail.bench.studies.loader.stages import (
    make_loader,
    measure_stages,
    record_stages,
)
from fuelrail.loaders.schedule.selection import stored_image

if TYPE_CHECKING:
    from fuelrail.bench.studies.loader.report import LoaderOptions
    from fuelrail.loaders.loader import DataLoader
    from fuelrail.pipeline.format.dataset import Dataset

_NUM_BATCHES_KEPT = 3

_NUM_SAMPLES_KEPT = 12


def run_loader(dataset: Dataset, options: LoaderOptions) -> LoaderRun:
    """Make a loader and take batches for the options' time, epoch after epoch; always one batch at
    least.

    Where other processes make the batches, their CPU time counts from the first batch on: they
    import torch before.
    """
    watch = CpuWatch()
    faults = _storage_faults()
    started_s = taken_s = time.perf_counter()
    batch_s: list[float] = []
    num_before = 0
    own_before_s = time.process_time()
    with make_loader(dataset, options) as loader:
        while not batch_s or taken_s - started_s < options.seconds:
            for _ in loader:
                now_s = time.perf_counter()
                batch_s.append(now_s - taken_s)
                taken_s = now_s
                if options.where is not None and len(batch_s) == 1:
                    started_s = now_s
                    watch = CpuWatch(partial(tree_cpu_s, os.getpid()))
                    num_before = _num_decoded(loader)
                    own_before_s = time.process_time()
                if now_s - started_s >= options.seconds:
                    break
        cpu = watch.use()
        own_s = time.process_time() - own_before_s
        num_decoded = _num_decoded(loader) - num_before
        stages = list(loader.stats().stages)
    # The first batch waits for threads to start and queues to fill; it is reported separately.
    warm_up = 1 + warm_up_length(batch_s[1:])
    steady = batch_s[warm_up:]
    return LoaderRun(
        first_batch_s=batch_s[0],
        num_warm_up_batches=warm_up,
        batch_s=batch_s,
        samples_per_s=len(steady) * options.batch_size / sum(steady)
        if len(steady) >= MIN_STEADY_BATCHES
        else None,
        cpu_ms_per_sample=1e3 * cpu.own_cpus * cpu.seconds / max(num_decoded, 1),
        trainer_cpu_ms_per_sample=1e3 * own_s / max(num_decoded, 1),
        cpu=cpu,
        stages=stages,
        num_storage_faults=_storage_faults() - faults,
    )


def _num_decoded(loader: DataLoader) -> int:
    return next(stage.items for stage in loader.stats().stages if stage.name == "decode")


def _storage_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


class LoaderRound(NamedTuple):
    """One round."""

    run: LoaderRun
    stages: list[Rate]
    limits: list[Rate]


class Rounds(NamedTuple):
    """The whole rounds, one at least; ``cut_off`` says why they are fewer than were asked for."""

    rounds: list[LoaderRound]
    peak_rss_bytes: int
    cut_off: str | None


def measure_rounds(
    dataset: Dataset,
    options: LoaderOptions,
    show: Callable[[str], None],
) -> Rounds:
    """Warm up and measure; ``show`` is called with the current part of the measurement.

    Interrupted, it returns the complete rounds; raises KeyboardInterrupt with a message where there
    are none.
    """
    rounds: list[LoaderRound] = []
    cut_off = None
    try:
        show("warming up")
        run_loader(dataset, options)
        # Read now: what follows keeps batches that a loader would not.
        peak_rss_bytes = peak_memory_bytes()
        num_batches = max(_NUM_BATCHES_KEPT, -(-_NUM_SAMPLES_KEPT // options.batch_size))
        recorded = record_stages(dataset, options, num_batches)
        for number in range(options.repeats):
            where = f"round {number + 1} of {options.repeats}"
            show(f"{where}: the whole loader")
            run = run_loader(dataset, options)
            local_rates = []
            if options.where is not None:
                show(f"{where}: the whole loader in threads of this process")
                local_run = run_loader(
                    dataset,
                    msgspec.structs.replace(options, where=None, ray_address=None),
                )
                rates = {
                    "samples_per_s": local_run.samples_per_s or 0.0,
                    "cpu_ms_per_sample": local_run.cpu_ms_per_sample,
                }
                local_rates = [
                    Rate(
                        name="the loader in threads here",
                        num_threads=options.workers or 1,
                        **rates,
                    )
                ]
            show(f"{where}: each stage alone")
            part_s = min(1.0, options.seconds / 8)
            alone = measure_stages(recorded, options.batch_size, part_s)
            show(f"{where}: this machine's limits")
            entries = {entry.stage.name: entry for entry in recorded}
            manifest = dataset.manifest
            image = options.image or stored_image({"": dataset})
            output_bytes = len(manifest.cameras) * 3 * image.height * image.width
            limits = measure_limits(
                entries["parse"].items,
                parsed=entries["decode"].items,
                skipped={lidar.channel for lidar in manifest.lidars if not options.points},
                output_bytes=output_bytes,
                num_threads=entries["decode"].stage.num_threads,
                seconds=part_s,
                dataset=dataset,
                to_device=pinned_copy(output_bytes),
            )
            rounds.append(LoaderRound(run, alone, limits + local_rates))
    except KeyboardInterrupt:
        if not rounds:
            raise KeyboardInterrupt(NOTHING_MEASURED) from None
        cut_off = f"it was interrupted after {len(rounds)} of {options.repeats} rounds"
    return Rounds(rounds, peak_rss_bytes, cut_off)
