"""Options and report of ``fuelrail bench loader``: repeats to medians with intervals, the bound,
and JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from fuelrail.bench.measure.display import display
from fuelrail.bench.measure.limits import jpeg_limit
from fuelrail.bench.measure.machine import CpuUse
from fuelrail.bench.measure.rates import Interval, Rate, interval_of
from fuelrail.bench.report.files import ReportHeader, created_now
from fuelrail.pipeline.runtime.stages import StageClock
from fuelrail.pipeline.settings import (
    Above0,
    CheckedSettings,
    NotNegative,
    Positive,
    flag,
)
from fuelrail.pipeline.transforms.image import ImageAugment
from fuelrail.sharding.engines import RayAddress, check_address

if TYPE_CHECKING:
    from fuelrail.bench.measure.machine import DatasetFacts, MachineFacts

SCHEMA = "fuelrail-bench-loader"

VERSION = 6

MIN_STEADY_BATCHES = 8

# A few pages are read again by any process.
_MANY_FAULTS = 100

Kind = Literal["cpu", "threads", "single thread", "storage", "waiting", "hand-over"]

# Shares from which a resource counts as used up, and a thread as always busy.
_USED_UP = 0.85

_ALWAYS_BUSY = 0.9

# A thread that computes for less than this share of its busy time mostly waits.
_COMPUTING = 0.5


class LoaderOptions(CheckedSettings, frozen=True, kw_only=True):
    """Options of `fuelrail.bench.bench_loader`, and the flags of ``fuelrail bench loader``."""

    split: Annotated[str, flag("split to load")] = "train"
    batch_size: Annotated[Positive, flag("samples in a batch")] = 8
    workers: Annotated[
        Positive | None,
        flag("decoding threads, or actors with --where remote (default: one per usable CPU)"),
    ] = None
    where: Annotated[
        Literal["process", "node", "remote"] | None,
        flag(
            "where batches are made, as in the DataLoader: measured in turns with threads "
            "of this process"
        ),
    ] = None
    ray_address: RayAddress = None
    image: Annotated[
        ImageAugment | None,
        flag("image settings (default: as stored, where all images have one size)"),
    ] = None
    decoder: Annotated[str, flag("decode backend, as in the DataLoader")] = "auto"
    points: Annotated[bool, flag("also decode the lidar sweep")] = False
    verify: Annotated[bool, flag("skip checksum verification")] = True
    seed: Annotated[NotNegative, flag("random seed for the order")] = 0
    repeats: Annotated[Positive, flag("rounds of measurement")] = 5
    seconds: Annotated[
        Above0,
        flag("seconds of one run of the loader, from its first batch on"),
    ] = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_address(self.ray_address, "where='remote'", is_used=self.where == "remote")


class LoaderRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Rates are of the steady part, after ``num_warm_up_batches``; stage clocks and CPU
    use of the whole run.

    ``trainer_cpu_ms_per_sample`` is that of this process, ``cpu_ms_per_sample`` of it and all that
    it started here. ``num_storage_faults`` counts the pages that were not in memory when they were
    touched. ``batch_s`` is the time between batches, the first from the loader's making.
    ``samples_per_s`` is None when fewer than ``MIN_STEADY_BATCHES`` were steady.
    """

    first_batch_s: float
    num_warm_up_batches: int
    batch_s: list[float]
    samples_per_s: float | None
    cpu_ms_per_sample: float
    trainer_cpu_ms_per_sample: float
    cpu: CpuUse
    stages: list[StageClock]
    num_storage_faults: int


class LoaderFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures over all repeats; rates are those of the steady parts."""

    samples_per_s: Annotated[Interval, display("samples/s", digits=".1f", better="more")]
    images_per_s: Interval
    stored_mb_per_s: Annotated[float, display("as stored", unit="MB/s", digits=".0f")]
    cpu_ms_per_sample: Annotated[
        Interval,
        display("CPU time a sample", unit="ms", digits=".2f", better="less"),
    ]
    trainer_cpu_ms_per_sample: Annotated[
        Interval, display("of that in this process", unit="ms", digits=".2f")
    ]
    cpu_s_per_1000_images: Annotated[
        float, display("CPU time per 1,000 images", unit="s", digits=".2f")
    ]
    first_batch_s: Annotated[
        Interval, display("first batch", unit="s", digits=".2f", better="less")
    ]
    peak_rss_bytes: Annotated[
        int,
        display("peak memory of the process", unit="GiB", digits=".2f", scale=2**-30),
    ]
    bound: Bound


class LoaderReport(ReportHeader, frozen=True, kw_only=True):
    """A whole report.

    ``limits``: the libraries alone. ``stages``: each stage alone. ``figures`` is None when no
    repeat became steady, and ``too_short`` says so; ``cut_off`` says why a report is partial.
    """

    limits: list[Rate]
    stages: list[Rate]
    runs: list[LoaderRun]
    figures: LoaderFigures | None
    too_short: str | None


def build_loader_report(
    *,
    machine: MachineFacts,
    dataset: DatasetFacts,
    options: dict[str, Any],
    limits: Sequence[Rate],
    stages: Sequence[Rate],
    runs: Sequence[LoaderRun],
    peak_rss_bytes: int,
    cut_off: str | None = None,
) -> LoaderReport:
    """Put the parts together and judge them."""
    steady = [run for run in runs if run.samples_per_s is not None]
    too_short = None
    figures = None
    if steady:
        rates = [run.samples_per_s for run in steady if run.samples_per_s is not None]
        samples_per_s = interval_of(rates)
        num_cameras = len(dataset.cameras)
        cpu_ms = interval_of([run.cpu_ms_per_sample for run in steady])
        # Where one run is to be judged, it is the median run.
        by_rate = sorted(steady, key=lambda run: run.samples_per_s or 0.0)
        middle = by_rate[len(steady) // 2]
        assert middle.samples_per_s is not None
        assert dataset.mean_sample_bytes is not None, "a split with batches has samples"
        figures = LoaderFigures(
            samples_per_s=samples_per_s,
            images_per_s=interval_of([rate * num_cameras for rate in rates]),
            stored_mb_per_s=samples_per_s.median * dataset.mean_sample_bytes / 1e6,
            cpu_ms_per_sample=cpu_ms,
            trainer_cpu_ms_per_sample=interval_of(
                [run.trainer_cpu_ms_per_sample for run in steady]
            ),
            cpu_s_per_1000_images=cpu_ms.median / num_cameras,
            first_batch_s=interval_of([run.first_batch_s for run in steady]),
            peak_rss_bytes=peak_rss_bytes,
            bound=find_bound(
                middle.samples_per_s,
                cpu_ms_per_sample=middle.cpu_ms_per_sample,
                cpu=middle.cpu,
                clocks=middle.stages,
                alone=stages,
                jpeg=jpeg_limit(limits),
                where=options.get("where"),
            ),
        )
    else:
        longest = max(len(run.batch_s) for run in runs)
        too_short = (
            f"no run became steady: the longest made {longest} batches, and "
            f"{MIN_STEADY_BATCHES} are needed after warm-up; give it more --seconds or a "
            "smaller --batch-size"
        )
    warnings = []
    faults = max(run.num_storage_faults for run in runs)
    if faults > _MANY_FAULTS:
        warnings.append(
            f"Up to {faults:,} pages a run came from storage, not from the page cache: the "
            "dataset does not fit into memory, or was not there yet. The limits below are "
            "those of cached bytes."
        )
    if figures is not None:
        if len(steady) < len(runs):
            warnings.append(
                f"{len(runs) - len(steady)} of {len(runs)} runs did not become steady and "
                "are left out."
            )
        rate = figures.samples_per_s
        spread = (rate.high - rate.low) / rate.median
        if spread > 0.1:
            warnings.append(
                f"The repeats differ by {spread:.0%} of their median: don't trust small "
                "differences."
            )
    uses = [run.cpu for run in runs]
    busiest_host = max(uses, key=lambda cpu: cpu.other_cpus or 0.0)
    return LoaderReport(
        schema=SCHEMA,
        version=VERSION,
        created=created_now(),
        machine=machine,
        dataset=dataset,
        options=options,
        limits=list(limits),
        stages=list(stages),
        runs=list(runs),
        figures=figures,
        too_short=too_short,
        cut_off=cut_off,
        interrupted=cut_off is not None,
        disturbed=busiest_host.disturbed,
        warnings=warnings,
    )


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """The bottleneck of the loader.

    ``gain`` is the factor by which the loader could be faster at best if the advice were followed,
    as far as the next bound that is known; None if unknown.
    """

    kind: Kind
    stage: str | None = None
    finding: str
    advice: str
    gain: float | None = None


def find_bound(
    samples_per_s: float,
    cpu_ms_per_sample: float,
    cpu: CpuUse,
    clocks: Sequence[StageClock],
    alone: Sequence[Rate],
    jpeg: Rate | None,
    where: str | None = None,
) -> Bound:
    """Judge a run: its rate and CPU time, the use of the CPUs, its stages' clocks, and the stages'
    rates alone.

    ``jpeg`` is what the JPEG library alone takes for the same images; None where they are none.
    """
    free = max(cpu.usable - (cpu.other_cpus or 0.0), 0.1)
    capacity = 1e3 * cpu.usable / cpu_ms_per_sample
    if cpu.own_cpus >= _USED_UP * free:
        return _cpu_bound(cpu_ms_per_sample, cpu=cpu, free=free, alone=alone, jpeg=jpeg)
    busiest = max(clocks, key=_busy_share)
    if where == "remote":
        return Bound(
            kind="waiting",
            finding=(
                "Ray actors make the batches, and CPUs are free here: actors, or the way from "
                "them, set the pace."
            ),
            advice="Use more actors (--workers), until the rate stays the same.",
        )
    if _busy_share(busiest) < _ALWAYS_BUSY:
        return Bound(
            kind="hand-over",
            finding=f"No stage is always busy (the busiest, {busiest.name}, "
            f"{_busy_share(busiest):.0%}) and CPUs are free: time goes into handing items "
            "from thread to thread, or the consumer is slow.",
            advice="Use larger batches and a larger prefetch_factor.",
        )
    cost = next(rate for rate in alone if rate.name == busiest.name)
    num_samples = samples_per_s * cpu.seconds
    computing = cost.cpu_ms_per_sample * num_samples / 1e3 / busiest.busy_s
    if computing < _COMPUTING:
        if busiest.name == "fetch":
            return Bound(
                kind="storage",
                stage=busiest.name,
                finding=f"Reading is always under way and computes for only {computing:.0%} of "
                "that time: storage is slower than the loader.",
                advice=(
                    "Read ahead with more parallel requests, keep the dataset on local NVMe, or "
                    "warm the page cache."
                ),
            )
        return Bound(
            kind="waiting",
            stage=busiest.name,
            finding=f"The threads of '{busiest.name}' are always at work, but compute for only "
            f"{computing:.0%} of that time: they wait for Python's global lock, or for a CPU "
            "that another process uses.",
            advice=(
                "Use fewer threads in this process and more ranks, and look for Python code in "
                "transforms."
            ),
            gain=None,
        )
    if busiest.num_threads == 1 and busiest.name != "decode":
        rates = [rate.samples_per_s for rate in alone if rate.name != busiest.name]
        return Bound(
            kind="single thread",
            stage=busiest.name,
            finding=(
                f"The stage '{busiest.name}' runs in one thread and is always busy, while CPUs "
                "are free."
            ),
            advice=(
                f"Make its work cheaper: what the samples hold decides what '{busiest.name}' costs."
            ),
            gain=min([capacity, *rates]) / samples_per_s,
        )
    return Bound(
        kind="threads",
        stage=busiest.name,
        finding=f"The {busiest.num_threads} threads of '{busiest.name}' are always busy, and "
        f"{free - cpu.own_cpus:.1f} of {cpu.usable:g} CPUs are idle.",
        advice=f"Use more threads: --workers {max(busiest.num_threads + 1, int(free))}.",
        gain=min(capacity, samples_per_s * free / busiest.num_threads) / samples_per_s,
    )


def _cpu_bound(
    cpu_ms_per_sample: float,
    cpu: CpuUse,
    free: float,
    alone: Sequence[Rate],
    jpeg: Rate | None,
) -> Bound:
    dearest = max(alone, key=lambda rate: rate.cpu_ms_per_sample)
    share = min(dearest.cpu_ms_per_sample / cpu_ms_per_sample, 1.0)
    free_text = ""
    if free < cpu.usable - 0.05:
        free_text = f" that other processes left free of {cpu.usable:g}"
    finding = (
        f"The CPUs are used up: the loader used {cpu.own_cpus:.1f} of the {free:.1f} "
        f"CPUs{free_text}. '{dearest.name}' makes {share:.0%} of its work: "
        f"{dearest.cpu_ms_per_sample:.1f} ms of CPU time a sample."
    )
    is_decoding = dearest.name == "decode" and jpeg is not None
    if jpeg is not None and is_decoding and jpeg.cpu_ms_per_sample >= dearest.cpu_ms_per_sample:
        return Bound(  # the loader decodes no more of an image than its crop keeps
            kind="cpu",
            stage="decode",
            finding=(
                f"{finding} The JPEG library alone, on whole images, takes "
                f"{jpeg.cpu_ms_per_sample:.1f} ms."
            ),
            advice="Give each rank more CPU cores, store smaller images, or decode on the GPU.",
        )
    if jpeg is not None and is_decoding:
        return Bound(
            kind="cpu",
            stage="decode",
            finding=(
                f"{finding} The JPEG library alone takes {jpeg.cpu_ms_per_sample:.1f} ms of it."
            ),
            advice="Give each rank more CPU cores, store smaller images, or decode on the GPU; on "
            "these cores and with these images no loader can do better than the library.",
            gain=cpu_ms_per_sample / jpeg.cpu_ms_per_sample,
        )
    advice = {
        "fetch": (
            "Leave out the digest check once the dataset is verified, and members that training "
            "does not read."
        ),
        "parse": "Store only the members that training reads.",
    }.get(dearest.name, "Give each rank more CPU cores.")
    return Bound(
        kind="cpu",
        stage=dearest.name,
        finding=finding,
        advice=advice,
        gain=1 / (1 - share) if share < 1 else None,
    )


def _busy_share(stage: StageClock) -> float:
    total_s = stage.busy_s + stage.starved_s + stage.blocked_s
    return stage.busy_s / total_s if total_s else 0.0
