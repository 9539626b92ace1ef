from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuelrail.sharding.demo.solids import far_to_near, solids_near
from fuelrail.sharding.demo.street import corners, footprints_overlap
from fuelrail.sharding.demo.world import WorldSpec, captures, make_clip

RECTANGLE = st.tuples(
    st.floats(-30, 30), st.floats(-30, 30), st.floats(-math.pi, math.pi), st.floats(0.5, 9), st.floats(0.5, 3)
)


def _first_hit(rectangle: np.ndarray, eye: np.ndarray, direction: np.ndarray) -> float:
    sides = np.roll(rectangle, -1, axis=0) - rectangle
    normals = np.stack([sides[:, 1], -sides[:, 0]], axis=-1)
    enter, leave = 0.0, np.inf
    for normal, corner in zip(normals, rectangle, strict=True):
        speed, gap = float(normal @ direction), float(normal @ (corner - eye))
        if speed == 0:
            if gap < 0:
                return np.inf
        elif speed < 0:
            enter = max(enter, gap / speed)
        else:
            leave = min(leave, gap / speed)
    return enter if 0 < enter < leave else np.inf


def _hidden_by(footprints: np.ndarray, eye: np.ndarray, num_rays: int) -> set[tuple[int, int]]:
    """Pairs (far, near) of which some ray meets the second just before the first."""
    found = set()
    for angle in np.linspace(0, 2 * math.pi, num_rays, endpoint=False):
        hits = [_first_hit(one, eye, np.array([math.cos(angle), math.sin(angle)])) for one in footprints]
        met = [int(index) for index in np.argsort(hits) if np.isfinite(hits[index])]
        found |= {(far, near) for near, far in pairwise(met)}
    return found


@settings(max_examples=100)
@given(RECTANGLE, RECTANGLE)
def test_the_nearer_of_two_is_painted_last(a: tuple[float, ...], b: tuple[float, ...]) -> None:
    ego, first, second = (
        corners(np.full(1, x), np.full(1, y), np.full(1, yaw), length, width)
        for x, y, yaw, length, width in ((0.0, 0.0, 0.0, 1.0, 1.0), a, b)
    )
    if any(footprints_overlap(one, other) for one, other in ((ego, first), (ego, second), (first, second))):
        return
    footprints = np.concatenate([first, second])
    order = far_to_near(footprints, np.tile([0.0, 2.0], (2, 1)), np.zeros(2))
    assert sorted(order) == [0, 1]
    hidden = _hidden_by(footprints, np.zeros(2), 90)
    assert hidden <= {(order[0], order[1])}


@pytest.mark.parametrize("index", [0, 1])
def test_what_a_ray_meets_first_in_a_street_is_painted_last(index: int) -> None:
    clip = make_clip(WorldSpec(seed=8), index)
    solids = [solid for solid in solids_near(clip, clip.start_us) if solid.kind != "crown"]
    footprints = np.array([solid.footprint() for solid in solids])
    eye = np.array(clip.ego(clip.start_us)[0][:2])
    order = far_to_near(footprints, np.tile([0.0, 2.0], (len(solids), 1)), eye)
    rank = {place: number for number, place in enumerate(order)}
    hidden = _hidden_by(footprints, eye, 160)
    assert len(hidden) > 50
    assert [pair for pair in hidden if rank[pair[0]] > rank[pair[1]]] == []


def test_a_crown_is_painted_before_what_stands_below_it_and_after_its_trunk() -> None:
    square = corners(np.full(3, 10.0), np.zeros(3), np.zeros(3), 3.0, 3.0)
    heights = np.array([[3.9, 8.0], [0.0, 4.2], [0.0, 1.6]])
    order = far_to_near(square, heights, np.zeros(2))
    assert order.index(1) < order.index(0) < order.index(2)


def test_solids_of_a_capture_are_the_actors_where_their_annotations_will_be() -> None:
    spec = WorldSpec(seed=3, num_frames=3)
    clip = make_clip(spec, 1)
    capture = [one for one in captures(spec, clip) if one.is_key_frame][2]
    found = [solid for solid in solids_near(clip, capture.timestamp_us) if solid.actor >= 0]
    assert len(found) > 20
    for solid in found:
        actor = clip.actors[solid.actor]
        assert (solid.centre, solid.yaw_rad) == clip.actor_box(actor, capture.timestamp_us)
        assert solid.size_lwh == (actor.size_wlh[1], actor.size_wlh[0], actor.size_wlh[2])
        bare = actor.attribute == "cycle.without_rider"
        assert solid.kind == ("bicycle" if bare else actor.category)
