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
        return tuple("dt_s" if name == RING else name for name in stored) + (
            () if RING in stored else ("dt_s",)
        )

    def chosen(
        self,
        num_stored: int,
        *,
        seed: int,
        epoch: int,
        sample: int,
    ) -> list[int]:
        """Return the selected earlier sweeps, the latest (0) first."""
        num = min(self.num_sweeps - 1, num_stored)
        if self.choose == "latest" or num == num_stored:
            return list(range(num))
        draws = uniforms(seed, epoch, sample, stream=STREAM, count=num_stored)[0]
        chosen: list[int] = np.sort(np.argsort(draws, kind="stable")[:num]).tolist()
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
            own: the sample's own sweep, float32 (P, C).
            earlier: the sweeps before it; None where none are stored.
            columns: names of the C columns; x, y, z come first. `columns` gives those of the
                result.
            lidar2global: of the own sweep, (4, 4) float64.
            timestamp_ns: of the own sweep.
            chosen: places in ``earlier`` to take, from `chosen`.

        Raises SchemaError where the sweeps' columns differ.

        """
        if earlier is not None and earlier.points.shape[1] != current.shape[1]:
            raise SchemaError(
                f"earlier sweeps have {earlier.points.shape[1]} columns, the sample's own "
                f"{current.shape[1]}"
            )
        parts: list[tuple[F32, F64 | None, float]] = [(current, None, 0.0)]
        if self.repeat_if_alone and not chosen:
            parts *= self.num_sweeps
        if earlier is not None and chosen:
            global2lidar = invert_rigid(lidar2global)
            ends = np.cumsum(earlier.num_points).tolist()
            for sweep in chosen:
                points = earlier.points[ends[sweep] - int(earlier.num_points[sweep]) : ends[sweep]]
                # Global coordinates lose centimetres in float32: composed in float64, applied to
                # the small numbers.
                move = global2lidar @ earlier.lidar2global[sweep]
                parts.append(
                    (
                        points,
                        move,
                        (timestamp_ns - int(earlier.timestamp_ns[sweep])) * 1e-9,
                    )
                )
        names = self.columns(columns)
        at_dt = names.index("dt_s")
        clouds = []
        for points, _, _ in parts:
            if self.min_distance_m > 0.0:
                near = (np.abs(points[:, :2]) < self.min_distance_m).all(axis=1)
                points = points[~near] if near.any() else points
            clouds.append(points)
        cloud = np.empty((sum(len(points) for points in clouds), len(names)), np.float32)
        first = 0
        for points, (_, move, dt_s) in zip(clouds, parts, strict=True):
            part = cloud[first : first + len(points)]
            part[:, : points.shape[1]] = points
            if move is not None:
                np.matmul(
                    points[:, :3],
                    move[:3, :3].T.astype(np.float32),
                    out=part[:, :3],
                )
                part[:, :3] += move[:3, 3].astype(np.float32)
            part[:, at_dt] = dt_s
            first += len(points)
        return cloud
