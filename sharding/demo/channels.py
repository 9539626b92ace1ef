"""Further true channels of a synthetic drive: radar, 2-D boxes and a mask of instances of each camera, and tokens.

They are written as files beside the tables (`fuelrail.sharding.sources.nuscenes.channels`), of keyframes only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fuelrail.pipeline.channels.kinds import KINDS
from fuelrail.pipeline.channels.table import ArraySpec, Channel, Law, Vocabulary
from fuelrail.sharding.demo.painter import NEAR_M
from fuelrail.sharding.demo.poses import inverse, stream
from fuelrail.sharding.demo.raster import clip_depth
from fuelrail.sharding.sources.nuscenes.channels import channel_file

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from fuelrail.sharding.demo.rig import Camera, Rig
    from fuelrail.sharding.demo.solids import Solid
    from fuelrail.sharding.demo.world import Clip

_POINTS_PER_ACTOR: Final = 4
_HALF_STEP_S: Final = 0.05
_FACES: Final = ((0, 1, 2, 3), (4, 5, 6, 7), (0, 1, 5, 4), (1, 2, 6, 5), (2, 3, 7, 6), (3, 0, 4, 7))

RADAR: Final = Channel(
    name="radar",
    kind="points",
    field="radar.npy",
    law=Law("ego_points", roles={"positions": (("x", "y", "z"),), "vectors": (("vx", "vy"),)}),
    dtype="float32",
    axes=("point", "column"),
    shape=(None, 7),
    columns=("x", "y", "z", "vx", "vy", "rcs", "instance"),
    units=("m", "m", "m", "m/s", "m/s", "dBsm", ""),
    frame="ego",
    description="points on the sides of objects, with their velocities over ground; instance counts from 1",
)

_CELLS: Final = 32
_CELL_M: Final = 3.2
_FREE: Final = 0
_START: Final = 63
_KINDS: Final = ("vehicle.", "human.", "movable_object.", "static_object.", "animal")
TOKENS: Final = Channel(
    name="tokens",
    kind="tokens",
    field="tokens.npy",
    law=Law("fixed"),
    dtype="uint16",
    axes=("token",),
    shape=(1 + _CELLS**2,),
    vocabulary=Vocabulary("top-view", 64),
    description="63, then the cells of 3.2 m around the vehicle, the nearest first: 0: free; else the kind of object "
    "whose centre is in it (from 1: vehicle, human, movable, static, animal) and, times 6, its heading in ego (0 to 7)",
)


def demo_channels(rig: Rig) -> tuple[Channel, ...]:
    """The entries of the table: the radar, then 2-D boxes and mask of each camera in rig order."""
    channels = [RADAR]
    for camera in rig.cameras:
        name = camera.channel.lower()
        channels += [_boxes_channel(name), _mask_channel(name)]
    return tuple(channels)


def _boxes_channel(camera: str) -> Channel:
    return Channel(
        name=f"boxes2d_{camera}",
        kind="ragged",
        field=f"boxes2d_{camera}.safetensors",
        law=Law("image_points", camera=camera, roles={"boxes": (("box",),), "visible": (("visible",),)}),
        arrays=(
            ArraySpec("box", "float32", (4,), "px"),
            ArraySpec("instance", "int32"),
            ArraySpec("visible", "uint8"),
        ),
        frame=f"image:{camera}",
        description="bounds of the projected 3-D boxes, cut off at the image's border; instance counts from 1",
    )


def _mask_channel(camera: str) -> Channel:
    return Channel(
        name=f"instances_{camera}",
        kind="image",
        field=f"instances_{camera}.png",
        law=Law("image", camera=camera, interpolation="nearest", fill=0.0),
        dtype="uint16",
        axes=("height", "width"),
        shape=(None, None),
        frame=f"image:{camera}",
        description="the instance that each pixel shows, from 1; 0 is none",
    )


def write_channel(root: Path, channel: Channel, token: str, value: Any) -> int:  # noqa: ANN401 - as its kind takes
    """Write a sample's file of a channel below ``root``, whose folders exist; returns its bytes."""
    return (root / channel_file(channel, token)).write_bytes(KINDS[channel.kind].encode(value, channel))


