"""The tree of frames of a log: where sensors are on the vehicle, and where the vehicle is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.rigid import invert_rigid
from fuelrail.sharding.sources.adapter.poses import Trajectory, pose

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.schema import F64
    from fuelrail.sharding.sources.logs.messages.records import Edges


GLOBAL_FRAMES: Final = ("map", "odom")


class FrameTree:
    """Static edges, and those that move, by child.

    Frames have no slash in front. Errors name ``where``.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._fixed: dict[str, tuple[str, F64]] = {}
        self._moving: dict[str, list[Edges]] = {}
        self._parents: dict[str, str] = {}

    def add(self, edges: Edges, *, is_static: bool) -> None:
        """Add transforms; raises SourceError for a frame that gets another parent."""
        parent = edges.parent.lstrip("/")
        child = edges.child.lstrip("/")
        if self._parents.setdefault(child, parent) != parent:
            raise SourceError(
                f"{self._where}: the frame '{child}' has the parents "
                f"'{self._parents[child]}' and '{parent}'"
            )
        if is_static:
            matrices = pose(
                edges.wxyz,
                edges.xyz,
                f"{self._where}: transform '{parent}' to '{child}'",
            )
            self._fixed[child] = parent, matrices[-1]
        else:
            self._moving.setdefault(child, []).append(edges)

    def settle(self) -> None:
        """Take as static what was said once, as logs without a topic for static transforms have
        it.
        """
        for child, parts in list(self._moving.items()):
            stamps = np.concatenate([part.stamp_ns for part in parts])
            if (stamps == stamps[0]).all():
                del self._moving[child]
                first = parts[0].rows(np.arange(1))
                self.add(first, is_static=True)

    def sensor2ego(self, frame: str, ego: str) -> F64:
        """Return static transform (4, 4); raise SourceError where static transforms do not
        connect the two frames.
        """
        up, sensor2top = self._find_top(frame)
        up_ego, ego2top = self._find_top(ego)
        if up != up_ego:
            names = {*self._parents, *self._parents.values()}
            frames = ", ".join(sorted(names)) or "none"
            raise SourceError(
                f"{self._where}: no static transform connects the sensor frame '{frame}' "
                f"with '{ego}', the option ego_frame; known frames: {frames}"
            )
        return np.asarray(invert_rigid(ego2top) @ sensor2top)

    def trajectory(self, ego: str, top: str, max_gap_s: float) -> Trajectory:
        """Return poses of ``ego`` in ``top``; an empty ``top`` is the first of map, odom above it,
        else the uppermost.

        Times are those of the moving transform next to ``ego``. Raises SourceError where nothing
        moves.
        """
        chain = self._trace_chain(ego)
        if not top:
            top = next((name for name in GLOBAL_FRAMES if name in chain), chain[-1])
        if top not in chain or not any(
            child in self._moving for child in chain[: chain.index(top)]
        ):
            raise SourceError(
                f"{self._where}: the transforms do not say how '{ego}' moves in '{top}': "
                f"above '{ego}' are {', '.join(chain[1:]) or 'no frames'}; the options "
                "ego_frame and global_frame name other frames, poses=TOPIC takes an "
                "Odometry topic, poses=none goes without"
            )
        children = chain[: chain.index(top)]
        first = next(child for child in children if child in self._moving)
        if children == [first]:
            return edges_trajectory(self._moving[first], f"{self._where}: {first}", max_gap_s)
        stamps = [part.stamp_ns for part in self._moving[first]]
        times = np.unique(np.concatenate(stamps))
        poses = np.broadcast_to(np.eye(4), (len(times), 4, 4))
        for child in children:
            if child in self._moving:
                step = edges_trajectory(
                    self._moving[child], f"{self._where}: {child}", max_gap_s
                ).at(times)
            else:
                step = self._fixed[child][1]
            poses = step @ poses
        is_known = ~np.isnan(poses[:, 0, 0])
        return Trajectory(
            timestamp_ns=times[is_known],
            ego2global=poses[is_known],
            where=self._where,
            max_gap_s=max_gap_s,
        )

    def _trace_chain(self, frame: str) -> list[str]:
        chain = [frame]
        while chain[-1] in self._parents:
            chain.append(self._parents[chain[-1]])
            if chain[-1] in chain[:-1]:
                raise SourceError(f"{self._where}: the frames {', '.join(chain)} are a ring")
        return chain

    def _find_top(self, frame: str) -> tuple[str, F64]:
        """Return the uppermost frame that static transforms lead to, and the way there."""
        self._trace_chain(frame)
        transform = np.eye(4)
        while frame in self._fixed:
            frame, step = self._fixed[frame]
            transform = step @ transform
        return frame, transform


def edges_trajectory(
    parts: Sequence[Edges],
    where: str,
    max_gap_s: float,
) -> Trajectory:
    """Return the trajectory of one moving frame, in time order; of edges with the same stamp the
    first counts.
    """
    if not parts:
        return Trajectory(
            np.empty(0, np.int64),
            np.empty((0, 4, 4)),
            where,
            max_gap_s=max_gap_s,
        )
    stamp_ns = np.concatenate([part.stamp_ns for part in parts])
    wxyz = np.concatenate([part.wxyz for part in parts])
    xyz = np.concatenate([part.xyz for part in parts])
    times, first = np.unique(stamp_ns, return_index=True)
    return Trajectory(
        timestamp_ns=times,
        ego2global=pose(wxyz[first], xyz[first], where),
        where=where,
        max_gap_s=max_gap_s,
    )
