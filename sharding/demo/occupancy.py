"""A grid of what is where for each keyframe of a drive, voxelised from its lidar sweeps and boxes.

It is read through the source, as any nuScenes dataroot is, and written as files beside the tables
(`fuelrail.sharding.sources.nuscenes.channels`).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

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
from fuelrail.sharding.demo.channels import write_channel
from fuelrail.sharding.sources.nuscenes.source import NuScenesSource
from fuelrail.sharding.sources.shared.scan_table import ScanRow, ScanTable, ScanWriter

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


def voxelise(root: Path, version: str, num_sweeps: int) -> int:
    """Write the grids of all keyframes of a dataroot, whose folder of the channel exists; returns their bytes.

    ``num_sweeps``: earlier lidar sweeps to use with each keyframe's own. Raises SourceError.
    """
    source = NuScenesSource(str(root), {"version": version, "sweeps": num_sweeps})
    num_bytes = 0
    with tempfile.TemporaryDirectory(prefix="fuelrail-") as scratch:
        path = Path(scratch) / "scan.arrow"
        with ScanWriter(path, source.attribute_types) as out:
            lidars = [entry.channel for entry in source.scan(out).lidars]
        table = ScanTable(path)
        for number in range(len(table)):
            row = table.row(number)
            boxes = None if row.boxes is None else decode_arrays(row.boxes, Boxes)
            points, age_s = _points(source, row, lidars)
            token = decode_meta(row.meta).sample_token
            num_bytes += write_channel(root, OCCUPANCY, token, occupancy_grid(points, age_s, boxes))
    return num_bytes


def _points(source: NuScenesSource, row: ScanRow, lidars: list[str]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Places (P, 3) in ego at the sample's time of all lidar points, and how long ago [s] each was measured (P,)."""
    geometry = decode_arrays(row.geometry, Geometry)
    global2ego = invert_rigid(geometry.ego2global)
    parts, ages = [np.empty((0, 3))], [np.empty(0)]
    refs = {member.name: member.ref for member in row.members}
    for number, lidar in enumerate(lidars):
        if f"{lidar}.npy" in refs:
            own = decode_points(source.open(refs[f"{lidar}.npy"]))
            parts.append(_moved(own, geometry.lidar2keyego(number)))
            ages.append(np.zeros(len(own)))
        if f"{lidar}{SWEEPS_FIELD}" in refs:
            sweeps = decode_arrays(source.open(refs[f"{lidar}{SWEEPS_FIELD}"]), Sweeps)
            pieces = np.split(sweeps.points, np.cumsum(sweeps.num_points)[:-1])
            for piece, time_ns, lidar2global in zip(pieces, sweeps.timestamp_ns, sweeps.lidar2global, strict=True):
                parts.append(_moved(piece, global2ego @ lidar2global))
                ages.append(np.full(len(piece), (row.timestamp_ns - time_ns) * 1e-9))
    return np.concatenate(parts), np.concatenate(ages)


def _moved(points: NDArray[np.float32], matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    moved: NDArray[np.float64] = points[:, :3].astype(np.float64) @ matrix[:3, :3].T + matrix[:3, 3]
    return moved


def occupancy_grid(points: NDArray[np.float64], age_s: NDArray[np.float64], boxes: Boxes | None) -> NDArray[np.uint8]:
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
        centre, half = boxes.boxes3d[row, :3].astype(np.float64), boxes.boxes3d[row, 3:6].astype(np.float64) / 2
        velocity = np.nan_to_num(boxes.velocity[row].astype(np.float64))
        inside = _inside(points - (centre - age_s[:, None] * velocity), turn, half)
        is_static &= ~inside
        value = STATIC if boxes.label[row] < 0 else FIRST_CLASS + int(boxes.label[row])
        of_boxes.append((np.concatenate([_centres_inside(centre, turn, half), points[inside & (age_s == 0)]]), value))
    _mark(grid, points[is_static], STATIC)
    for places, value in of_boxes:
        _mark(grid, places, value)
    return grid


def _inside(offset: NDArray[np.float64], turn: NDArray[np.float64], half: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which offsets (P, 3) from a box's centre are in it."""
    return np.asarray((np.abs(offset @ turn) <= half).all(1), np.bool_)


def _centres_inside(
    centre: NDArray[np.float64], turn: NDArray[np.float64], half: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Centres (K, 3) of the cells that are in a box."""
    reach, low = np.abs(turn) @ half, np.array(EXTENT_M[:3])
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
