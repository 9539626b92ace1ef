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
    if order is None:
        return None
    rule = order.balance or order.pack
    return None if rule is None else rule.cost


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
        lost = ""
        if self.left_out:
            lost = f" Not certain, so left out: {', '.join(self.left_out)}; more steps may tell."
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
    terms = [("", 0)]
    for name in sums[0]:
        terms.append((name, 1))
        terms.append((name, 2))
    rows = []
    for step in sums:
        num_samples = next(iter(step.values()))[0]
        row = [num_samples]
        for column_sums in step.values():
            row.extend(column_sums[1:])
        rows.append(row)
    table = np.array(rows)
    if not np.ptp(table[:, 0]):  # as many samples in each step: their own part is that of the step
        terms = terms[1:]
        table = table[:, 1:]
    units = [("sample", name, f"{name} squared")[power] for name, power in terms]
    num_terms = len(terms)
    num_measured = len(table)
    for unit, column in zip(units, table.T, strict=True):
        if not np.ptp(column):
            refused = f"{unit} is the same in all of them"
            return CostFit(num_measured=num_measured, refused=refused)
    if num_measured < 4 * num_terms:
        refused = f"{num_terms} terms need {4 * num_terms} steps"
        return CostFit(num_measured=num_measured, refused=refused)
    correlation = np.corrcoef(table.T) + 1e-9 * np.eye(num_terms)
    inflation = np.diag(np.linalg.inv(correlation))
    alike = [units[number] for number in np.flatnonzero(inflation > _MAX_INFLATION)]
    if alike:
        refused = f"{' and '.join(alike)} rise and fall together, so cannot be distinguished"
        return CostFit(num_measured=num_measured, refused=refused)
    residuals = np.abs(_solve(table, times_ns)[2])
    limit = _OUTLIER * np.median(residuals) + 1e-9 * times_ns.mean()
    is_usual = residuals <= limit
    table = table[is_usual]
    times_ns = times_ns[is_usual]
    columns_used = list(range(num_terms))
    while True:
        ns, errors, residuals = _solve(table[:, columns_used], times_ns)
        if not columns_used or (ns >= _MIN_T * errors).all():
            break
        least_certain = int((ns / errors).argmin())
        del columns_used[least_certain]
    if not any(terms[number][1] for number in columns_used):
        return CostFit(num_measured=num_measured, refused="times do not follow the columns")
    # Of the smallest three digits, and of the largest no more than a `Cost` can hold.
    digits = 2 - floor(log10(ns.min()))
    max_digits = 17 - floor(log10(ns.max()))
    divisor = 10 ** max(0, min(digits, max_digits))
    constant = 0
    linear: dict[str, int] = {}
    quadratic: dict[str, int] = {}
    terms_ns = {}
    for number, value, error in zip(columns_used, ns.tolist(), errors.tolist(), strict=True):
        terms_ns[units[number]] = value, error
        name, power = terms[number]
        factor = round(value * divisor)
        if power == 0:
            constant = factor
        elif power == 1:
            linear[name] = factor
        else:
            quadratic[name] = factor
    root_mean_square = np.sqrt(np.mean(residuals**2))
    return CostFit(
        num_measured=num_measured,
        num_steps=len(table),
        residual=float(root_mean_square / times_ns.mean()),
        terms_ns=terms_ns,
        left_out=[unit for number, unit in enumerate(units) if number not in columns_used],
        cost=Cost(linear, quadratic, constant, divisor),
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
    information = (design / scale).T @ (design / scale)
    variances = spread * np.diag(np.linalg.pinv(information))
    errors = np.sqrt(variances) + 1e-300
    coefficients = solution / scale
    return coefficients[1:], (errors / scale)[1:], residuals


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
    compute_ns = [[step.forward_ns + step.backward_ns for step in rank] for rank in ranks]
    compute_ms = np.array(compute_ns) / NS_PER_MS
    paddings = [[step.padding for step in rank] for rank in ranks]
    padding = np.array(paddings, np.float64)  # None is NaN
    losses: dict[str, Loss] = {}
    if not np.isnan(padding).any() and padding.any():
        padding_ms = padding * compute_ms
        losses["padding"] = Loss(
            size=float(padding.mean()),
            time_ms=float(padding_ms.mean()),
        )
    if cost is not None and len(ranks) > 1:
        model = Cost({cost: 1}) if isinstance(cost, str) else cost
        loads = np.zeros(compute_ms.shape)
        for rank, step in np.ndindex(*loads.shape):
            sums = ranks[rank][step].sums
            count = next(iter(sums.values()))[0]
            linear = sum(factor * sums[name][1] for name, factor in model.linear.items())
            quadratic = sum(factor * sums[name][2] for name, factor in model.quadratic.items())
            loads[rank, step] = model.constant * count + linear + quadratic
        loads[:, ~loads.any(axis=0)] = 1.0  # all ranks cost nothing
        mean = loads.mean(axis=0)
        dearest = loads.max(axis=0)
        dearest_rank = loads.argmax(axis=0)
        dearest_ms = compute_ms[dearest_rank, np.arange(len(dearest_rank))]
        waits_ms = (1 - mean / dearest) * dearest_ms
        excess = dearest / mean - 1
        losses["imbalance"] = Loss(
            size=float(excess.mean()),
            time_ms=float(waits_ms.mean()),
        )
    return losses
