"""The channel ``ego_trajectory``: past and future of the ego vehicle in ego at the sample's time.

2 s of past and 6 s of future, as the nuScenes prediction task has them:
https://www.nuscenes.org/prediction
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from fuelrail.pipeline.channels.kinds import KINDS
from fuelrail.pipeline.channels.table import Channel, Law
from fuelrail.sharding.sources.adapter.channels import computed

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.schema import F64, Mask
    from fuelrail.sharding.sources.shared.scan_table import Reference

PAST: Final = 4
FUTURE: Final = 12
STEPS: Final = PAST + 1 + FUTURE
ABOUT_STEPS: Final = (
    f"step {PAST} is the sample itself, each step is a keyframe; NaN and not valid where there "
    "is none"
)

EGO: Final = Channel(
    name="ego_trajectory",
    kind="array",
    field="ego_trajectory.npy",
    law=Law(
        "ego_poses",
        roles={"positions": (("x", "y", "z"),), "yaws": (("yaw",),)},
    ),
    dtype="float32",
    axes=("step", "column"),
    shape=(STEPS, 6),
    columns=("x", "y", "z", "yaw", "time_s", "valid"),
    units=("m", "m", "m", "rad", "s", ""),
    frame="ego",
    allows_nan=True,
    description=(
        f"the ego vehicle's poses in ego at the sample's time; {ABOUT_STEPS}; time_s is after "
        "the sample"
    ),
)


def ego_trajectory(
    global2ego: F64,
    ego2global: F64,
    time_s: F64,
    exists: Mask,
) -> Reference:
    """Return the member of a sample with ``global2ego`` (4, 4).

    ``exists`` (17,) says which steps there are; of these K are the poses (K, 4, 4), and the times
    (K,) [s] after it.
    """
    value = np.full((STEPS, len(EGO.columns)), np.nan)
    poses = global2ego @ ego2global
    value[exists, :3] = poses[:, :3, 3]
    value[exists, 3] = np.arctan2(poses[:, 1, 0], poses[:, 0, 0])
    value[exists, 4] = time_s
    value[:, 5] = exists
    data = KINDS[EGO.kind].encode(value.astype(np.float32), EGO)
    return computed(EGO, data)
