"""The members of a sample beyond cameras, lidars and boxes, in groups: what the options choose."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, Protocol

from fuelrail.pipeline.channels.table import Channel, Law
from fuelrail.sharding.sources.adapter.channels import computed
from fuelrail.sharding.sources.nuscenes.extras.boxes2d import BoxTokens, ImageBoxes
from fuelrail.sharding.sources.nuscenes.extras.maps import Maps
from fuelrail.sharding.sources.nuscenes.extras.radar import Radars
from fuelrail.sharding.sources.nuscenes.extras.trajectories import Trajectories

if TYPE_CHECKING:
    from fuelrail.sharding.sources.adapter.frame import FileMember
    from fuelrail.sharding.sources.adapter.vector_maps import MapWindows
    from fuelrail.sharding.sources.nuscenes.boxes import Annotations
    from fuelrail.sharding.sources.nuscenes.extras.can import CanBus
    from fuelrail.sharding.sources.nuscenes.geometry import Keyframes, SceneRows
    from fuelrail.sharding.sources.nuscenes.tables import Tables
    from fuelrail.sharding.sources.shared.joins import Database
    from fuelrail.sharding.sources.shared.scan_table import Reference

GroupName = Literal["radar", "can", "boxes2d", "tokens", "trajectories", "description", "map"]
"""Names that the option ``channels`` takes."""
_DESCRIPTION: Final = Channel(
    name="description",
    kind="text",
    field="description.txt",
    law=Law("fixed"),
    optional=True,
    description="the scene in words; none in the test split",
)


class Group(Protocol):
    """One group of channels."""

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Entries of the table, of what any sample may have."""
        ...

    def members(self, rows: SceneRows, at: int) -> Iterable[FileMember | Reference]:
        """Return the members of sample number ``at`` of a scene; raise SourceError."""
        ...


class Descriptions:
    """What table ``scene`` says of a sample's scene in words."""

    channels = (_DESCRIPTION,)

    def members(self, rows: SceneRows, at: int) -> list[Reference]:  # noqa: ARG002 - all samples of a scene have it
        """Return the reference of one sample's member; none where the tables say nothing."""
        text = rows.scene.description
        return [computed(_DESCRIPTION, text.encode())] if text else []


def chosen_groups(
    names: Iterable[GroupName],
    tables: Tables,
    database: Database,
    keyframes: Keyframes,
    annotations: Annotations,
    radar_sweeps: int,
    windows: MapWindows | None,
    can: CanBus,
) -> dict[GroupName, Group]:
    """Return the groups of these names, in the order of the table of channels; ``windows`` are of the maps."""
    make: dict[GroupName, Callable[[], Group]] = {
        "radar": lambda: Radars(tables, database, keyframes, radar_sweeps),
        "can": lambda: can,
        "boxes2d": lambda: ImageBoxes(keyframes.cameras, annotations),
        "tokens": lambda: BoxTokens(annotations),
        "trajectories": lambda: Trajectories(database, keyframes, annotations),
        "description": Descriptions,
    }
    if windows is not None:
        make["map"] = partial(Maps, windows)
    chosen = set(names)
    return {name: make[name]() for name in make if name in chosen}
