"""A loader whose batches Ray actors make, while actors and nodes are killed."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fuelrail import DataLoader
    from support.ray_cluster import RayCluster

_ACTORS_A_NODE = 7  # that are killed between two nodes


def batches_through_kills(
    loader: DataLoader, cluster: RayCluster, num_kills: int, seed: int
) -> tuple[list[Any], Any]:
    """Take whole epochs until that many actors and nodes are dead; return the batches, and a count of the dead.

    An actor's process gets SIGKILL, so does a node's raylet with all its processes; another node takes its place.
    """
    rng = random.Random(seed)
    batches = []
    killed = Counter[str]()
    while killed.total() < num_kills:
        for batch in loader:
            batches.append(batch)
            if killed.total() == num_kills or rng.random() < 0.5:
                continue
            if killed["actor"] == _ACTORS_A_NODE * (1 + killed["node"]):
                cluster.tell("kill")
                cluster.tell("add")
                killed["node"] += 1
            elif actors := cluster.processes("ray::StepMaker"):
                rng.choice(actors).kill()
                killed["actor"] += 1
    return batches, killed
