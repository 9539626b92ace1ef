"""Engines run the same pure shard tasks in different places; all of them give the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Final, Literal, Protocol

from msgspec import Meta

from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.runtime.host import num_usable_cpus
from fuelrail.pipeline.settings import Settings, flag

if TYPE_CHECKING:
    from fuelrail.sharding.write.shard_writer import ShardDone, WriteJob

LOCAL_ENGINES: Final = ("threads", "processes")


RayAddress = Annotated[
    str | None,
    flag(
        "address of a Ray cluster: auto, or HOST:PORT (default: start a local one)",
        metavar="ADDRESS",
    ),
]


class EngineOptions(Settings, frozen=True, kw_only=True):
    """Options that say where shards are made, and by how many workers."""

    workers: Annotated[int, Meta(ge=0), flag("number of workers (default: one per core)")] = 0
    engine: Annotated[
        Literal["threads", "processes", "ray"] | None,
        flag(
            "where shards are made: threads or processes of this machine, or a Ray cluster; "
            "the bytes are the same (default: threads for a few workers, processes for more)"
        ),
    ] = None
    ray_address: RayAddress = None

    @property
    def num_workers(self) -> int:
        """The number of workers, one per core where none is given."""
        return self.workers or num_usable_cpus()


class Engine(Protocol):
    """A place where shards are made."""

    def make_shards(
        self,
        job: WriteJob,
        numbers: Sequence[int],
        advance: Callable[[int], None],
    ) -> Iterator[ShardDone]:
        """Make these shards of the plan; yield them as they are done, in any order.

        ``advance`` gets the bytes written since its last call, in the calling thread. Raises the
        first error of a task; the other tasks stop between two samples and leave no partial file.
        """
        ...


def check_address(address: str | None, purpose: str, *, is_used: bool) -> None:
    """Raise ConfigError for an address of Ray without what it is for."""
    if address is not None and not is_used:
        raise ConfigError(f"a Ray address needs {purpose}, got address '{address}' without it")


def make_engine(options: EngineOptions) -> Engine:
    """Make the engine; raises ConfigError where Ray is not installed or options do not go
    together.
    """
    check_address(options.ray_address, "the engine ray", is_used=options.engine == "ray")
    if options.engine == "ray":
        from fuelrail.sharding.engines.ray import RayEngine

        return RayEngine(options.ray_address, options.workers)
    from fuelrail.sharding.engines.local import LocalEngine

    return LocalEngine(options.num_workers, options.engine)
