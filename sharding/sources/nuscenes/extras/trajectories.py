"""Past and future of the ego vehicle and of each box, in ego at the sample's time, keyframe by
keyframe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from fuelrail.pipeline.channels.kinds import KINDS
from fuelrail.pipeline.channels.table import ArraySpec, Channel, Law
from fuelrail.pipeline.rigid import invert_rigid, move_points, rotation_matrices
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
    from fuelrail.pipeline.dtypes import I32
    from fuelrail.pipeline.sample.schema import I64
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

    def __init__(
        self,
        disk: Disk,
        keyframes: Keyframes,
        annotations: Annotations,
    ) -> None:
        self._annotations = annotations
        self._links = keyframes.joined["sample"].links
        self.channels = (EGO, AGENTS) if len(annotations) else (EGO,)
        num_samples = len(keyframes.joined["sample"])
        self._frame: I32 = disk.filled(-1, num_samples, np.int32)
        for _, samples in keyframes.scenes():
            self._frame[samples] = np.arange(len(samples))

    def members(self, rows: SceneRows, number: int) -> list[Reference]:
        """Return references of one sample's members."""
        global2ego = invert_rigid(rows.ego2global[number])
        keyframes = rows.keyframes
        sample = rows.samples[number : number + 1]
        past = _follow_link(sample, self._links["prev"], PAST)
        future = _follow_link(sample, self._links["next"], FUTURE)
        samples = np.concatenate([past[::-1, 0], sample, future[:, 0]])
        exists = samples >= 0
        samples = samples[exists]
        times_us = keyframes.timestamp_us[samples] - rows.timestamp_us[number]
        trajectory = ego_trajectory(
            global2ego,
            ego2global=keyframes.ego2global(samples),
            time_s=times_us * 1e-6,
            exists=exists,
        )
        references = [trajectory]
        if AGENTS not in self.channels:
            return references
        sample_row = int(rows.samples[number])
        annotations = self._annotations
        agent_rows = annotations.rows_of(sample_row)
        steps = np.full((len(agent_rows), STEPS), -1, np.int64)
        steps[:, PAST] = agent_rows
        scene_of = self._links["scene_token"]
        for link, num_steps in (
            (annotations.links["prev"], PAST),
            (annotations.links["next"], FUTURE),
        ):
            for followed in _follow_link(agent_rows, link, num_steps):
                # A track may leave keyframes out: what counts is the keyframe of the box, not the
                # number of links.
                box_samples = annotations.links["sample_token"][followed]
                step = self._frame[box_samples] - self._frame[sample_row] + PAST
                fits = (followed >= 0) & (step != PAST)
                fits &= (step >= 0) & (step < STEPS)
                fits &= scene_of[box_samples] == scene_of[sample_row]
                steps[np.flatnonzero(fits), step[fits]] = followed[fits]
        is_there = steps >= 0
        places = annotations.columns["translation"][steps]
        position = move_points(places, global2ego)
        position[~is_there] = np.nan
        rotations = rotation_matrices(annotations.columns["rotation"][steps])
        turn = global2ego[:3, :3] @ rotations
        yaw = np.arctan2(turn[..., 1, 0], turn[..., 0, 0])
        yaw[~is_there] = np.nan
        agents = {
            "position": position.astype(np.float32),
            "yaw": yaw.astype(np.float32)[..., None],
            "valid": is_there.astype(np.uint8),
        }
        data = KINDS[AGENTS.kind].encode(agents, AGENTS)
        references.append(computed(AGENTS, data))
        return references


def _follow_link(rows: I64, link: I64, number: int) -> I64:
    """Return rows (number, M) that follow some rows (M,) along a link, -1 after its end."""
    table = np.empty((number, len(rows)), np.int64)
    for step in range(number):
        rows = np.where(rows >= 0, link[rows], -1)
        table[step] = rows
    return table
