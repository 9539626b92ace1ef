"""Pictures of the synthetic world: what is drawn lies in the projected boxes, and fills them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuelrail.pipeline.rigid import invert_rigid
from fuelrail.sharding.demo.picture.camera import render
from fuelrail.sharding.demo.picture.raster import clip_depth, coverage, window_of
from fuelrail.sharding.demo.picture.shapes import shape_of
from fuelrail.sharding.demo.solids import Solid, solids_near
from fuelrail.sharding.demo.street import KINDS
from fuelrail.sharding.demo.world import Clip, WorldSpec, captures, make_clip

if TYPE_CHECKING:
    from fuelrail.sharding.demo.rig import Camera

SPEC = WorldSpec(seed=4, num_frames=4, width_px=800, height_px=450)
CLEAR, RAIN, DUSK, NIGHT = range(4)


class _Shot(NamedTuple):
    clip: Clip
    camera: Camera
    solids: list[Solid]
    exposure_us: int


def _shot(index: int, channel: str, frame: int = 2) -> _Shot:
    clip = make_clip(SPEC, index)
    capture = [one for one in captures(SPEC, clip) if one.is_key_frame][frame]
    camera = next(one for one in clip.rig.cameras if one.channel == channel)
    return _Shot(clip, camera, solids_near(clip, capture.timestamp_us), capture.timestamp_us - camera.lead_us)


def _projected_corners(shot: _Shot, solid: Solid) -> np.ndarray | None:
    """Corners (8, 2) by the plain formula K @ [R|t], None where some are not well ahead."""
    length, width, height = solid.size_lwh
    c, s = np.cos(solid.yaw_rad), np.sin(solid.yaw_rad)
    x, y, z = np.array(np.meshgrid([-0.5, 0.5], [-0.5, 0.5], [-0.5, 0.5])).reshape(3, 8)
    corners = np.array([c * x * length - s * y * width, s * x * length + c * y * width, z * height, np.zeros(8)])
    corners = corners + np.array([[*solid.centre, 1.0]]).T
    global2cam = invert_rigid(shot.clip.ego2global(shot.exposure_us) @ shot.camera.cam2ego)
    seen = (global2cam @ corners)[:3]
    if seen[2].min() < 1.0:
        return None
    return (shot.camera.intrinsics @ (seen / seen[2]))[:2].T


def _hull_mask(shot: _Shot, corners: np.ndarray, grow_px: float) -> np.ndarray:
    mask = np.zeros((shot.camera.height_px, shot.camera.width_px), np.uint8)
    hull = cv2.convexHull(np.round(corners * 16).astype(np.int32))
    cv2.fillConvexPoly(mask, hull, 1, cv2.LINE_8, 4)
    size = 2 * int(np.ceil(grow_px)) + 1
    return cv2.dilate(mask, np.ones((size, size), np.uint8)).astype(bool)


def _inside(shot: _Shot, corners: np.ndarray) -> bool:
    low, high = corners.min(0), corners.max(0)
    return bool((low > 3).all() and high[0] < shot.camera.width_px - 4 and high[1] < shot.camera.height_px - 4)


@pytest.mark.slow
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
    _, owners = render(*shot, owners=True)
    assert owners is not None
    num_checked = 0
    for solid in shot.solids:
        drawn = owners == solid.actor
        if solid.actor < 0 or drawn.sum() < 12:
            continue
        corners = _projected_corners(shot, solid)
        if corners is None:
            continue
        assert not (drawn & ~_hull_mask(shot, corners, 1.0)).any(), solid
        num_checked += 1
    assert num_checked >= 1


@pytest.mark.slow
@pytest.mark.parametrize("index", [CLEAR, DUSK])
def test_unhidden_objects_fill_their_projected_boxes_to_the_edges(index: int) -> None:
    shot = _shot(index, "CAM_FRONT")
    num_checked = 0
    for solid in shot.solids:
        corners = _projected_corners(shot, solid) if solid.actor >= 0 else None
        if corners is None or not _inside(shot, corners) or np.ptp(corners, axis=0).min() < 12:
            continue
        # Alone in the world, so that nothing hides it.
        _, owners = render(shot.clip, shot.camera, [solid], shot.exposure_us, owners=True)
        assert owners is not None
        rows, columns = np.nonzero(owners == solid.actor)
        low, high = corners.min(0), corners.max(0)
        size = high - low
        assert rows.min() - low[1] < 2 + 0.13 * size[1], solid.kind
        assert high[1] - rows.max() < 2 + 0.14 * size[1], solid.kind
        # Shapes taper; people are flat pictures that turn to the camera inside a squarish box, cycles hardly turn.
        flat = ("human", "bicycle", "vehicle.bicycle", "vehicle.motorcycle", "movable")
        slack = (0.6 if "cycle" in solid.kind else 0.36) if solid.kind.startswith(flat) else 0.12
        assert columns.min() - low[0] < 2 + slack * size[0], solid.kind
        assert high[0] - columns.max() < 2 + slack * size[0], solid.kind
        share = len(rows) / _hull_mask(shot, corners, 0.0).sum()
        least = 0.04 if solid.kind == "bicycle" else 0.18 if slack > 0.2 else 0.6  # one sees through spokes and frame
        assert share > least, (solid.kind, share)
        num_checked += 1
    assert num_checked >= 8


@pytest.mark.slow
def test_taking_an_object_away_changes_its_box_and_nothing_else() -> None:
    # Independent of who is said to own a pixel: compare two pictures. Overcast, so shadows stay under their objects.
    shot = _shot(DUSK, "CAM_FRONT")
    with_all, owners = render(*shot, owners=True)
    assert owners is not None
    visible = sorted(
        (solid for solid in shot.solids if solid.actor >= 0 and (owners == solid.actor).sum() > 150),
        key=lambda solid: -int((owners == solid.actor).sum()),
    )
    chosen = [(s, c) for s in visible if (c := _projected_corners(shot, s)) is not None][:3]
    assert len(chosen) == 3
    for solid, corners in chosen:
        others = [one for one in shot.solids if one.actor != solid.actor]
        without, _ = render(shot.clip, shot.camera, others, shot.exposure_us)
        changed = np.abs(with_all.astype(int) - without).max(axis=-1) > 6
        assert not (changed & ~_hull_mask(shot, corners, 5.0)).any(), solid
        own = owners == solid.actor
        assert changed[own].mean() > 0.7, solid


@given(st.floats(20.0, 60.0), st.floats(20.0, 60.0), st.floats(0.0, math.pi), st.floats(8.0, 30.0))
def test_coverage_sums_to_the_area(x: float, y: float, turn: float, size: float) -> None:
    angles = turn + np.arange(4) * math.pi / 2
    square = np.column_stack([x + size / math.sqrt(2) * np.cos(angles), y + size / math.sqrt(2) * np.sin(angles)])
    window = window_of(square, 100, 100)
    assert window is not None
    # Within a twentieth of a pixel along the sides, and a pixel at each corner.
    assert coverage(square, window).sum() == pytest.approx(size * size, abs=0.05 * 4 * size + 4)
    assert coverage(square[::-1], window).sum() == pytest.approx(size * size, abs=0.05 * 4 * size + 4)


def test_clip_depth_cuts_where_the_plane_is() -> None:
    square = np.array([[0.0, 0, -1], [2.0, 0, -1], [2.0, 0, 3], [0.0, 0, 3]])
    kept = clip_depth(square, 1.0)
    assert kept[:, 2].min() == pytest.approx(1.0)
    assert sorted(kept[np.isclose(kept[:, 2], 1.0)][:, 0]) == pytest.approx([0.0, 2.0])
    assert len(clip_depth(square, 5.0)) == 0
    np.testing.assert_array_equal(clip_depth(square, -2.0), square)


ALL = [*KINDS, "bicycle", "building", "tree", "crown"]


@pytest.mark.parametrize("kind", ALL)
def test_shapes_stay_in_the_unit_box_and_reach_its_ends(kind: str) -> None:
    vertices = np.concatenate([part.vertices for part in shape_of(kind)])
    assert (np.abs(vertices[:, :2]) <= 0.5 + 1e-12).all()
    assert vertices[:, 2].min() >= 0.0
    assert vertices[:, 2].max() <= 1.0
    np.testing.assert_allclose(np.ptp(vertices, axis=0), [1.0, 1.0, 1.0], atol=1e-9)


@pytest.mark.parametrize("kind", [*ALL, "post"])
def test_bodies_are_closed_convex_and_face_outwards(kind: str) -> None:
    for part in shape_of(kind):
        middle = part.vertices.mean(0)
        edges = []
        for face in part.faces:
            corners = part.vertices[list(face.vertices)]
            normal = np.cross(corners[1] - corners[0], corners[2] - corners[1])
            assert normal @ (corners[0] - middle) > 0
            beyond = (part.vertices - corners[0]) @ normal / np.linalg.norm(normal)
            assert beyond.max() < 1e-9, "every vertex lies behind or in every face"
            edges += list(zip(face.vertices, (*face.vertices[1:], face.vertices[0]), strict=True))
        assert sorted(edges) == sorted((b, a) for a, b in edges), "each edge is used once each way"
