"""Further true channels of a synthetic drive: radar, a mask and a depth map of each camera, and occupancy.

They are files beside the tables (`fuelrail.sharding.sources.nuscenes.extras.groups`), of keyframes only.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from fuelrail.pipeline.channels.kinds import KINDS
from fuelrail.pipeline.channels.table import Channel, Law
from fuelrail.pipeline.rigid import invert_rigid, rotation_matrices
from fuelrail.pipeline.sample.schema import (
    SWEEPS_FIELD,
    Boxes,
    Geometry,
    Sweeps,
    decode_arrays,
    decode_meta,
    decode_points,
)
from fuelrail.sharding.demo.options import VERSION
from fuelrail.sharding.demo.picture import owners, pixel_rays, sights
from fuelrail.sharding.demo.rig import RigSensor, stream
from fuelrail.sharding.demo.street import corners
from fuelrail.sharding.demo.synth import synth
from fuelrail.sharding.demo.world import captures, make_clip, token
from fuelrail.sharding.sources.nuscenes.extras.groups import (
    CHANNELS_FILE,
    channel_file,
)
from fuelrail.sharding.sources.nuscenes.source import NuScenesSource
from fuelrail.sharding.sources.shared.scan_table import (
    ScanRow,
    ScanTable,
    ScanWriter,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fuelrail.sharding.demo.shapes import Solid
    from fuelrail.sharding.demo.world import SynthClip

_POINTS_PER_ACTOR: Final = 4
_HALF_STEP_S: Final = 0.05
DEPTH_FRACTION: Final = 4
"""Pixels of the image along each side of a pixel of the depth map."""
_FARTHEST_M: Final = 75.0

RADAR: Final = Channel(
    name="radar",
    kind="points",
    field="radar.npy",
    law=Law(
        "ego_points",
        roles={"positions": (("x", "y", "z"),), "vectors": (("vx", "vy"),)},
    ),
    dtype="float32",
    axes=("point", "column"),
    shape=(None, 7),
    columns=("x", "y", "z", "vx", "vy", "rcs", "instance"),
    units=("m", "m", "m", "m/s", "m/s", "dBsm", ""),
    frame="ego",
    description="points on the sides of objects, with their velocities over ground; instance counts from 1",
)

FREE: Final = 0
STATIC: Final = 1
FIRST_CLASS: Final = 2
CELL_M: Final = 0.4
EXTENT_M: Final = (-40.0, -40.0, -1.0, 40.0, 40.0, 5.4)
SHAPE: Final = (200, 200, 16)

OCCUPANCY: Final = Channel(
    name="occupancy",
    kind="array",
    field="occupancy.npy",
    law=Law("ego_grid", interpolation="nearest", fill=float(FREE), extent_m=EXTENT_M),
    dtype="uint8",
    axes=("x", "y", "z"),
    shape=SHAPE,
    frame="ego",
    description="0: nothing known; 1: lidar points outside of boxes; 2 and more: class of the box, counted from 2",
)


def synth_with_channels(out: Path, **options: Any) -> None:
    """Make a drive with radar points, and an instance mask and a depth map of each camera."""
    world = synth(out, **options).world
    for index in range(world.clips):
        clip = make_clip(world, index)
        channels = [RADAR]
        for camera in clip.rig.cameras:
            channels += [
                _mask_channel(camera.channel.lower()),
                _depth_channel(camera),
            ]
        if not index:
            _write_table(out / VERSION, channels)
        for capture in captures(world, clip):
            if capture.is_key_frame:
                solids = clip.solids(capture.timestamp_us)
                sample = token(world.seed, "sample", index, capture.frame)
                _write(
                    out,
                    RADAR,
                    sample,
                    radar_points(clip, solids, capture.timestamp_us),
                )
                for camera in clip.rig.cameras:
                    cam2global = (
                        clip.ego2global(capture.timestamp_us - camera.lead_us) @ camera.sensor2ego
                    )
                    owner_ids, _ = owners(camera, cam2global, solids, camera.size[0])
                    _write(
                        out,
                        _mask_channel(camera.channel.lower()),
                        sample,
                        (owner_ids + 1).astype(np.uint16),
                    )
                    _write(
                        out,
                        _depth_channel(camera),
                        sample,
                        depth_map(camera, cam2global, solids),
                    )


def synth_with_occupancy(out: Path, **options: Any) -> None:
    """Make a drive with an occupancy grid for each keyframe, of the lidar's sweeps and the boxes."""
    world = synth(out, **options).world
    source = NuScenesSource(str(out), {"version": VERSION, "sweeps": world.lidar_sweeps})
    with tempfile.TemporaryDirectory(prefix="fuelrail-") as scratch:
        path = Path(scratch) / "scan.arrow"
        with ScanWriter(path, source.attribute_types) as rows:
            lidars = [entry.channel for entry in source.scan(rows).lidars]
        table = ScanTable(path)
        for number in range(len(table)):
            row = table.row(number)
            boxes = None if row.boxes is None else decode_arrays(row.boxes, Boxes)
            points, age_s = _points(source, row, lidars)
            _write(
                out,
                OCCUPANCY,
                decode_meta(row.meta).sample_token,
                occupancy_grid(points, age_s, boxes),
            )
    _write_table(out / VERSION, [OCCUPANCY])


