"""Runs of the loader benchmark that never happened."""

from __future__ import annotations

import msgspec

from fuelrail.bench.measure.machine import CpuUse
from fuelrail.bench.measure.rates import Rate
from fuelrail.bench.studies.loader.report import (
    LoaderReport,
    LoaderRun,
    build_loader_report,
)
from fuelrail.pipeline.runtime.stages import StageClock
from support.bench_runs import DATASET, MACHINE

STAGES = [
    Rate(name="fetch", num_threads=1, samples_per_s=3000, cpu_ms_per_sample=0.2),
    Rate(name="parse", num_threads=1, samples_per_s=2000, cpu_ms_per_sample=0.3),
    Rate(name="decode", num_threads=2, samples_per_s=130, cpu_ms_per_sample=14.0),
    Rate(name="collate", num_threads=1, samples_per_s=9000, cpu_ms_per_sample=0.1),
]
LIMITS = [
    Rate(
        name="xxh3 digest",
        num_threads=2,
        samples_per_s=20_000,
        cpu_ms_per_sample=0.1,
    ),
    Rate(
        name="libjpeg-turbo at 1/2",
        num_threads=2,
        samples_per_s=160,
        cpu_ms_per_sample=12.0,
    ),
]


def loader_run(samples_per_s=125.0, **changes) -> LoaderRun:
    """A run at this rate, of two samples a batch; None: it did not become steady."""
    batch_s = 2 / (samples_per_s or 10.0)
    stages = [
        StageClock(
            name=rate.name,
            num_threads=rate.num_threads,
            items=400,
            busy_s=2.0 if rate.name == "decode" else 0.1,
            starved_s=0.0,
            blocked_s=0.1,
            waiting=1,
            capacity=2,
        )
        for rate in STAGES
    ]
    values = {
        "first_batch_s": 0.3,
        "num_warm_up_batches": 2,
        "batch_s": [0.3, 2 * batch_s] + [batch_s] * 20,
        "samples_per_s": samples_per_s,
        "cpu_ms_per_sample": 15.0,
        "trainer_cpu_ms_per_sample": 15.0,
        "cpu": CpuUse(seconds=3.0, own_cpus=1.9, other_cpus=0.0, usable=2.0),
        "stages": stages,
        "num_storage_faults": 0,
    }
    return LoaderRun(**(values | changes))


def loader_report_of(runs, *, limits=LIMITS, dataset=DATASET) -> LoaderReport:
    """The report of these runs."""
    return build_loader_report(
        machine=MACHINE,
        dataset=msgspec.structs.replace(dataset, mean_sample_bytes=1e6),
        options={"batch_size": 2, "workers": 2},
        limits=limits,
        stages=STAGES,
        runs=runs,
        peak_rss_bytes=2**30,
    )
