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
from fuelrail.bench.measure.records import BUSY, NAMED, step_table

if TYPE_CHECKING:
    from fuelrail.bench.measure.records import StepRecord

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

PARTS: Final = tuple(LABELS)
"""Phases of a step, with the named parts of `other` apart."""

_NOTABLE: Final = 0.05
"""A loss whose interval begins below this share is not named: trainers take some percent for
themselves.
"""
_ORDINARY: Final = 0.1
"""What ranks may lose by waiting for each other in turns: no two are alike."""
_CONTENDED: Final = 0.15
"""What they may lose so, or a rank in computing, where other processes or ranks take its CPUs, and
in collectives anywhere; more where its threads stand in the queue.
"""
_COMPUTES: Final = 0.6
_WAITS: Final = 0.3
_QUEUED: Final = 0.1
_FIRST = ("memory leak", "interpreter lock")
"""Causes that end the run, or show as others."""
_LOST = ("data_wait", "host_to_device", *NAMED, "other")
_EVENTS = ("evaluation", "checkpoint")
_HIDDEN = ("data_wait", "other")
"""What a device does not wait for while its queue has work."""
_RARE = 0.2
_NEARLY_ALL = 0.8
_MIN_STEPS = 10
_MIN_SAMPLES = 5
_LEAK_BYTES = 64 << 20
_LOCKED_MS = 1.5
_LOCKED_SHARE = 0.1
_CROWDED = 1.5
"""Threads for each CPU."""

Times: TypeAlias = NDArray[np.float64]


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
    """A cause in a word, a sentence on it, and advice where it is not the cause's."""

    cause: str
    text: str = ""
    advice: str = ""


class _Share(NamedTuple):
    """A share of the time, with the ends of its 95 % interval."""

    share: float
    low: float
    high: float

    @classmethod
    def of_steps(cls, times: Times, wall: Times) -> _Share:
        """Return the share of the wall time, with its interval over blocks of steps."""
        shares = bootstrap_means(times, seed=0) / bootstrap_means(wall, seed=0)
        low, high = np.quantile(shares, (0.025, 0.975)).tolist()
        return cls(float(times.sum() / wall.sum()), low, high)

    def __str__(self) -> str:
        return f"{self.share:.1%} of the time ({self.low:.1%} to {self.high:.1%})"


