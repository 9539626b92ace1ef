"""What holds the accelerators up, from the records of all ranks. Pure.

Ranks leave a collective together, so its duration says how long before that moment each one came:
no clocks are compared. The last one to come waited least. What the others waited longer is charged
to it, and to the phase in which it took most longer than they.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fuelrail.bench.measure.occupancy import MOSTLY
from fuelrail.bench.measure.rates import bootstrap_means

if TYPE_CHECKING:
    from fuelrail.bench.measure.records import StepRecord

PARTS: Final = (
    "data_wait",
    "host_to_device",
    "forward",
    "backward",
    "optimiser",
    "evaluation",
    "checkpoint",
    "other",
    "all_reduce",
)
"""Phases of a step, with the named parts of `other` apart."""

LABELS: Final = {
    "data_wait": "wait for data",
    "host_to_device": "copies to the device",
    "forward": "forward pass",
    "backward": "backward pass",
    "optimiser": "optimiser",
    "evaluation": "evaluation",
    "checkpoint": "checkpoints",
    "other": "work outside the phases",
    "all_reduce": "collectives",
}

_NOTABLE: Final = 0.02
"""A loss whose interval begins below this share is not certain."""
_ORDINARY: Final = 0.1
"""What ranks may lose in collectives, and by waiting for each other in turns: no two are alike."""
_CONTENDED: Final = 0.15
"""What ranks may lose so, or a rank in computing, where other processes take its CPUs."""
_COMPUTING: Final = ("forward", "backward", "optimiser")
_LARGE_UPDATE: Final = 1 / 3
_COMPUTES: Final = 0.6
_WAITS: Final = 0.3
_USED_UP: Final = 0.85
_QUEUED: Final = 0.1
_LOST = ("data_wait", "host_to_device", "evaluation", "checkpoint", "other")
_COLLECTIVE = PARTS.index("all_reduce")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that holds accelerators up, certainly: its 95 % interval is above noise.

    ``share`` is of the time of all ranks, ``rank`` the one to blame (None: all of them, or each in
    turn), ``cause`` one word, ``phase`` one of ``PARTS``.
    """

    cause: str
    phase: str
    rank: int | None
    share: float
    low: float
    high: float
    text: str
    advice: str


class _Loader(NamedTuple):
    """Why a loader is waited for: cause, a sentence, and advice."""

    cause: str
    reason: str
    advice: str


def find_causes(
    ranks: Mapping[int, Sequence[StepRecord]],
    *,
    num_workers: int,
    num_cpus: float,
    is_loaded: bool,
) -> list[Finding]:
    """Return what certainly holds the accelerators up, the largest share first.

    ``ranks`` are the measured steps of each rank, as many of each; ``num_workers`` those of a
    rank's loader, ``num_cpus`` of the host, which is loaded where other processes use it too.
    """
    ordinary = _CONTENDED if is_loaded else _ORDINARY
    numbers = list(ranks)
    parts = np.array([[part_times(step) for step in steps] for steps in ranks.values()], np.float64)
    wall = np.array([[step.wall_ns for step in steps] for steps in ranks.values()], np.float64)
    wall = wall.mean(axis=0)
    lost = {name: parts[:, :, PARTS.index(name)].mean(axis=0) for name in _LOST}
    findings = []
    if len(numbers) > 1:
        late = _late_ranks(parts, lost)
        lost["all_reduce"] = parts[:, :, _COLLECTIVE].min(axis=0)
        total = sum(charged.sum() for charged in late.values())
        rank = max(range(len(numbers)), key=lambda row: _sum_of(late, row))
        is_one = _sum_of(late, rank) >= MOSTLY * total
        charges = {place: times for place, times in late.items() if not is_one or place[0] == rank}
        charged = np.sum(list(charges.values()), axis=0)
        share, low, high = _share(charged, wall)
        by_part = {
            part: sum(times.sum() for (_, name), times in charges.items() if name == part)
            for part in PARTS
        }
        part = max(by_part, key=lambda name: by_part[name])
        others = [steps for number, steps in ranks.items() if number != numbers[rank]]
        is_computing = part in _COMPUTING
        least = _CONTENDED if is_computing and is_loaded else _NOTABLE
        # A rank that computes longer does so in each step; it saves a checkpoint in some.
        is_one &= not is_computing or late_steps(list(ranks.values()))[rank] >= MOSTLY
        if part == "data_wait" and is_one and num_workers and not _has_stock(others):
            # Of ranks that starve alike, one gets its batch last every time, while those of the
            # others are made when they come out of the collective.
            lost["data_wait"] += charged
        elif low > (least if is_one else ordinary):
            findings.append(
                _late_finding(
                    numbers[rank] if is_one else None,
                    part=part,
                    shares=(share, low, high),
                    loader=_explain_loader([ranks[numbers[rank]]], num_workers, num_cpus),
                    is_queued=_queued_share(ranks[numbers[rank]]) > _QUEUED,
                )
            )
    for part, times in lost.items():
        share, low, high = _share(times, wall)
        if low <= (ordinary if part == "all_reduce" else _NOTABLE):
            continue
        loader = _explain_loader(list(ranks.values()), num_workers, num_cpus)
        cause, reason, advice = loader if part == "data_wait" else _REASONS[part]
        findings.append(
            Finding(
                cause=cause,
                phase=part,
                rank=None,
                share=share,
                low=low,
                high=high,
                text=f"{_SUBJECTS[part]} up: {_in_words(share, low, high)}. {reason}".strip(),
                advice=advice,
            )
        )
    details = [[step.details for step in steps] for steps in ranks.values()]
    collector = np.array(
        [[entry.collector_ns for entry in steps] for steps in details], np.float64
    ).mean(axis=0)
    share, low, high = _share(collector, wall)
    if low > _NOTABLE:
        findings.append(
            Finding(
                cause="garbage collection",
                phase="other",
                rank=None,
                share=share,
                low=low,
                high=high,
                text=f"Python's garbage collection holds the loop up: "
                f"{_in_words(share, low, high)}, within the phases.",
                advice="Call gc.freeze() before the loop, and gc.collect() every some steps with "
                "gc.disable().",
            )
        )
    findings.sort(key=lambda finding: -finding.share)
    # Work of the accelerator, though rarely what it is for: after what keeps it from working.
    share, low, high = _share(parts[:, :, PARTS.index("optimiser")].mean(axis=0), wall)
    if low > _LARGE_UPDATE:
        findings.append(
            Finding(
                cause="optimiser",
                phase="optimiser",
                rank=None,
                share=share,
                low=low,
                high=high,
                text=f"The optimiser takes {_in_words(share, low, high)}.",
                advice="Use fused=True or foreach=True, fewer parameter groups, or more samples "
                "a step (accumulation).",
            )
        )
    return findings


