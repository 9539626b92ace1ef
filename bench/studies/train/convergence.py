"""Loss curves: whether two runs learn the same, and when one reached a target.

Two runs are compared in the last third of what they share, cut into up to ten batches of steps: their differences are
nearly independent where those of neighbouring steps are not, and what both curves do is in none of them (the method of
batch means: G. S. Fishman, "Grouping observations in digital simulation", Management Science 24 (1978) 510-521). The
mean of the differences is judged by Student's t at 2 % of false alarms.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

_BATCH_STEPS = 3
# Quantiles of Student's t at 99 %, from two degrees of freedom on: one less than there are batches.
_QUANTILES = (6.96, 4.54, 3.75, 3.36, 3.14, 3.00, 2.90, 2.82)
_MIN_BATCHES, _MAX_BATCHES = 3, 10
# One standard error more, and four runs in five show a difference.
_POWER = 1.0
# Of the loss: what another order of sums may change.
_ROUNDING = 1e-5
_TARGET_STEPS = 5


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's steps, warm-up included, column by column. ``end_s`` counts from the first rank's start.

    ``first_step`` is not 0 in a run that continues from a checkpoint.
    """

    rank: int
    first_step: int = 0
    end_s: list[float]
    occupancy: list[float]
    loss: list[float | None]
    wall_ms: list[float]
    phases_ms: dict[str, list[float]]


class LossComparison(msgspec.Struct, frozen=True, kw_only=True):
    """This run's loss compared with that of another report, at equal numbers of samples.

    ``largest_difference``: of any single step, where both runs have the same global batch; else None. ``difference``
    is this run's mean loss less the other's over the last third, ``noise`` the standard error of that, ``smallest`` the
    smallest difference that would mostly have been seen, all over ``num_windows`` batches of steps. ``part_at``: the
    number of samples at which the curves part; None where they stay within the noise.
    """

    other: str
    verdict: Literal["within noise", "parted", "too short"]
    num_samples: int
    num_windows: int
    difference: float | None
    noise: float | None
    smallest: float | None = None
    largest_difference: float | None
    part_at: int | None
    part_at_step: int | None

    def sentence(self) -> str:
        """Return the result as text."""
        if self.verdict == "too short":
            return f"The loss cannot be compared with {self.other}: the runs share too few steps."
        end = "in the last third the loss is not finite"
        if self.difference is not None and self.noise is not None and self.smallest is not None:
            end = (
                f"in the last third this run's loss differs by {self.difference:+.4g} (standard error "
                f"{self.noise:.2g}; a difference of {self.smallest:.2g} would have been seen)"
            )
        if self.part_at is not None:
            return (
                f"The loss parts from that of {self.other} at step {self.part_at_step}, after {self.part_at:,} "
                f"samples; {end}."
            )
        same = (
            "" if self.largest_difference is None else f"; no step differs by more than {self.largest_difference:.2g}"
        )
        return f"The loss stays within the noise of {self.other} over {self.num_samples:,} samples; {end}{same}."


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """When the loss, as a mean of five steps, was at most ``loss``; all None where it never was.

    ``seconds`` of wall time from the start of the run's first step, ``samples`` of the whole world.
    """

    loss: float
    step: int | None
    seconds: float | None
    samples: int | None

    def sentence(self) -> str:
        """Return the result as text."""
        if self.step is None:
            return f"The loss did not reach {self.loss:g}."
        return (
            f"The loss reached {self.loss:g} at step {self.step}, after {self.seconds:.1f} s and {self.samples:,} "
            "samples."
        )


def time_to(target: float, series: Sequence[Series], global_batch: int) -> Target:
    """Return when the mean of the ranks' losses reached a target."""
    loss, end_s = _mean_loss(series), np.array([one.end_s[: _length(series)] for one in series]).max(axis=0)
    first = series[0].first_step
    for at in range(_TARGET_STEPS - 1, len(loss)):
        if loss[at - _TARGET_STEPS + 1 : at + 1].mean() <= target:  # a step that is not finite never is
            steps = first + at + 1
            return Target(loss=target, step=steps - 1, seconds=float(end_s[at]), samples=steps * global_batch)
    return Target(loss=target, step=None, seconds=None, samples=None)


