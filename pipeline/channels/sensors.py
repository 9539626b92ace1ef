"""Cameras, lidars and 3-D boxes as entries of the table: every reader knows these, and they have
this form only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec

from fuelrail.pipeline.channels.table import ArraySpec, Channel, Law
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.sample.schema import (
    ARRAYS,
    BOXES,
    POINTS_EXTENSION,
    Boxes,
)
from fuelrail.pipeline.settings import Settings, did_you_mean

CAMERA: Final = "camera"
LIDAR: Final = "lidar"
"""Sensors whose channels every reader knows."""

BOXES_CHANNEL: Final = Channel(
    name="boxes",
    kind="ragged",
    field=BOXES,
    law=Law(
        "ego_boxes",
        roles={
            "boxes": (("boxes3d",),),
            "vectors": (("velocity",),),
            "rotations": (("rotation_wxyz",),),
        },
    ),
    arrays=tuple(
        ArraySpec(
            name,
            dtype.name,
            tuple(side for side in shape if isinstance(side, int)),
        )
        for name, dtype, shape in ARRAYS[Boxes]
    ),
    frame="ego",
    allows_nan=True,
    optional=True,
)
"""The entry of the 3-D annotations in the table of channels."""

RESERVED: Final = ("meta", "geometry", BOXES_CHANNEL.name)
"""Names that no other channel has: those of the parts of every sample."""


class CameraEntry(Settings, frozen=True):
    """One camera of the table: its channel, the source's name for it, the stored sizes that
    occur (w, h) [px].
    """

    channel: str
    source_name: str
    sizes: tuple[tuple[int, int], ...]


class LidarEntry(Settings, frozen=True):
    """One lidar of the table: its channel, the source's name, and the names of the columns of
    its points.
    """

    channel: str
    source_name: str
    columns: tuple[str, ...]


def camera_channel(camera: CameraEntry, extension: str = "jpg") -> Channel:
    """Return the entry of a camera in the table of channels; ``extension`` is that of most of
    its images.
    """
    return Channel(
        name=camera.channel,
        kind="image",
        field=f"{camera.channel}.{extension}",
        law=Law("image", camera=camera.channel, interpolation="linear"),
        dtype="uint8",
        axes=("height", "width", "colour"),
        shape=(None, None, 3),
        frame=f"image:{camera.channel}",
        sensor=CAMERA,
        sizes=camera.sizes,
        optional=True,
        source_name=camera.source_name,
    )


def lidar_channel(lidar: LidarEntry) -> Channel:
    """Return the entry of a lidar in the table of channels; the first three columns are x, y, z
    [m].
    """
    return Channel(
        name=lidar.channel,
        kind="points",
        field=f"{lidar.channel}.{POINTS_EXTENSION}",
        law=Law("ego_points", roles={"positions": (lidar.columns[:3],)}),
        dtype="float32",
        axes=("point", "column"),
        shape=(None, len(lidar.columns)),
        columns=lidar.columns,
        frame=f"sensor:{lidar.channel}",
        sensor=LIDAR,
        allows_nan=True,
        allows_inf=True,
        optional=True,
        source_name=lidar.source_name,
    )


def choose_cameras(
    rig: Sequence[str],
    names: Collection[str] | None,
    where: str,
) -> tuple[str, ...]:
    """Return the cameras of a rig that are asked for by ``cameras=names``, in the order of the rig;
    None: all of them.

    Raises ConfigError, naming ``where``, for no names, for one that comes twice, and for one that
    is not in the rig.
    """
    if names is None:
        return tuple(rig)
    for name in names:
        if name not in rig:
            raise ConfigError(
                f"cameras={list(names)}: '{where}' has no camera "
                f"{name!r:.110}{did_you_mean(name, rig)}; it has: {', '.join(rig) or 'none'}"
            )
    if not names or len(set(names)) < len(names):
        raise ConfigError(
            f"cameras={list(names)} must name a camera or more, each once; there are: "
            f"{', '.join(rig)}"
        )
    return tuple(camera for camera in rig if camera in names)


def lies_on(channel: Channel, cameras: Collection[str]) -> bool:
    """Return whether a channel belongs to samples of these cameras: it lies on none, or on the
    image of one of them.
    """
    return channel.law.camera is None or channel.law.camera in cameras


def channel_table(
    cameras: Sequence[CameraEntry],
    lidars: Sequence[LidarEntry],
    extra: Sequence[Channel] = (),
    fields: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Channel, ...]:
    """Return the table of a dataset: cameras in rig order, lidars, boxes, then other channels.

    ``fields`` are the field names that occur, with their usual codecs: boxes are in the table where
    they are among them, and a camera without any ``.jpg`` has ``.png``.
    """
    names = [camera.channel for camera in cameras]
    png = {name for name in names if f"{name}.png" in fields and f"{name}.jpg" not in fields}
    channels = [
        *(camera_channel(camera, "png" if camera.channel in png else "jpg") for camera in cameras),
        *map(lidar_channel, lidars),
        *((BOXES_CHANNEL,) if BOXES in fields else ()),
        *extra,
    ]
    return tuple(
        msgspec.structs.replace(channel, codec=fields.get(channel.field, ""))
        for channel in channels
    )
