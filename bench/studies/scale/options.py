"""Options of a measurement of scaling."""

from __future__ import annotations

from typing import Annotated

import msgspec

from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.settings import AtLeast0, CheckedSettings, NotNegative, Positive, flag


def parse_ranks(text: str) -> tuple[int, ...]:
    """Return the numbers of a list such as ``1,2,4``. Raises ConfigError."""
    words = text.split(",")
    if not all(word.isdigit() and int(word) for word in words):
        raise ConfigError("it must be a list of numbers such as 1,2,4")
    return tuple(map(int, words))


class ScaleOptions(CheckedSettings, frozen=True, kw_only=True):
    """Options of `fuelrail.scale`, and the flags of ``fuelrail bench scale``."""

    ranks: Annotated[
        tuple[Positive, ...],
        flag("numbers of ranks to measure, 1 among them (default: 1,2,4)", metavar="LIST", parse=parse_ranks),
    ] = (1, 2, 4)
    split: Annotated[str, flag("split to train on")] = "train"
    batch_size: Annotated[Positive, flag("samples per rank in weak scaling")] = 2
    steps: Annotated[Positive, flag("steps of each run")] = 50
    warmup: Annotated[NotNegative, flag("warm-up steps, excluded from all results")] = 10
    accelerator: Annotated[str, flag("emulated:PROFILE, as in `bench train`")] = "auto"
    workers: Annotated[Positive | None, flag("decoding threads per rank (default: the rank's share of the CPUs)")] = (
        None
    )
    max_ranks: Annotated[Positive, flag("largest number of ranks to simulate, each on a host like this one")] = 4096
    straggler_share: Annotated[float, msgspec.Meta(ge=0, le=1), flag("share of ranks that are slow")] = 0.01
    straggler_slowdown: Annotated[AtLeast0, flag("extra compute time of slow ranks (0.2 = 20 %)")] = 0.2
    storage_gb_per_s: Annotated[AtLeast0, flag("total storage bandwidth in GB/s")] = 10.0
