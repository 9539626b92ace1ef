"""The members of a sample beyond cameras, lidars and boxes, in groups: their form, and the group of
one's own files.

``{version}/channels.json`` is a list of entries of the table of channels (FORMAT.md, section 2.1);
the file of channel ``depth`` of a sample is ``channels/depth/{sample token}.{extension}``. nuScenes
itself has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol

from fuelrail.pipeline.channels.table import Channel
from fuelrail.sharding.sources.adapter.channels import value_channel
from fuelrail.sharding.sources.adapter.frame import FileMember

if TYPE_CHECKING:
    from fuelrail.sharding.sources.nuscenes.geometry import SceneRows
    from fuelrail.sharding.sources.nuscenes.tables import Tables
    from fuelrail.sharding.sources.shared.scan_table import Reference

GroupName = Literal["radar", "can", "boxes2d", "tokens", "trajectories", "description", "map"]
"""Names that the option ``channels`` takes."""
CHANNELS_FILE: Final = "channels.json"
CHANNELS_FOLDER: Final = "channels"
DESCRIPTION: Final = value_channel(
    "description", description="the scene in words; none in the test split"
)


class Group(Protocol):
    """One group of channels."""

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Entries of the table, of what any sample may have."""
        ...

    def members(self, rows: SceneRows, number: int) -> Iterable[FileMember | Reference]:
        """Return the members of sample ``number`` of a scene; raise SourceError."""
        ...


class Stated(NamedTuple):
    """Channels of what frames have themselves: values and 2-D boxes."""

    channels: tuple[Channel, ...]

    def members(self, rows: SceneRows, number: int) -> tuple[()]:  # noqa: ARG002 - it has none
        """Return none."""
        return ()


def load_channels(tables: Tables) -> tuple[Channel, ...]:
    """Return the entries beside the tables; none where the file is not there. Raise SourceError."""
    return tables.beside(CHANNELS_FILE, tuple[Channel, ...], "is not a list of channels") or ()


def channel_file(channel: Channel, token: str) -> str:
    """Return the file of a sample below the dataroot."""
    return f"{CHANNELS_FOLDER}/{channel.name}/{token}.{channel.extension}"


class OwnChannels:
    """The channels that have files beside the tables."""

    def __init__(self, channels: tuple[Channel, ...]) -> None:
        self.channels = channels

    def members(self, rows: SceneRows, number: int) -> Iterator[FileMember]:
        """Yield the members of one sample."""
        for channel in self.channels:
            hint = f'bring it there, or say "optional": true in {CHANNELS_FILE}'
            name = channel_file(channel, rows.tokens[number])
            yield FileMember(
                channel.field,
                name,
                (name,),
                "" if channel.optional else hint,
                is_estimate=False,
            )
