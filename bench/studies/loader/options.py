"""Options of a measurement of the loader."""

from __future__ import annotations

from typing import Annotated, Literal

from fuelrail.pipeline.settings import Above0, CheckedSettings, NotNegative, Positive, flag
from fuelrail.pipeline.transforms.image import ImageAugment
from fuelrail.sharding.engines import RayAddress, check_address


class LoaderOptions(CheckedSettings, frozen=True, kw_only=True):
    """Options of `fuelrail.bench_loader`, and the flags of ``fuelrail bench loader``."""

    split: Annotated[str, flag("split to load")] = "train"
    batch_size: Annotated[Positive, flag("samples in a batch")] = 8
    workers: Annotated[
        Positive | None, flag("decoding threads, or actors with --where remote (default: one per usable CPU)")
    ] = None
    where: Annotated[
        Literal["process", "node", "remote"] | None,
        flag("where batches are made, as in the DataLoader: measured in turns with threads of this process"),
    ] = None
    ray_address: RayAddress = None
    image: Annotated[
        ImageAugment | None, flag("image settings (default: crop 704x256 from the bottom of the image)")
    ] = None
    decoder: Annotated[str, flag("decode backend, as in the DataLoader")] = "auto"
    points: Annotated[bool, flag("also decode the lidar sweep")] = False
    verify: Annotated[bool, flag("skip checksum verification")] = True
    seed: Annotated[NotNegative, flag("random seed for the order")] = 0
    repeats: Annotated[Positive, flag("rounds of measurement")] = 5
    seconds: Annotated[Above0, flag("seconds of one run of the loader, from its first batch on")] = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_address(self.ray_address, "where='remote'", is_used=self.where == "remote")
