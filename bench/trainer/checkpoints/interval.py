"""How often to save: the interval that loses the least time to saves and to work done again."""

from __future__ import annotations

from math import sqrt

_S_PER_DAY = 86_400


def suggested_interval_s(stall_s: float, save_s: float, failures_per_day: float) -> float:
    """Return the seconds of training between two saves that lose the least time.

    ``stall_s``: what one save takes from the training. ``save_s``: how long it takes in the background; saves do not
    overlap, so the interval is at least that. ``failures_per_day``: of the whole job, more than 0.

    Daly's estimate, J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
    Generation Computer Systems 22 (2006) 303-312, equation 37: for a cost C and a mean time M between failures
    sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C where C < 2 M, else M. Its first term is Young's (1974).
    """
    mean_s = _S_PER_DAY / failures_per_day
    ratio = stall_s / (2 * mean_s)
    best = mean_s if ratio >= 1 else sqrt(2 * stall_s * mean_s) * (1 + sqrt(ratio) / 3 + ratio / 9) - stall_s
    return max(best, save_s)
