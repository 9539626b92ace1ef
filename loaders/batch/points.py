"""A sample's lidar points as the batch has them: its own sweep, or several accumulated."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from fuelrail.pipeline.errors import ConfigError, SchemaError
from fuelrail.pipeline.sample.schema import SWEEPS_FIELD, Sample

if TYPE_CHECKING:
    from fuelrail.pipeline.channels.sensors import LidarEntry
    from fuelrail.pipeline.format.dataset import Dataset
    from fuelrail.pipeline.transforms.points import PointSweeps


class Accumulation(NamedTuple):
    """Which lidar's sweeps are put together, and how."""

    lidar: LidarEntry
    sweeps: PointSweeps

    def __call__(
        self,
        sample: Sample,
        *,
        seed: int,
        epoch: int,
        row: int,
    ) -> Sample:
        """Replace the lidar's own sweep of the sample by the cloud; raise SchemaError, naming
        the sample.
        """
        channel = self.lidar.channel
        current = sample.points.get(channel)
        earlier = sample.sweeps.get(channel)
        if current is None:
            return sample
        geometry = sample.geometry
        num_stored = 0 if earlier is None else len(earlier.num_points)
        try:
            cloud = self.sweeps.accumulate(
                current,
                earlier,
                columns=self.lidar.columns,
                lidar2global=geometry.lidar_ego2global[0] @ geometry.lidar2ego[0],
                timestamp_ns=int(geometry.lidar_timestamp_ns[0]),
                chosen=self.sweeps.chosen(
                    num_stored,
                    seed=seed,
                    epoch=epoch,
                    sample=row,
                ),
            )
        except SchemaError as error:
            raise SchemaError(
                error.message,
                key=sample.key,
                member=f"{channel}{SWEEPS_FIELD}",
            ) from error
        return dataclasses.replace(sample, points={**sample.points, channel: cloud})


class Points(NamedTuple):
    """What ``points=`` comes to: the lidar whose points are in the batch, with their columns
    there; None for none.
    """

    lidar: LidarEntry | None
    accumulation: Accumulation | None


def choose_points(dataset: Dataset, points: bool | PointSweeps) -> Points:
    """Resolve the loader's ``points``; raises ConfigError where the dataset does not have them."""
    if points is False:
        return Points(None, None)
    if not dataset.manifest.lidars:
        raise ConfigError(
            f"points={points}, but dataset '{dataset.root}' has no lidar; leave it out"
        )
    lidar = dataset.manifest.lidars[0]
    if points is True:
        return Points(lidar, None)
    if points.num_sweeps > 1 and f"{lidar.channel}{SWEEPS_FIELD}" not in dataset.index.names:
        raise ConfigError(
            f"num_sweeps={points.num_sweeps}, but dataset '{dataset.root}' stores one sweep "
            f"of {lidar.channel} a sample: make it with `fuelrail shard -o sweeps=9`, or "
            "take num_sweeps=1"
        )
    columns = points.columns(lidar.columns)
    return Points(
        msgspec.structs.replace(lidar, columns=columns),
        Accumulation(lidar, points),
    )
