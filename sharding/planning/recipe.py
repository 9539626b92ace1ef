"""What decides every byte of a dataset, apart from the source's own bytes: the recipe of one sharding run.

It stands in the working folder while shards are made and in the manifest's provenance afterwards. A run into a folder
that holds another recipe is refused, and :func:`differences` says what differs. Paths, times, hosts and the number
of workers are no part of it.
"""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
import yaml
import zstandard

from fuelrail import __version__
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.format.codecs import (
    DEFAULT_ZSTD_LEVEL,
    MAX_DICTIONARY_BYTES,
    MIN_DICTIONARY_BYTES,
    RAW,
    ZSTD,
    ZSTD_DICT,
    planes,
)
from fuelrail.pipeline.sample.schema import BOXES, GEOMETRY, META, POINTS_EXTENSION, SWEEPS_FIELD, lidar_channel
from fuelrail.pipeline.settings import Settings, convert, read_text

if TYPE_CHECKING:
    from fuelrail.pipeline.format.manifest import LidarEntry

DEFAULT_QUALITY: Final = 92


FORM: Final = "resize=FACTOR or size=WIDTHxHEIGHT, and quality=1..100, joined by a comma"


_PACKAGES: Final = ("simplejpeg", "opencv-python-headless")


def _versions() -> str:
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)


class ImageRecipe(Settings, frozen=True):
    """How images are stored: scaled by ``resize`` (0 to 1) or to ``size`` (w, h) [px], as JPEG 4:2:0 of ``quality``."""

    resize: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    size: tuple[Annotated[int, msgspec.Meta(ge=8)], Annotated[int, msgspec.Meta(ge=8)]] | None = None
    quality: Annotated[int, msgspec.Meta(ge=1, le=100)] = DEFAULT_QUALITY
    by: str = msgspec.field(default_factory=_versions)


def parse_images(text: str) -> ImageRecipe:
    """``resize=0.5,quality=92`` or ``size=800x450``; raises ConfigError."""
    values: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        size = re.fullmatch(r"([0-9]+)x([0-9]+)", value)
        number = re.fullmatch(r"[0-9]+(\.[0-9]+)?", value)
        if name in values or not (size if name == "size" else number) or name not in ("resize", "size", "quality"):
            raise ConfigError(f"--images {text!r}: {part.strip()!r} is not understood; write {FORM}")
        if size:
            values[name] = (int(size.group(1)), int(size.group(2)))
        else:
            values[name] = float(value) if name == "resize" else int(float(value))
    recipe = convert(values, ImageRecipe, f"--images {text!r}")
    if recipe.resize is not None and recipe.size is not None:
        raise ConfigError(f"--images {text!r} has both resize and size; write {FORM}")
    return recipe


DEFAULT_SHARD_BYTES: Final = 256 << 20


MIN_SHARD_BYTES: Final = 1 << 10


LAYOUTS: Final = ("member", "frame", "none")


JPEGS: Final = ("keep", "restart")


ORDERS: Final = "frame, clip, window:N"


SMALL_MEMBERS: Final = (META, GEOMETRY, BOXES)

_LABELS: Final = {
    "scan_sha256": "the source's content (SHA-256 of its scan)",
    "shard_size_bytes": "shard size",
    "dictionary_bytes": "dictionary size",
}


_POINT_BYTES: Final = 4  # points are float32 (schema.encode_points)


_UNITS: Final = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


_SPLIT_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,31}\Z")

Splits = dict[str, float | list[str]]
"""Split name to its share of the clips, or to the names of its clips."""


class Recipe(Settings, frozen=True):
    """Everything that the bytes of a dataset depend on. The run fills in what the source and its scan say.

    ``select``: an expression over the attributes, ``limit``: the first so many samples of those, in the source's order.
    ``order``: what stays together when samples are shuffled into shards: ``frame``, ``clip`` or ``window:N``.
    ``splits``: None for the source's own. ``images``: None for the source's own bytes. ``layout``: ``member`` (compress
    what shrinks), ``frame`` (each sample as a whole, in ``.tar.zst``) or ``none``. ``dictionary_bytes``: size of a zstd
    dictionary for the small members of layout ``member``, None for none. ``scan_sha256`` is the digest of the scan
    table: which samples there are, their metadata, and the names and sizes of their files.
    ``jpeg``: ``keep`` their bytes, or ``restart``: rewrite them losslessly so that rows can be cut out
    (:mod:`fuelrail.sharding.write.images`), by the ``jpegtran`` of that version.
    """

    source: str = ""
    source_options: dict[str, Any] = msgspec.field(default_factory=dict)
    scan_sha256: str = ""
    name: str | None = None
    license: str | None = None
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    select: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1)] | None = None
    order: str = "frame"
    splits: Splits | None = None
    split_seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    images: ImageRecipe | None = None
    shard_size_bytes: Annotated[int, msgspec.Meta(ge=MIN_SHARD_BYTES)] = DEFAULT_SHARD_BYTES
    layout: Literal["member", "frame", "none"] = "member"
    compression_level: Annotated[int, msgspec.Meta(ge=1, le=19)] = DEFAULT_ZSTD_LEVEL
    dictionary_bytes: Annotated[int, msgspec.Meta(ge=MIN_DICTIONARY_BYTES, le=MAX_DICTIONARY_BYTES)] | None = None
    jpeg: Literal["keep", "restart"] = "keep"
    jpegtran: str = ""
    tool: str = f"fuelrail {__version__}"
    zstd: str = ".".join(map(str, zstandard.ZSTD_VERSION))


