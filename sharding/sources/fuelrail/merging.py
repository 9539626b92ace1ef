"""Open datasets as sources; say whether several can become one, and what it is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from fuelrail.pipeline.errors import DatasetError, SourceError
from fuelrail.pipeline.format.dataset import Dataset, open_dataset
from fuelrail.pipeline.text import differences

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
    """Raise SourceError, showing both sides, unless rig, classes and conventions of all datasets
    are the same.
    """
    first = datasets[0]
    for second in datasets[1:]:
        places = f"'{first.location}' and '{second.location}'"
        for name, noun in _ALIKE.items():
            texts = []
            for dataset in (first, second):
                value = getattr(dataset.manifest, name)
                entries = value if isinstance(value, tuple) else (value,)
                parts = []
                for entry in entries:
                    part = str(entry)
                    if hasattr(entry, "channel"):
                        part = f"{entry.channel} ({entry.source_name}"
                        if hasattr(entry, "columns"):
                            part += f": {' '.join(entry.columns)}"
                        part += ")"
                    parts.append(part)
                texts.append(", ".join(parts))
            if texts[0] != texts[1]:
                raise SourceError(
                    f"{places} cannot become one dataset: the {noun} of the first are "
                    f"{texts[0]}, of the second {texts[1]}"
                )
        tables = []
        for dataset in (first, second):
            alike = [
                msgspec.structs.replace(
                    channel,
                    codec="",
                    description="",
                    source_name="",
                )
                for channel in dataset.manifest.extra_channels
            ]
            tables.append({channel.name: msgspec.to_builtins(channel) for channel in alike})
        first_table, second_table = tables
        if list(first_table.items()) != list(second_table.items()):
            sides = (
                differences(first_table, second_table, "in the first", "in the second")
                or "they are in another order"
            )
            raise SourceError(f"{places} cannot become one dataset: their channels differ: {sides}")


def check_disjoint(clips: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Raise SourceError for a clip that is in two datasets; ``clips`` are the location and the
    clip ids of each.
    """
    location_of: dict[str, str] = {}
    for location, ids in clips:
        for clip in ids:
            if location_of.get(clip) == location:
                raise SourceError(f"the dataset '{location}' is named twice: name each once")
            if clip in location_of:
                raise SourceError(
                    f"clip '{clip}' is in '{location_of[clip]}' and in '{location}', so "
                    "keys would be duplicate; leave it out of one of them (`fuelrail "
                    "reshard --select`)"
                )
            location_of[clip] = location


def joined(values: Sequence[str | None]) -> str | None:
    """Join names or licenses of several datasets: each once, in order; None where none is
    stated.
    """
    return " + ".join(dict.fromkeys(value for value in values if value)) or None


def joined_types(tables: Sequence[Mapping[str, type]]) -> dict[str, type]:
    """Return all attribute columns of several datasets; raise SourceError for one that is of two
    types.
    """
    types: dict[str, type] = {}
    for table in tables:
        for name, kind in table.items():
            if types.setdefault(name, kind) is not kind:
                raise SourceError(
                    f"attribute '{name}' is {types[name].__name__} in one dataset and "
                    f"{kind.__name__} in another"
                )
    return types
