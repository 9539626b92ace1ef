"""What holds the accelerators up, from the records of all ranks. Pure.

Ranks leave a collective together, so its duration says how long before that moment each one came:
no clocks are compared. The last one to come waited threshold. What the others waited longer is charged
to it, and to the phase in which it took most longer than they.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from fuelrail.bench.measure.occupancy import MOSTLY
from fuelrail.bench.measure.rates import bootstrap_means
from fuelrail.bench.measure.recorder import BUSY

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
_LARGE_UPDATE: Final = 1 / 3
_COMPUTES: Final = 0.6
_WAITS: Final = 0.3
_USED_UP: Final = 0.85
_QUEUED: Final = 0.1
_LOST = ("data_wait", "host_to_device", "evaluation", "checkpoint", "other")
_EVENTS = ("evaluation", "checkpoint")
_MIN_EVENTS = 3
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


class _Reason(NamedTuple):
    """A cause in a word, a sentence on it, and advice."""

    cause: str
    text: str
    advice: str


class _Late(NamedTuple):
    """Of each step: the rank that came last, the part that made it late, what that cost the mean
    rank, and how much of this the late rank lost itself [ns].
    """

    ranks: NDArray[np.int64]
    parts: NDArray[np.int64]
    costs: NDArray[np.float64]
    excess: NDArray[np.float64]


_Shares: TypeAlias = tuple[float, float, float]
"""A share of the time, with the ends of its 95 % interval."""


def find_causes(
    ranks: Mapping[int, Sequence[StepRecord]],
    *,
    num_workers: int | None,
    num_cpus: float,
    is_loaded: bool,
) -> list[Finding]:
    """Return what certainly holds the accelerators up, the largest share first.

    ``ranks`` are the measured steps of each rank, as many of each; ``num_workers`` those of a
    rank's loader (None: nothing says what it does while the trainer waits), ``num_cpus`` of the
    host, which is loaded where other processes use it too.
    """
    ordinary = _CONTENDED if is_loaded else _ORDINARY
    numbers = list(ranks)
    every = list(ranks.values())
    parts = np.array([[part_times(step) for step in steps] for steps in every], np.float64)
    wall = np.array([[step.wall_ns for step in steps] for steps in every], np.float64).mean(axis=0)
    lost = {name: parts[:, :, PARTS.index(name)].mean(axis=0) for name in _LOST}
    lost["all_reduce"] = parts[:, :, _COLLECTIVE].min(axis=0)
    loader = _explain_loader(every, num_workers, num_cpus)
    findings = []
    if len(numbers) > 1:
        late = _find_late(parts)
        costs = np.bincount(late.ranks, late.costs, len(numbers))
        row = int(costs.argmax())
        is_one = bool(costs[row] >= MOSTLY * costs.sum())
        chosen = late.ranks == row if is_one else np.ones(len(wall), bool)
        by_part = np.bincount(late.parts[chosen], late.costs[chosen], len(PARTS))
        part = PARTS[int(by_part.argmax())]
        # A rank that computes longer does so in each step; it saves a checkpoint in some.
        is_computing = part in BUSY
        is_one &= not is_computing or late_steps(every)[row] >= MOSTLY
        shares = _share(np.where(chosen, late.costs, 0.0), wall)
        threshold = _CONTENDED if is_computing and is_loaded else _NOTABLE
        others = [steps for number, steps in ranks.items() if number != numbers[row]]
        if part == "data_wait" and is_one and num_workers != 0 and not _has_stock(others):
            # Of ranks that starve alike, one gets its batch last every time, while those of the
            # others are made when they come out of the collective.
            lost["data_wait"] += np.where(chosen, late.costs - late.excess, 0.0)
        elif shares[1] > (threshold if is_one else ordinary):
            for name in _LOST:
                is_part = chosen & (late.parts == PARTS.index(name))
                lost[name] = lost[name] - np.where(is_part, late.excess, 0.0)
            reason = _explain_loader([every[row]], num_workers, num_cpus) if is_one else loader
            number = numbers[row] if is_one else None
            is_queued = _queued_share(every[row]) > _QUEUED
            findings.append(
                _late_finding(number, part=part, shares=shares, loader=reason, is_queued=is_queued)
            )
    for part, times in lost.items():
        shares = _share(times, wall)
        # What comes now and then is in few steps, and yet no chance.
        is_event = part in _EVENTS and np.count_nonzero(times) >= _MIN_EVENTS
        threshold = ordinary if part == "all_reduce" else _NOTABLE
        if shares[0 if is_event else 1] > threshold:
            reason = loader if part == "data_wait" else _REASONS[part]
            text = f"{_SUBJECTS[part]} up: {_in_words(shares)}. {reason.text}".strip()
            findings.append(_finding(reason, part, shares, text=text))
    collector = [[step.details.collector_ns for step in steps] for steps in every]
    shares = _share(np.array(collector, np.float64).mean(axis=0), wall)
    if shares[1] > _NOTABLE:
        text = f"Python's garbage collection holds the loop up: {_in_words(shares)}, within phases."
        findings.append(_finding(_REASONS["collector"], "other", shares, text=text))
    findings.sort(key=lambda finding: -finding.share)
    # Work of the accelerator, though rarely what it is for: after what keeps it from working.
    shares = _share(parts[:, :, PARTS.index("optimiser")].mean(axis=0), wall)
    if shares[1] > _LARGE_UPDATE:
        text = f"The optimiser takes {_in_words(shares)}."
        findings.append(_finding(_REASONS["optimiser"], "optimiser", shares, text=text))
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


def _find_late(parts: NDArray[np.float64]) -> _Late:
    waits = parts[:, :, _COLLECTIVE]
    last = waits.argmin(axis=0)
    durations = parts[:, :, :_COLLECTIVE].copy()
    # The optimiser comes after the collectives: it makes a rank late to those of the next step.
    update = PARTS.index("optimiser")
    durations[:, 1:, update] = durations[:, :-1, update]
    beyond = np.zeros(durations.shape[1:])
    for rank in np.unique(last):
        steps = last == rank
        others = np.delete(durations[:, steps], rank, axis=0)
        beyond[steps] = durations[rank, steps] - np.median(others, axis=0)
    most = beyond.argmax(axis=1)
    is_lost = np.isin(most, [PARTS.index(name) for name in _LOST])
    excess = np.where(is_lost, np.maximum(0.0, beyond.max(axis=1)), 0.0) / len(parts)
    waited = (waits - waits.min(axis=0)).mean(axis=0)
    return _Late(ranks=last, parts=most, costs=waited + excess, excess=excess)


def _has_stock(ranks: Sequence[Sequence[StepRecord]]) -> bool:
    """Return whether these ranks' loaders had mostly made all their batches when asked for one."""
    details = [step.details for steps in ranks for step in steps]
    num_counted = sum(entry.num_counted for entry in details)
    return num_counted > 0 and sum(entry.num_idle for entry in details) >= num_counted / 2


