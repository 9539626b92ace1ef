"""Options of a comparison of loaders."""

from __future__ import annotations

from typing import Annotated

import msgspec

from fuelrail.bench.trainer.models.settings import NotNegative, Positive  # noqa: TC001 (msgspec resolves the fields' types)
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.settings import Settings, check_types


class CompareOptions(Settings, frozen=True, kw_only=True):
    """Options of `fuelrail.compare`, and the flags of ``fuelrail bench compare``."""

    only: Annotated[
        tuple[str, ...],
        msgspec.Meta(
            description="compare only this loader, or LOADER:RECIPE; may be repeated (default: all that are installed)",
            extra={"metavar": "NAME", "repeat": True},
        ),
    ] = ()
    data: (
        Annotated[
            str,
            msgspec.Meta(
                description="folder that keeps the samples in each loader's format for the next comparison (default: "
                "data in the folder of the report)",
                extra={"metavar": "FOLDER"},
            ),
        ]
        | None
    ) = None
    split: Annotated[str, msgspec.Meta(description="split to load (default: the only one of the dataset)")] | None = (
        None
    )
    version: (
        Annotated[
            str,
            msgspec.Meta(
                description="nuScenes version folder of a nuscenes: source, e.g. v1.0-mini", extra={"metavar": "FOLDER"}
            ),
        ]
        | None
    ) = None
    batch_size: Annotated[Positive, msgspec.Meta(description="samples in a batch")] = 8
    height: Annotated[Positive, msgspec.Meta(description="height of the images delivered")] = 256
    width: Annotated[Positive, msgspec.Meta(description="width of the images delivered")] = 704
    cpus: (
        Annotated[
            str,
            msgspec.Meta(
                description="CPUs that every loader is pinned to, such as 0,1 or 0-3 (default: all usable)",
                extra={"metavar": "LIST"},
            ),
        ]
        | None
    ) = None
    rounds: Annotated[NotNegative, msgspec.Meta(description="runs of each loader, in turns; 0: prepare and check")] = 5
    seconds: Annotated[
        float, msgspec.Meta(gt=0, le=1e9, description="measured time per run in seconds, without warm-up")
    ] = 4.0
    psnr: Annotated[float, msgspec.Meta(le=1e9, description="lowest acceptable PSNR in dB")] = 36.0
    seed: Annotated[NotNegative, msgspec.Meta(description="random seed for the orders")] = 0
    resume: Annotated[bool, msgspec.Meta(description="add rounds to the report in --out, if there is one")] = False

    def __post_init__(self) -> None:
        check_types(self, ConfigError)