def find_causes(
    ranks: Mapping[int, Sequence[StepRecord]],
    *,
    num_workers: int | None,
    num_cpus: float,
    is_loaded: bool,
    is_crowded: bool = False,
) -> list[Finding]:
    """Return what certainly holds the accelerators up, the largest share first.

    ``ranks`` are the measured steps of each rank, as many of each; ``num_workers`` those of a
    rank's loader (None: nothing says what it does while the trainer waits), ``num_cpus`` of the
    host, which is loaded where other processes use it too, and crowded where it has more ranks than
    CPUs: collectives there are no finding, for ranks in them wait for each other's turn on a CPU.
    """
    steps = step_table(ranks.values())
    parts = part_times(steps)
    wall = steps["wall_ns"].mean(axis=0)
    lost = {part: parts[part].mean(axis=0) for part in _LOST}
    if not is_crowded:
        lost["all_reduce"] = parts["all_reduce"].min(axis=0)
    collector = steps["collector_ns"].mean(axis=0)
    lost["other"] = np.maximum(0.0, lost["other"] - collector)
    loader = _explain_loader(steps, num_workers, num_cpus)
    ordinary = _ORDINARY
    is_contended = is_loaded or is_crowded
    if is_contended:
        queued_ns = steps["threads_queued_ns"].sum()
        ordinary = _CONTENDED + queued_ns / max(1, steps["cpu_wall_ns"].sum()) / 2
    findings = [
        *_find_leak(steps, list(ranks)),
        *(_find_lock(steps) or _find_threads(steps, parts, num_cpus)),
        *_find_syncs(steps, lost, wall),
    ]
    if len(ranks) > 1:
        late = _find_late(parts)
        costs = np.bincount(late.ranks, late.costs, len(ranks))
        row = int(costs.argmax())
        is_one = bool(costs[row] >= MOSTLY * costs.sum())
        chosen = late.ranks == row if is_one else np.ones(len(wall), bool)
        part = PARTS[np.bincount(late.parts[chosen], late.costs[chosen]).argmax()]
        # A rank that computes longer does so in each step; it saves a checkpoint in some.
        is_computing = part in BUSY
        is_one &= not is_computing or late_steps(steps)[row] >= MOSTLY
        share = _Share.of_steps(np.where(chosen, late.costs, 0.0), wall)
        threshold = _CONTENDED if is_computing and is_contended else _NOTABLE
        # Whether the other ranks' loaders had mostly made all their batches when asked for one: of
        # ranks that starve alike, one gets its batch last every time, while those of the others
        # are made when they come out of the collective.
        rest = np.delete(steps, row, axis=0)
        has_stock = 0 < rest["num_counted"].sum() <= 2 * rest["num_idle"].sum()
        if part == "data_wait" and is_one and num_workers != 0 and not has_stock:
            lost["data_wait"] += np.where(chosen, late.costs - late.excess, 0.0)
        elif share.low > (threshold if is_one else ordinary):
            for name in _LOST:
                is_part = chosen & (late.parts == PARTS.index(name))
                lost[name] = lost[name] - np.where(is_part, late.excess, 0.0)
            reason = loader if part == "data_wait" else _Reason("uneven ranks")
            text = f"The ranks hold each other up in turns, mostly by the {LABELS[part]}: {share}."
            rank = None
            if is_one:
                reason = _Reason("slow rank" if is_computing else _CAUSES.get(part, part))
                if part == "data_wait":
                    reason = _explain_loader(steps[row : row + 1], num_workers, num_cpus)
                rank = list(ranks)[row]
                text = f"Rank {rank} holds the others up by its {LABELS[part]}: {share}."
            text = f"{text} {reason.text}".strip()
            queued_ns = steps[row]["trainer_queued_ns"].sum()
            if is_computing and is_one and queued_ns > _QUEUED * steps[row]["cpu_wall_ns"].sum():
                text += " Its thread stands in the queue for a CPU."
            findings.append(_finding(reason, part, share, text, rank))
    for part, times in lost.items():
        share = _Share.of_steps(times, wall)
        # What comes now and then is in few steps, and yet no chance.
        is_event = part in _EVENTS and np.count_nonzero(times) >= 3
        threshold = max(ordinary, _CONTENDED) if part == "all_reduce" else _NOTABLE
        if (share.share if is_event else share.low) > threshold:
            reason = loader if part == "data_wait" else _Reason(_CAUSES.get(part, part))
            text = f"{_SUBJECTS[part]} up: {share}. {reason.text}".strip()
            findings.append(_finding(reason, part, share, text))
    share = _Share.of_steps(collector, wall)
    if share.low > _NOTABLE:
        text = f"Python's garbage collection holds the loop up: {share}, within phases."
        findings.append(_finding(_Reason("garbage collection"), "other", share, text))
    findings.sort(key=lambda finding: (finding.cause not in _FIRST, -finding.share))
    # Work of the accelerator, though rarely what it is for: after what keeps it from working.
    share = _Share.of_steps(parts["optimiser"].mean(axis=0), wall)
    if share.low > 1 / 3:
        text = f"The optimiser takes {share}."
        findings.append(_finding(_Reason("optimiser"), "optimiser", share, text))
    return findings


def part_times(steps: NDArray[np.void]) -> dict[str, Times]:
    """Return the times of ``PARTS`` in a table of steps [ns]."""
    times = {part: steps[f"{part}_ns"] for part in PARTS}
    return times | {"other": times["other"] - sum(times[part] for part in NAMED)}


def late_steps(steps: NDArray[np.void]) -> list[float]:
    """Return for each rank the share of steps in which it came last to the collectives."""
    last = steps["all_reduce_ns"].argmin(axis=0)
    shares: list[float] = (np.bincount(last, minlength=len(steps)) / len(last)).tolist()
    return shares