def part_times(step: StepRecord) -> list[int]:
    """Return a step's times of ``PARTS`` [ns]."""
    details = step.details
    named_ns = details.evaluation_ns + details.checkpoint_ns
    times = {
        "evaluation": details.evaluation_ns,
        "checkpoint": details.checkpoint_ns,
        "other": step.other_ns - named_ns,
    }
    return [times[part] if part in times else step.phase_ns(part) for part in PARTS]


def late_steps(ranks: Sequence[Sequence[StepRecord]]) -> list[float]:
    """Return for each rank the share of steps in which it came last to the collectives."""
    waits = np.array([[step.all_reduce_ns for step in steps] for steps in ranks])
    last = waits.argmin(axis=0)
    return [float((last == rank).mean()) for rank in range(len(ranks))]


def _late_ranks(
    parts: NDArray[np.float64], lost: dict[str, NDArray[np.float64]]
) -> dict[tuple[int, str], NDArray[np.float64]]:
    """Return the time of a mean rank that each late rank costs by each part, by step [ns].

    What the late rank itself loses more than the others is moved there from ``lost``.
    """
    world, num_steps, _ = parts.shape
    waits = parts[:, :, _COLLECTIVE]
    waits = waits - waits.min(axis=0)
    own = parts[:, :, :_COLLECTIVE].copy()
    # The optimiser comes after the collectives: it makes a rank late to those of the next step.
    update = PARTS.index("optimiser")
    own[:, 1:, update] = own[:, :-1, update]
    charged: dict[tuple[int, str], NDArray[np.float64]] = {}
    last = waits.argmin(axis=0)
    for step in range(num_steps):
        rank = int(last[step])
        others = np.delete(own[:, step], rank, axis=0)
        beyond = own[rank, step] - np.median(others, axis=0)
        part = PARTS[int(beyond.argmax())]
        times = charged.setdefault((rank, part), np.zeros(num_steps))
        times[step] = waits[:, step].mean()
        if part in lost:
            excess = max(0.0, float(beyond.max())) / world
            times[step] += excess
            lost[part][step] -= excess
    return charged


def _has_stock(ranks: Sequence[Sequence[StepRecord]]) -> bool:
    """Return whether these ranks' loaders had mostly made all their batches when asked for one."""
    details = [step.details for steps in ranks for step in steps]
    num_counted = sum(entry.num_counted for entry in details)
    return num_counted > 0 and sum(entry.num_idle for entry in details) >= num_counted / 2


def _sum_of(late: Mapping[tuple[int, str], NDArray[np.float64]], rank: int) -> float:
    return float(sum(times.sum() for (row, _), times in late.items() if row == rank))


