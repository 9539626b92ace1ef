"""What unequal samples do to a step: padding, ranks that wait for the dearest, and a cost model
of its time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor, log10
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fuelrail.bench.measure.clock import NS_PER_MS
from fuelrail.pipeline.order.cost import Cost

if TYPE_CHECKING:
    from fuelrail.bench.measure.records import StepRecord
    from fuelrail.pipeline.order.spec import OrderSpec

_OUTLIER = 5.0
_MAX_INFLATION = 1e4
_MIN_T = 2.0


def cost_model(order: OrderSpec | None) -> str | Cost | None:
    """Return the cost of a sample that an order balances by, else that of its packs; None
    without either.
    """
    by = order and (order.balance or order.pack)
    return by.cost if by else None


class CostFit(msgspec.Struct, frozen=True, kw_only=True):
    """The time of forward and backward on one rank, fitted to sums over the samples of its step.

    ``terms_ns``: coefficients of two standard errors or more, and these; ``cost`` has them as whole
    numbers. ``left_out``: terms that the steps do not tell from 0. ``num_steps`` of
    ``num_measured`` were used: the rest are outliers. ``residual``: root mean square of what the
    fit leaves, in parts of the mean. ``refused`` says why there is no model.
    """

    num_measured: int
    num_steps: int = 0
    residual: float = 0.0
    terms_ns: dict[str, tuple[float, float]] = {}
    left_out: list[str] = []
    cost: Cost | None = None
    refused: str | None = None

    def sentence(self) -> str:
        """Return the fit as text."""
        if self.refused is not None:
            return f"No cost model from {self.num_measured} steps: {self.refused}."
        terms = "; ".join(
            f"{ns:.4g} ns a {name} (standard error {error:.2g})"
            for name, (ns, error) in self.terms_ns.items()
        )
        lost = (
            f" Not certain, so left out: {', '.join(self.left_out)}; more steps may tell."
            if self.left_out
            else ""
        )
        return (
            f"Forward and backward of {self.num_steps} of {self.num_measured} steps take a "
            f"part that all have, and {terms}; the fit leaves {self.residual:.1%} of the "
            f"mean.{lost} For an order: Balance(cost={self.cost!r})"
        )


def fit_cost(
    sums: Sequence[Mapping[str, Sequence[float]]], times_ns: NDArray[np.float64]
) -> CostFit:
    """Fit times (n,) of steps to a part that all have, and terms of each column and its square,
    none below 0.

    ``sums``: for each step and column the number of samples, their sum, and their sum of squares.
    By non-negative least squares (Lawson and Hanson, "Solving Least Squares Problems", 1974,
    chapter 23), again without steps whose residual is above five times the median. Terms below two
    standard errors are left out, the least certain first. Refused are columns that never differ,
    and terms that others explain: a variance inflation factor above 10^4.
    """
    terms = [("", 0), *((name, power) for name in sums[0] for power in (1, 2))]
    table = np.array(
        [
            [
                next(iter(step.values()))[0],
                *(value for x in step.values() for value in x[1:]),
            ]
            for step in sums
        ]
    )
    if not np.ptp(table[:, 0]):  # as many samples in each step: their own part is that of the step
        terms = terms[1:]
        table = table[:, 1:]
    units = [("sample", name, f"{name} squared")[power] for name, power in terms]
    refused = (
        f"{len(terms)} terms need {4 * len(terms)} steps" if len(table) < 4 * len(terms) else None
    )
    if still := [unit for unit, column in zip(units, table.T, strict=True) if not np.ptp(column)]:
        refused = f"{still[0]} is the same in all of them"
    if refused is None:
        inflation = np.diag(np.linalg.inv(np.corrcoef(table.T) + 1e-9 * np.eye(len(terms))))
        if alike := [
            unit for unit, factor in zip(units, inflation, strict=True) if factor > _MAX_INFLATION
        ]:
            refused = f"{' and '.join(alike)} rise and fall together, so cannot be distinguished"
    if refused is not None:
        return CostFit(num_measured=len(table), refused=refused)
    residuals = np.abs(_solve(table, times_ns)[2])
    usual = residuals <= _OUTLIER * np.median(residuals) + 1e-9 * times_ns.mean()
    columns_used = list(range(len(terms)))
    while True:
        ns, errors, residuals = _solve(table[usual][:, columns_used], times_ns[usual])
        if not columns_used or (ns >= _MIN_T * errors).all():
            break
        del columns_used[int((ns / errors).argmin())]
    if not any(terms[column_number][1] for column_number in columns_used):
        return CostFit(num_measured=len(table), refused="times do not follow the columns")
    # Of the smallest three digits, and of the largest no more than a `Cost` can hold.
    divisor = 10 ** max(0, min(2 - floor(log10(ns.min())), 17 - floor(log10(ns.max()))))
    parts: tuple[dict[str, int], ...] = ({}, {}, {})
    for column_number, value in zip(columns_used, ns.tolist(), strict=True):
        parts[terms[column_number][1]][terms[column_number][0]] = round(value * divisor)
    return CostFit(
        num_measured=len(table),
        num_steps=int(usual.sum()),
        residual=float(np.sqrt(np.mean(residuals**2)) / times_ns[usual].mean()),
        terms_ns={
            units[column_number]: (value, error)
            for column_number, value, error in zip(
                columns_used, ns.tolist(), errors.tolist(), strict=True
            )
        },
        left_out=[
            unit for column_number, unit in enumerate(units) if column_number not in columns_used
        ],
        cost=Cost(parts[1], parts[2], sum(parts[0].values()), divisor),
    )


def _solve(
    table: NDArray[np.float64], times: NDArray[np.float64]
) -> tuple[NDArray[np.float64], ...]:
    """Return the coefficients of the columns of ``table`` (n, k), their standard errors, and the
    residuals (n,).
    """
    from scipy.optimize import nnls

    design = np.column_stack((np.ones(len(table)), table))
    scale = design.max(axis=0)
    solution, _ = nnls(design / scale, times)
    residuals = times - design / scale @ solution
    spread = residuals @ residuals / (len(times) - design.shape[1])
    errors = (
        np.sqrt(spread * np.diag(np.linalg.pinv((design / scale).T @ (design / scale)))) + 1e-300
    )
    return (solution / scale)[1:], (errors / scale)[1:], residuals


class Loss(NamedTuple):
    """Time that a step loses on a rank, the mean over steps and ranks, and how large its cause
    is; see `losses_of`.
    """

    size: float
    time_ms: float


def losses_of(ranks: Sequence[Sequence[StepRecord]], cost: str | Cost | None) -> dict[str, Loss]:
    """Return what padding and imbalance take of the steps of all ranks, those that are known.

    Padding: the share of a model's predictions that count for nothing; its time is that share of
    forward and backward. Imbalance: what the dearest rank's samples cost, by ``cost``, above the
    mean of the ranks, in parts of it; its time is what the mean rank waits, (1 - mean / dearest) of
    the dearest rank's forward and backward.
    """
    compute_ms = (
        np.array([[step.forward_ns + step.backward_ns for step in rank] for rank in ranks])
        / NS_PER_MS
    )
    padding = np.array(
        [[step.padding for step in rank] for rank in ranks], np.float64
    )  # None is NaN
    losses: dict[str, Loss] = {}
    if not np.isnan(padding).any() and padding.any():
        losses["padding"] = Loss(float(padding.mean()), float((padding * compute_ms).mean()))
    if cost is not None and len(ranks) > 1:
        model = Cost({cost: 1}) if isinstance(cost, str) else cost
        loads = np.zeros(compute_ms.shape)
        for place in np.ndindex(*loads.shape):
            sums = ranks[place[0]][place[1]].sums
            count = next(iter(sums.values()))[0]
            linear = sum(factor * sums[name][1] for name, factor in model.linear.items())
            quadratic = sum(factor * sums[name][2] for name, factor in model.quadratic.items())
            loads[place] = model.constant * count + linear + quadratic
        loads[:, ~loads.any(axis=0)] = 1.0  # all ranks cost nothing
        mean = loads.mean(axis=0)
        dearest = loads.max(axis=0)
        dearest_rank = loads.argmax(axis=0)
        waits_ms = (1 - mean / dearest) * compute_ms[dearest_rank, np.arange(len(dearest_rank))]
        losses["imbalance"] = Loss(float((dearest / mean - 1).mean()), float(waits_ms.mean()))
    return losses
