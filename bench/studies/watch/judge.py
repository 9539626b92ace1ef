"""What holds the accelerators up, from the records of all ranks. Pure.

Ranks leave a collective together, so its duration says how long before that moment each one came:
no clocks are compared. The last one to come waited least. What the others waited longer is charged
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
from fuelrail.bench.measure.recorder import BUSY, NAMED

if TYPE_CHECKING:
    from fuelrail.bench.measure.records import StepDetails, StepRecord

PARTS: Final = (
    "data_wait",
    "host_to_device",
    "forward",
    "backward",
    "optimiser",
    "evaluation",
    "checkpoint",
    "logging",
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
    "logging": "logging",
    "other": "work outside the phases",
    "all_reduce": "collectives",
}

_NOTABLE: Final = 0.02
"""A loss whose interval begins below this share is not certain."""
_ORDINARY: Final = 0.1
"""What ranks may lose in collectives, and by waiting for each other in turns: no two are alike."""
_CONTENDED: Final = 0.15
"""What ranks may lose so, or a rank in computing, where other processes take its CPUs; more where
its threads stand in the queue.
"""
_NOTABLE_CONTENDED: Final = 0.05
"""What else is not certain there."""
_LARGE_UPDATE: Final = 1 / 3
_COMPUTES: Final = 0.6
_WAITS: Final = 0.3
_USED_UP: Final = 0.85
_QUEUED: Final = 0.1
_FIRST = ("memory leak", "interpreter lock")
"""Causes that end the run, or show as others."""
_LOST = ("data_wait", "host_to_device", *NAMED, "other")
_EVENTS = ("evaluation", "checkpoint")
_MIN_EVENTS = 3
_COLLECTIVE = PARTS.index("all_reduce")
_HIDDEN = ("data_wait", "other")
"""What a device does not wait for while its queue has work."""
_FEW = 0.2
_NEARLY_ALL = 0.8
_COLD = 4
_MIN_STEPS = 10
_MIN_SAMPLES = 5
_LEAK_BYTES = 64 << 20
_LOCKED_MS = 1.5
_LOCKED_SHARE = 0.3
_MANY = 1.5


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
    numbers = list(ranks)
    every = list(ranks.values())
    ordinary = _CONTENDED + _queued_of_threads(every) / 2 if is_loaded else _ORDINARY
    parts = np.array([[part_times(step) for step in steps] for steps in every], np.float64)
    wall = np.array([[step.wall_ns for step in steps] for steps in every], np.float64).mean(axis=0)
    lost = {name: parts[:, :, PARTS.index(name)].mean(axis=0) for name in _LOST}
    lost["all_reduce"] = parts[:, :, _COLLECTIVE].min(axis=0)
    loader = _explain_loader(every, num_workers, num_cpus)
    notable = _NOTABLE_CONTENDED if is_loaded else _NOTABLE
    collector = _mean_of(every, "collector_ns")
    lost["other"] = np.maximum(0.0, lost["other"] - collector)
    findings = [
        *_find_leak(ranks),
        *(_find_lock(every) or _find_threads(every, parts, num_cpus)),
        *_find_syncs(every, lost, wall),
    ]
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
        threshold = _CONTENDED if is_computing and is_loaded else notable
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
        threshold = ordinary if part == "all_reduce" else notable
        if shares[0 if is_event else 1] > threshold:
            reason = loader if part == "data_wait" else _REASONS[part]
            text = f"{_SUBJECTS[part]} up: {_in_words(shares)}. {reason.text}".strip()
            findings.append(_finding(reason, part, shares, text=text))
    shares = _share(collector, wall)
    if shares[1] > notable:
        text = f"Python's garbage collection holds the loop up: {_in_words(shares)}, within phases."
        findings.append(_finding(_REASONS["collector"], "other", shares, text=text))
    findings.sort(key=lambda finding: (finding.cause not in _FIRST, -finding.share))
    # Work of the accelerator, though rarely what it is for: after what keeps it from working.
    shares = _share(parts[:, :, PARTS.index("optimiser")].mean(axis=0), wall)
    if shares[1] > _LARGE_UPDATE:
        text = f"The optimiser takes {_in_words(shares)}."
        findings.append(_finding(_REASONS["optimiser"], "optimiser", shares, text=text))
    return findings


def list_advice() -> dict[str, str]:
    """Return what to do about each cause that a finding may have."""
    return {reason.cause: reason.advice for reason in _REASONS.values()}


def part_times(step: StepRecord) -> list[int]:
    """Return a step's times of ``PARTS`` [ns]."""
    times = {part: getattr(step.details, f"{part}_ns") for part in NAMED}
    times["other"] = step.other_ns - sum(times.values())
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
    in_few_steps = _explain_when(ranks, num_workers or 0)
    if in_few_steps is not None:
        return in_few_steps
    counted_ns = sum(entry.cpu_wall_ns for entry in details)
    computing = None
    if num_workers == 0:
        waited_ns = sum(step.data_wait_ns - step.details.data_queued_ns for step in steps)
        computing = sum(entry.data_cpu_ns for entry in details) / max(1, waited_ns)
    elif num_workers and counted_ns:
        # Workers are processes, or threads of this one.
        used_ns = sum(
            entry.workers_cpu_ns + max(0, entry.process_cpu_ns - entry.trainer_cpu_ns)
            for entry in details
        )
        queued_ns = sum(entry.workers_queued_ns for entry in details)
        computing = used_ns / max(1, counted_ns * num_workers - queued_ns)
    host_cpus = sum(entry.host_cpu_ns for entry in details) / max(1, counted_ns)
    if computing is not None and computing > _COMPUTES:
        reason = _REASONS["preprocessing"]
        if num_workers == 0:
            advice = "Give the loader workers (num_workers=4, persistent_workers=True)."
            reason = reason._replace(advice=advice)
        if host_cpus > _USED_UP * num_cpus:
            advice = "All CPUs of the host are busy: make the transforms cheaper, or store their "
            advice += "results; more workers gain nothing."
            reason = reason._replace(advice=advice)
        return reason
    if computing is not None and computing < _WAITS:
        return _REASONS["storage"]
    return _REASONS["loader"]


