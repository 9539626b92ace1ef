"""The synthetic world without its pictures: streets, who drives on them, who hides whom."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuelrail.sharding.demo.options import SynthOptions
from fuelrail.sharding.demo.picture import owners, visible_shares
from fuelrail.sharding.demo.rig import make_rig
from fuelrail.sharding.demo.shapes import Solid
from fuelrail.sharding.demo.street import (
    check_times,
    corners,
    footprint_track,
    footprints_overlap,
)
from fuelrail.sharding.demo.world import (
    KEYFRAME_US,
    SynthClip,
    captures,
    make_clip,
    token,
)
from support.synth_rays import first_met

SPEC = SynthOptions(seed=11, clips=6, frames=5, lidar_sweeps=2)


@pytest.mark.costly
def test_a_clip_is_the_same_in_a_larger_world() -> None:
    larger = msgspec.structs.replace(SPEC, clips=9)
    assert make_clip(larger, 1).actors == make_clip(SPEC, 1).actors
    assert make_clip(larger, 1).scenery == make_clip(SPEC, 1).scenery


@pytest.mark.costly
def test_seeds_give_other_worlds() -> None:
    reseeded = make_clip(msgspec.structs.replace(SPEC, seed=12), 0)
    mine = make_clip(SPEC, 0)
    assert reseeded.actors != mine.actors
    assert reseeded.road != mine.road
    assert token(11, "sample", 0) != token(12, "sample", 0)
    assert len(token(11, "sample", 0)) == 32


def test_captures_are_in_time_order_and_keyframes_half_a_second_apart() -> None:
    clip_captures = captures(SPEC, make_clip(SPEC, 0))
    times = [capture.timestamp_us for capture in clip_captures]
    assert times == sorted(times)
    keys = [capture for capture in clip_captures if capture.is_key_frame]
    assert [capture.frame for capture in keys] == list(range(5))
    assert np.abs(np.diff([capture.timestamp_us for capture in keys]) - KEYFRAME_US).max() <= 2000
    sweeps = [capture for capture in clip_captures if not capture.is_key_frame]
    assert len(sweeps) == 2 * 4
    # A sweep belongs to the keyframe that follows it.
    for capture in sweeps:
        assert (
            keys[capture.frame - 1].timestamp_us
            < capture.timestamp_us
            < keys[capture.frame].timestamp_us
        )


@pytest.mark.slow
@pytest.mark.parametrize("index", range(4))
def test_nothing_ever_touches_anything(index: int) -> None:
    clip = make_clip(SPEC, index)
    times = check_times(clip.duration_s)
    tracks = [footprint_track(actor, clip.road, times) for actor in clip.actors]
    centres = np.array([track.mean(1) for track in tracks])
    for a in range(len(tracks)):
        near = np.abs(centres[a + 1 :] - centres[a]).max(-1).min(-1) < 12.0
        for b in np.nonzero(near)[0] + a + 1:
            assert not footprints_overlap(tracks[a], tracks[b]), (
                clip.actors[a],
                clip.actors[b],
            )
    assert len(tracks) > 40


@pytest.mark.costly
def test_clips_differ_in_weather_and_say_so() -> None:
    clips = [make_clip(SPEC, index) for index in range(6)]
    words = [clip.description.lower() for clip in clips]
    assert sum("rain" in text for text in words) >= 1
    assert sum("night" in text for text in words) >= 1
    assert len({clip.weather.description for clip in clips[:4]}) == 4


def test_ego_moves_smoothly_and_faces_where_it_goes() -> None:
    clip = make_clip(SPEC, 2)
    step_us = 20_000
    poses = [clip.ego2global(clip.start_us + step_us * step) for step in range(100)]
    places = np.array([pose[:3, 3] for pose in poses])
    speeds = np.linalg.norm(np.diff(places, axis=0), axis=1) / (step_us * 1e-6)
    assert speeds.min() > 4.0
    assert speeds.max() < 12.0
    assert (places[:, 2] == 0).all()
    for pose, move in zip(poses, np.diff(places, axis=0), strict=False):
        facing = pose[:3, 0]
        assert facing @ move / np.linalg.norm(move) > math.cos(0.02)


def test_cameras_look_where_their_names_say_and_scale_with_the_image() -> None:
    full = make_rig(3, "a", 1600, 900)
    half = make_rig(3, "a", 800, 450)
    bearings = {}
    for camera in full.cameras:
        forward = camera.sensor2ego[:3, 2]
        bearings[camera.channel] = math.degrees(math.atan2(forward[1], forward[0]))
        assert abs(forward[2]) < 0.03
    expected = {
        "CAM_FRONT": 0,
        "CAM_FRONT_RIGHT": -55,
        "CAM_FRONT_LEFT": 55,
        "CAM_BACK": 180,
        "CAM_BACK_LEFT": 108,
        "CAM_BACK_RIGHT": -110,
    }
    for channel, degrees in expected.items():
        assert abs((bearings[channel] - degrees + 180) % 360 - 180) < 3, channel
    resize = np.array(
        [[0.5, 0, -0.25], [0, 0.5, -0.25], [0, 0, 1]]
    )  # centre-origin pixels, factor one half
    for large, small in zip(full.cameras, half.cameras, strict=True):
        np.testing.assert_allclose(small.intrinsics, resize @ large.intrinsics, atol=1e-6)
        np.testing.assert_array_equal(small.sensor2ego, large.sensor2ego)


@given(st.floats(0, 5), st.floats(-math.pi, math.pi))
def test_overlap_of_turned_rectangles_agrees_with_sampled_points(
    distance: float, yaw: float
) -> None:
    first = corners(np.zeros(1), y=np.zeros(1), yaw_rad=np.zeros(1), length=4.0, width=2.0)
    second = corners(
        np.full(1, distance),
        y=np.zeros(1),
        yaw_rad=np.full(1, yaw),
        length=3.0,
        width=1.0,
    )
    u, v = np.meshgrid(np.linspace(-0.499, 0.499, 60), np.linspace(-0.499, 0.499, 60))
    c = math.cos(yaw)
    s = math.sin(yaw)
    x = distance + c * u * 3.0 - s * v
    y = s * u * 3.0 + c * v
    sampled = bool(((np.abs(x) < 2.0) & (np.abs(y) < 1.0)).any())
    if sampled:  # samples may miss the very edge, never the other way round
        assert footprints_overlap(first, second)
    elif not ((np.abs(x) < 2.1) & (np.abs(y) < 1.1)).any():
        assert not footprints_overlap(first, second)


@pytest.mark.costly
def test_each_pixel_shows_what_its_ray_meets_first() -> None:
    clip = make_clip(SynthOptions(seed=8), 0)
    solids = clip.solids(clip.start_us)
    camera = clip.rig.cameras[0]
    cam2global = clip.ego2global(clip.start_us) @ camera.sensor2ego
    actor_map, _ = owners(camera, cam2global, solids, 160)
    draw = np.random.default_rng(0)
    actors = set()
    for u, v in zip(draw.integers(0, 160, 400), draw.integers(0, 90, 400), strict=True):
        ray = (
            cam2global[:3, :3]
            @ np.linalg.inv(camera.intrinsics)
            @ (u * 10 + 4.5, v * 10 + 4.5, 1.0)
        )
        _, solid = first_met(cam2global[:3, 3], ray, solids, 0.3)
        assert actor_map[v, u] == (-1 if solid is None else solid.actor)
        actors.add(actor_map[v, u])
    assert len(actors) > 5


def _ahead(
    clip: SynthClip,
    metres: float,
    left_m: float,
    actor: int,
    size: tuple[float, float, float],
) -> Solid:
    (x, y, _), _ = clip.ego(clip.start_us)
    forward = clip.ego2global(clip.start_us)[:3, 0]
    side = np.array([-forward[1], forward[0]])
    place = np.array([x, y]) + metres * forward[:2] + left_m * side
    yaw = float(np.arctan2(forward[1], forward[0]))
    return Solid(
        kind="vehicle.bus.rigid",
        actor=actor,
        centre=(place[0], place[1], size[2] / 2),
        yaw_rad=yaw,
        size_lwh=size,
        colour=(9, 9, 9),
        style=0,
    )


@pytest.mark.costly
def test_what_is_hidden_is_not_seen() -> None:
    clip = make_clip(SynthOptions(seed=2), 0)
    large = (8.0, 3.0, 3.0)
    small = (2.0, 1.0, 1.0)
    alone = visible_shares(
        clip,
        [_ahead(clip, metres=30.0, left_m=0.0, actor=0, size=small)],
        clip.start_us,
    )
    assert alone == {0: 1.0}
    behind = [
        _ahead(clip, metres=30.0, left_m=0.0, actor=0, size=small),
        _ahead(clip, metres=15.0, left_m=0.0, actor=1, size=large),
    ]
    assert visible_shares(clip, behind, clip.start_us) == {0: 0.0, 1: 1.0}
    half = [
        _ahead(clip, metres=30.0, left_m=0.0, actor=0, size=large),
        _ahead(clip, metres=15.0, left_m=0.8, actor=1, size=(2.0, 1.6, 3.0)),
    ]
    assert 0.3 < visible_shares(clip, half, clip.start_us)[0] < 0.7
    assert visible_shares(clip, half[::-1], clip.start_us) == pytest.approx(
        visible_shares(clip, half, clip.start_us)
    )