def _write_table(folder: Path, channels: list[Channel]) -> None:
    (folder / CHANNELS_FILE).write_bytes(msgspec.json.encode(channels))


def _write(root: Path, channel: Channel, sample: str, value: Any) -> None:
    file = root / channel_file(channel, sample)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(KINDS[channel.kind].encode(value, channel))


def _depth_channel(camera: RigSensor) -> Channel:
    name = camera.channel.lower()
    return Channel(
        name=f"depth_{name}",
        kind="array",
        field=f"depth_{name}.npy",
        law=Law(
            "image",
            camera=name,
            interpolation="nearest",
            fill=0.0,
            fraction=DEPTH_FRACTION,
        ),
        dtype="float32",
        axes=("height", "width"),
        shape=(
            -(-camera.size[1] // DEPTH_FRACTION),
            -(-camera.size[0] // DEPTH_FRACTION),
        ),
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


def depth_map(
    camera: RigSensor, cam2global: NDArray[np.float64], solids: list[Solid]
) -> NDArray[np.float32]:
    """Cast a ray through the centre of each pixel of the map, against the ground and the bodies that the lidar hits."""
    height, width = _depth_channel(camera).shape
    assert height is not None and width is not None
    first = (DEPTH_FRACTION - 1) / 2
    image2map = np.array([[1, 0, -first], [0, 1, -first], [0, 0, DEPTH_FRACTION]]) / DEPTH_FRACTION
    # The rays' third component is 1, so that places on them are depths.
    intrinsics = image2map @ camera.intrinsics
    rays = pixel_rays(intrinsics, (width, height))
    down = np.tensordot(cam2global[2, :3], rays, 1)
    with np.errstate(divide="ignore"):
        depth = np.where(down < -1e-6, -cam2global[2, 3] / down, np.inf)
    for solid in solids:
        for sight in sights(solid, invert_rigid(cam2global), intrinsics, rays):
            np.minimum(depth[sight.window], sight.depth, out=depth[sight.window])
    return np.where(depth < _FARTHEST_M, depth, 0.0).astype(np.float32)


def radar_points(clip: SynthClip, solids: list[Solid], capture_us: int) -> NDArray[np.float32]:
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
        x, y, yaw = (np.asarray(value) for value in (*solid.centre[:2], solid.yaw_rad))
        footprint = corners(x, y, yaw, *solid.size_lwh[:2])
        for _ in range(_POINTS_PER_ACTOR):
            side = draw.integers(4)
            share = draw.uniform()
            height = draw.uniform(0.1, 0.9)
            place = footprint[side] * (1 - share) + footprint[(side + 1) % 4] * share
            z = solid.centre[2] + (height - 0.5) * solid.size_lwh[2]
            x, y, z = global2ego[:3, :3] @ (*place, z) + global2ego[:3, 3]
            vx, vy = global2ego[:2, :2] @ velocity
            rows.append((x, y, z, vx, vy, draw.normal(5.0, 4.0), solid.actor + 1))
    return np.array(rows, np.float32).reshape(-1, len(RADAR.columns))


def _points(
    source: NuScenesSource, row: ScanRow, lidars: list[str]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Places (P, 3) in ego at the sample's time of all lidar points, and how long ago [s] each was measured (P,)."""
    geometry = decode_arrays(row.geometry, Geometry)
    global2ego = invert_rigid(geometry.ego2global)
    parts = [np.empty((0, 3))]
    ages = [np.empty(0)]
    refs = {member.name: member.ref for member in row.members}
    for number, lidar in enumerate(lidars):
        if f"{lidar}.npy" in refs:
            lidar_points = decode_points(source.open(refs[f"{lidar}.npy"]))
            parts.append(_moved(lidar_points, geometry.lidar2keyego(number)))
            ages.append(np.zeros(len(lidar_points)))
        if f"{lidar}{SWEEPS_FIELD}" in refs:
            sweeps = decode_arrays(source.open(refs[f"{lidar}{SWEEPS_FIELD}"]), Sweeps)
            pieces = np.split(sweeps.points, np.cumsum(sweeps.num_points)[:-1])
            for piece, time_ns, lidar2global in zip(
                pieces, sweeps.timestamp_ns, sweeps.lidar2global, strict=True
            ):
                parts.append(_moved(piece, global2ego @ lidar2global))
                ages.append(np.full(len(piece), (row.timestamp_ns - time_ns) * 1e-9))
    return np.concatenate(parts), np.concatenate(ages)


def _moved(points: NDArray[np.float32], matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    moved: NDArray[np.float64] = points[:, :3].astype(np.float64) @ matrix[:3, :3].T + matrix[:3, 3]
    return moved


def occupancy_grid(
    points: NDArray[np.float64], age_s: NDArray[np.float64], boxes: Boxes | None
) -> NDArray[np.uint8]:
    """The grid (X, Y, Z) of points (P, 3) in ego, measured ``age_s`` ago, and boxes at age 0.

    A cell is of a box's class where its centre is in the box, or where a point of age 0 in the box is. Other points
    make their cells static; those of earlier sweeps that lie in a box as its velocity takes it back are left out,
    for what was measured there has moved on. A box of no class is static.
    """
    grid = np.full(SHAPE, FREE, np.uint8)
    is_static = np.ones(len(points), np.bool_)
    of_boxes: list[tuple[NDArray[np.float64], int]] = []
    for row in range(0 if boxes is None else len(boxes.label)):
        assert boxes is not None, "there are rows"
        turn = rotation_matrices(boxes.rotation_wxyz[row].astype(np.float64))
        centre = boxes.boxes3d[row, :3].astype(np.float64)
        half = boxes.boxes3d[row, 3:6].astype(np.float64) / 2
        velocity = np.nan_to_num(boxes.velocity[row].astype(np.float64))
        inside = _inside(points - (centre - age_s[:, None] * velocity), turn, half)
        is_static &= ~inside
        value = STATIC if boxes.label[row] < 0 else FIRST_CLASS + int(boxes.label[row])
        of_boxes.append(
            (
                np.concatenate(
                    [
                        _centres_inside(centre, turn, half),
                        points[inside & (age_s == 0)],
                    ]
                ),
                value,
            )
        )
    _mark(grid, points[is_static], STATIC)
    for places, value in of_boxes:
        _mark(grid, places, value)
    return grid


def _inside(
    offset: NDArray[np.float64],
    turn: NDArray[np.float64],
    half: NDArray[np.float64],
) -> NDArray[np.bool_]:
    """Which offsets (P, 3) from a box's centre are in it."""
    return np.asarray((np.abs(offset @ turn) <= half).all(1), np.bool_)


def _centres_inside(
    centre: NDArray[np.float64],
    turn: NDArray[np.float64],
    half: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Centres (K, 3) of the cells that are in a box."""
    reach = np.abs(turn) @ half
    low = np.array(EXTENT_M[:3])
    first = np.clip(np.floor((centre - reach - low) / CELL_M).astype(int), 0, SHAPE)
    last = np.clip(np.ceil((centre + reach - low) / CELL_M).astype(int), 0, SHAPE)
    axes = [np.arange(a, b) for a, b in zip(first.tolist(), last.tolist(), strict=True)]
    cells = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 3)
    places = low + (cells + 0.5) * CELL_M
    return places[_inside(places - centre, turn, half)]


def _mark(grid: NDArray[np.uint8], places: NDArray[np.float64], value: int) -> None:
    """Set the cells in which places (K, 3) lie."""
    cells = np.floor((places - EXTENT_M[:3]) / CELL_M).astype(int)
    cells = cells[((cells >= 0) & (cells < SHAPE)).all(1)]
    grid[tuple(cells.T)] = value
