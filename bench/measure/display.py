"""How the fields of a record show: name, unit, digits, and whether more is better.

A page's tables and tiles and the comparison of two reports are made from these
(:func:`fuelrail.bench.report.page.table_of`, :func:`fuelrail.bench.report.page.tiles_of`).
"""

from __future__ import annotations

from functools import cache
from typing import Literal, NamedTuple, get_type_hints

import msgspec

Better = Literal["more", "less"]


class Display(NamedTuple):
    """How a field shows: ``digits`` is a format, or "" for three digits or more; ``scale`` is what
    the value is multiplied by; ``missing`` stands for None; ``better`` is None for a figure that is
    not compared.
    """

    name: str
    unit: str = ""
    digits: str = ""
    scale: float = 1.0
    missing: str = ""
    better: Better | None = None

    @property
    def label(self) -> str:
        """The name with its unit: ``first batch [s]``."""
        return f"{self.name} [{self.unit}]" if self.unit else self.name


def display(
    name: str,
    *,
    unit: str = "",
    digits: str = "",
    scale: float = 1.0,
    missing: str = "",
    better: Better | None = None,
) -> msgspec.Meta:
    """Say how a field shows.

    ``Annotated[float, display("first batch", unit="s", digits=".2f")]``.
    """
    entry = Display(
        name=name,
        unit=unit,
        digits=digits,
        scale=scale,
        missing=missing,
        better=better,
    )
    return msgspec.Meta(extra={"display": entry})


@cache
def displayed_fields(kind: type[msgspec.Struct]) -> dict[str, Display]:
    """Return how the fields of a type of records show, by field; those that say nothing do not."""
    entries = {}
    for field, hint in get_type_hints(kind, include_extras=True).items():
        for meta in getattr(hint, "__metadata__", ()):
            if isinstance(meta, msgspec.Meta) and meta.extra and "display" in meta.extra:
                entries[field] = meta.extra["display"]
    return entries
