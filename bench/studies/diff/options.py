"""Options of a comparison of two reports."""

from __future__ import annotations

from typing import Annotated

import msgspec

from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.settings import Settings, check_types


class DiffOptions(Settings, frozen=True, kw_only=True):
    """Options of `fuelrail.diff`, and the flags of ``fuelrail bench diff``."""

    threshold: Annotated[float, msgspec.Meta(ge=0, lt=1, description="tolerated slowdown (0.02 = 2 %)")] = 0.02
    other_dataset: Annotated[
        bool, msgspec.Meta(description="compare reports of different datasets or splits; refused otherwise")
    ] = False

    def __post_init__(self) -> None:
        check_types(self, ConfigError)
