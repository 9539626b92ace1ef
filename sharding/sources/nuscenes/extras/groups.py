"""The opt-in channels of nuScenes by name, and what a worker makes members of.

A reference of theirs is JSON: everything that the member's bytes depend on but the files it names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Protocol

import msgspec

from fuelrail.pipeline.channels.table import Channel, Law
from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.nuscenes.extras.batch import Inline, inline
from fuelrail.sharding.sources.nuscenes.extras.boxes2d import BoxTokens, ImageBoxes
from fuelrail.sharding.sources.nuscenes.extras.can import CanBus, CanMessages
from fuelrail.sharding.sources.nuscenes.extras.maps import Maps, MapWindow
from fuelrail.sharding.sources.nuscenes.extras.radar import RadarFiles, Radars
from fuelrail.sharding.sources.nuscenes.extras.trajectories import Trajectories

if TYPE_CHECKING:
    from fuelrail.sharding.sources.nuscenes.extras.batch import Batch
    from fuelrail.sharding.sources.nuscenes.geometry import Keyframes
    from fuelrail.sharding.sources.shared.joins import Database
    from fuelrail.sharding.sources.shared.scan_table import Reference

Group = Literal["radar", "can", "boxes2d", "tokens", "trajectories", "description", "map"]
"""Names that the option ``channels`` takes."""
MADE: Final = "{"
"""Begins a reference that :func:`made` knows."""
_DECODER: Final[msgspec.json.Decoder[Inline | RadarFiles | CanMessages | MapWindow]] = msgspec.json.Decoder(
    Inline | RadarFiles | CanMessages | MapWindow
)


_DESCRIPTION: Final = Channel(
    name="description",
    kind="text",
    field="description.txt",
    law=Law("fixed"),
    optional=True,
    description="the scene in words; none in the test split",
)


class _Channels(Protocol):
    """One group of channels."""

    @property
    def channels(self) -> tuple[Channel, ...]: ...

    def members(self, batch: Batch, at: int) -> list[Reference]: ...


class Descriptions:
    """What table ``scene`` says of a sample's scene in words."""

    channels = (_DESCRIPTION,)

    def members(self, batch: Batch, at: int) -> list[Reference]:
        """The reference of one sample's member; none where the tables say nothing."""
        text = batch.scene(at).description
        return [inline(_DESCRIPTION, text.encode())] if text else []


class Extras:
    """The chosen groups of channels of one scan."""

    def __init__(
        self, chosen: Sequence[Group], folder: Path, database: Database, keyframes: Keyframes, *, radar_sweeps: int
    ) -> None:
        has_boxes = len(keyframes.annotations) > 0
        make: dict[Group, Callable[[], _Channels]] = {
            "radar": lambda: Radars(folder, database, keyframes, radar_sweeps),
            "can": CanBus,
            "boxes2d": lambda: ImageBoxes(keyframes.cameras, has_boxes=has_boxes),
            "tokens": lambda: BoxTokens(has_boxes=has_boxes),
            "trajectories": lambda: Trajectories(database, keyframes),
            "description": Descriptions,
            "map": Maps,
        }
        self._by_name = {name: make[name]() for name in make if name in chosen}
        self._groups = list(self._by_name.values())

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Entries of the table, once all samples are through."""
        return tuple(channel for group in self._groups for channel in group.channels)

    @property
    def empty(self) -> list[str]:
        """The chosen groups of which the source has nothing, once all samples are through."""
        return [name for name, group in self._by_name.items() if not group.channels]

    def look_at(self, batch: Batch) -> None:
        """Look at files of the batch together, of which there are many: those of radars. Raises SourceError."""
        for group in self._groups:
            if isinstance(group, Radars):
                group.look_at(batch)

    def members(self, batch: Batch, at: int) -> list[Reference]:
        """References of one sample's members, in the table's order; raises SourceError."""
        return [member for group in self._groups for member in group.members(batch, at)]


def check_apart(given: Sequence[Channel], own: Sequence[Channel], where: str) -> None:
    """Raise SourceError where a channel of ``where`` has the name of an opt-in channel."""
    names = {channel.name for channel in own}
    for channel in given:
        if channel.name in names:
            raise SourceError(
                f"{where} has the channel '{channel.name}', which the option channels makes too: rename or leave "
                "out one"
            )


def made(ref: str, read: Callable[[str], bytes]) -> bytes:
    """The bytes of a member by its reference; ``read`` gives a file's bytes. Raises SourceError."""
    return _DECODER.decode(ref).member(read)
