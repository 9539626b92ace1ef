"""Open datasets as sources; say whether several can become one, and what it is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from fuelrail.pipeline.errors import DatasetError, SourceError
from fuelrail.pipeline.format.dataset import Dataset, open_dataset
from fuelrail.pipeline.text import differences

if TYPE_CHECKING:
    from fuelrail.pipeline.channels.table import Channel

_ALIKE: Final = {
    "cameras": "cameras",
    "lidars": "lidars",
    "classes": "classes",
    "attributes": "attributes of boxes",
    "time_base": "time base",
    "ego_origin": "origin of ego",
}


def open_source(location: str) -> Dataset:
    """Open a dataset to be read from; raise SourceError where that fails."""
    try:
        return open_dataset(location)
    except DatasetError as error:
        raise SourceError(str(error)) from error


def check_alike(datasets: Sequence[Dataset]) -> None:
    """Raise SourceError, showing both sides, unless rig, classes and conventions of all datasets are the same."""
    first = datasets[0]
    for other in datasets[1:]:
        both = f"'{first.location}' and '{other.location}'"
        for name, what in _ALIKE.items():
            ours, theirs = (_shown(getattr(dataset.manifest, name)) for dataset in (first, other))
            if ours != theirs:
                raise SourceError(
                    f"{both} cannot become one dataset: the {what} of the first are {ours}, of the second {theirs}"
                )
        one, two = (_table(dataset.manifest.extra_channels) for dataset in (first, other))
        if list(one.items()) != list(two.items()):
            sides = (
                differences(one, two, "in the first", "in the second")
                or "they are in another order"
            )
            raise SourceError(f"{both} cannot become one dataset: their channels differ: {sides}")


def check_disjoint(clips: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Raise SourceError for a clip that is in two datasets; ``clips`` are the location and the clip ids of each."""
    seen: dict[str, str] = {}
    for location, ids in clips:
        for clip in ids:
            if seen.get(clip) == location:
                raise SourceError(f"the dataset '{location}' is named twice: name each once")
            if clip in seen:
                raise SourceError(
                    f"clip '{clip}' is in '{seen[clip]}' and in '{location}', so keys would be duplicate; leave it "
                    "out of one of them (`fuelrail reshard --select`)"
                )
            seen[clip] = location


def joined(values: Sequence[str | None]) -> str | None:
    """Join names or licenses of several datasets: each once, in order; None where none is stated."""
    return " + ".join(dict.fromkeys(value for value in values if value)) or None


def joined_types(tables: Sequence[Mapping[str, type]]) -> dict[str, type]:
    """Return all attribute columns of several datasets; raise SourceError for one that is of two types."""
    types: dict[str, type] = {}
    for table in tables:
        for name, kind in table.items():
            if types.setdefault(name, kind) is not kind:
                raise SourceError(
                    f"attribute '{name}' is {types[name].__name__} in one dataset and {kind.__name__} in another"
                )
    return types


def _shown(value: object) -> str:
    if isinstance(value, tuple) and value and not isinstance(value[0], str):
        parts = [f"{entry.channel} ({entry.source_name}{_columns(entry)})" for entry in value]
        return ", ".join(parts)
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _table(channels: Sequence[Channel]) -> dict[str, Any]:
    """Return the entries by name, without what may differ between two datasets that become one."""
    alike = [
        msgspec.structs.replace(channel, codec="", description="", source_name="")
        for channel in channels
    ]
    return {channel.name: msgspec.to_builtins(channel) for channel in alike}


def _columns(entry: object) -> str:
    return f": {' '.join(entry.columns)}" if hasattr(entry, "columns") else ""
