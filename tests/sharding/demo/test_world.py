from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from fuelrail.sharding.demo.rig import make_rig
from fuelrail.sharding.demo.street import check_times, footprint_track, footprints_overlap
from fuelrail.sharding.demo.world import KEYFRAME_US, WorldSpec, captures, make_clip, token

pytestmark = pytest.mark.slow

SPEC = WorldSpec(seed=11, num_clips=6, num_frames=5, num_lidar_sweeps=2, num_camera_sweeps=1)


def test_a_clip_is_the_same_in_a_larger_world() -> None:
    larger = msgspec.structs.replace(SPEC, num_clips=9)
    assert make_clip(larger, 1).actors == make_clip(SPEC, 1).actors
    assert make_clip(larger, 1).props == make_clip(SPEC, 1).props


def test_seeds_give_other_worlds() -> None:
    other = make_clip(msgspec.structs.replace(SPEC, seed=12), 0)
    mine = make_clip(SPEC, 0)
    assert other.actors != mine.actors
    assert other.road != mine.road
    assert token(11, "sample", 0) != token(12, "sample", 0)
    assert len(token(11, "sample", 0)) == 32


def test_captures_are_in_time_order_and_keyframes_half_a_second_apart() -> None:
    taken = captures(SPEC, make_clip(SPEC, 0))
    times = [one.timestamp_us for one in taken]
    assert times == sorted(times)
    keys = [one for one in taken if one.is_key_frame]
    assert [one.frame for one in keys] == list(range(5))
    assert np.abs(np.diff([one.timestamp_us for one in keys]) - KEYFRAME_US).max() <= 2000
    assert all(one.lidar and one.cameras for one in keys)
    sweeps = [one for one in taken if not one.is_key_frame]
    assert sum(one.lidar for one in sweeps) == 2 * 4
    assert sum(one.cameras for one in sweeps) == 4
    # A sweep belongs to the keyframe that follows it.
    for one in sweeps:
        assert keys[one.frame - 1].timestamp_us < one.timestamp_us < keys[one.frame].timestamp_us


@pytest.mark.parametrize("index", range(4))
def test_nothing_ever_touches_anything(index: int) -> None:
    clip = make_clip(SPEC, index)
    times = check_times(clip.duration_s)
    tracks = [footprint_track(actor, clip.road, times) for actor in clip.actors]
    centres = np.array([track.mean(1) for track in tracks])
    for a in range(len(tracks)):
        near = np.abs(centres[a + 1 :] - centres[a]).max(-1).min(-1) < 12.0
        for b in np.nonzero(near)[0] + a + 1:
            assert not footprints_overlap(tracks[a], tracks[b]), (clip.actors[a], clip.actors[b])
    assert len(tracks) > 40


def test_clips_differ_in_weather_and_say_so() -> None:
    words = [make_clip(SPEC, index).description.lower() for index in range(6)]
    assert sum("rain" in text for text in words) >= 1
    assert sum("night" in text for text in words) >= 1
    assert len({make_clip(SPEC, index).weather.name for index in range(4)}) == 4


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
    full, half = make_rig(3, "a", 1600, 900), make_rig(3, "a", 800, 450)
    bearings = {}
    for camera in full.cameras:
        forward = camera.cam2ego[:3, 2]
        bearings[camera.channel] = math.degrees(math.atan2(forward[1], forward[0]))
        assert abs(forward[2]) < 0.03
    expected = {
        "CAM_FRONT": 0, "CAM_FRONT_RIGHT": -55, "CAM_FRONT_LEFT": 55, "CAM_BACK": 180, "CAM_BACK_LEFT": 108,
        "CAM_BACK_RIGHT": -110,
    }  # fmt: skip
    for channel, degrees in expected.items():
        assert abs((bearings[channel] - degrees + 180) % 360 - 180) < 3, channel
    resize = np.array([[0.5, 0, -0.25], [0, 0.5, -0.25], [0, 0, 1]])  # centre-origin pixels, factor one half
    for large, small in zip(full.cameras, half.cameras, strict=True):
        np.testing.assert_allclose(small.intrinsics, resize @ large.intrinsics, atol=1e-6)
        np.testing.assert_array_equal(small.cam2ego, large.cam2ego)