def _explain_when(ranks: Sequence[Sequence[StepRecord]], num_workers: int) -> _Reason | None:
    """Return the reason of waits that are of the first epoch, or of few steps."""
    waits = np.array([[step.data_wait_ns for step in steps] for steps in ranks], np.float64)
    epochs = np.array([step.epoch for step in ranks[0]])
    is_first = epochs == epochs[0]
    if _MIN_STEPS <= is_first.sum() <= len(epochs) - _MIN_STEPS:
        cold_ms = waits[:, is_first].mean() / 1e6
        warm_ms = waits[:, ~is_first].mean() / 1e6
        if epochs[0] == 0 and cold_ms > _COLD * warm_ms:
            text = f"It takes {cold_ms:.1f} ms a step in the first epoch, {warm_ms:.1f} ms later."
            return _REASONS["cold"]._replace(text=text)
    longest = np.sort(waits.ravel())[::-1]
    num_long = int(len(longest) * min(_FEW, _FEW * 2 / max(1, num_workers)))
    if longest[:num_long].sum() > _NEARLY_ALL * longest.sum():
        return _REASONS["stalls"]
    return None


def _find_leak(ranks: Mapping[int, Sequence[StepRecord]]) -> list[Finding]:
    """Return what is certain of memory that grows to the end."""
    rates: dict[tuple[int, str], float] = {}
    for rank, steps in ranks.items():
        for kind in ("memory_bytes", "device_bytes"):
            held = [(step.step, getattr(step.details, kind)) for step in steps]
            held = [(number, num_bytes) for number, num_bytes in held if num_bytes]
            if len(held) < _MIN_SAMPLES:
                continue
            numbers, sizes = np.array(held, np.float64).T
            growth = np.diff(sizes)
            middle = len(sizes) // 2
            early = (sizes[middle] - sizes[0]) / (numbers[middle] - numbers[0])
            late = (sizes[-1] - sizes[middle]) / (numbers[-1] - numbers[middle])
            is_steady = (growth > 0).mean() > _NEARLY_ALL and late > early / 2
            if is_steady and sizes[-1] - sizes[0] > _LEAK_BYTES:
                rates[rank, kind] = late
    if not rates:
        return []
    (rank, kind), rate = max(rates.items(), key=lambda item: item[1])
    of_one = len({number for number, _ in rates}) == 1 and len(ranks) > 1
    where = "Device memory" if kind == "device_bytes" else "Memory"
    whose = f" of rank {rank}" if of_one else ""
    text = f"{where}{whose} grows by {rate / 2**20:.2f} MiB a step, up to the last."
    shares = (0.0, 0.0, 0.0)
    leak = _REASONS["leak"]
    return [_finding(leak, "other", shares, text=text, rank=rank if of_one else None)]


