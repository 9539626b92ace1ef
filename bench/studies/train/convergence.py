"""Loss curves: whether two runs learn the same, and when one reached a target.

The noise of a curve is estimated from its own steps: half the mean square of successive differences, which a slow trend
hardly changes (J. von Neumann, "Distribution of the ratio of the mean square successive difference to the variance",
Annals of Mathematical Statistics 12 (1941) 367-395).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from fuelrail.bench.trainer.strategies.settings import ParallelSettings, degrees_of

if TYPE_CHECKING:
    from fuelrail.bench.studies.train.series import Series

_NUM_WINDOWS = 20
_MIN_WINDOW_STEPS = 3
# A window that differs by more than this many standard errors is outside the noise; several in a row are no accident.
_NUM_ERRORS = 3.0
_IN_A_ROW = 2
_TARGET_STEPS = 5


class LossComparison(msgspec.Struct, frozen=True, kw_only=True):
    """This run's loss compared with that of another report, at equal numbers of samples.

    ``largest_difference``: of any single step, where both runs have the same global batch; else None. ``difference``
    is this run's mean loss less the other's over the last window, ``noise`` the standard error of that. ``part_at``:
    the number of samples at which the curves part; None where they stay within the noise.
    """

    other: str
    verdict: Literal["within noise", "parted", "too short"]
    num_samples: int
    num_windows: int
    difference: float | None
    noise: float | None
    largest_difference: float | None
    part_at: int | None
    part_at_step: int | None

    def sentence(self) -> str:
        """The result as text."""
        if self.verdict == "too short":
            return f"The loss cannot be compared with {self.other}: the runs share too few steps."
        end = "at the end the loss is not finite"
        if self.difference is not None and self.noise is not None:
            end = f"at the end this run's loss differs by {self.difference:+.4g} (standard error {self.noise:.2g})"
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
        """The result as text."""
        if self.step is None:
            return f"The loss did not reach {self.loss:g}."
        return (
            f"The loss reached {self.loss:g} at step {self.step}, after {self.seconds:.1f} s and {self.samples:,} "
            "samples."
        )


def time_to(target: float, series: Sequence[Series], global_batch: int) -> Target:
    """When the mean of the ranks' losses reached a target."""
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
    steps = min((end - start) // ours.batch, (end - start) // theirs.batch)
    num_windows = min(_NUM_WINDOWS, steps // _MIN_WINDOW_STEPS)
    if num_windows < _IN_A_ROW:
        return LossComparison(
            other=name, verdict="too short", num_samples=max(0, end - start), num_windows=0, difference=None,
            noise=None, largest_difference=None, part_at=None, part_at_step=None,
        )  # fmt: skip
    edges = np.linspace(start, end, num_windows + 1)
    our_means, our_errors = ours.windows(edges)
    their_means, their_errors = theirs.windows(edges)
    differences, errors = our_means - their_means, np.hypot(our_errors, their_errors)
    # Not finite in one run only: parted.
    outside = ~(np.abs(differences) <= _NUM_ERRORS * errors) & ~(np.isnan(our_means) & np.isnan(their_means))
    # The last window alone would be one in many.
    runs = [at for at in range(num_windows - _IN_A_ROW + 1) if outside[at : at + _IN_A_ROW].all()]
    part_at = int(edges[runs[0]]) if runs else None
    same_batch = ours.batch == theirs.batch
    return LossComparison(
        other=name,
        verdict="parted" if runs else "within noise",
        num_samples=int(end - start),
        num_windows=num_windows,
        difference=_finite(differences[-1]),
        noise=_finite(errors[-1]),
        largest_difference=_largest(ours, theirs, start, end) if same_batch else None,
        part_at=part_at,
        part_at_step=None if part_at is None else part_at // ours.batch,
    )


class _Curve(msgspec.Struct, frozen=True):
    """Mean loss of each step, from ``start`` samples on; ``batch`` samples a step."""

    loss: Any
    start: int
    batch: int

    @property
    def end(self) -> int:
        return self.start + len(self.loss) * self.batch

    def between(self, start: int, end: int) -> NDArray[np.float64]:
        """The losses of the steps from ``start`` to ``end`` samples."""
        first = -(-(start - self.start) // self.batch)
        found: NDArray[np.float64] = self.loss[first : (end - self.start) // self.batch]
        return found

    def windows(self, edges: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean loss between neighbouring edges, and its standard error by the noise around it."""
        at = self.start + (np.arange(len(self.loss)) + 0.5) * self.batch
        means, errors = [], []
        for first, last in pairwise(edges):
            inside = self.loss[(at > first) & (at <= last)]
            # The noise is estimated from neighbours too: a few steps say little on it.
            around = self.loss[(at > 2 * first - last) & (at <= 2 * last - first)]
            variance = np.square(np.diff(around)).mean() / 2
            means.append(inside.mean() if len(inside) else np.nan)
            errors.append(np.sqrt(variance / max(1, len(inside))))
        return np.array(means), np.array(errors)


def global_batch(options: Mapping[str, Any], num_ranks: int) -> int:
    """Samples of one optimiser step over all ranks, of a report's options."""
    ranks = degrees_of(ParallelSettings.among(options, "report"), num_ranks).data
    return int(ranks * options["batch_size"] * options["accumulation"])


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