def _late_finding(
    rank: int | None,
    *,
    part: str,
    shares: _Shares,
    loader: _Reason,
    is_queued: bool,
) -> Finding:
    if rank is None:
        text = f"The ranks hold each other up in turns, mostly by the {LABELS[part]}: "
        reason = loader if part == "data_wait" else _REASONS["turns"]
    else:
        text = f"Rank {rank} holds the others up by its {LABELS[part]}: "
        reason = _REASONS.get(part, _REASONS["rank"]) if part != "optimiser" else _REASONS["rank"]
        reason = loader if part == "data_wait" else reason
    text += f"{_in_words(shares)}. {reason.text}"
    if part in BUSY and rank is not None and is_queued:
        text = f"{text.strip()} Its thread stands in the queue for a CPU."
    return _finding(reason, part, shares, text=text.strip(), rank=rank)


def _finding(
    reason: _Reason, part: str, shares: _Shares, *, text: str, rank: int | None = None
) -> Finding:
    share, low, high = shares
    return Finding(
        cause=reason.cause,
        phase=part,
        rank=rank,
        share=share,
        low=low,
        high=high,
        text=text,
        advice=reason.advice,
    )


def _explain_loader(
    ranks: Sequence[Sequence[StepRecord]], num_workers: int | None, num_cpus: float
) -> _Reason:
    steps = [step for rank in ranks for step in rank]
    details = [step.details for step in steps]
    counted_ns = sum(entry.cpu_wall_ns for entry in details)
    computing = None
    if num_workers == 0:
        waited_ns = sum(step.data_wait_ns - step.details.data_queued_ns for step in steps)
        computing = sum(entry.data_cpu_ns for entry in details) / max(1, waited_ns)
    elif num_workers and counted_ns:
        used_ns = sum(entry.workers_cpu_ns for entry in details)
        queued_ns = sum(entry.workers_queued_ns for entry in details)
        computing = used_ns / max(1, counted_ns * num_workers - queued_ns)
    host_cpus = sum(entry.host_cpu_ns for entry in details) / max(1, counted_ns)
    if computing is not None and computing > _COMPUTES:
        advice = "Give the loader more workers, or cheaper transforms (smaller images, resizing "
        advice += "while decoding, results stored once)."
        if num_workers == 0:
            advice = "Give the loader workers (num_workers=4, persistent_workers=True)."
        if host_cpus > _USED_UP * num_cpus:
            advice = "All CPUs of the host are busy: make the transforms cheaper, or store their "
            advice += "results; more workers gain nothing."
        return _Reason("preprocessing", "It computes most of that time.", advice)
    if computing is not None and computing < _WAITS:
        return _Reason(
            "storage",
            "It waits most of that time, and does not compute.",
            "Look at what it waits for: storage, the network, a lock. More workers wait side by "
            "side; a copy on a local disk ends it.",
        )
    return _Reason("loader", "", "Try more workers, and look at what they do.")