def _find_lock(ranks: Sequence[Sequence[StepRecord]]) -> list[Finding]:
    """Return whether other Python threads keep the loop from Python's lock."""
    samples = [entry for steps in ranks for entry in _samples(steps)]
    waits_ms = np.array([entry.lock_ns / 1e6 for entry in samples])
    if len(samples) < _MIN_SAMPLES or (waits_ms > _LOCKED_MS).mean() < _LOCKED_SHARE:
        return []
    used = [_used_by_others(entry) / entry.cpu_wall_ns for entry in samples]
    if sum(map(_used_by_others, samples)) < sum(entry.process_cpu_ns for entry in samples) / 2:
        return []
    shares = (sum(used) / len(used), min(used), max(used))
    text = (
        f"Other Python threads of the process compute {_in_words(shares)} and hold Python's lock: "
        f"the loop waits {np.quantile(waits_ms, 0.75):.1f} ms for it each time it comes back from torch."
    )
    return [_finding(_REASONS["lock"], "other", shares, text=text)]


def _find_threads(
    ranks: Sequence[Sequence[StepRecord]], parts: NDArray[np.float64], num_cpus: float
) -> list[Finding]:
    """Return whether the ranks' threads are more than the CPUs, and wait for each other."""
    num_wanted = 0.0
    waiting = []
    for steps in ranks:
        samples = _samples(steps)
        used_ns = sum(entry.process_cpu_ns for entry in samples)
        if not samples or sum(map(_used_by_others, samples)) < used_ns / 2:
            return []
        counted_ns = sum(entry.cpu_wall_ns for entry in samples)
        queued_ns = sum(entry.threads_queued_ns for entry in samples)
        num_wanted += (used_ns + queued_ns) / counted_ns
        waiting.append(queued_ns / max(1, used_ns + queued_ns))
    if num_wanted < _MANY * num_cpus or min(map(_queued_share, ranks)) < _QUEUED:
        return []
    phases = parts[:, :, [PARTS.index(name) for name in BUSY]].sum(axis=(0, 1))
    busy = float(phases.sum() / parts.sum())
    shares = (busy * sum(waiting) / len(waiting), busy * min(waiting), busy * max(waiting))
    text = (
        f"The ranks' own threads hold each other up: {num_wanted:.1f} of them want "
        f"{num_cpus:g} CPUs, and stand in the queue {_in_words(shares)}."
    )
    return [_finding(_REASONS["threads"], BUSY[int(phases.argmax())], shares, text=text)]


def _samples(steps: Sequence[StepRecord]) -> list[StepDetails]:
    """Return the details that have CPU times."""
    return [step.details for step in steps if step.details.cpu_wall_ns]


def _used_by_others(entry: StepDetails) -> int:
    """Return the CPU time of other threads than the trainer's [ns]."""
    return entry.process_cpu_ns - entry.trainer_cpu_ns


def _find_syncs(
    ranks: Sequence[Sequence[StepRecord]],
    lost: dict[str, NDArray[np.float64]],
    wall: NDArray[np.float64],
) -> list[Finding]:
    """Return whether the device idles since the host waits for its values, and take that time out
    of what is lost otherwise: with its queue full the device would hide it.
    """
    waited = _mean_of(ranks, "sync_ns")
    busy = np.array([[step.device_busy_ns for step in steps] for steps in ranks]).mean(axis=0)
    if not waited.any():
        return []
    idle = sum((lost[name] for name in _HIDDEN), np.zeros(len(wall)))
    # A step would last as long as the device's work, or as the host's own.
    saved = np.clip(wall - np.maximum(busy, wall - waited), 0.0, idle)
    shares = _share(saved, wall)
    if shares[1] < _NOTABLE:
        return []
    for name in _HIDDEN:
        lost[name] = lost[name] * (1 - saved / np.maximum(1.0, idle))
    text = (
        "The host waits for values of the device, such as by .item(), and the device then for the "
        f"host: {_in_words(shares)}."
    )
    return [_finding(_REASONS["sync"], "other", shares, text=text)]