class _Lateness(NamedTuple):
    """Of each step: the rank that came last, the part that made it late, what that cost the mean
    rank, and how much of this the late rank lost itself [ns].
    """

    ranks: NDArray[np.int64]
    parts: NDArray[np.int64]
    costs: Times
    excess: Times


def _find_late(parts: Mapping[str, Times]) -> _Lateness:
    waits = parts["all_reduce"]
    last = waits.argmin(axis=0)
    durations = np.stack([parts[part] for part in PARTS if part != "all_reduce"])
    # The optimiser comes after the collectives: it makes a rank late to those of the next step.
    update = durations[PARTS.index("optimiser")]
    update[:, 1:] = update[:, :-1].copy()
    beyond = np.zeros((len(durations), len(last)))
    for rank in np.unique(last):
        late = durations[:, rank, last == rank]
        rest = np.delete(durations[:, :, last == rank], rank, axis=1)
        beyond[:, last == rank] = late - np.median(rest, axis=1)
    longest = beyond.argmax(axis=0)
    is_lost = np.isin(longest, [PARTS.index(name) for name in _LOST])
    excess = np.where(is_lost, np.maximum(0.0, beyond.max(axis=0)), 0.0) / len(waits)
    waited = (waits - waits.min(axis=0)).mean(axis=0)
    return _Lateness(ranks=last, parts=longest, costs=waited + excess, excess=excess)


def _explain_loader(steps: NDArray[np.void], num_workers: int | None, num_cpus: float) -> _Reason:
    """Return why ranks wait for their loaders."""
    waits = steps["data_wait_ns"]
    epochs = steps["epoch"][0]
    is_first = epochs == epochs[0]
    if epochs[0] == 0 and _MIN_STEPS <= is_first.sum() <= len(epochs) - _MIN_STEPS:
        cold_ms = waits[:, is_first].mean() / 1e6
        warm_ms = waits[:, ~is_first].mean() / 1e6
        if cold_ms > 4 * warm_ms:
            text = f"It takes {cold_ms:.1f} ms a step in the first epoch, {warm_ms:.1f} ms later."
            return _Reason("cold cache", text)
    longest = np.sort(waits.ravel())[::-1]
    num_long = int(len(longest) * min(_RARE, _RARE * 2 / max(1, num_workers or 0)))
    if longest[:num_long].sum() > _NEARLY_ALL * longest.sum():
        return _Reason("stalls", "Nearly all of that is in few steps.")
    counted_ns = steps["cpu_wall_ns"].sum()
    num_used = steps["host_cpu_ns"].sum() / max(1, counted_ns)
    computing = None
    if num_workers == 0:
        queued_ns = steps["data_queued_ns"].sum()
        computing = steps["data_cpu_ns"].sum() / max(1, waits.sum() - queued_ns)
    elif num_workers and counted_ns:
        # Workers are processes, or threads of this one.
        used_ns = steps["workers_cpu_ns"].sum() + max(0, _background_ns(steps).sum())
        queued_ns = steps["workers_queued_ns"].sum()
        computing = used_ns / max(1, counted_ns * num_workers - queued_ns)
    if computing is None or _WAITS <= computing <= _COMPUTES:
        return _Reason("loader")
    if computing < _WAITS:
        return _Reason("storage", "It waits most of that time, and does not compute.")
    num_idle = int(num_cpus - num_used) if num_used else 0
    if num_workers and computing > 0.9 and num_idle >= len(steps):
        busy = f"All {num_workers} workers are busy" if num_workers > 1 else "Its worker is busy"
        cores = f"{num_idle} cores are" if num_idle > 1 else "a core is"
        return _Reason("too few workers", f"{busy}, and {cores} idle.")
    advice = ""
    if num_used > 0.85 * num_cpus:
        advice = "All CPUs of the host are busy: make the transforms cheaper, or store their "
        advice += "results; more workers gain nothing."
    elif num_workers == 0:
        advice = "Give the loader workers (num_workers=4, persistent_workers=True)."
    return _Reason("preprocessing", "It computes most of that time.", advice)