def _late_finding(
    rank: int | None,
    *,
    part: str,
    shares: tuple[float, float, float],
    loader: _Loader,
    is_queued: bool,
) -> Finding:
    share, low, high = shares
    text = f"The ranks hold each other up in turns, mostly by the {LABELS[part]}: "
    if rank is not None:
        text = f"Rank {rank} holds the others up by its {LABELS[part]}: "
    text += f"{_in_words(share, low, high)}."
    cause = "uneven ranks" if rank is None else "slow rank"
    if part == "data_wait":
        cause, reason, advice = loader
        text += f" {reason}"
    elif rank is None:
        advice = "Give ranks batches of equal cost, or look for what disturbs their hosts in turns."
    elif part in _REASONS:
        cause, _, advice = _REASONS[part]
    else:
        advice = (
            f"Look at rank {rank}'s host and device: clock, temperature, other processes; and at "
            "what only this rank computes."
        )
        if is_queued:
            text += " Its thread stands in the queue for a CPU."
    return Finding(
        cause=cause,
        phase=part,
        rank=rank,
        share=share,
        low=low,
        high=high,
        text=text.strip(),
        advice=advice,
    )


def _explain_loader(
    ranks: Sequence[Sequence[StepRecord]], num_workers: int, num_cpus: float
) -> _Loader:
    steps = [step for rank in ranks for step in rank]
    details = [step.details for step in steps]
    counted_ns = sum(entry.cpu_wall_ns for entry in details)
    computing = None
    if num_workers == 0:
        computed_ns = sum(entry.data_cpu_ns for entry in details)
        # With its part of the time in the queue for a CPU, which is that of whatever computes.
        cpu_share = (computed_ns + sum(step.cpu_ns for step in steps)) / max(
            1, sum(step.wall_ns for step in steps)
        )
        queued_ns = sum(entry.trainer_queued_ns for entry in details)
        queued_share = queued_ns / max(1, counted_ns)
        waited_ns = sum(step.data_wait_ns for step in steps)
        computing = computed_ns * (1 + queued_share / max(1e-9, cpu_share)) / max(1, waited_ns)
    elif counted_ns:
        used_ns = sum(entry.workers_cpu_ns for entry in details)
        computing = used_ns / counted_ns / num_workers
    host_cpus = sum(entry.host_cpu_ns for entry in details) / max(1, counted_ns)
    if computing is not None and computing > _COMPUTES:
        advice = "Give the loader more workers, or cheaper transforms (smaller images, resizing "
        advice += "while decoding, results stored once)."
        if num_workers == 0:
            advice = "Give the loader workers (num_workers=4, persistent_workers=True)."
        if host_cpus > _USED_UP * num_cpus:
            advice = "All CPUs of the host are busy: make the transforms cheaper, or store their "
            advice += "results; more workers gain nothing."
        return _Loader("preprocessing", "It computes most of that time.", advice)
    if computing is not None and computing < _WAITS:
        return _Loader(
            "storage",
            "It waits most of that time, and does not compute.",
            "Look at what it waits for: storage, the network, a lock. More workers wait side by "
            "side; a copy on a local disk ends it.",
        )
    return _Loader("loader", "", "Try more workers, and look at what they do.")


_SUBJECTS: Final = {
    "data_wait": "The loader holds all ranks",
    "host_to_device": "Copies to the device hold all ranks",
    "evaluation": "Evaluation holds all ranks",
    "checkpoint": "Saving checkpoints holds all ranks",
    "other": "Work outside of forward, backward and optimiser holds all ranks",
    "all_reduce": "Collectives themselves, without late ranks, hold all ranks",
}
_REASONS: Final = {
    "host_to_device": _Loader(
        "copy", "", "Pin memory (pin_memory=True) and copy with non_blocking=True."
    ),
    "evaluation": _Loader(
        "evaluation", "", "Evaluate less often, on fewer samples, or in another process."
    ),
    "checkpoint": _Loader("checkpoint", "", "Save less often, or in the background."),
    "other": _Loader(
        "host",
        "",
        "Look at what the loop does between the phases: logging, printing, metrics, values read "
        "from the device.",
    ),
    "all_reduce": _Loader(
        "collective",
        "",
        "Accumulate gradients over more batches, reduce in bf16, in larger buckets, or use a "
        "faster link.",
    ),
}


def _share(times: NDArray[np.float64], wall: NDArray[np.float64]) -> tuple[float, float, float]:
    """Return the share of the wall time, with a 95 % interval over blocks of steps."""
    shares = bootstrap_means(times, seed=0) / bootstrap_means(wall, seed=0)
    low, high = np.quantile(shares, (0.025, 0.975)).tolist()
    return float(times.sum() / wall.sum()), low, high


def _in_words(share: float, low: float, high: float) -> str:
    return f"{share:.1%} of the time ({low:.1%} to {high:.1%})"


def _queued_share(steps: Sequence[StepRecord]) -> float:
    details = [step.details for step in steps]
    queued_ns = sum(entry.trainer_queued_ns for entry in details)
    return queued_ns / max(1, sum(entry.cpu_wall_ns for entry in details))
