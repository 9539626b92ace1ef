"""Past and future of the ego vehicle and of each box, in ego at the sample's time, keyframe by keyframe.

2 s of past and 6 s of future, as the nuScenes prediction task has them: https://www.nuscenes.org/prediction
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.channels.kinds import KINDS
from fuelrail.pipeline.channels.table import ArraySpec, Channel, Law
from fuelrail.pipeline.rigid import invert_rigid, rotation_matrices
from fuelrail.sharding.sources.adapter.channels import computed

if TYPE_CHECKING:
    from fuelrail.sharding.sources.nuscenes.boxes import Annotations
    from fuelrail.sharding.sources.nuscenes.geometry import Keyframes, SceneRows
    from fuelrail.sharding.sources.shared.joins import Database
    from fuelrail.sharding.sources.shared.scan_table import Reference

PAST: Final = 4
FUTURE: Final = 12
STEPS: Final = PAST + 1 + FUTURE
_STEPS: Final = f"step {PAST} is the sample itself, each step is a keyframe; NaN and not valid where there is none"

EGO: Final = Channel(
    name="ego_trajectory",
    kind="array",
    field="ego_trajectory.npy",
    law=Law("ego_poses", roles={"positions": (("x", "y", "z"),), "yaws": (("yaw",),)}),
    dtype="float32",
    axes=("step", "column"),
    shape=(STEPS, 6),
    columns=("x", "y", "z", "yaw", "time_s", "valid"),
    units=("m", "m", "m", "rad", "s", ""),
    frame="ego",
    allows_nan=True,
    description=f"the ego vehicle's poses in ego at the sample's time; {_STEPS}; time_s is after the sample",
)
AGENTS: Final = Channel(
    name="agent_trajectories",
    kind="ragged",
    field="agent_trajectories.safetensors",
    law=Law("ego_poses", roles={"positions": (("position",),), "yaws": (("yaw",),)}),
    arrays=(
        ArraySpec("position", "float32", (STEPS, 3), "m"),
        ArraySpec("yaw", "float32", (STEPS, 1), "rad"),
        ArraySpec("valid", "uint8", (STEPS,)),
    ),
    frame="ego",
    allows_nan=True,
    optional=True,
    description=f"centres and headings of the boxes of the sample, in their order; {_STEPS}",
)


class Trajectories:
    """Trajectories of the ego vehicle and, where the tables have annotations, of the boxes."""

    def __init__(self, database: Database, keyframes: Keyframes, annotations: Annotations) -> None:
        self._annotations, self._links = annotations, keyframes.joined["sample"].links
        self.channels = (EGO, AGENTS) if len(annotations) else (EGO,)
        self._frame: NDArray[np.int32] = database.filled(-1, len(keyframes.joined["sample"]), np.int32)
        for _, samples in keyframes.scenes():
            self._frame[samples] = np.arange(len(samples))

    def members(self, rows: SceneRows, at: int) -> list[Reference]:
        """Return references of one sample's members."""
        global2ego = invert_rigid(rows.ego2global[at])
        found = [computed(EGO, KINDS[EGO.kind].encode(self._ego(rows, at, global2ego), EGO))]
        if AGENTS in self.channels:
            found.append(computed(AGENTS, KINDS[AGENTS.kind].encode(self._agents(rows, at, global2ego), AGENTS)))
        return found

    def _ego(self, rows: SceneRows, at: int, global2ego: NDArray[np.float64]) -> NDArray[np.float32]:
        keyframes, own = rows.keyframes, rows.samples[at : at + 1]
        past, future = (
            _followed(own, self._links[link], number) for link, number in (("prev", PAST), ("next", FUTURE))
        )
        samples = np.concatenate([past[::-1, 0], own, future[:, 0]])
        there = samples >= 0
        value = np.full((STEPS, len(EGO.columns)), np.nan)
        poses = global2ego @ keyframes.ego2global(samples[there])
        value[there, :3] = poses[:, :3, 3]
        value[there, 3] = np.arctan2(poses[:, 1, 0], poses[:, 0, 0])
        value[there, 4] = (keyframes.timestamp_us[samples[there]] - rows.timestamp_us[at]) * 1e-6
        value[:, 5] = there
        return value.astype(np.float32)

    def _agents(self, rows: SceneRows, at: int, global2ego: NDArray[np.float64]) -> dict[str, NDArray[np.generic]]:
        sample, annotations = int(rows.samples[at]), self._annotations
        own = annotations.rows_of(sample)
        steps = np.full((len(own), STEPS), -1, np.int64)
        steps[:, PAST] = own
        scene_of = self._links["scene_token"]
        for link, number in ((annotations.links["prev"], PAST), (annotations.links["next"], FUTURE)):
            for found in _followed(own, link, number):
                # A track may leave keyframes out: what counts is the keyframe of the box, not the number of links.
                samples = annotations.links["sample_token"][found]
                step = self._frame[samples] - self._frame[sample] + PAST
                fits = (found >= 0) & (step >= 0) & (step < STEPS) & (step != PAST)
                fits &= scene_of[samples] == scene_of[sample]
                steps[np.flatnonzero(fits), step[fits]] = found[fits]
        there = steps >= 0
        position = annotations.columns["translation"][steps] @ global2ego[:3, :3].T + global2ego[:3, 3]
        turn = global2ego[:3, :3] @ rotation_matrices(annotations.columns["rotation"][steps])
        yaw = np.arctan2(turn[..., 1, 0], turn[..., 0, 0])
        return {
            "position": np.where(there[..., None], position, np.nan).astype(np.float32),
            "yaw": np.where(there, yaw, np.nan).astype(np.float32)[..., None],
            "valid": there.astype(np.uint8),
        }


def _followed(rows: NDArray[np.int64], link: NDArray[np.int64], number: int) -> NDArray[np.int64]:
    """Return rows (number, M) that follow some rows (M,) along a link, -1 after its end."""
    found = np.empty((number, len(rows)), np.int64)
    for step in range(number):
        rows = found[step] = np.where(rows >= 0, link[rows], -1)
    return found
