"""What bounds a loader that runs as fast as it can, in words, with what to do and what it would bring. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fuelrail.bench.cpu_watch import CpuUse
    from fuelrail.bench.rates import Rate
    from fuelrail.bench.records import Stage

Kind = Literal["cpu", "threads", "single thread", "storage", "waiting", "hand-over"]

# Shares from which a resource counts as used up, and a thread as always busy.
_USED_UP = 0.85
_ALWAYS_BUSY = 0.9
# A thread that computes for less than this share of its busy time mostly waits.
_COMPUTING = 0.5


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """What bounds the loader.

    ``gain`` is the factor by which the loader could be faster at best if the advice were followed, as far as the next
    bound that is known; None where it cannot be told.
    """

    kind: Kind
    stage: str | None
    finding: str
    advice: str
    gain: float | None


def find_bound(
    samples_per_s: float,
    cpu_ms_per_sample: float,
    cpu: CpuUse,
    clocks: Sequence[Stage],
    alone: Sequence[Rate],
    jpeg: Rate | None,
) -> Bound:
    """Judge a run: its rate and CPU time, who used the CPUs, its stages' clocks, and the stages' rates alone.

    ``jpeg`` is what the JPEG library alone takes for the same images; None where they are none.
    """
    free = max(cpu.usable - (cpu.others or 0.0), 0.1)
    capacity = 1e3 * cpu.usable / cpu_ms_per_sample
    if cpu.own >= _USED_UP * free:
        return _cpu_bound(cpu_ms_per_sample, cpu, free, alone, jpeg)
    busiest = max(clocks, key=_busy_share)
    if _busy_share(busiest) < _ALWAYS_BUSY:
        return Bound(
            kind="hand-over",
            stage=None,
            finding=f"No stage is always busy (the busiest, {busiest.name}, {_busy_share(busiest):.0%}) and CPUs are "
            "free: time goes into handing items from thread to thread, or the consumer is slow.",
            advice="Use larger batches and a larger prefetch_factor.",
            gain=None,
        )
    cost = next(rate for rate in alone if rate.name == busiest.name)
    num_samples = samples_per_s * cpu.seconds
    computing = cost.cpu_ms_per_sample * num_samples / 1e3 / busiest.busy_s
    if computing < _COMPUTING:
        return _waiting(busiest, computing)
    if busiest.num_threads == 1 and busiest.name != "decode":
        others = [rate.samples_per_s for rate in alone if rate.name != busiest.name]
        return Bound(
            kind="single thread",
            stage=busiest.name,
            finding=f"The stage '{busiest.name}' runs in one thread and is always busy, while CPUs are free.",
            advice=f"Make its work cheaper: what the samples hold decides what '{busiest.name}' costs.",
            gain=min([capacity, *others]) / samples_per_s,
        )
    return Bound(
        kind="threads",
        stage=busiest.name,
        finding=f"The {busiest.num_threads} threads of '{busiest.name}' are always busy, and {free - cpu.own:.1f} of "
        f"{cpu.usable:g} CPUs are idle.",
        advice=f"Use more threads: --workers {max(busiest.num_threads + 1, int(free))}.",
        gain=min(capacity, samples_per_s * free / busiest.num_threads) / samples_per_s,
    )


def _cpu_bound(cpu_ms_per_sample: float, cpu: CpuUse, free: float, alone: Sequence[Rate], jpeg: Rate | None) -> Bound:
    dearest = max(alone, key=lambda rate: rate.cpu_ms_per_sample)
    share = min(dearest.cpu_ms_per_sample / cpu_ms_per_sample, 1.0)
    left = f" that others left of {cpu.usable:g}" if free < cpu.usable - 0.05 else ""
    finding = (
        f"The CPUs are used up: the loader took {cpu.own:.1f} of the {free:.1f}{left}. '{dearest.name}' makes "
        f"{share:.0%} of its work: {dearest.cpu_ms_per_sample:.1f} ms of CPU time a sample."
    )
    if dearest.name == "decode" and jpeg is not None and jpeg.cpu_ms_per_sample >= dearest.cpu_ms_per_sample:
        return Bound(  # the loader decodes no more of an image than its crop keeps
            kind="cpu",
            stage="decode",
            finding=f"{finding} The JPEG library alone, on whole images, takes {jpeg.cpu_ms_per_sample:.1f} ms.",
            advice="Give each rank more CPU cores, store smaller images, or decode on the GPU.",
            gain=None,
        )
    if dearest.name == "decode" and jpeg is not None:
        return Bound(
            kind="cpu",
            stage="decode",
            finding=f"{finding} The JPEG library alone takes {jpeg.cpu_ms_per_sample:.1f} ms of that.",
            advice="Give each rank more CPU cores, store smaller images, or decode on the GPU; on these cores and with "
            "these images no loader can do better than the library.",
            gain=cpu_ms_per_sample / jpeg.cpu_ms_per_sample,
        )
    advice = {
        "fetch": "Leave out the digest check once the dataset is verified, and members that training does not read.",
        "parse": "Store only the members that training reads.",
    }.get(dearest.name, "Give each rank more CPU cores.")
    return Bound(
        kind="cpu", stage=dearest.name, finding=finding, advice=advice, gain=1 / (1 - share) if share < 1 else None
    )


def _waiting(stage: Stage, computing: float) -> Bound:
    if stage.name == "fetch":
        return Bound(
            kind="storage",
            stage=stage.name,
            finding=f"Reading is always under way and computes for only {computing:.0%} of that time: storage is "
            "slower than the loader.",
            advice="Read ahead with more parallel requests, keep the dataset on local NVMe, or warm the page cache.",
            gain=None,
        )
    return Bound(
        kind="waiting",
        stage=stage.name,
        finding=f"The threads of '{stage.name}' are always at work, but compute for only {computing:.0%} of that time: "
        "they wait for Python's global lock, or for a CPU.",
        advice="Use fewer threads in this process and more ranks, and look for Python code in transforms.",
        gain=None,
    )


def _busy_share(stage: Stage) -> float:
    total_s = stage.busy_s + stage.starved_s + stage.blocked_s
    return stage.busy_s / total_s if total_s else 0.0
