"""What a request of the page asks for."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

_MOST: int = (1 << 53) - 1  # what a number of JavaScript counts exactly
_Whole = Annotated[int, Meta(ge=0, le=_MOST)]
_Text = Annotated[str, Meta(max_length=10_000)]


class Query(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of a request, of which each kind of request takes what it needs."""

    row: _Whole = 0
    first: _Whole = 0
    count: Annotated[int, Meta(ge=1, le=500)] = 60
    filter: _Text = ""
    split: _Text = ""
    columns: _Text = ""
    sensor: _Whole = 0
    width: Annotated[int, Meta(ge=16, le=640)] = 240
    name: _Text = ""
    seed: _Whole = 0
    epoch: _Whole = 0
    step: _Whole = 0
    batch: Annotated[int, Meta(ge=1, le=_MOST)] = 16

    @property
    def place(self) -> slice:
        """The part of a list that is asked for."""
        return slice(self.first, self.first + self.count)
