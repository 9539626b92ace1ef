"""Options of a measurement of the loader."""

from __future__ import annotations

from typing import Annotated

from fuelrail.pipeline.settings import Above0, CheckedSettings, NotNegative, Positive, flag
from fuelrail.pipeline.transforms.image import ImageAugment


class LoaderOptions(CheckedSettings, frozen=True, kw_only=True):
    """Options of `fuelrail.bench_loader`, and the flags of ``fuelrail bench loader``."""

    split: Annotated[str, flag("split to load")] = "train"
    batch_size: Annotated[Positive, flag("samples in a batch")] = 8
    workers: Annotated[Positive | None, flag("decoding threads (default: one per usable CPU)")] = None
    image: Annotated[
        ImageAugment | None, flag("image settings (default: crop 704x256 from the bottom of the image)")
    ] = None
    decoder: Annotated[str, flag("decode backend, as in the DataLoader")] = "auto"
    points: Annotated[bool, flag("also decode the lidar sweep")] = False
    verify: Annotated[bool, flag("skip checksum verification")] = True
    seed: Annotated[NotNegative, flag("random seed for the order")] = 0
    repeats: Annotated[Positive, flag("rounds of measurement")] = 5
    seconds: Annotated[Above0, flag("seconds of one run of the loader")] = 3.0
