"""The whole table: what is wrong with it, which channels a reader takes, and their values in one
sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fuelrail.pipeline.channels.kinds import KINDS, image_size
from fuelrail.pipeline.channels.laws import LAWS
from fuelrail.pipeline.channels.logits import Logits
from fuelrail.pipeline.channels.table import MAX_CHANNELS, Channel, broken_entry
from fuelrail.pipeline.errors import (
    ConfigError,
    ManifestError,
    MemberError,
    SchemaError,
)
from fuelrail.pipeline.limits import LOGITS_OF_SAMPLE, MASKS_OF_SAMPLE

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.arrays import Buffer


def broken_table(channels: Sequence[Channel], *, known_only: bool = False) -> Iterator[str]:
    """Yield what is wrong with a table, entry by entry.

    ``known_only`` leaves out that a kind or law is unknown here, and what follows from it: a reader
    need not know the channels that it does not select.
    """
    if len(channels) > MAX_CHANNELS:
        yield f"{len(channels)} channels, at most {MAX_CHANNELS} are allowed"
        return
    table = {channel.name: channel for channel in channels}
    for name, count in Counter(channel.name for channel in channels).items():
        if count > 1:
            yield f"channel {name!r:.110}: the name occurs twice"
    for channel in channels:
        faults = list(broken_entry(channel))
        kind = KINDS.find(channel.kind)
        law = LAWS.find(channel.law.name)
        if not known_only or (kind is not None and law is not None):
            faults += _find_faults_of_kind_and_law(channel, table)
        yield from (f"channel {channel.name!r:.110}: {text}" for text in faults)


def _find_faults_of_kind_and_law(channel: Channel, table: Mapping[str, Channel]) -> Iterator[str]:
    kind = KINDS.find(channel.kind)
    law = LAWS.find(channel.law.name)
    if kind is None:
        yield f"its kind {channel.kind!r:.80} is unknown; known: {', '.join(KINDS.names())}"
    if law is None:
        yield f"its law {channel.law.name!r:.80} is unknown; known: {', '.join(LAWS.names())}"
    if kind is None or law is None:
        return
    if channel.extension not in kind.extensions:
        yield (
            f"field '{channel.field}' of kind '{channel.kind}' must end with one of "
            f"{', '.join(kind.extensions)}"
        )
    yield from kind.broken(channel)
    yield from law.broken(channel, table)


def check_table(
    channels: Sequence[Channel],
    where: str,
    error: type[Exception],
    *,
    known_only: bool = False,
) -> None:
    """Raise ``error``, naming ``where`` and the channel, for the first thing that is wrong with
    a table.
    """
    for text in broken_table(channels, known_only=known_only):
        raise error(f"'{where}': {text}")


def select(
    channels: Sequence[Channel],
    names: Sequence[str],
    where: str,
) -> tuple[Channel, ...]:
    """Return the entries of these names, in the table's order.

    Raises ConfigError, listing the names there are, for one that is not in the table, and
    ManifestError for a channel whose kind or law is unknown here.
    """
    table = {channel.name: channel for channel in channels}
    for name in names:
        if name not in table:
            raise ConfigError(
                f"'{where}' has no channel {name!r:.110}; it has: {', '.join(table) or 'none'}"
            )
        for text in _find_faults_of_kind_and_law(table[name], table):
            raise ManifestError(
                f"'{where}': channel '{name}': {text}; leave it out, or install what knows it"
            )
    return tuple(channel for channel in channels if channel.name in names)


def decode_values(
    members: Mapping[str, Buffer],
    channels: Sequence[Channel],
    key: str,
) -> dict[str, Any]:
    """Return the value of each channel by name, None where the sample lacks an optional one.

    ``members`` are raw bytes by field name. Raises SchemaError or ImageError with key and member.
    """
    values: dict[str, Any] = {}
    num_bytes = Counter[str]()
    for channel in channels:
        data = members.get(channel.field)
        try:
            if data is None and not channel.optional:
                raise SchemaError(
                    f"channel '{channel.name}' is missing, and the table does not say optional"
                )
            values[channel.name] = None
            if data is not None:
                if channel.kind == "image":
                    _add_mask(num_bytes, data, channel)
                values[channel.name] = KINDS[channel.kind].decode(data, channel)
                if isinstance(values[channel.name], Logits):
                    _add_logits(num_bytes, values[channel.name], channel)
        except MemberError as error:
            raise type(error)(error.message, key=key, member=channel.field) from error
    return values


def check_members(
    members: Mapping[str, Buffer],
    channels: Sequence[Channel],
    sizes: Mapping[str, tuple[int, int]],
    *,
    deep: bool = False,
) -> Iterator[tuple[str, str]]:
    """Yield field name and text of each extra member of a sample that is not as the table says.

    ``sizes`` are width and height [px] of the stored images that the sample has, by camera.
    ``deep`` decodes the pixels of images. Channels whose kind is unknown here are not looked at.
    """
    num_bytes = Counter[str]()
    for channel in channels:
        data = members.get(channel.field)
        kind = KINDS.find(channel.kind)
        if data is None:
            if not channel.optional:
                yield (
                    channel.field,
                    f"channel '{channel.name}' is missing, and the table does not say optional",
                )
            continue
        if kind is None:
            continue
        try:
            if channel.kind == "image":
                _add_mask(num_bytes, data, channel)
            value = kind.check(data, channel)
            if isinstance(value, Logits):
                _add_logits(num_bytes, value, channel)
            text = _misfit(data, channel, sizes)
            if deep:
                kind.decode(data, channel)
        except MemberError as error:
            text = error.message
        if text is not None:
            yield channel.field, text


def _add_logits(num_bytes: Counter[str], value: Logits, channel: Channel) -> None:
    """Count the bytes of one more channel of logits of a sample; raise SchemaError over the
    limit.
    """
    num_bytes["logits"] += sum(part.nbytes for part in value.parts.values())
    text = LOGITS_OF_SAMPLE.broken(num_bytes["logits"])
    if text is not None:
        raise SchemaError(f"with channel '{channel.name}' what the sample has of logits {text}")


def _add_mask(num_bytes: Counter[str], data: Buffer, channel: Channel) -> None:
    """Count the bytes of the pixels of one more mask of a sample, by its header; raise
    SchemaError over the limit.
    """
    width, height = image_size(data, channel)
    components = 3 if len(channel.shape) == 3 else 1
    num_bytes["masks"] += width * height * components * channel.numpy_dtype.itemsize
    text = MASKS_OF_SAMPLE.broken(num_bytes["masks"])
    if text is not None:
        raise SchemaError(f"with channel '{channel.name}' what the sample has of masks {text}")


def _misfit(
    data: Buffer,
    channel: Channel,
    sizes: Mapping[str, tuple[int, int]],
) -> str | None:
    """Return why a raster is not of the size of its camera's stored image; None where it is, and
    for other laws.
    """
    law = channel.law
    if law.name != "image" or law.camera is None:
        return None
    if law.camera not in sizes:
        return (
            f"the sample has no image of camera '{law.camera}', which channel '{channel.name}' "
            "lies on"
        )
    image_width, image_height = sizes[law.camera]
    if channel.kind == "image":
        width, height = image_size(data, channel)
    else:
        raster = KINDS[channel.kind].decode(data, channel)
        height, width = raster.shape[:2]
    fraction = law.fraction or 1
    expected_width = -(-image_width // fraction)
    expected_height = -(-image_height // fraction)
    if width == expected_width and height == expected_height:
        return None
    return (
        f"{width} x {height} pixels; on the image of '{law.camera}' of {image_width} x "
        f"{image_height} at 1/{fraction} it has {expected_width} x {expected_height}"
    )