def _mean_of(ranks: Sequence[Sequence[StepRecord]], name: str) -> NDArray[np.float64]:
    """Return the mean over ranks of one of the details, by step."""
    values = [[getattr(step.details, name) for step in steps] for steps in ranks]
    means: NDArray[np.float64] = np.array(values, np.float64).mean(axis=0)
    return means


_SUBJECTS: Final = {
    "data_wait": "The loader holds all ranks",
    "host_to_device": "Copies to the device hold all ranks",
    "evaluation": "Evaluation holds all ranks",
    "checkpoint": "Saving checkpoints holds all ranks",
    "logging": "Logging holds all ranks",
    "other": "Work outside of forward, backward and optimiser holds all ranks",
    "all_reduce": "Collectives themselves, without late ranks, hold all ranks",
}
_REASONS: Final = {
    "storage": _Reason(
        "storage",
        "It waits most of that time, and does not compute.",
        "Look at what it waits for: storage, the network, a lock. More workers wait side by "
        "side; a copy on a local disk ends it.",
    ),
    "preprocessing": _Reason(
        "preprocessing",
        "It computes most of that time.",
        "Give the loader more workers, or cheaper transforms (smaller images, resizing while "
        "decoding, results stored once).",
    ),
    "loader": _Reason("loader", "", "Try more workers, and look at what they do."),
    "host_to_device": _Reason(
        "copy", "", "Pin memory (pin_memory=True) and copy with non_blocking=True."
    ),
    "evaluation": _Reason(
        "evaluation", "", "Evaluate less often, on fewer samples, or in another process."
    ),
    "checkpoint": _Reason("checkpoint", "", "Save less often, or in the background."),
    "logging": _Reason("logging", "", "Log less often, or from another thread."),
    "cold": _Reason(
        "cold cache",
        "",
        "Only the first epoch is slow: copy the data to a local disk before, or let it be.",
    ),
    "stalls": _Reason(
        "stalls",
        "Nearly all of that is in few steps.",
        "Look at what single samples wait for: a slow file, a retry, a worker that starts. A "
        "larger prefetch_factor hides short ones.",
    ),
    "leak": _Reason(
        "memory leak",
        "",
        "Look at what the loop keeps: losses with their graphs, lists of outputs, a cache "
        "without a bound.",
    ),
    "lock": _Reason(
        "interpreter lock",
        "",
        "Move that work to another process, or to code that gives the lock away.",
    ),
    "threads": _Reason(
        "threads",
        "",
        "Set OMP_NUM_THREADS, torch.set_num_threads and cv2.setNumThreads so that all ranks "
        "and workers together have one thread a CPU.",
    ),
    "sync": _Reason(
        "synchronisation",
        "",
        "Read values every some steps, or copy them with non_blocking=True and look a step later.",
    ),
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
        "Give ranks batches of equal cost, sorted by length or balanced, or look for what disturbs "
        "their hosts in turns.",
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


def _queued_of_threads(ranks: Sequence[Sequence[StepRecord]]) -> float:
    """Return what all threads of a rank stand in the queue for a CPU, over the time."""
    samples = [entry for steps in ranks for entry in _samples(steps)]
    queued_ns = sum(entry.threads_queued_ns for entry in samples)
    return queued_ns / max(1, sum(entry.cpu_wall_ns for entry in samples))


def _queued_share(steps: Sequence[StepRecord]) -> float:
    details = [step.details for step in steps]
    queued_ns = sum(entry.trainer_queued_ns for entry in details)
    return queued_ns / max(1, sum(entry.cpu_wall_ns for entry in details))
