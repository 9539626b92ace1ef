"""2-D boxes and signals as channels, and members that the scan computes: their bytes stand in the reference."""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.channels.kinds import KINDS
from fuelrail.pipeline.channels.table import ArraySpec, Channel, Law
from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.adapter.boxes import stable_id
from fuelrail.sharding.sources.shared.scan_table import Reference

if TYPE_CHECKING:
    from fuelrail.sharding.sources.adapter.classes import ClassMap
    from fuelrail.sharding.sources.adapter.frame import ImageBoxRows

COMPUTED: Final = "computed:"
"""Begins the reference of a member that the scan computed."""
_FIRST_NS: Final = 500_000_000


def boxes2d_channel(camera: str, description: str) -> Channel:
    """The entry of the table for the 2-D boxes of one camera; ``row`` is the box's row in ``boxes``, -1 for none."""
    return Channel(
        name=f"boxes2d_{camera}",
        kind="ragged",
        field=f"boxes2d_{camera}.safetensors",
        law=Law("image_points", camera=camera, roles={"boxes": (("box",),), "visible": (("visible",),)}),
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


def signals_channel(name: str, units: Mapping[str, str], source_name: str, *, has_unknown: bool = False) -> Channel:
    """The entry of the table for messages of numbers, such as CAN's: columns to units, after ``dt_s``.

    With ``has_unknown`` numbers may be NaN, or infinite, as they were measured. A member has the messages since the
    sample before it, as :func:`signals` makes it.
    """
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
        description="as measured, not moved by augmentation; time of a message is dt_s before the sample; rows ascend "
        "in time, the last is the latest at or before it",
    )


def signals(
    channel: Channel, stamp_ns: NDArray[np.int64], values: NDArray[np.float64], times_ns: Sequence[int]
) -> list[list[Reference]]:
    """The members of samples at these times, ascending: messages (N, C) with stamps (N,) of a :func:`signals_channel`.

    Of the first sample they are those of the last 0.5 s. A sample without a message has no member.
    """
    ends = np.searchsorted(stamp_ns, times_ns, "right").tolist()
    first = int(np.searchsorted(stamp_ns, times_ns[0] - _FIRST_NS, "right"))
    found: list[list[Reference]] = []
    for begin, end, time_ns in zip([first, *ends], ends, times_ns, strict=False):
        rows = np.concatenate([(time_ns - stamp_ns[begin:end, None]) * 1e-9, values[begin:end]], 1)
        found.append([computed(channel, KINDS[channel.kind].encode(rows, channel))] if begin < end else [])
    return found


def image_boxes(
    channels: Sequence[Channel], boxes: Mapping[str, ImageBoxRows], cameras: Collection[str], classes: ClassMap,
    where: str,
) -> list[Reference]:  # fmt: skip
    """References of a frame's 2-D boxes, of those ``cameras`` that have an image.

    Raises SourceError, naming ``where``, for boxes that are not finite, or whose borders are in the wrong order.
    """
    found = []
    for channel in channels:
        rows = boxes.get(channel.law.camera or "")
        if rows is None or channel.law.camera not in cameras:
            continue
        box = np.asarray(rows.box, np.float64).reshape(-1, 4)
        bad = ~(np.isfinite(box).all(1) & (box[:, 2:] >= box[:, :2]).all(1))
        if bad.any():
            at = int(np.argmax(bad))
            raise SourceError(
                f"{where}: 2-D box {at} of {channel.law.camera} is {box[at].tolist()}; wanted are left, top, right, "
                "bottom [px], finite and in order"
            )
        number, tracks = len(box), rows.track or [""] * len(box)
        value = {
            "box": box.astype(np.float32),
            "row": np.full(number, -1, np.int32) if rows.row is None else np.asarray(rows.row, np.int32),
            "label": classes.labels(rows.category, counted=False),
            "instance_id": np.array([stable_id(name) if name else -1 for name in tracks], np.int64),
            "visible": np.ones(number, np.uint8),
        }
        found.append(computed(channel, KINDS[channel.kind].encode(value, channel)))
    return found


def computed(channel: Channel, data: bytes) -> Reference:
    """The reference of a member of these bytes."""
    return Reference(channel.field, COMPUTED + base64.b85encode(data).decode(), len(data))


def computed_bytes(ref: str) -> bytes:
    """Back from the reference."""
    return base64.b85decode(ref.removeprefix(COMPUTED))
