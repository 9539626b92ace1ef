"""Closed formulas of training at scale, each with the paper that it is from."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, expm1, sqrt

_S_PER_DAY = 86_400


def zero_state_bytes(
    parameters: float,
    ranks: int,
    stage: int,
    param_bytes: float = 2,
    grad_bytes: float = 2,
    optimiser_bytes: float = 12,
) -> float:
    """Return bytes of weights, gradients and optimiser state per rank under ZeRO (arXiv
    1910.02054, figure 1).
    """
    weight_shards = ranks if stage >= 3 else 1
    gradient_shards = ranks if stage >= 2 else 1
    moment_shards = ranks if stage >= 1 else 1
    weights = param_bytes / weight_shards
    gradients = grad_bytes / gradient_shards
    moments = optimiser_bytes / moment_shards
    return parameters * (weights + gradients + moments)


def sent_bytes(kind: str, ranks: int, size: float) -> float:
    """Return the bytes that each rank of a ring sends, ``size`` of the whole tensor (nccl-tests,
    doc/PERFORMANCE.md).

    ``kind`` is all_reduce, all_gather, reduce_scatter, or broadcast, whose root sends everything.
    """
    if kind == "broadcast":
        return size * (ranks > 1)
    share = (ranks - 1) / ranks
    if kind == "all_reduce":
        return 2 * size * share
    return size * share


def bubble(pp: int, micro_batches: int, virtual_stages: int = 1) -> float:
    """Return the idle time of a pipeline over its ideal time, (p - 1) / (v m) (arXiv 2104.04473,
    section 2.2).
    """
    return (pp - 1) / (virtual_stages * micro_batches)


def in_flight(schedule: str, pp: int, stage: int, micro_batches: int) -> int:
    """Return the number of micro-batches whose activations a stage holds at once, in GPipe and
    1F1B.
    """
    if schedule == "GPipe" and pp > 1:
        return micro_batches
    return min(micro_batches, pp - stage)


def chunks_in_flight(
    pp: int,
    stage: int,
    micro_batches: int,
    virtual_stages: int,
) -> int:
    """Return the number of virtual stages' micro-batches whose activations a rank of interleaved
    1F1B holds at once.

    On the first one they are L (1 + (p - 1) / (p v)) layers' worth (arXiv 2205.05198, section
    4.2.3).
    """
    all_chunks = virtual_stages * micro_batches
    warm_up = 2 * (pp - stage - 1) + (virtual_stages - 1) * pp
    return min(all_chunks, warm_up + 1)


def schedule_order(schedule: str, pp: int, stage: int, micro_batches: int) -> list[str]:
    """Return a stage's order of work in GPipe or 1F1B: F and B with the number of a micro-batch."""
    ahead = in_flight(schedule, pp, stage, micro_batches)
    order = [f"F{number}" for number in range(ahead)]
    for number in range(micro_batches):
        order.append(f"B{number}")
        if number + ahead < micro_batches:
            order.append(f"F{number + ahead}")
    return order


def passes_of(order: Sequence[str], way: str) -> tuple[int, int]:
    """Count the passes of one way, F or B, in a stage's order of work, and those of them that
    gather weights.

    Weights are gathered by what follows their release: a forward pass releases them, a backward
    pass does not.
    """
    num_passes = 0
    num_gathers = 0
    way_before = "F"
    for work in order:
        if work[0] == way:
            num_passes += 1
            num_gathers += way_before == "F"
        way_before = work[0]
    return num_passes, num_gathers


def checkpoint_interval_s(save_s: float, failures_per_day: float) -> float:
    """Return the seconds of training between two checkpoints, of ``save_s`` each, that lose the
    least time.

    ``failures_per_day``: of the whole job, more than 0. J. T. Daly, "A higher order estimate of the
    optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22 (2006)
    303-312, equation 37: for a cost C and a mean time M between failures sqrt(2 C M) (1 + sqrt(C /
    2M) / 3 + (C / 2M) / 9) - C where C < 2 M, else M. Its first term is Young's (1974). Saves do
    not overlap, so the interval is at least C.
    """
    mean_s = _S_PER_DAY / failures_per_day
    ratio = save_s / (2 * mean_s)
    if ratio >= 1:
        return max(mean_s, save_s)
    young_s = sqrt(2 * save_s * mean_s)
    correction = 1 + sqrt(ratio) / 3 + ratio / 9
    daly_s = young_s * correction - save_s
    return max(daly_s, save_s)


def kept_by_restarts(
    interval_s: float,
    save_s: float,
    failures_per_day: float,
) -> float:
    """Return the share of the time that is training which no failure undoes, where a failure ends
    the job, and it restarts from the newest checkpoint.

    Daly's equation 20 (see `checkpoint_interval_s`), the restart being as long as a save.
    """
    mean_s = _S_PER_DAY / failures_per_day
    restart = exp(save_s / mean_s)
    repeats = expm1((interval_s + save_s) / mean_s)
    expected_s = mean_s * restart * repeats
    return interval_s / expected_s


def kept_by_reshape(step_s: float, save_s: float, failures_per_day: float) -> float:
    """Return that share where the ranks that are left go on with the same global batch.

    A failure costs the step that is repeated, and the copy of the state to the rank that joins, as
    long as a save.
    """
    mean_s = _S_PER_DAY / failures_per_day
    return mean_s / (mean_s + step_s + save_s)
