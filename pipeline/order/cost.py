"""What a sample costs a training step, as a whole number: a column, or a model of several columns.

A step of a transformer costs ``linear * tokens + quadratic * tokens**2``: the second term is
attention. A detector's cost follows its boxes or points. All of it is integer arithmetic, so the
same samples cost the same everywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, Protocol

from msgspec import Meta, field

from fuelrail.pipeline.errors import OrderError
from fuelrail.pipeline.order.epoch import digest
from fuelrail.pipeline.settings import Settings, check_types

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    from fuelrail.pipeline.dtypes import I64

MAX_COST: Final = 2**40
"""Largest cost of a sample, and largest budget: sums of 2**20 of them stay under 2**62."""
Coefficient = Annotated[int, Meta(ge=0, lt=2**62)]


class AttributeTable(Protocol):
    """Attributes of the samples that an order is over."""

    def __len__(self) -> int:
        """The number of samples."""

    @property
    def names(self) -> Collection[str]:
        """The attributes there are."""

    def read(self, names: Sequence[str]) -> pa.Table:
        """Return columns ``names``, a row a sample; raise OrderError for unknown names."""


class Cost(Settings, frozen=True):
    """A cost model: ``(constant + sum of linear * x + quadratic * x**2 over columns) / divisor``,
    rounded up.

    All coefficients are whole numbers; a measured 0.0031 is ``31`` with ``divisor=10_000``.
    """

    linear: dict[str, Coefficient] = field(default_factory=dict)
    quadratic: dict[str, Coefficient] = field(default_factory=dict)
    constant: Coefficient = 0
    divisor: Annotated[int, Meta(ge=1, lt=2**62)] = 1

    def __post_init__(self) -> None:
        check_types(self, OrderError)
        if not (self.linear or self.quadratic):
            raise OrderError(f"a cost needs columns, got {self}")


def cost_columns(cost: str | Cost) -> tuple[str, ...]:
    """Return the columns that a cost depends on, each once."""
    if isinstance(cost, str):
        return (cost,)
    names = dict.fromkeys((*cost.linear, *cost.quadratic))
    return tuple(names)


def compute_costs(cost: str | Cost, table: pa.Table, *, texts: bool = False) -> I64:
    """Return the cost of each row of ``table`` (with :func:`cost_columns` of it): int64 (n,), 0 or
    more.

    A column holds whole numbers, truth values (true is 1) or lists, whose length counts; with
    ``texts`` also texts: the first five bytes of a text's SHA-256 count. Raises OrderError for
    other types, for unknown and negative values, and for costs above 2**40.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    values: dict[str, I64] = {}
    for name in cost_columns(cost):
        column = table[name]
        if column.null_count:
            first_null = column.is_null().index(True).as_py()
            raise OrderError(
                f"attribute {name!r} is unknown (null) for {column.null_count} of {len(column)} "
                f"samples (the first is number {first_null} of those selected), and a cost "
                f"needs a number; leave them out by the filter '{name} is not None'"
            )
        if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            column = pc.list_value_length(column)
        if texts and pa.types.is_string(column.type):
            encoded = column.combine_chunks().dictionary_encode()
            numbers = []
            for text in encoded.dictionary.to_pylist():
                text_digest = hashlib.sha256(text.encode()).digest()
                numbers.append(int.from_bytes(text_digest[:5], "little"))
            column = pa.array(numbers, pa.int64()).take(encoded.indices)
        if not (pa.types.is_integer(column.type) or pa.types.is_boolean(column.type)):
            raise OrderError(
                f"attribute {name!r} is {column.type}, and a cost needs whole numbers or lists"
            )
        extremes = pc.min_max(column).as_py()
        for extreme in extremes.values():
            if extreme is not None and not 0 <= extreme < 2**63:
                raise OrderError(
                    f"attribute {name!r} is {extreme} somewhere, and a cost needs numbers of 0 .. "
                    "2**63 - 1"
                )
        values[name] = column.cast(pa.int64()).to_numpy()
    if isinstance(cost, str):
        costs = values[cost]
    else:
        largest = {name: int(column.max(initial=0)) for name, column in values.items()}
        max_total = _total(cost, largest)
        if max_total >= 2**62:
            raise OrderError(
                f"the sum of {cost} reaches {max_total}, and 2**62 - 1 is the limit: take "
                "smaller coefficients"
            )
        totals = _total(cost, values)
        costs = -(-totals // cost.divisor)
    if costs.size and costs.max() > MAX_COST:
        raise OrderError(
            f"row {int(costs.argmax())} costs {costs.max()}, and at most 2**40 is allowed; "
            "use a divisor"
        )
    return costs


def _total(cost: Cost, values: Mapping[str, Any]) -> Any:
    total: Any = cost.constant
    for name, factor in cost.linear.items():
        total = total + factor * values[name]
    for name, factor in cost.quadratic.items():
        total = total + factor * values[name] ** 2
    return total


class OrderCosts(NamedTuple):
    """What the samples of an order cost, by what it is for: an array for each dataset of a mix."""

    pack: tuple[NDArray[np.integer], ...] = ()
    bucket: tuple[NDArray[np.integer], ...] = ()
    balance: tuple[NDArray[np.integer], ...] = ()

    @property
    def digests(self) -> dict[str, str]:
        """Digests of the costs of one dataset, by what they are for."""
        digests = {}
        for use, arrays in self._asdict().items():
            if arrays:
                digests[f"{use}_costs"] = digest(arrays[0])
        return digests


NO_COSTS: Final = OrderCosts()