def _find_leak(steps: NDArray[np.void], numbers: Sequence[int]) -> list[Finding]:
    """Return what is certain of memory that grows to the end."""
    rates: dict[tuple[int, str], float] = {}
    for rank, records in zip(numbers, steps, strict=True):
        for kind in ("memory_bytes", "device_bytes"):
            held = records[records[kind] > 0]
            if len(held) < _MIN_SAMPLES:
                continue
            sizes = held[kind]
            middle = len(sizes) // 2
            early = (sizes[middle] - sizes[0]) / (held["step"][middle] - held["step"][0])
            late = (sizes[-1] - sizes[middle]) / (held["step"][-1] - held["step"][middle])
            is_steady = (np.diff(sizes) > 0).mean() > _NEARLY_ALL and late > early / 2
            if is_steady and sizes[-1] - sizes[0] > _LEAK_BYTES:
                rates[rank, kind] = late
    if not rates:
        return []
    rank, kind = max(rates, key=lambda key: rates[key])
    blamed = rank if len({number for number, _ in rates}) == 1 < len(numbers) else None
    owner = "" if blamed is None else f" of rank {rank}"
    subject = "Device memory" if kind == "device_bytes" else "Memory"
    rate = rates[rank, kind] / 2**20
    text = f"{subject}{owner} grows by {rate:.2f} MiB a step, up to the last."
    return [_finding(_Reason("memory leak"), "other", _Share(0.0, 0.0, 0.0), text, blamed)]


def _find_lock(steps: NDArray[np.void]) -> list[Finding]:
    """Return whether other Python threads keep the loop from Python's lock."""
    samples = steps[steps["cpu_wall_ns"] > 0]
    waits_ms = samples["lock_ns"] / 1e6
    num_waits = np.count_nonzero(waits_ms > _LOCKED_MS)
    if len(samples) < _MIN_SAMPLES or num_waits < max(2, _LOCKED_SHARE * len(samples)):
        return []
    used_ns = _background_ns(samples)
    if used_ns.sum() < samples["process_cpu_ns"].sum() / 2:
        return []
    used = used_ns / samples["cpu_wall_ns"]
    share = _Share(float(used.mean()), float(used.min()), float(used.max()))
    text = (
        f"Other Python threads of the process compute {share} and hold Python's lock: the loop "
        f"waits {waits_ms.mean():.1f} ms for it each time it comes back from torch."
    )
    return [_finding(_Reason("interpreter lock"), "other", share, text)]


def _find_threads(
    steps: NDArray[np.void], parts: Mapping[str, Times], num_cpus: float
) -> list[Finding]:
    """Return whether the ranks' threads are more than the CPUs, and wait for each other."""
    counted_ns = np.maximum(1, steps["cpu_wall_ns"].sum(axis=1))
    used_ns = steps["process_cpu_ns"].sum(axis=1)
    queued_ns = steps["threads_queued_ns"].sum(axis=1)
    is_queued = steps["trainer_queued_ns"].sum(axis=1) >= _QUEUED * counted_ns
    is_own = _background_ns(steps).sum(axis=1) >= used_ns / 2
    num_wanted = ((used_ns + queued_ns) / counted_ns).sum()
    if not (is_queued & is_own).all() or num_wanted < _CROWDED * num_cpus:
        return []
    phases = {phase: float(parts[phase].sum()) for phase in BUSY}
    busy = sum(phases.values()) / steps["wall_ns"].sum()
    waiting = busy * queued_ns / np.maximum(1, used_ns + queued_ns)
    share = _Share(float(waiting.mean()), float(waiting.min()), float(waiting.max()))
    text = (
        f"The ranks' own threads hold each other up: {num_wanted:.1f} of them want "
        f"{num_cpus:g} CPUs, and stand in the queue {share}."
    )
    return [_finding(_Reason("threads"), max(BUSY, key=lambda phase: phases[phase]), share, text)]


def _background_ns(steps: NDArray[np.void]) -> Times:
    """Return the CPU time of other threads than the trainer's [ns]."""
    times: Times = steps["process_cpu_ns"] - steps["trainer_cpu_ns"]
    return times


