"""Further true channels of a synthetic drive: radar, tokens, and a mask and a depth map of each camera.

They are files beside the tables (`fuelrail.sharding.sources.nuscenes.channels`), of keyframes only. 2-D boxes come from
the tables, as for every nuScenes source (``-o channels=[boxes2d]``).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.channels.kinds import KINDS
from fuelrail.pipeline.channels.table import Channel, Law, Vocabulary
from fuelrail.pipeline.rigid import invert_rigid
from fuelrail.sharding.demo.lidar import crossings
from fuelrail.sharding.demo.picture.raster import NEAR_M
from fuelrail.sharding.demo.picture.shapes import shape_of
from fuelrail.sharding.demo.rig import Camera, Rig, stream
from fuelrail.sharding.sources.nuscenes.channels import channel_file

if TYPE_CHECKING:
    from fuelrail.sharding.demo.solids import Solid
    from fuelrail.sharding.demo.world import Clip

_POINTS_PER_ACTOR: Final = 4
_HALF_STEP_S: Final = 0.05
DEPTH_FRACTION: Final = 4
"""Pixels of the image along each side of a pixel of the depth map."""
_FARTHEST_M: Final = 75.0

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
    """The entries of the table: the radar, then mask and depth of each camera in rig order."""
    channels = [RADAR]
    for camera in rig.cameras:
        channels += [_mask_channel(camera.channel.lower()), _depth_channel(camera)]
    return tuple(channels)


def _depth_channel(camera: Camera) -> Channel:
    name = camera.channel.lower()
    return Channel(
        name=f"depth_{name}",
        kind="array",
        field=f"depth_{name}.npy",
        law=Law("image", camera=name, interpolation="nearest", fill=0.0, fraction=DEPTH_FRACTION),
        dtype="float32",
        axes=("height", "width"),
        shape=(-(-camera.height_px // DEPTH_FRACTION), -(-camera.width_px // DEPTH_FRACTION)),
        units=("m",),
        frame=f"image:{name}",
        description=f"depth along the camera's axis at pixel centres; 0 where nothing is nearer than {_FARTHEST_M:g} m",
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
    """Write mask and depth of an image; ``owners`` (H, W) is the actor that each pixel shows, -1 for none."""
    mask = _mask_channel(camera.channel.lower())
    num_bytes = write_channel(root, mask, token, (owners + 1).astype(np.uint16))
    return num_bytes + write_channel(root, _depth_channel(camera), token, depth_map(camera, cam2global, solids))


def depth_map(camera: Camera, cam2global: NDArray[np.float64], solids: list[Solid]) -> NDArray[np.float32]:
    """Cast a ray through the centre of each pixel of the map, against the ground and the bodies that the lidar hits."""
    height, width = _depth_channel(camera).shape
    assert height is not None and width is not None
    first = (DEPTH_FRACTION - 1) / 2
    u, v = np.meshgrid(*(np.arange(side) * DEPTH_FRACTION + first for side in (width, height)))
    # The rays' third component is 1, so that places on them are depths.
    rays = np.tensordot(np.linalg.inv(camera.intrinsics), np.stack((u, v, np.ones_like(u))), 1)
    down = np.tensordot(cam2global[2, :3], rays, 1)
    with np.errstate(divide="ignore"):
        depth = np.where(down < -1e-6, -cam2global[2, 3] / down, np.inf)
    global2cam = invert_rigid(cam2global)
    for solid in solids:
        unit2cam = global2cam @ solid.unit2global()
        for part in shape_of(solid.kind):
            vertices = part.vertices @ unit2cam[:3, :3].T + unit2cam[:3, 3]
            window = _window(vertices, camera, (height, width))
            enter, leave, _ = crossings(part, vertices, rays[:, *window])
            hit = (enter > NEAR_M) & (enter < leave) & (enter < depth[window])
            depth[window][hit] = enter[hit]
    return np.where(depth < _FARTHEST_M, depth, 0.0).astype(np.float32)


def _window(vertices: NDArray[np.float64], camera: Camera, shape: tuple[int, int]) -> tuple[slice, slice]:
    """Return the rows and columns of the depth map that can show a body with these vertices (V, 3)."""
    if (vertices[:, 2] < NEAR_M).all():
        return slice(0), slice(0)
    if (vertices[:, 2] < NEAR_M).any():
        return slice(None), slice(None)
    pixels = vertices @ camera.intrinsics.T
    places = (pixels[:, 1::-1] / pixels[:, 2:] + 0.5) / DEPTH_FRACTION
    low = np.clip(np.floor(places.min(0)), 0, shape).astype(int)
    high = np.clip(np.ceil(places.max(0)), 0, shape).astype(int)
    return slice(low[0], high[0]), slice(low[1], high[1])


def top_view_tokens(clip: Clip, solids: list[Solid], capture_us: int) -> NDArray[np.uint16]:
    """Tokens (1025,) as `TOKENS` has them."""
    global2ego = invert_rigid(clip.ego2global(capture_us))
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
    global2ego = invert_rigid(clip.ego2global(capture_us))
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
