"""Several lidar sweeps as one cloud: the sample's own and those before it, moved along with the
vehicle.

As nuScenes' ``LidarPointCloud.from_file_multisweep`` and mmdetection3d's
``LoadPointsFromMultiSweeps`` build it: points close to the sensor go, every sweep is moved from the
lidar at its own time, through both ego poses, to the lidar at the sample's time, and a column says
how long ago it was measured. Objects that move are smeared; the vehicle's ego-motion is
compensated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import numpy as np

from fuelrail.pipeline.errors import SchemaError
from fuelrail.pipeline.rigid import invert_rigid
from fuelrail.pipeline.settings import (
    AtLeast0,
    CheckedSettings,
    Positive,
    must_be,
)
from fuelrail.pipeline.transforms.randomness import uniforms

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import F32, F64
    from fuelrail.pipeline.sample.schema import Sweeps

STREAM = "lidar-sweeps"
"""Name of the random stream; a column for each stored sweep."""

RING = "ring"
"""The column of points that the time takes the place of, as in the trainers; where there is
none, it comes last.
"""


class PointSweeps(CheckedSettings, frozen=True):
    """How many lidar sweeps make the points of a sample, and which.

    Attributes:
        num_sweeps: sweeps together, the sample's own included (nuScenes: 10). Where fewer are
            stored, as at a clip's start, there are fewer.
        choose: which of the earlier ones: the ``"latest"``, or ``"random"`` among those stored
            (mmdetection3d in training), drawn for each sample and epoch.
        min_distance_m: points with both |x| and |y| below it, in their own sweep's lidar frame, are
            left out (nuScenes and mmdetection3d: 1.0): those are the vehicle itself.
        repeat_if_alone: a sample without any earlier sweep has its own ``num_sweeps`` times
            (mmdetection3d's ``pad_empty_sweeps``).

    Raises ConfigError for values out of range.
    """

    num_sweeps: Annotated[Positive, must_be("1 or more: the sample's own sweep counts")]
    choose: Literal["latest", "random"] = "latest"
    min_distance_m: Annotated[AtLeast0, must_be("0 or more metres")] = 0.0
    repeat_if_alone: bool = False

    def evaluation(self) -> PointSweeps:
        """Return the settings that draw nothing: the latest sweeps."""
        return msgspec.structs.replace(self, choose="latest")

    def columns(self, stored: Sequence[str]) -> tuple[str, ...]:
        """Return the columns of the cloud: those stored, with ``dt_s`` in the place of ``ring``,
        or last.
        """
        names = ["dt_s" if name == RING else name for name in stored]
        if RING not in stored:
            names.append("dt_s")
        return tuple(names)

    def chosen(
        self,
        num_stored: int,
        *,
        seed: int,
        epoch: int,
        sample: int,
    ) -> list[int]:
        """Return the selected earlier sweeps, the latest (0) first."""
        num_earlier = min(self.num_sweeps - 1, num_stored)
        if self.choose == "latest" or num_earlier == num_stored:
            return list(range(num_earlier))
        draws = uniforms(
            seed,
            epoch,
            sample,
            stream=STREAM,
            count=num_stored,
        )
        by_draw = np.argsort(draws[0], kind="stable")
        chosen: list[int] = np.sort(by_draw[:num_earlier]).tolist()
        return chosen

    def accumulate(
        self,
        current: F32,
        earlier: Sweeps | None,
        *,
        columns: Sequence[str],
        lidar2global: F64,
        timestamp_ns: int,
        chosen: Sequence[int],
    ) -> F32:
        """Return the cloud, float32 (P', C'), in the lidar's frame at the sample's time, the own
        sweep first.

        Args:
            current: the sample's own sweep, float32 (P, C).
            earlier: the sweeps before it; None where none are stored.
            columns: names of the C columns; x, y, z come first. `columns` gives those of the
                result.
            lidar2global: of the own sweep, (4, 4) float64.
            timestamp_ns: of the own sweep.
            chosen: places in ``earlier`` to take, from `chosen`.

        Raises SchemaError where the sweeps' columns differ.

        """
        num_stored_columns = current.shape[1]
        if earlier is not None and earlier.points.shape[1] != num_stored_columns:
            raise SchemaError(
                f"earlier sweeps have {earlier.points.shape[1]} columns, the sample's own "
                f"{num_stored_columns}"
            )
        sweeps: list[tuple[F32, F64 | None, float]] = [(current, None, 0.0)]
        if self.repeat_if_alone and not chosen:
            sweeps *= self.num_sweeps
        if earlier is not None and chosen:
            global2lidar = invert_rigid(lidar2global)
            ends = np.cumsum(earlier.num_points).tolist()
            for number in chosen:
                end = ends[number]
                start = end - int(earlier.num_points[number])
                points = earlier.points[start:end]
                # Global coordinates lose centimetres in float32: composed in float64, applied to
                # the small numbers.
                earlier2lidar = global2lidar @ earlier.lidar2global[number]
                dt_ns = timestamp_ns - int(earlier.timestamp_ns[number])
                sweeps.append((points, earlier2lidar, dt_ns * 1e-9))
        names = self.columns(columns)
        dt_column = names.index("dt_s")
        clouds = []
        for points, _, _ in sweeps:
            if self.min_distance_m > 0.0:
                is_near = (np.abs(points[:, :2]) < self.min_distance_m).all(axis=1)
                if is_near.any():
                    points = points[~is_near]
            clouds.append(points)
        num_points = sum(map(len, clouds))
        cloud = np.empty((num_points, len(names)), np.float32)
        start = 0
        for points, (_, transform, dt_s) in zip(clouds, sweeps, strict=True):
            end = start + len(points)
            part = cloud[start:end]
            part[:, :num_stored_columns] = points
            if transform is not None:
                rotation = transform[:3, :3].T.astype(np.float32)
                translation = transform[:3, 3].astype(np.float32)
                places = part[:, :3]
                np.matmul(points[:, :3], rotation, out=places)
                places += translation
            part[:, dt_column] = dt_s
            start = end
        return cloud
