"""Engines run the same pure shard tasks in different places; all of them give the same bytes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fuelrail.sharding.write.shard_writer import ShardDone, WriteJob

LOCAL_ENGINES: Final = ("threads", "processes")
ENGINES: Final = (*LOCAL_ENGINES, "ray")


class Engine(Protocol):
    """Where shards are made."""

    def make_shards(self, job: WriteJob, numbers: Sequence[int], advance: Callable[[int], None]) -> Iterator[ShardDone]:
        """Make these shards of the plan; yields them as they are done, in any order.

        ``advance`` gets the bytes written since it was last called, in the calling thread. Raises what a task raised
        first; the others are stopped between two samples, and nothing of them is left half-written.
        """
        ...


def make_engine(name: str | None, num_workers: int, ray_address: str | None) -> Engine:
    """The engine of that name; None for threads or processes, whichever suits so many workers.

    ``num_workers`` of 0 means one for each core. ``ray_address`` is an existing cluster's (``auto`` for the one this
    machine belongs to), None for one of this run's own. Raises ConfigError where Ray is not installed.
    """
    if name == "ray":
        from fuelrail.sharding.engines.ray import RayEngine

        return RayEngine(ray_address, num_workers)
    from fuelrail.sharding.engines.local import LocalEngine

    return LocalEngine(num_workers or len(os.sched_getaffinity(0)), name)
