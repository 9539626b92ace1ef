"""Sharding in this process, and digests of what came out."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from fuelrail.sharding.planning.recipe import make_recipe
from fuelrail.sharding.progress import Quiet
from fuelrail.sharding.run import Outcome, shard
from fuelrail.sharding.sources.registry import SourceSpec

if TYPE_CHECKING:
    from pathlib import Path

    from fuelrail.sharding.engines import Engine


_OF_SOURCE = ("version", "missing_camera", "points", "sweeps")


def shard_nuscenes(
    root: Path,
    out: Path | str,
    *,
    num_workers: int = 1,
    progress: Quiet | None = None,
    engine: Engine | None = None,
    **values,
) -> Outcome:
    """Shard a nuScenes dataroot; ``values`` are those of the recipe, and of the source what `_OF_SOURCE` names."""
    options = {name: values.pop(name) for name in _OF_SOURCE if name in values}
    recipe = make_recipe(**{"seed": 7, **values})
    return shard(SourceSpec("nuscenes", str(root), options), out, recipe, num_workers, progress or Quiet(), engine)


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file under a folder, by relative name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


class Interrupt(Quiet):
    """Interrupts a run after this number of shards."""

    def __init__(self, after):
        self.left = after

    def shard_done(self, shard):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
