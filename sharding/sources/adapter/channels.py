"""Values, 2-D boxes and signals as channels; members that the scan computes, whose bytes stand
in the reference.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.channels.kinds import KINDS
from fuelrail.pipeline.channels.sensors import RESERVED
from fuelrail.pipeline.channels.series import one_of_series, series_channel
from fuelrail.pipeline.channels.table import (
    DTYPES,
    MAX_RANK,
    MAX_TEXT,
    ArraySpec,
    Channel,
    Law,
)
from fuelrail.pipeline.errors import MemberError, SchemaError, SourceError
from fuelrail.pipeline.settings import did_you_mean
from fuelrail.sharding.sources.adapter.boxes import stable_id
from fuelrail.sharding.sources.shared.scan_table import Reference

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.schema import F64, I64
    from fuelrail.sharding.sources.adapter.classes import ClassMap
    from fuelrail.sharding.sources.adapter.frame import (
        Clip,
        Frame,
        ImageBoxRows,
    )

COMPUTED: Final = "computed:"
"""Begins the reference of a member that the scan computed."""
SIGNALS_AS_SERIES: Final = (
    "true stores signals as series, at their own rate: windows in seconds read them by time"
)
"""Describes the option ``series`` of sources with signals."""
_BESIDE_NS: Final = 500_000_000
"""How long before and after its samples a clip has signals."""
_Form: TypeAlias = tuple[str, tuple[int | None, ...]]
"""Dtype of a value ("" for a text, "texts", "bytes"), and its shape, None for a side that varies.
"""
_EMPTY: Final = ("float64", (0,))
"""The form of an empty list."""
_NONE: Final = ("float64", (None,))
_BYTES: Final = "bytes"
_TEXTS: Final = "texts"
_NAME: Final = re.compile(r"[a-z0-9_]{1,100}")


def value_channel(
    name: str,
    dtype: str = "",
    shape: tuple[int | None, ...] = (),
    description: str = "",
) -> Channel:
    """Return the entry of the table for a sample's value (``Frame.values``); augmentation does not
    move it.

    Without ``dtype`` it is a text, with "texts" a list of texts, with "bytes" bytes. Else it is an
    array of this shape, a number where that is (), and in batches a tensor [B, ...]. Where the
    first side is None it varies: batches then have ``{"values": list of B tensors}``.
    """
    facts: dict[str, Any] = {
        "name": name,
        "law": Law("fixed"),
        "optional": True,
        "description": description,
    }
    if not dtype:
        return Channel(kind="text", field=f"{name}.txt", **facts)
    if dtype == _TEXTS:
        return Channel(kind="texts", field=f"{name}.json", **facts)
    if dtype == _BYTES:
        return Channel(kind="bytes", field=f"{name}.bin", **facts)
    is_float = np.dtype(dtype).kind == "f"
    facts |= {"allows_nan": is_float, "allows_inf": is_float}
    if shape[:1] == (None,):
        value_shape = tuple(side or 0 for side in shape[1:])
        arrays = (ArraySpec("values", dtype, value_shape),)
        return Channel(
            kind="ragged",
            field=f"{name}.safetensors",
            arrays=arrays,
            **facts,
        )
    axes = tuple(f"axis{number}" for number in range(len(shape)))
    return Channel(
        kind="array",
        field=f"{name}.npy",
        dtype=dtype,
        axes=axes,
        shape=shape,
        **facts,
    )


class ValueForms:
    """What the values of names are, learnt from values: for each name a channel, or why there
    can be none.
    """

    def __init__(self) -> None:
        self._forms: dict[str, _Form] = {}
        self.refused: dict[str, str] = {}

    def learn(self, name: str, value: Any) -> None:
        """Take a value: a text or a list of texts, bytes, a number, or numbers in an array or
        lists; None: missing.
        """
        if value is None or name in self.refused:
            return
        try:
            form = _find_form(name, value)
            earlier_form = self._forms.get(name, form)
            self._forms[name] = _join_forms(earlier_form, form)
        except (ValueError, OverflowError) as error:
            self.refused[name] = str(error)

    def channels(self) -> tuple[Channel, ...]:
        """Return the channels, by name; bytes come last, where who does not select them does not
        fetch them.
        """
        ordered = sorted(
            self._forms.items(),
            key=lambda item: (item[1][0] == _BYTES, item[0]),
        )
        forms = {name: form for name, form in ordered if name not in self.refused}
        return tuple(
            value_channel(name, *(_NONE if form == _EMPTY else form))
            for name, form in forms.items()
        )


def _find_form(name: str, value: Any) -> _Form:
    """Return the form of a value; raise ValueError for one that has none."""
    if not _NAME.fullmatch(name) or name in RESERVED:
        raise ValueError(
            "its name must have at most 100 letters, digits and _, and not be one of "
            f"{', '.join(RESERVED)}"
        )
    if isinstance(value, str | bytes):
        return ("" if isinstance(value, str) else _BYTES), ()
    is_list = isinstance(value, list) and bool(value)
    if is_list and all(isinstance(text, str) for text in value):
        return _TEXTS, (None,)
    array = np.asarray(value)  # ValueError for lists of differing lengths
    if array.shape == (0,):
        return _EMPTY
    if array.dtype.name not in DTYPES or 0 in array.shape[1:] or array.ndim > MAX_RANK:
        raise ValueError(
            f"it is neither text nor numbers in an array, but {array.dtype.name}{list(array.shape)}"
        )
    return array.dtype.name, array.shape


def _join_forms(first_form: _Form, second_form: _Form) -> _Form:
    """Return the form that both fit; raise ValueError where there is none."""
    if _EMPTY in (first_form, second_form):  # an empty list, of any type and rank
        dtype, shape = first_form if second_form == _EMPTY else second_form
        if not shape:
            raise ValueError("samples differ: some are lists, others are none")
        return dtype, shape if (dtype, shape) == _EMPTY else (None, *shape[1:])
    dtype, shape = first_form
    other_dtype, other_shape = second_form
    kinds = {dtype, other_dtype}
    if dtype != other_dtype and kinds & {"", "bool", _BYTES, _TEXTS}:
        raise ValueError(f"samples differ: {dtype or 'text'} and {other_dtype or 'text'}")
    if (len(shape), shape[1:]) != (len(other_shape), other_shape[1:]):
        raise ValueError(f"samples differ in shape: {list(shape)} and {list(other_shape)}")
    if shape[:1] != other_shape[:1]:
        shape = (None, *shape[1:])
    if dtype not in ("", _BYTES, _TEXTS):
        dtype = np.promote_types(dtype, other_dtype).name
    return dtype, shape


def clip_series(
    channels: Sequence[Channel],
    clip: Clip,
    frames: Sequence[Frame],
) -> dict[str, tuple[I64, NDArray[Any]]]:
    """Return times and values of each series that a clip has: its own, or of its frames, also of
    frames to leave out.

    Raises SourceError for times that do not ascend, and for measurements that are not of the
    channel's form.
    """
    series: dict[str, tuple[I64, NDArray[Any]]] = {}
    for channel in channels:
        measurement = one_of_series(channel)
        if measurement is None:
            continue
        frames_with = [frame for frame in frames if frame.values.get(channel.name) is not None]
        frame_series = (
            [frame.timestamp_ns for frame in frames_with],
            [frame.values[channel.name] for frame in frames_with],
        )
        times, values = clip.series.get(channel.name, frame_series)
        stamps = np.asarray(times, np.int64)
        array = np.asarray(values)
        if not len(stamps):
            array = array.reshape(0, *measurement.shape)
        is_ascending = not (np.diff(stamps) <= 0).any()
        if array.shape != (len(stamps), *measurement.shape) or not is_ascending:
            raise SourceError(
                f"clip '{clip.name}': series '{channel.name}' has {len(stamps)} times and "
                f"values of {list(array.shape)}; times must ascend, and each value be of "
                f"{list(measurement.shape)}"
            )
        if len(stamps):
            series[channel.name] = stamps, array.astype(measurement.numpy_dtype)
    return series


def value_members(
    channels: Sequence[Channel],
    values: Mapping[str, Any],
    where: str,
) -> list[Reference]:
    """Return references of a frame's values; raise SourceError, naming ``where``, for one unlike
    its channel.
    """
    table = {channel.name: channel for channel in channels}
    references = []
    for name, value in values.items():
        if name not in table:
            raise SourceError(
                f"{where} has the value '{name}'{did_you_mean(name, table)}, which the "
                "source's channels do not name"
            )
        if value is not None:
            try:
                data = encode_value(table[name], value)
                references.append(computed(table[name], data))
            except (MemberError, ValueError, OverflowError) as error:
                raise SourceError(f"{where}: value '{name}': {error}") from error
    return references


def encode_value(channel: Channel, value: Any) -> bytes:
    """Encode a value of a :func:`value_channel`, or a part of a series; raise SchemaError and
    ValueError for others.
    """
    if one_of_series(channel) is not None:
        return KINDS[channel.kind].encode(value, channel)
    dtype = channel.arrays[0].dtype if channel.kind == "ragged" else channel.dtype
    if dtype:
        array = np.asarray(value)
        cast = array.astype(dtype) if array.dtype.kind in "biuf" else array
        # What is cut is lost without a word: 0.5 as an integer, 300 as uint8. Floats are rounded.
        if cast.dtype.kind in "biu" and not np.array_equal(cast, array):
            raise SchemaError(f"{value!r:.100} is not of {dtype}")
        if channel.kind == "ragged":
            if not cast.size:
                cast = cast.reshape(0, *channel.arrays[0].shape)
            value = {"values": cast}
        else:
            value = cast
    return KINDS[channel.kind].encode(value, channel)


def boxes2d_channel(camera: str, description: str) -> Channel:
    """Return entry of the table for the 2-D boxes of one camera; ``row`` is the box's row in
    ``boxes``, -1 for none.
    """
    return Channel(
        name=f"boxes2d_{camera}",
        kind="ragged",
        field=f"boxes2d_{camera}.safetensors",
        law=Law(
            "image_points",
            camera=camera,
            roles={"boxes": (("box",),), "visible": (("visible",),)},
        ),
        arrays=(
            ArraySpec("box", "float32", (4,), "px"),
            ArraySpec("row", "int32"),
            ArraySpec("label", "int16"),
            ArraySpec("instance_id", "int64"),
            ArraySpec("visible", "uint8"),
        ),
        frame=f"image:{camera}",
        optional=True,
        description=description,
    )


def signals_channel(
    name: str,
    units: Mapping[str, str],
    source_name: str,
    *,
    has_unknown: bool = False,
    series: bool = False,
) -> Channel:
    """Return the entry of the table for messages of numbers, such as CAN's: columns to units, after
    ``dt_s``.

    With ``has_unknown`` numbers may be NaN, or infinite, as they were measured. A member has the
    messages since the sample before it, as :func:`signals` makes it. With ``series`` it is one of
    :func:`signal_series` instead, whose measurements are the columns without ``dt_s``.
    """
    if series:
        columns = ", ".join(
            f"{column} [{unit}]" if unit else column for column, unit in units.items()
        )
        channel_made = series_channel(
            name,
            "float64",
            (len(units),),
            description=f"columns: {columns}"[:MAX_TEXT],
        )
        return msgspec.structs.replace(
            channel_made,
            source_name=source_name,
            allows_nan=has_unknown,
            allows_inf=has_unknown,
        )
    return Channel(
        name=name,
        kind="points",
        field=f"{name}.npy",
        law=Law("fixed"),
        dtype="float64",
        axes=("message", "column"),
        shape=(None, len(units) + 1),
        columns=("dt_s", *units),
        units=("s", *units.values()),
        optional=True,
        allows_nan=has_unknown,
        allows_inf=has_unknown,
        source_name=source_name,
        description="as measured, not moved by augmentation; time of a message is dt_s before the "
        "sample; rows ascend in time, the last is the latest at or before it",
    )


def signals(
    channel: Channel,
    stamp_ns: I64,
    values: F64,
    times_ns: Sequence[int],
) -> list[list[Reference]]:
    """Return members of samples at ascending times: messages (N, C) with stamps (N,) of a
    :func:`signals_channel`.

    Of the first sample they are those of the last 0.5 s. A sample without a message has no member.
    """
    ends = np.searchsorted(stamp_ns, times_ns, "right").tolist()
    start_ns = times_ns[0] - _BESIDE_NS
    first = int(np.searchsorted(stamp_ns, start_ns, "right"))
    members: list[list[Reference]] = []
    for begin, end, time_ns in zip([first, *ends], ends, times_ns, strict=False):
        if begin >= end:
            members.append([])
            continue
        ages_s = (time_ns - stamp_ns[begin:end, None]) * 1e-9
        rows = np.concatenate([ages_s, values[begin:end]], 1)
        data = KINDS[channel.kind].encode(rows, channel)
        members.append([computed(channel, data)])
    return members


def signal_series(
    stamp_ns: I64,
    values: F64,
    times_ns: Sequence[int] = (),
) -> tuple[I64, F64]:
    """Return times and values of a clip's series: of messages (N, C) with stamps (N,), one of each
    stamp, the first.

    With ``times_ns``, those of its samples that ascend, they are from 0.5 s before the first one to
    0.5 s after the last one.
    """
    stamps, rows = np.unique(stamp_ns, return_index=True)
    if times_ns:
        start_ns = times_ns[0] - _BESIDE_NS
        end_ns = times_ns[-1] + _BESIDE_NS + 1
        first, end = np.searchsorted(stamps, (start_ns, end_ns))
        stamps = stamps[first:end]
        rows = rows[first:end]
    return stamps, values[rows]


def image_boxes(
    channels: Sequence[Channel],
    boxes: Mapping[str, ImageBoxRows],
    cameras: Collection[str],
    classes: ClassMap,
    where: str,
) -> list[Reference]:
    """Return references of a frame's 2-D boxes, of those ``cameras`` that have an image.

    Raises SourceError, naming ``where``, for boxes that are not finite, or whose borders are in the
    wrong order.
    """
    references = []
    for channel in channels:
        camera = channel.law.camera or ""
        rows = boxes.get(camera) if channel.name == f"boxes2d_{camera}" else None
        if rows is None or camera not in cameras:
            continue
        box = np.asarray(rows.box, np.float64).reshape(-1, 4)
        low = box[:, :2]
        high = box[:, 2:]
        is_ordered = (high >= low).all(1)
        bad = ~(np.isfinite(box).all(1) & is_ordered)
        if bad.any():
            row = int(np.argmax(bad))
            raise SourceError(
                f"{where}: 2-D box {row} of {channel.law.camera} is {box[row].tolist()}; "
                "wanted are left, top, right, bottom [px], finite and in order"
            )
        number = len(box)
        tracks = rows.track or [""] * len(box)
        value = {
            "box": box.astype(np.float32),
            "row": np.full(number, -1, np.int32)
            if rows.row is None
            else np.asarray(rows.row, np.int32),
            "label": classes.labels(rows.category, counted=False),
            "instance_id": np.array([stable_id(name) if name else -1 for name in tracks], np.int64),
            "visible": np.ones(number, np.uint8),
        }
        data = KINDS[channel.kind].encode(value, channel)
        references.append(computed(channel, data))
    return references


def computed(channel: Channel, data: bytes) -> Reference:
    """Return the reference of a member of these bytes."""
    text = base64.b85encode(data).decode()
    return Reference(channel.field, COMPUTED + text, len(data))


def computed_bytes(ref: str) -> bytes:
    """Return the bytes of the reference."""
    return base64.b85decode(ref.removeprefix(COMPUTED))