def write_image_channels(
    root: Path, camera: Camera, token: str, cam2global: NDArray[np.float64], solids: list[Solid], owners: Any  # noqa: ANN401
) -> int:  # fmt: skip
    """Write 2-D boxes and mask of an image; ``owners`` (H, W) is the actor that each pixel shows, -1 for none."""
    name = camera.channel.lower()
    num_bytes = write_channel(root, _mask_channel(name), token, (owners + 1).astype(np.uint16))
    return num_bytes + write_channel(root, _boxes_channel(name), token, boxes_2d(camera, cam2global, solids))


def boxes_2d(camera: Camera, cam2global: NDArray[np.float64], solids: list[Solid]) -> dict[str, NDArray[np.generic]]:
    """Bounds of the part of each actor's box that is before the camera and in its image."""
    global2cam = inverse(cam2global)
    limits = np.array((camera.width_px - 0.5, camera.height_px - 0.5))
    boxes, instances = [], []
    for solid in solids:
        corners = solid.vertices() @ global2cam[:3, :3].T + global2cam[:3, 3]
        if solid.actor < 0 or (corners[:, 2] < NEAR_M).all():
            continue
        kept = np.concatenate([clip_depth(corners[list(face)], NEAR_M) for face in _FACES])
        image = kept @ camera.intrinsics.T
        pixels = image[:, :2] / image[:, 2:]
        low, high = np.clip(pixels.min(0), -0.5, limits), np.clip(pixels.max(0), -0.5, limits)
        if (high - low).min() >= 1.0:
            boxes.append((*low, *high))
            instances.append(solid.actor + 1)
    return {
        "box": np.array(boxes, np.float32).reshape(-1, 4),
        "instance": np.array(instances, np.int32),
        "visible": np.ones(len(boxes), np.uint8),
    }


def top_view_tokens(clip: Clip, solids: list[Solid], capture_us: int) -> NDArray[np.uint16]:
    """Tokens (1025,) as `TOKENS` has them."""
    global2ego = inverse(clip.ego2global(capture_us))
    cells = np.full((_CELLS, _CELLS), _FREE, np.uint16)
    for solid in solids:
        place = global2ego[:3, :3] @ solid.centre + global2ego[:3, 3]
        row, column = (int(at // _CELL_M) + _CELLS // 2 for at in place[:2])
        if solid.actor < 0 or not (0 <= row < _CELLS and 0 <= column < _CELLS):
            continue
        category = clip.actors[solid.actor].category
        kind = next(number for number, prefix in enumerate(_KINDS, 1) if category.startswith(prefix))
        along = global2ego[:2, :2] @ (np.cos(solid.yaw_rad), np.sin(solid.yaw_rad))
        heading = int(np.arctan2(along[1], along[0]) / np.pi * 4) % 8
        cells[row, column] = kind + 6 * heading
    middle = np.arange(_CELLS) - (_CELLS - 1) / 2
    nearest = np.argsort((middle[:, None] ** 2 + middle**2).ravel(), kind="stable")
    return np.concatenate([np.array([_START], np.uint16), cells.ravel()[nearest]])


def radar_points(clip: Clip, solids: list[Solid], capture_us: int) -> NDArray[np.float32]:
    """Points (P, 7) as `RADAR` has them, on the upright sides of the actors' boxes, in ego at ``capture_us``."""
    global2ego = inverse(clip.ego2global(capture_us))
    draw = stream("radar", clip.name, capture_us)
    rows = []
    now_s = clip.seconds(capture_us)
    for solid in solids:
        if solid.actor < 0:
            continue
        actor = clip.actors[solid.actor]
        before, after = (actor.pose(clip.road, now_s + side * _HALF_STEP_S) for side in (-1, 1))
        velocity = (np.array(after[:2]) - before[:2]) / (2 * _HALF_STEP_S)
        footprint = solid.footprint()
        for _ in range(_POINTS_PER_ACTOR):
            side, share, height = draw.integers(4), draw.uniform(), draw.uniform(0.1, 0.9)
            place = footprint[side] * (1 - share) + footprint[(side + 1) % 4] * share
            z = solid.centre[2] + (height - 0.5) * solid.size_lwh[2]
            x, y, z = global2ego[:3, :3] @ (*place, z) + global2ego[:3, 3]
            vx, vy = global2ego[:2, :2] @ velocity
            rows.append((x, y, z, vx, vy, draw.normal(5.0, 4.0), solid.actor + 1))
    return np.array(rows, np.float32).reshape(-1, len(RADAR.columns))
