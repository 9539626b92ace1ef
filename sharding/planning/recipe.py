"""The recipe of a sharding run: everything but the source's own bytes that the bytes of a dataset
depend on.

The working folder holds it while shards are made, and the manifest's provenance afterwards. A run
into a folder that holds another recipe is refused, and :func:`recipe_differences` says what
differs. Paths, times, hosts and the number of workers are not part of it. Fields with a description
are the user's options: flags of `fuelrail shard`, keywords of ``fuelrail.shard``.
"""

from __future__ import annotations

import importlib.metadata
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
import zstandard
from msgspec import Meta

from fuelrail import __version__
from fuelrail.pipeline.channels.kinds import KINDS
from fuelrail.pipeline.errors import ConfigError, needs
from fuelrail.pipeline.format.codecs import (
    DEFAULT_ZSTD_LEVEL,
    MAX_DICTIONARY_BYTES,
    MAX_ROW_BYTES,
    MIN_DICTIONARY_BYTES,
    RAW,
    ZSTD,
    ZSTD_DICT,
    planes,
)
from fuelrail.pipeline.format.tar import BLOCK_BYTES
from fuelrail.pipeline.sample.schema import (
    BOXES,
    GEOMETRY,
    META,
    POINTS_EXTENSION,
    SWEEPS_FIELD,
    lidar_channel,
)
from fuelrail.pipeline.settings import (
    Settings,
    convert,
    flag,
    parse_yaml,
    read_text,
)
from fuelrail.pipeline.text import differences

if TYPE_CHECKING:
    from fuelrail.pipeline.channels.sensors import LidarEntry
    from fuelrail.pipeline.channels.table import Channel

DEFAULT_QUALITY: Final = 92

ZSTD_VERSION: Final = ".".join(map(str, zstandard.ZSTD_VERSION))
"""What the stored bytes depend on."""

FORM: Final = "resize=FACTOR or size=WIDTHxHEIGHT, and quality=1..100, joined by a comma"

_NPY_HEADER_BYTES: Final = 128

_PACKAGES: Final = ("simplejpeg", "opencv-python-headless")

DEFAULT_SHARD_BYTES: Final = 256 << 20

MIN_SHARD_BYTES: Final = 1 << 10

ORDERS: Final = "frame, clip, window:N"

SMALL_MEMBERS: Final = (META, GEOMETRY, BOXES)

_LABELS: Final = {
    "scan_sha256": "the source's content (SHA-256 of its scan)",
    "shard_size_bytes": "shard size",
    "dictionary_bytes": "dictionary size",
    "jpegtran": "writer of restart markers",
}

_POINT_BYTES: Final = 4  # points are float32 (schema.encode_points)

_UNITS: Final = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
}

# As FORMAT.md has it: shards are named after it.
_SPLIT_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,99}\Z")

Splits = dict[str, float | list[str]]
"""Split name to its share of the clips, or to the names of its clips."""

FLAGS: Final = {
    "shard_size_bytes": "shard-size",
    "compression_level": "zstd-level",
    "dictionary_bytes": "dictionary",
}
"""Flags whose names differ from their field of the recipe."""


def _list_versions() -> str:
    with needs("images that are scaled or encoded anew", "fuelrail[opencv]"):
        return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)


class ImageRecipe(Settings, frozen=True):
    """Stored images: scaled by ``resize`` (0 to 1) or to ``size`` (w, h) [px], as JPEG 4:2:0 of
    ``quality``.
    """

    resize: Annotated[float, Meta(gt=0, le=1)] | None = None
    size: tuple[Annotated[int, Meta(ge=8)], Annotated[int, Meta(ge=8)]] | None = None
    quality: Annotated[int, Meta(ge=1, le=100)] = DEFAULT_QUALITY
    by: str = msgspec.field(default_factory=_list_versions)


def parse_images(text: str) -> ImageRecipe:
    """Parse ``resize=0.5,quality=92`` or ``size=800x450``; raises ConfigError."""
    values: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        size = re.fullmatch(r"([0-9]+)x([0-9]+)", value)
        number = re.fullmatch(r"[0-9]+(\.[0-9]+)?", value)
        if (
            name in values
            or not (size if name == "size" else number)
            or name not in ("resize", "size", "quality")
        ):
            raise ConfigError(f"{part.strip()!r} is not understood; write {FORM}")
        if size:
            width, height = size.groups()
            values[name] = (int(width), int(height))
        else:
            values[name] = float(value) if name == "resize" else int(float(value))
    recipe = convert(values, ImageRecipe, "images")
    if recipe.resize is not None and recipe.size is not None:
        raise ConfigError(f"there are both resize and size; write {FORM}")
    return recipe


