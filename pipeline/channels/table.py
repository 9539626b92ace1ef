"""The records of the channel table, and the checks that need no registry.

FORMAT.md has the table, section 2.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.settings import Settings
from fuelrail.pipeline.text import shortened

DTYPES: Final = (
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "float16",
    "uint32",
    "int32",
    "float32",
    "uint64",
    "int64",
    "float64",
)
"""What arrays may hold; stored little-endian."""
MAX_CHANNELS: Final = 1024
MAX_RANK: Final = 8
MAX_TEXT: Final = 4096

_NAME: Final = re.compile(r"[a-z0-9_]{1,100}")
_PLUG_IN: Final = re.compile(r"[A-Za-z0-9_.:-]{1,100}")  # also of what this version does not know
_MOST_SIDE: Final = 1 << 27  # no member has more bytes


class Law(Settings, frozen=True, omit_defaults=True):
    """What augmentation does to a channel's values; ``name`` is that of a law of the registry.

    Attributes:
        name: `fixed`, `image`, `image_points`, `ego_points`, `ego_boxes`, `ego_grid`, `ego_poses`,
            `classes`, or a plug-in's.
        camera: of ``image`` and ``image_points``: the camera on whose stored image the values lie.
        interpolation: of ``image`` and ``ego_grid``; None is ``nearest``.
        fill: of ``image`` and ``ego_grid``: the value where nothing was stored; None is 0.
        fraction: of ``image``: the raster has ceil(side / fraction) pixels of each side of the
            camera's stored image, and its pixels are exactly ``fraction`` pixels long; None is 1.
        extent_m: of ``ego_grid``: the outer borders of the first cells along x, y (and z), then
            those of the last ones, in m in ego's axes; the first may be larger than the last.
        roles: which columns (of ``ragged``: which array) play which part, as groups; the law's
            table names the roles.
    """

    name: str
    camera: str | None = None
    interpolation: Literal["nearest", "linear"] | None = None
    fill: float | None = None
    fraction: int | None = None
    extent_m: tuple[float, ...] | None = None
    roles: dict[str, tuple[tuple[str, ...], ...]] = msgspec.field(default_factory=dict)


class ArraySpec(Settings, frozen=True, omit_defaults=True):
    """One array of a ``ragged`` channel: its dtype, its shape after the first axis M, and the
    unit of its values.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    unit: str = ""


class Vocabulary(Settings, frozen=True):
    """What integers of a ``tokens`` channel, and of logits, index: its name, and the number of
    entries.
    """

    name: str
    size: int


class Channel(Settings, frozen=True, kw_only=True, omit_defaults=True):
    """One channel of a dataset's samples.

    Attributes:
        name: ``[a-z0-9_]+``, unique; the batch's key.
        kind: of the registry: `image`, `points`, `array`, `ragged`, `text`, `texts`, `tokens`,
            `bytes`, `logits_topk`, `logits_sampled`, or a plug-in's.
        field: the member's field name, such as ``radar_front.npy``; its part before the dot is
            ``name``.
        law: what augmentation does to it.
        dtype: one of `DTYPES`, stored little-endian; empty for ``ragged``, texts, ``bytes`` and
            draws.
        axes: names of the axes.
        shape: their lengths; None for one that varies.
        columns: names along the last axis where it is a record.
        units: of each column, or one for all values; empty text for none.
        arrays: of ``ragged``: the arrays, which share their first axis M.
        frame: frame of reference: ``ego``, ``global``, ``image:{camera}``, ``sensor:{name}``, or
            None.
        sensor: ``camera``, ``lidar``, ``radar`` or another word where the channel is what a sensor
            of the rig measured.
        sizes: of a camera: all sizes (width, height) [px] that occur.
        allows_nan, allows_inf: whether float values may be NaN (unknown) or infinite.
        optional: whether a sample may lack it.
        codec: the codec that most members have; for people: the index counts.
        vocabulary: of ``tokens`` and logits.
        source_name, description: for people.
    """

    name: str
    kind: str
    field: str
    law: Law
    dtype: str = ""
    axes: tuple[str, ...] = ()
    shape: tuple[int | None, ...] = ()
    columns: tuple[str, ...] = ()
    units: tuple[str, ...] = ()
    arrays: tuple[ArraySpec, ...] = ()
    frame: str | None = None
    sensor: str | None = None
    sizes: tuple[tuple[int, int], ...] = ()
    allows_nan: bool = False
    allows_inf: bool = False
    optional: bool = False
    codec: str = ""
    vocabulary: Vocabulary | None = None
    source_name: str = ""
    description: str = ""

    @property
    def extension(self) -> str:
        """The ending of ``field`` after the last dot."""
        return self.field.rpartition(".")[2]

    @property
    def numpy_dtype(self) -> np.dtype[np.generic]:
        """The numpy dtype, little-endian."""
        return little_endian(self.dtype)


@lru_cache(maxsize=64)
def little_endian(dtype: str) -> np.dtype[np.generic]:
    """Return the numpy dtype of a name of `DTYPES`."""
    return np.dtype(dtype).newbyteorder("<")


