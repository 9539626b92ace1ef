"""Options of a comparison of loaders."""

from __future__ import annotations

from typing import Annotated

import msgspec

from fuelrail.pipeline.settings import Above0, CheckedSettings, NotNegative, Positive, flag


class CompareOptions(CheckedSettings, frozen=True, kw_only=True):
    """Options of `fuelrail.compare`, and the flags of ``fuelrail bench compare``."""

    only: Annotated[
        tuple[str, ...],
        flag(
            "compare only this loader, or LOADER:RECIPE; may be repeated (default: all that are installed)",
            metavar="NAME",
            repeat=True,
        ),
    ] = ()
    data: Annotated[
        str | None,
        flag(
            "folder that keeps the samples in each loader's format for the next comparison (default: "
            "data in the folder of the report)",
            metavar="FOLDER",
        ),
    ] = None
    split: Annotated[str | None, flag("split to load (default: the only one of the dataset)")] = None
    version: Annotated[
        str | None, flag("nuScenes version folder of a nuscenes: source, e.g. v1.0-mini", metavar="FOLDER")
    ] = None
    batch_size: Annotated[Positive, flag("samples in a batch")] = 8
    height: Annotated[Positive, flag("height of the images delivered")] = 256
    width: Annotated[Positive, flag("width of the images delivered")] = 704
    cpus: Annotated[
        str | None,
        flag("CPUs that every loader is pinned to, such as 0,1 or 0-3 (default: all usable)", metavar="LIST"),
    ] = None
    rounds: Annotated[NotNegative, flag("runs of each loader, in turns; 0: prepare and check")] = 5
    seconds: Annotated[Above0, flag("measured time per run in seconds, without warm-up")] = 4.0
    psnr: Annotated[float, msgspec.Meta(le=1e9), flag("lowest acceptable PSNR in dB")] = 36.0
    seed: Annotated[NotNegative, flag("random seed for the orders")] = 0
    resume: Annotated[bool, flag("add rounds to the report in --out, if there is one")] = False
