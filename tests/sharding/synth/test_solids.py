from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fuelrail.sharding.synth.road import corners, footprints_overlap
from fuelrail.sharding.synth.solids import far_to_near, solids_near
from fuelrail.sharding.synth.world import WorldSpec, captures, make_clip

RECTANGLES = st.lists(
    st.tuples(
        st.floats(-30, 30), st.floats(-30, 30), st.floats(-math.pi, math.pi), st.floats(0.5, 9), st.floats(0.5, 3)
    ),
    min_size=2,
    max_size=10,
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


@settings(max_examples=60)
@given(RECTANGLES)
def test_what_a_ray_meets_first_is_painted_last(drawn: list[tuple[float, float, float, float, float]]) -> None:
    eye = np.zeros(2)
    ego = corners(np.zeros(1), np.zeros(1), np.zeros(1), 1.0, 1.0)
    kept: list[np.ndarray] = []
    for x, y, yaw, length, width in drawn:
        one = corners(np.full(1, x), np.full(1, y), np.full(1, yaw), length, width)
        if not any(footprints_overlap(one, other) for other in [ego, *kept]):
            kept.append(one)
    if len(kept) < 2:
        return
    footprints = np.concatenate(kept)
    order = far_to_near(footprints, np.tile([0.0, 2.0], (len(kept), 1)), eye)
    assert sorted(order) == list(range(len(kept)))
    rank = {index: place for place, index in enumerate(order)}
    before: set[tuple[int, int]] = set()
    for angle in np.linspace(0, 2 * math.pi, 180, endpoint=False):
        hits = [_first_hit(one, eye, np.array([math.cos(angle), math.sin(angle)])) for one in footprints]
        met = [int(index) for index in np.argsort(hits) if np.isfinite(hits[index])]
        before |= {(far, near) for near, far in zip(met, met[1:], strict=False)}
    cyclic = any((near, far) in before for far, near in before)
    if not cyclic and len(kept) < 3:
        assert all(rank[far] < rank[near] for far, near in before)
    wrong = [pair for pair in before if rank[pair[0]] > rank[pair[1]]]
    # Three or more long boxes can hide one another in a ring, which no order satisfies; one pair of it goes wrong.
    assert len(wrong) <= (0 if len(kept) < 3 else 1)


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
        assert solid.kind == actor.category