def make_recipe(**values: Any) -> Recipe:  # noqa: ANN401 - checked by the conversion
    """A recipe from plain values; raises ConfigError naming the one that is out of range."""
    recipe = convert(values, Recipe, "options")
    unit_frames(recipe.order)
    _check_splits(recipe.splits)
    if recipe.dictionary_bytes is not None and recipe.layout != "member":
        raise ConfigError(f"a dictionary goes with layout member only, not with layout {recipe.layout}")
    return recipe


def differences(there: Recipe, here: Recipe) -> str:
    """Both sides of every field that differs, as text; empty where the two are equal."""
    sides = [
        (_LABELS.get(field.name, field.name.replace("_", " ")), getattr(there, field.name), getattr(here, field.name))
        for field in msgspec.structs.fields(Recipe)
    ]
    return "; ".join(
        f"{name} is {_short(theirs)} there and {_short(ours)} here" for name, theirs, ours in sides if theirs != ours
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 72 else text[:69] + "..."


def codec_of(field: str, recipe: Recipe, lidars: tuple[LidarEntry, ...]) -> str:
    """The codec that a member of this field name is stored with: what shrinks is compressed, media stay raw."""
    if recipe.layout != "member":
        return RAW
    if field in SMALL_MEMBERS:
        return ZSTD if recipe.dictionary_bytes is None else ZSTD_DICT
    if field.endswith((f".{POINTS_EXTENSION}", SWEEPS_FIELD)):
        channel = lidar_channel(field)
        num_columns = next((len(lidar.columns) for lidar in lidars if lidar.channel == channel), 0)
        return planes(num_columns * _POINT_BYTES) if num_columns else ZSTD
    return RAW


def unit_frames(order: str) -> int:
    """Frames of a clip that stay together: 1 for ``frame``, N for ``window:N``, 0 for ``clip`` (all of them)."""
    if order in ("frame", "clip"):
        return 1 if order == "frame" else 0
    match = re.fullmatch(r"window:([1-9][0-9]{0,8})", order)
    if match is None:
        raise ConfigError(f"order {order!r} is unknown; known: {ORDERS} (N frames, from 1)")
    return int(match.group(1))


def parse_size(text: str, option: str = "size") -> int:
    """Bytes from ``256MB``, ``1.5 GiB`` or a plain number; raises ConfigError, with the option's name."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match.group(2).upper() not in _UNITS:
        raise ConfigError(f"{option} {text!r} is not a number with one of the units B, kB, MB, GB, KiB, MiB, GiB")
    size = int(float(match.group(1)) * _UNITS[match.group(2).upper()])
    if size < MIN_SHARD_BYTES:
        raise ConfigError(f"{option} {text!r} is under {MIN_SHARD_BYTES} bytes")
    return size


def parse_splits(text: str) -> Splits:
    """``train=0.8,val=0.2``, or the name of a JSON or YAML file that maps split names to lists of clip names."""
    if not text.strip():
        raise ConfigError("--splits is empty: write train=0.8,val=0.2, or name a file")
    if "=" not in text:
        return _read_splits(Path(text))
    splits: Splits = {}
    for part in text.split(","):
        name, _, share = part.partition("=")
        name = name.strip()
        if name in splits:
            raise ConfigError(f"--splits {text!r} has '{name}' twice")
        try:
            splits[name] = float(share)
        except ValueError as error:
            raise ConfigError(f"--splits {text!r}: {share!r} is not a number; write train=0.8,val=0.2") from error
    _check_splits(splits)
    return splits


def _read_splits(path: Path) -> Splits:
    try:
        value = yaml.safe_load(read_text(path))
        lists = msgspec.convert(value, dict[str, list[str]])
    except OSError as error:
        raise ConfigError(
            f"--splits '{path}' is neither shares such as train=0.8,val=0.2 nor a file that can be read: "
            f"{error.strerror}"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError, msgspec.ValidationError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(f"--splits '{path}' does not map split names to lists of clip names: {text}") from error
    splits: Splits = dict(lists)
    _check_splits(splits)
    return splits


def _check_splits(splits: Splits | None) -> None:
    if splits is None:
        return
    if not splits:
        raise ConfigError("splits are empty: name one at least")
    for name in splits:
        if not _SPLIT_NAME.match(name):
            raise ConfigError(f"split name {name!r} is not allowed: lower-case letters, digits and _, a letter first")
    shares = [share for share in splits.values() if isinstance(share, float)]
    if shares and not (min(shares) > 0 and abs(sum(shares) - 1) <= 1e-6):  # so put, NaN is refused too
        raise ConfigError(f"the shares of splits {', '.join(splits)} must be over 0 and add up to 1, not {sum(shares)}")