def compare_losses(
    own: Sequence[Series], own_batch: int, other: Sequence[Series], other_batch: int, name: str
) -> LossComparison:
    """Compare the losses of two runs; the batches are samples of an optimiser step, ``name`` is that of the other."""
    ours, theirs = _curve(own, own_batch), _curve(other, other_batch)
    start, end = max(ours.start, theirs.start), min(ours.end, theirs.end)
    steps = min((end - start) // ours.batch, (end - start) // theirs.batch) // 3
    count = min(max(_MIN_BATCHES, steps // _BATCH_STEPS), _MAX_BATCHES)
    if steps < count:
        return LossComparison(
            other=name, verdict="too short", num_samples=max(0, end - start), num_windows=0, difference=None,
            noise=None, largest_difference=None, part_at=None, part_at_step=None,
        )  # fmt: skip
    edges = np.linspace(start, end, 3 * count + 1)
    our_means, their_means = ours.means(edges), theirs.means(edges)
    differences, their_level = our_means - their_means, their_means[-count:].mean()
    difference, deviation = differences[-count:].mean(), differences[-count:].std(ddof=1)
    noise, quantile = deviation / np.sqrt(count), _QUANTILES[count - _MIN_BATCHES]
    if np.isfinite(difference):
        parted = abs(difference) > max(quantile * noise, _ROUNDING * abs(their_level))
    else:
        parted = np.isfinite(our_means[-count:].mean()) != np.isfinite(their_level)
    part_at = int(edges[_change(differences)]) if parted else None
    same_batch = ours.batch == theirs.batch
    return LossComparison(
        other=name,
        verdict="parted" if parted else "within noise",
        num_samples=int(end - start),
        num_windows=count,
        difference=_finite(difference),
        noise=_finite(noise),
        smallest=_finite((quantile + _POWER) * noise),
        largest_difference=_largest(ours, theirs, start, end) if same_batch else None,
        part_at=part_at,
        part_at_step=None if part_at is None else part_at // ours.batch,
    )


def _change(differences: NDArray[np.float64]) -> int:
    """Return where differences change from 0 to another level, by least squares; or the first that is not finite."""
    if not np.isfinite(differences).all():
        return int(np.argmin(np.isfinite(differences)))
    gains = [rest.sum() ** 2 / len(rest) for rest in (differences[at:] for at in range(len(differences)))]
    return int(np.argmax(gains))


class _Curve(msgspec.Struct, frozen=True):
    """Mean loss of each step, from ``start`` samples on; ``batch`` samples a step."""

    loss: Any
    start: int
    batch: int

    @property
    def end(self) -> int:
        return self.start + len(self.loss) * self.batch

    def between(self, start: int, end: int) -> NDArray[np.float64]:
        """Return the losses of the steps from ``start`` to ``end`` samples."""
        first = -(-(start - self.start) // self.batch)
        found: NDArray[np.float64] = self.loss[first : (end - self.start) // self.batch]
        return found

    def means(self, edges: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the mean loss between neighbouring edges."""
        # A step belongs where its middle is.
        cuts = np.ceil((edges - self.start) / self.batch - 0.5).astype(int)
        return np.array([self.loss[first:last].mean() for first, last in pairwise(cuts)])


def _curve(series: Sequence[Series], batch: int) -> _Curve:
    found = [one for one in series if one.loss]
    return _Curve(_mean_loss(found), found[0].first_step * batch, batch) if found else _Curve(np.zeros(0), 0, batch)


def _length(series: Sequence[Series]) -> int:
    return min(len(one.loss) for one in series)


def _mean_loss(series: Sequence[Series]) -> NDArray[np.float64]:
    losses = np.array([one.loss[: _length(series)] for one in series], dtype=np.float64)  # None becomes NaN
    mean: NDArray[np.float64] = losses.mean(axis=0)
    return mean


def _largest(ours: _Curve, theirs: _Curve, start: int, end: int) -> float | None:
    return _finite(np.abs(ours.between(start, end) - theirs.between(start, end)).max())


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