def broken_entry(channel: Channel) -> Iterator[str]:
    """Yield what is wrong with an entry of any kind and law: names, dtype, axes, texts."""
    if not _NAME.fullmatch(channel.name):
        yield f"channel name '{shortened(channel.name)}' does not match [a-z0-9_]{{1,100}}"
    for noun, name in (("kind", channel.kind), ("law", channel.law.name)):
        if not _PLUG_IN.fullmatch(name):
            yield f"{noun} '{shortened(name)}' does not match [A-Za-z0-9_.:-]{{1,100}}"
    has_extension = re.fullmatch(r"[a-z0-9_]{1,20}", channel.extension)
    if not has_extension or channel.field != f"{channel.name}.{channel.extension}":
        yield (
            f"field '{shortened(channel.field)}' must be the channel's name, a dot and an extension"
        )
    if channel.dtype and channel.dtype not in DTYPES:
        yield f"dtype '{shortened(channel.dtype)}' is unknown; known: {', '.join(DTYPES)}"
    rank = len(channel.shape)
    if len(channel.axes) != rank or rank > MAX_RANK:
        yield (f"{len(channel.axes)} axes and a shape of {rank}: give as many, {MAX_RANK} at most")
    if len(set(channel.axes)) != len(channel.axes):
        yield f"axes {_listed(channel.axes)} must differ"
    sides = [side for side in channel.shape if side is not None]
    if any(side < 1 for side in sides) or math.prod(sides) > _MOST_SIDE:
        yield f"shape {list(channel.shape)} must have sides from 1, and {_MOST_SIDE} values at most"
    num_columns = len(channel.columns)
    # A lidar's columns may occur twice: `fuelrail verify --deep` reports that.
    if channel.sensor is None and len(set(channel.columns)) != num_columns:
        yield f"columns {_listed(channel.columns)} must differ"
    if num_columns and channel.shape[-1:] != (num_columns,):
        yield f"shape {list(channel.shape)} must end with the {num_columns} columns"
    if len(channel.units) not in (0, 1, num_columns):
        yield (
            f"{len(channel.units)} units: give one for all values, or one for each of "
            f"{num_columns} columns"
        )
    for spec in channel.arrays:
        if spec.dtype not in DTYPES:
            yield (
                f"array '{shortened(spec.name)}' has the unknown dtype "
                f"'{shortened(spec.dtype)}'; known: {', '.join(DTYPES)}"
            )
        if (
            any(side < 1 for side in spec.shape)
            or len(spec.shape) >= MAX_RANK
            or math.prod(spec.shape) > _MOST_SIDE
        ):
            yield (
                f"array '{shortened(spec.name)}' has the shape {list(spec.shape)}; sides from 1 "
                "are allowed"
            )
    array_names = [spec.name for spec in channel.arrays]
    if len(set(array_names)) != len(array_names):
        yield f"arrays {_listed(array_names)} must differ"
    texts = [
        channel.codec,
        channel.source_name,
        channel.description,
        channel.frame or "",
        channel.sensor or "",
        channel.law.camera or "",
        *channel.axes,
        *channel.columns,
        *channel.units,
        *array_names,
        *(spec.unit for spec in channel.arrays),
    ]
    if channel.vocabulary is not None:
        texts.append(channel.vocabulary.name)
    longest = max(map(len, texts))
    if longest > MAX_TEXT:
        yield f"a text of {longest} characters, at most {MAX_TEXT} are allowed"
    frame = "ego" if channel.frame is None else channel.frame
    if frame not in ("ego", "global") and not frame.startswith(("image:", "sensor:")):
        yield (
            f"frame '{shortened(channel.frame)}' is unknown: ego, global, image:CAMERA or "
            "sensor:NAME, or leave it out"
        )


def check_shape(array: NDArray[np.generic], channel: Channel) -> str | None:
    """Return why dtype or shape of an array differ from those of the table; None where they do
    not.
    """
    fits = array.shape == channel.shape
    if not fits and array.ndim == len(channel.shape):
        sides = zip(array.shape, channel.shape, strict=True)
        fits = all(expected in (None, side) for side, expected in sides)
    if fits and array.dtype == channel.numpy_dtype:
        return None
    expected_sides = ["any" if side is None else str(side) for side in channel.shape]
    return (
        f"{array.dtype}{list(array.shape)}; the table has "
        f"{channel.dtype}[{', '.join(expected_sides)}]"
    )


def not_finite(array: NDArray[np.generic], channel: Channel) -> str | None:
    """Return why the values are not those that the table allows (NaN, infinity); None where they
    are.
    """
    if array.dtype.kind != "f" or (channel.allows_nan and channel.allows_inf):
        return None
    # NaN and infinities go through a sum, which costs half of a look at each value.
    sum_dtype = np.promote_types(array.dtype, np.float32)
    with np.errstate(all="ignore"):
        if np.isfinite(array.sum(dtype=sum_dtype)):
            return None
    for is_allowed, test, word, key in (
        (channel.allows_nan, np.isnan, "NaN", "allows_nan"),
        (channel.allows_inf, np.isinf, "an infinity", "allows_inf"),
    ):
        if is_allowed:
            continue
        bad = test(array)
        if bad.any():
            place = f" at {np.argwhere(bad)[0].tolist()}" if array.ndim else ""
            return (
                f"{word}{place}; the table of channel '{channel.name}' forbids it: remove it, "
                f"or set {key} there"
            )
    return None


def _listed(names: object) -> str:
    if isinstance(names, (list, tuple)):
        return shortened(", ".join(names))
    return ""
