"""Past and future of the ego vehicle and of each box, in ego at the sample's time, keyframe by
keyframe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.channels.kinds import KINDS
from fuelrail.pipeline.channels.table import ArraySpec, Channel, Law
from fuelrail.pipeline.rigid import invert_rigid, rotation_matrices
from fuelrail.sharding.sources.adapter.channels import computed
from fuelrail.sharding.sources.adapter.trajectories import (
    ABOUT_STEPS,
    EGO,
    FUTURE,
    PAST,
    STEPS,
    ego_trajectory,
)

if TYPE_CHECKING:
    from fuelrail.pipeline.storage.columns import Disk
    from fuelrail.sharding.sources.nuscenes.boxes import Annotations
    from fuelrail.sharding.sources.nuscenes.geometry import Keyframes, SceneRows
    from fuelrail.sharding.sources.shared.scan_table import Reference

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
    description=f"centres and headings of the boxes of the sample, in their order; {ABOUT_STEPS}",
)


class Trajectories:
    """Trajectories of the ego vehicle and, where the tables have annotations, of the boxes."""

    def __init__(self, disk: Disk, keyframes: Keyframes, annotations: Annotations) -> None:
        self._annotations = annotations
        self._links = keyframes.joined["sample"].links
        self.channels = (EGO, AGENTS) if len(annotations) else (EGO,)
        self._frame: NDArray[np.int32] = disk.filled(-1, len(keyframes.joined["sample"]), np.int32)
        for _, samples in keyframes.scenes():
            self._frame[samples] = np.arange(len(samples))

    def members(self, rows: SceneRows, number: int) -> list[Reference]:
        """Return references of one sample's members."""
        global2ego = invert_rigid(rows.ego2global[number])
        references = [self._follow_ego(rows, number, global2ego)]
        if AGENTS in self.channels:
            references.append(
                computed(
                    AGENTS,
                    KINDS[AGENTS.kind].encode(
                        self._follow_agents(rows, number, global2ego), AGENTS
                    ),
                )
            )
        return references

    def _follow_ego(self, rows: SceneRows, row: int, global2ego: NDArray[np.float64]) -> Reference:
        keyframes = rows.keyframes
        sample = rows.samples[row : row + 1]
        past, future = (
            _followed(sample, self._links[link], number)
            for link, number in (("prev", PAST), ("next", FUTURE))
        )
        samples = np.concatenate([past[::-1, 0], sample, future[:, 0]])
        exists = samples >= 0
        times_s = (keyframes.timestamp_us[samples[exists]] - rows.timestamp_us[row]) * 1e-6
        return ego_trajectory(global2ego, keyframes.ego2global(samples[exists]), times_s, exists)

    def _follow_agents(
        self, rows: SceneRows, row: int, global2ego: NDArray[np.float64]
    ) -> dict[str, NDArray[np.generic]]:
        sample = int(rows.samples[row])
        annotations = self._annotations
        agent_rows = annotations.rows_of(sample)
        steps = np.full((len(agent_rows), STEPS), -1, np.int64)
        steps[:, PAST] = agent_rows
        scene_of = self._links["scene_token"]
        for link, number in (
            (annotations.links["prev"], PAST),
            (annotations.links["next"], FUTURE),
        ):
            for followed in _followed(agent_rows, link, number):
                # A track may leave keyframes out: what counts is the keyframe of the box, not the
                # number of links.
                samples = annotations.links["sample_token"][followed]
                step = self._frame[samples] - self._frame[sample] + PAST
                fits = (followed >= 0) & (step >= 0) & (step < STEPS) & (step != PAST)
                fits &= scene_of[samples] == scene_of[sample]
                steps[np.flatnonzero(fits), step[fits]] = followed[fits]
        exists = steps >= 0
        position = (
            annotations.columns["translation"][steps] @ global2ego[:3, :3].T + global2ego[:3, 3]
        )
        turn = global2ego[:3, :3] @ rotation_matrices(annotations.columns["rotation"][steps])
        yaw = np.arctan2(turn[..., 1, 0], turn[..., 0, 0])
        return {
            "position": np.where(exists[..., None], position, np.nan).astype(np.float32),
            "yaw": np.where(exists, yaw, np.nan).astype(np.float32)[..., None],
            "valid": exists.astype(np.uint8),
        }


def _followed(rows: NDArray[np.int64], link: NDArray[np.int64], number: int) -> NDArray[np.int64]:
    """Return rows (number, M) that follow some rows (M,) along a link, -1 after its end."""
    table = np.empty((number, len(rows)), np.int64)
    for step in range(number):
        rows = table[step] = np.where(rows >= 0, link[rows], -1)
    return table
