"""What a request of the page asks for."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

_MAX_NUMBER: int = (1 << 53) - 1  # what a number of JavaScript counts exactly
_Count = Annotated[int, Meta(ge=0, le=_MAX_NUMBER)]
_Text = Annotated[str, Meta(max_length=10_000)]


class Query(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of a request, of which each kind of request takes what it needs."""

    row: _Count = 0
    first: _Count = 0
    count: Annotated[int, Meta(ge=1, le=500)] = 60
    filter: _Text = ""
    split: _Text = ""
    columns: _Text = ""
    sensor: _Count = 0
    width: Annotated[int, Meta(ge=16, le=640)] = 240
    name: _Text = ""
    seed: _Count = 0
    epoch: _Count = 0
    step: _Count = 0
    batch: Annotated[int, Meta(ge=1, le=_MAX_NUMBER)] = 16

    @property
    def place(self) -> slice:
        """The part of a list that is asked for."""
        return slice(self.first, self.first + self.count)
