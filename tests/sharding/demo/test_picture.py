"""Pictures of the synthetic world: what is drawn lies in the projected boxes, and fills them."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import cv2
import numpy as np
import pytest

from fuelrail.pipeline.rigid import invert_rigid
from fuelrail.sharding.demo.options import SynthOptions
from fuelrail.sharding.demo.picture import (
    NEAR_M,
    owners,
    painting_order,
    pixel_rays,
    render,
    sights,
)
from fuelrail.sharding.demo.shapes import meet
from fuelrail.sharding.demo.street import corners as outline_of
from fuelrail.sharding.demo.street import footprints_overlap
from fuelrail.sharding.demo.world import SynthClip, captures, make_clip

if TYPE_CHECKING:
    from fuelrail.sharding.demo.rig import RigSensor
    from fuelrail.sharding.demo.shapes import Solid

pytestmark = pytest.mark.slow

SPEC = SynthOptions(seed=4, frames=4, size=(800, 450))
CLEAR, RAIN, DUSK, NIGHT = range(4)


class _Shot(NamedTuple):
    clip: SynthClip
    camera: RigSensor
    solids: list[Solid]
    exposure_us: int


def _shot(index: int, channel: str, frame: int = 2) -> _Shot:
    clip = make_clip(SPEC, index)
    capture = [candidate for candidate in captures(SPEC, clip) if candidate.is_key_frame][frame]
    camera = next(sensor for sensor in clip.rig.cameras if sensor.channel == channel)
    return _Shot(
        clip,
        camera,
        clip.solids(capture.timestamp_us),
        capture.timestamp_us - camera.lead_us,
    )


def _owners(shot: _Shot) -> np.ndarray:
    cam2global = shot.clip.ego2global(shot.exposure_us) @ shot.camera.sensor2ego
    return owners(shot.camera, cam2global, shot.solids, shot.camera.size[0])[0]


def _projected_corners(shot: _Shot, solid: Solid) -> np.ndarray | None:
    """Corners (8, 2) by the plain formula K @ [R|t], None where some are not well ahead."""
    length, width, height = solid.size_lwh
    c = np.cos(solid.yaw_rad)
    s = np.sin(solid.yaw_rad)
    x, y, z = np.array(np.meshgrid([-0.5, 0.5], [-0.5, 0.5], [-0.5, 0.5])).reshape(3, 8)
    corners = np.array(
        [
            c * x * length - s * y * width,
            s * x * length + c * y * width,
            z * height,
            np.zeros(8),
        ]
    )
    corners = corners + np.array([[*solid.centre, 1.0]]).T
    global2cam = invert_rigid(shot.clip.ego2global(shot.exposure_us) @ shot.camera.sensor2ego)
    camera_corners = (global2cam @ corners)[:3]
    if camera_corners[2].min() < 1.0:
        return None
    return (shot.camera.intrinsics @ (camera_corners / camera_corners[2]))[:2].T


def _hull_mask(shot: _Shot, corners: np.ndarray, grow_px: float) -> np.ndarray:
    mask = np.zeros((shot.camera.size[1], shot.camera.size[0]), np.uint8)
    hull = cv2.convexHull(np.round(corners * 16).astype(np.int32))
    cv2.fillConvexPoly(mask, hull, 1, cv2.LINE_8, 4)
    size = 2 * int(np.ceil(grow_px)) + 1
    return cv2.dilate(mask, np.ones((size, size), np.uint8)).astype(bool)


def _inside(shot: _Shot, corners: np.ndarray) -> bool:
    low = corners.min(0)
    high = corners.max(0)
    return bool((low > 3).all() and (high < np.array(shot.camera.size) - 4).all())


@pytest.mark.parametrize(
    ("index", "channel"),
    [
        (CLEAR, "CAM_FRONT"),
        (RAIN, "CAM_BACK"),
        (DUSK, "CAM_FRONT_RIGHT"),
        (DUSK, "CAM_FRONT"),
        (NIGHT, "CAM_BACK_LEFT"),
    ],
)
def test_pixels_of_every_object_lie_in_its_projected_box(index: int, channel: str) -> None:
    shot = _shot(index, channel)
    actor_map = _owners(shot)
    num_checked = 0
    for solid in shot.solids:
        drawn = actor_map == solid.actor
        if solid.actor < 0 or drawn.sum() < 12:
            continue
        corners = _projected_corners(shot, solid)
        if corners is None:
            continue
        assert not (drawn & ~_hull_mask(shot, corners, 1.0)).any(), solid
        num_checked += 1
    assert num_checked >= 1


@pytest.mark.parametrize("index", [CLEAR, DUSK])
def test_unhidden_objects_fill_their_projected_boxes_to_the_edges(
    index: int,
) -> None:
    shot = _shot(index, "CAM_FRONT")
    num_checked = 0
    for solid in shot.solids:
        corners = _projected_corners(shot, solid) if solid.actor >= 0 else None
        if corners is None or not _inside(shot, corners) or np.ptp(corners, axis=0).min() < 12:
            continue
        # Alone in the world, so that nothing hides it.
        rows, columns = np.nonzero(_owners(shot._replace(solids=[solid])) == solid.actor)
        low = corners.min(0)
        high = corners.max(0)
        size = high - low
        assert rows.min() - low[1] < 2 + 0.13 * size[1], solid.kind
        assert high[1] - rows.max() < 2 + 0.14 * size[1], solid.kind
        # Shapes taper; people are flat pictures that turn to the camera inside a squarish box, cycles turn little.
        flat = (
            "human",
            "bicycle",
            "vehicle.bicycle",
            "vehicle.motorcycle",
            "movable",
        )
        slack = (0.6 if "cycle" in solid.kind else 0.36) if solid.kind.startswith(flat) else 0.12
        assert columns.min() - low[0] < 2 + slack * size[0], solid.kind
        assert high[0] - columns.max() < 2 + slack * size[0], solid.kind
        share = len(rows) / _hull_mask(shot, corners, 0.0).sum()
        min_share = (
            0.04 if solid.kind == "bicycle" else 0.18 if slack > 0.2 else 0.6
        )  # one sees through spokes and frame
        assert share > min_share, (solid.kind, share)
        num_checked += 1
    assert num_checked >= 8


@pytest.mark.parametrize("channel", ["CAM_FRONT", "CAM_BACK_LEFT"])
def test_what_is_beside_a_camera_is_met_in_its_window_only(
    channel: str,
) -> None:
    """Also what lies across the plane of the camera: a window leaves out no pixel that shows it."""
    shot = _shot(DUSK, channel)
    rays = pixel_rays(shot.camera.intrinsics, shot.camera.size)
    global2cam = invert_rigid(shot.clip.ego2global(shot.exposure_us) @ shot.camera.sensor2ego)
    num_across = num_smaller = 0
    for solid in shot.solids:
        unit2cam = global2cam @ solid.unit2global()
        in_window = {
            sight.block: sight for sight in sights(solid, global2cam, shot.camera.intrinsics, rays)
        }
        for block in solid.blocks:
            depths = (block.corners @ unit2cam[:3, :3].T + unit2cam[:3, 3])[:, 2]
            if not depths.min() < NEAR_M < depths.max():
                continue
            num_across += 1
            expected, _ = meet(block, np.linalg.inv(unit2cam), rays)
            expected[expected < NEAR_M] = np.inf
            depth_map = np.full_like(expected, np.inf)
            if block in in_window:
                depth_map[in_window[block].window] = in_window[block].depth
            num_smaller += block not in in_window or in_window[block].depth.size < depth_map.size
            np.testing.assert_array_equal(depth_map, expected)
    assert num_across > 3
    assert num_smaller > 3, "else the windows cut nothing off"


def test_taking_an_object_away_changes_its_box_and_nothing_else() -> None:
    # Independent of who is said to own a pixel: compare two pictures.
    shot = _shot(DUSK, "CAM_FRONT")
    with_all = render(*shot)
    actor_map = _owners(shot)
    visible = sorted(
        (
            solid
            for solid in shot.solids
            if solid.actor >= 0 and (actor_map == solid.actor).sum() > 150
        ),
        key=lambda solid: -int((actor_map == solid.actor).sum()),
    )
    chosen = [(s, c) for s in visible if (c := _projected_corners(shot, s)) is not None][:3]
    assert len(chosen) == 3
    for solid, corners in chosen:
        neighbours = [neighbour for neighbour in shot.solids if neighbour.actor != solid.actor]
        without = render(shot.clip, shot.camera, neighbours, shot.exposure_us)
        changed = np.abs(with_all.astype(int) - without).max(axis=-1) > 6
        assert not (changed & ~_hull_mask(shot, corners, 5.0)).any(), solid
        mask = actor_map == solid.actor
        assert changed[mask].mean() > 0.7, solid


@pytest.mark.parametrize("index", [CLEAR, RAIN, DUSK, NIGHT])
def test_what_may_hide_another_is_painted_after_it(index: int) -> None:
    shot = _shot(index, "CAM_FRONT")
    eye = (shot.clip.ego2global(shot.exposure_us) @ shot.camera.sensor2ego)[:2, 3]
    rank = {place: number for number, place in enumerate(painting_order(shot.solids, eye))}
    assert sorted(rank) == list(range(len(shot.solids)))
    num_checked = 0
    for angle in np.linspace(-np.pi, np.pi, 360):
        ray = np.array([np.cos(angle), np.sin(angle)])
        distances = [_enter_footprint(solid, eye, ray) for solid in shot.solids]
        met = sorted((d, place) for place, d in enumerate(distances) if np.isfinite(d) and d > 1.0)
        # A tree's crown and trunk stand above one another, so either may come first.
        met = [pair for pair in met if shot.solids[pair[1]].kind not in ("crown", "trunk")]
        for (near_m, near), (far_m, far) in pairwise(met):
            # On the inside of a bend the backs of houses run into one another.
            if far_m - near_m > 0.01 and not _touch(shot.solids[near], shot.solids[far]):
                assert rank[far] < rank[near], (
                    shot.solids[far],
                    shot.solids[near],
                )
                num_checked += 1
    assert num_checked > 200


def _touch(first: Solid, second: Solid) -> bool:
    outlines = [
        outline_of(
            np.array([solid.centre[0]]),
            y=np.array([solid.centre[1]]),
            yaw_rad=np.array([solid.yaw_rad]),
            length=solid.size_lwh[0],
            width=solid.size_lwh[1],
        )
        for solid in (first, second)
    ]
    return footprints_overlap(*outlines)


def _enter_footprint(solid: Solid, eye: np.ndarray, ray: np.ndarray) -> float:
    """Distance at which a ray on the ground enters a footprint, inf for a miss."""
    c, s = np.cos(solid.yaw_rad), np.sin(solid.yaw_rad)
    turn = np.array([[c, s], [-s, c]])
    start = turn @ (eye - solid.centre[:2])
    step = turn @ ray
    half = np.array(solid.size_lwh[:2]) / 2.0
    enter = np.minimum((-half - start) / step, (half - start) / step).max()
    leave = np.maximum((-half - start) / step, (half - start) / step).min()
    return float(enter) if 0.0 < enter < leave else np.inf