def parse_size(text: str) -> int:
    """Parse a number of bytes: ``256MB``, ``1.5 GiB`` or a plain number; raises ConfigError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match.group(2).upper() not in _UNITS:
        raise ConfigError(
            "a size must be a number with one of the units B, kB, MB, GB, KiB, MiB, GiB, "
            "such as 256MiB"
        )
    unit = _UNITS[match.group(2).upper()]
    size = int(float(match.group(1)) * unit)
    if size < MIN_SHARD_BYTES:
        raise ConfigError(f"a size must be {MIN_SHARD_BYTES} bytes or more")
    return size


def parse_splits(text: str) -> Splits:
    """Parse ``train=0.8,val=0.2``, or read a JSON or YAML file that maps split names to lists of
    clip names.
    """
    if not text.strip():
        raise ConfigError("it is empty; write train=0.8,val=0.2, or name a file")
    splits: Splits = {}
    if "=" not in text:
        problem = f"'{text}' does not map split names to lists of clip names"
        try:
            _, value = parse_yaml(read_text(Path(text)), takes_merges=True)
        except OSError as error:
            raise ConfigError(
                f"'{text}' is neither shares such as train=0.8,val=0.2 nor a file that can be "
                f"read: {error.strerror}"
            ) from error
        except ValueError as error:
            raise ConfigError(f"{problem}: {error}") from error
        splits.update(convert(value, dict[str, list[str]], problem))
        try:
            _check_splits(splits)
        except ConfigError as error:
            raise ConfigError(f"'{text}': {error}") from error
        return splits
    for part in text.split(","):
        name, _, share = part.partition("=")
        name = name.strip()
        if name in splits:
            raise ConfigError(f"duplicate split '{name}'")
        try:
            splits[name] = float(share)
        except ValueError as error:
            raise ConfigError(f"{share!r} is not a number; write train=0.8,val=0.2") from error
    _check_splits(splits)
    return splits


def check_split_names(names: Iterable[str]) -> None:
    """Raise ConfigError for a split that shards cannot be named after."""
    for name in names:
        if not _SPLIT_NAME.match(name):
            raise ConfigError(
                f"split name {name!r:.110} is not allowed; use at most 100 lower-case "
                "letters, digits and _, starting with a letter; --splits overrides the source's own"
            )


def _check_splits(splits: Splits | None) -> None:
    if splits is None:
        return
    if not splits:
        raise ConfigError("splits are empty; name at least one")
    check_split_names(splits)
    shares = [share for share in splits.values() if isinstance(share, float)]
    is_whole = abs(sum(shares) - 1) <= 1e-6  # false for NaN too
    if shares and not (min(shares) > 0 and is_whole):
        raise ConfigError(
            f"the shares of splits {', '.join(splits)} must be over 0 and add up to 1, got "
            f"{sum(shares)}"
        )


class Recipe(Settings, frozen=True):
    """Everything that the bytes of a dataset depend on.

    Fields without a description are set by the run itself.

    ``source_options`` are those of the source, defaults included. ``scan_sha256`` is the digest of
    the scan table: the samples, their metadata, and the names and sizes of their files. ``images``:
    None for the source's own bytes. ``restart_writer`` names what added restart markers to JPEGs; a
    manifest has it as ``jpegtran``, the program that did so once.
    """

    source: str = ""
    source_options: dict[str, Any] = msgspec.field(default_factory=dict)
    scan_sha256: str = ""
    name: Annotated[str | None, flag("name of the dataset (default: from the source)")] = None
    license: Annotated[
        str | None,
        flag("license of the data, stored in the manifest and in every sample"),
    ] = None
    seed: Annotated[
        int,
        Meta(ge=0, le=2**63 - 1),
        flag("random seed for the order of samples in the shards (default: 0)"),
    ] = 0
    select: Annotated[
        str | None,
        flag(
            (
                'select samples by their attributes: "night and num_pedestrian >= 3 and '
                "location != 'x'\""
            ),
            metavar="EXPRESSION",
        ),
    ] = None
    limit: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        flag("keep only the first N selected samples"),
    ] = None
    order: Annotated[
        str,
        flag("shuffle granularity: frame, clip or window:N (default: frame)"),
    ] = "frame"
    splits: Annotated[
        Splits | None,
        flag(
            "share of the clips for each split (train=0.8,val=0.2), or a JSON or YAML file "
            "that maps each split to a list of clips (default: the source's own splits, or "
            "a single split train)",
            parse=parse_splits,
        ),
    ] = None
    split_seed: Annotated[
        int,
        Meta(ge=0, le=2**63 - 1),
        flag("random seed for which clips go to which split (default: 0)"),
    ] = 0
    images: Annotated[
        ImageRecipe | None,
        flag(f"store smaller images, which is lossy: {FORM}", parse=parse_images),
    ] = None
    shard_size_bytes: Annotated[
        int,
        Meta(ge=MIN_SHARD_BYTES),
        flag(
            f"approximate size of a shard (default: {DEFAULT_SHARD_BYTES >> 20}MiB)",
            parse=parse_size,
            metavar="SIZE",
        ),
    ] = DEFAULT_SHARD_BYTES
    layout: Annotated[
        Literal["member", "frame", "none"],
        flag(
            "member: compress metadata and points, each member on its own; frame: compress "
            "each sample as a whole (.tar.zst); none: no compression (default: member)"
        ),
    ] = "member"
    compression_level: Annotated[
        int, Meta(ge=1, le=19), flag("zstd compression level, 1 to 19")
    ] = DEFAULT_ZSTD_LEVEL
    dictionary_bytes: Annotated[
        Annotated[int, Meta(ge=MIN_DICTIONARY_BYTES, le=MAX_DICTIONARY_BYTES)] | None,
        flag(
            "train a zstd dictionary of this size (64KiB) for metadata, geometry and boxes; needs "
            "layout member, and is useful for datasets without images (default: none)",
            parse=parse_size,
            metavar="SIZE",
        ),
    ] = None
    jpeg: Annotated[
        Literal["keep", "restart"],
        flag(
            "keep: store JPEGs byte for byte; restart: rewrite them losslessly so that "
            "loaders can skip the parts outside the crop (default: keep)"
        ),
    ] = "keep"
    restart_writer: str = msgspec.field(default="", name="jpegtran")
    tool: str = f"fuelrail {__version__}"
    zstd: str = ZSTD_VERSION


def make_recipe(**values: Any) -> Recipe:  # checked by the conversion
    """Make a recipe from plain values; raises ConfigError naming the one that is not allowed."""
    recipe = convert(values, Recipe, "options")
    check_recipe(recipe)
    return recipe


def check_recipe(recipe: Recipe) -> None:
    """Raise ConfigError for options that are not allowed, or not together."""
    unit_frames(recipe.order)
    _check_splits(recipe.splits)
    if recipe.dictionary_bytes is not None and recipe.layout != "member":
        raise ConfigError(f"a dictionary needs layout member, got layout {recipe.layout}")


def recipe_differences(stored: Recipe, current: Recipe) -> str:
    """Return every field that differs with both its values, as text; empty where the two are
    equal.
    """
    stored_fields, current_fields = (
        {
            _LABELS.get(name, name.replace("_", " ")): value
            for name, value in msgspec.to_builtins(recipe).items()
        }
        for recipe in (stored, current)
    )
    return differences(stored_fields, current_fields, "there", "here")


def channel_codec(channel: Channel) -> str:
    """Return the codec of a channel's members where what shrinks is compressed.

    Arrays that fit into one block of a tar stay raw: they take a block either way.
    """
    if channel.dtype and None not in channel.shape:
        num_values = math.prod(side or 1 for side in channel.shape)
        num_bytes = channel.numpy_dtype.itemsize * num_values
        if _NPY_HEADER_BYTES + num_bytes <= BLOCK_BYTES:
            return RAW
    row_bytes = KINDS[channel.kind].row_bytes(channel)
    if not row_bytes or row_bytes > MAX_ROW_BYTES:
        return RAW if row_bytes is None else ZSTD
    return planes(row_bytes)


def codec_of(
    field: str,
    recipe: Recipe,
    lidars: tuple[LidarEntry, ...],
    extra: tuple[Channel, ...] = (),
) -> str:
    """Return the codec of a member with this field name: what shrinks is compressed, media stay
    raw.

    ``extra`` are the channels other than cameras, lidars and boxes.
    """
    if recipe.layout != "member":
        return RAW
    channel = next((candidate for candidate in extra if candidate.field == field), None)
    if channel is not None:
        return channel_codec(channel)
    if field in SMALL_MEMBERS:
        return ZSTD if recipe.dictionary_bytes is None else ZSTD_DICT
    if field.endswith((f".{POINTS_EXTENSION}", SWEEPS_FIELD)):
        name = lidar_channel(field)
        num_columns = next((len(lidar.columns) for lidar in lidars if lidar.channel == name), 0)
        return planes(num_columns * _POINT_BYTES) if num_columns else ZSTD
    return RAW


def unit_frames(order: str) -> int:
    """Return how many frames of a clip stay together: 1 for ``frame``, N for ``window:N``, 0
    (all) for ``clip``.
    """
    if order in ("frame", "clip"):
        return 1 if order == "frame" else 0
    match = re.fullmatch(r"window:([1-9][0-9]{0,8})", order)
    if match is None:
        raise ConfigError(f"order {order!r} is unknown; known: {ORDERS} (N frames, from 1)")
    return int(match.group(1))