def _find_syncs(steps: NDArray[np.void], lost: dict[str, Times], wall: Times) -> list[Finding]:
    """Return whether the device idles since the host waits for its values, and take that time out
    of what is lost otherwise: with its queue full the device would hide it.
    """
    waited = steps["sync_ns"].mean(axis=0)
    busy = steps["device_busy_ns"].mean(axis=0)
    idle = sum((lost[name] for name in _HIDDEN), np.zeros(len(wall)))
    # A step would last as long as the device's work, or as the host's own.
    saved = np.clip(wall - np.maximum(busy, wall - waited), 0.0, idle)
    share = _Share.of_steps(saved, wall)
    if share.low < _NOTABLE:
        return []
    for name in _HIDDEN:
        lost[name] = lost[name] * (1 - saved / np.maximum(1.0, idle))
    text = (
        "The host waits for values of the device, such as by .item(), and the device then for the "
        f"host: {share}."
    )
    return [_finding(_Reason("synchronisation"), "other", share, text)]


def _finding(
    reason: _Reason, part: str, share: _Share, text: str, rank: int | None = None
) -> Finding:
    return Finding(
        cause=reason.cause,
        phase=part,
        rank=rank,
        text=text,
        advice=reason.advice or ADVICE[reason.cause],
        **share._asdict(),
    )


_SUBJECTS: Final = {
    "data_wait": "The loader holds all ranks",
    "host_to_device": "Copies to the device hold all ranks",
    "evaluation": "Evaluation holds all ranks",
    "checkpoint": "Saving checkpoints holds all ranks",
    "logging": "Logging holds all ranks",
    "other": "Work outside of forward, backward and optimiser holds all ranks",
    "all_reduce": "Collectives themselves, without late ranks, hold all ranks",
}
_CAUSES: Final = {"host_to_device": "copy", "other": "host", "all_reduce": "collective"}
"""Causes by the part of the step that they lengthen; the others are called as it is."""
ADVICE: Final = {
    "storage": "Look at what it waits for: storage, the network, a lock. More workers wait side by "
    "side; a copy on a local disk ends it.",
    "too few workers": "Give the loader more workers (num_workers).",
    "preprocessing": "Give the loader more workers, or cheaper transforms (smaller images, "
    "resizing while decoding, results stored once).",
    "loader": "Try more workers, and look at what they do.",
    "copy": "Pin memory (pin_memory=True) and copy with non_blocking=True.",
    "evaluation": "Evaluate less often, on fewer samples, or in another process.",
    "checkpoint": "Save less often, or in the background.",
    "logging": "Log less often, or from another thread.",
    "cold cache": "Only the first epoch is slow: copy the data to a local disk, or let it be.",
    "stalls": "Look at what single samples wait for: a slow file, a retry, a worker that starts. A "
    "larger prefetch_factor hides short ones.",
    "memory leak": "Look at what the loop keeps: losses with their graphs, lists of outputs, a "
    "cache without a bound.",
    "interpreter lock": "Move that work to another process, or to code that gives the lock away.",
    "threads": "Set OMP_NUM_THREADS, torch.set_num_threads and cv2.setNumThreads so that all ranks "
    "and workers together have one thread a CPU.",
    "synchronisation": "Read values less often, or a step later by a non_blocking=True copy.",
    "host": "Look at what the loop does between the phases: printing, metrics, values read.",
    "garbage collection": "Call gc.freeze() before the loop, or gc.disable() and gc.collect() "
    "every some steps.",
    "optimiser": "Use fused=True or foreach=True, fewer parameter groups, or more samples a step "
    "(accumulation).",
    "uneven ranks": "Give ranks batches of equal cost, sorted by length or balanced, or look for "
    "what disturbs their hosts in turns.",
    "slow rank": "Look at that rank's host and device: clock, temperature, other processes; and at "
    "what only this rank computes.",
    "collective": "Accumulate gradients over more batches, reduce in bf16, in larger buckets, or "
    "use a faster link.",
}
"""What to do about each cause that a finding may have."""