_SUBJECTS: Final = {
    "data_wait": "The loader holds all ranks",
    "host_to_device": "Copies to the device hold all ranks",
    "evaluation": "Evaluation holds all ranks",
    "checkpoint": "Saving checkpoints holds all ranks",
    "other": "Work outside of forward, backward and optimiser holds all ranks",
    "all_reduce": "Collectives themselves, without late ranks, hold all ranks",
}
_REASONS: Final = {
    "host_to_device": _Reason(
        "copy", "", "Pin memory (pin_memory=True) and copy with non_blocking=True."
    ),
    "evaluation": _Reason(
        "evaluation", "", "Evaluate less often, on fewer samples, or in another process."
    ),
    "checkpoint": _Reason("checkpoint", "", "Save less often, or in the background."),
    "other": _Reason(
        "host",
        "",
        "Look at what the loop does between the phases: logging, printing, metrics, values read "
        "from the device.",
    ),
    "collector": _Reason(
        "garbage collection",
        "",
        "Call gc.freeze() before the loop, or gc.disable() and gc.collect() every some steps.",
    ),
    "optimiser": _Reason(
        "optimiser",
        "",
        "Use fused=True or foreach=True, fewer parameter groups, or more samples a step "
        "(accumulation).",
    ),
    "turns": _Reason(
        "uneven ranks",
        "",
        "Give ranks batches of equal cost, or look for what disturbs their hosts in turns.",
    ),
    "rank": _Reason(
        "slow rank",
        "",
        "Look at that rank's host and device: clock, temperature, other processes; and at what "
        "only this rank computes.",
    ),
    "all_reduce": _Reason(
        "collective",
        "",
        "Accumulate gradients over more batches, reduce in bf16, in larger buckets, or use a "
        "faster link.",
    ),
}


def _share(times: NDArray[np.float64], wall: NDArray[np.float64]) -> _Shares:
    """Return the share of the wall time, with a 95 % interval over blocks of steps."""
    shares = bootstrap_means(times, seed=0) / bootstrap_means(wall, seed=0)
    low, high = np.quantile(shares, (0.025, 0.975)).tolist()
    return float(times.sum() / wall.sum()), low, high


def _in_words(shares: _Shares) -> str:
    share, low, high = shares
    return f"{share:.1%} of the time ({low:.1%} to {high:.1%})"


def _queued_share(steps: Sequence[StepRecord]) -> float:
    details = [step.details for step in steps]
    queued_ns = sum(entry.trainer_queued_ns for entry in details)
    return queued_ns / max(1, sum(entry.cpu_wall_ns for entry in details))
