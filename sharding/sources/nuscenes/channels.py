"""Channels beside the nuScenes tables: whatever a team has for each sample, as files that are stored as they are.

``{version}/channels.json`` is a list of entries of the table of channels (FORMAT.md, section 2.1); the file of channel
``depth`` of a sample is ``channels/depth/{sample token}.{extension}``. nuScenes itself has none.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from fuelrail.pipeline.channels.table import Channel
from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.shared.files import source_files
from fuelrail.sharding.sources.shared.foreign import read_json
from fuelrail.sharding.sources.shared.scan_table import Reference

CHANNELS_FILE: Final = "channels.json"
CHANNELS_FOLDER: Final = "channels"


def load_channels(folder: Path) -> tuple[Channel, ...]:
    """The entries beside the tables in ``folder``; none where the file is not there. Raises SourceError."""
    files, name = source_files(str(folder.parent)), f"{folder.name}/{CHANNELS_FILE}"
    if not (folder / CHANNELS_FILE).exists():
        return ()
    return read_json(files.read(name), f"'{folder / CHANNELS_FILE}'", tuple[Channel, ...], "is not a list of channels")


def channel_file(channel: Channel, token: str) -> str:
    """The file of a sample below the dataroot."""
    return f"{CHANNELS_FOLDER}/{channel.name}/{token}.{channel.extension}"


def channel_members(
    channels: tuple[Channel, ...], token: str, file_bytes: Callable[[str], int | None]
) -> list[Reference]:
    """References of a sample's members; ``file_bytes`` gives a file's size, None where it is not there.

    Raises SourceError for a channel that is not optional and has no file.
    """
    members = []
    for channel in channels:
        name = channel_file(channel, token)
        size = file_bytes(name)
        if size is not None:
            members.append(Reference(channel.field, name, size))
        elif not channel.optional:
            raise SourceError(
                f"file '{name}' of channel '{channel.name}' is not there: bring it there, or say \"optional\": true in "
                f"{CHANNELS_FILE}"
            )
    return members
