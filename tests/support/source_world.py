"""One small synthetic world as neutral frames: each adapter's tests write it in their format, and compare.

Ego drives on a circle, three cameras of two sizes expose at times of their own, a lidar sees points of the world, and
boxes move straight ahead. All times are whole milliseconds, so every format has them exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import simplejpeg

from fuelrail.pipeline.format.dataset import open_dataset, read_members
from fuelrail.pipeline.sample.schema import decode_sample

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fuelrail.pipeline.sample.schema import Sample

START_NS = 1_600_000_000_000_000_000
PERIOD_NS = 100_000_000
RADIUS_M = 40.0
SPEED_MPS = 8.0
CATEGORIES = ("car", "pedestrian")
OPTICAL = np.array([[0.0, 0, 1], [-1, 0, 0], [0, -1, 0]])
"""Columns: a camera's right, down and forward, in the axes forward, left, up."""


@dataclass
class WorldImage:
    jpeg: bytes
    timestamp_ns: int
    intrinsics: np.ndarray
    cam2ego: np.ndarray
    ego2global: np.ndarray
    size: tuple[int, int]


@dataclass
class WorldSweep:
    """``points``: float32 (P, 5) x, y, z, intensity, ring, in the lidar's frame."""

    points: np.ndarray
    timestamp_ns: int
    lidar2ego: np.ndarray
    ego2global: np.ndarray


@dataclass
class WorldBox:
    """A box in global."""

    centre: np.ndarray
    size_lwh: np.ndarray
    yaw: float
    category: str
    track: str
    num_points: int
    velocity: np.ndarray

    @property
    def rotation_wxyz(self) -> list[float]:
        return [math.cos(self.yaw / 2), 0.0, 0.0, math.sin(self.yaw / 2)]


@dataclass
class WorldFrame:
    timestamp_ns: int
    ego2global: np.ndarray
    images: dict[str, WorldImage]
    sweeps: dict[str, WorldSweep]
    boxes: list[WorldBox]


@dataclass
class WorldClip:
    name: str
    frames: list[WorldFrame] = field(default_factory=list)


@dataclass
class World:
    """``cameras`` map channel to size, in the order of the rig."""

    clips: list[WorldClip]
    cameras: dict[str, tuple[int, int]]
    lidars: tuple[str, ...]

    def frames(self) -> Iterator[tuple[WorldClip, int, WorldFrame]]:
        for clip in self.clips:
            for number, frame in enumerate(clip.frames):
                yield clip, number, frame


def ego_at(clip: int, timestamp_ns: int) -> np.ndarray:
    """Ego pose (4, 4): on a circle, nose along it, a little pitched."""
    angle = (timestamp_ns - START_NS) * 1e-9 * SPEED_MPS / RADIUS_M + clip
    pose = np.eye(4)
    pose[:3, :3] = turn(angle + math.pi / 2, "z") @ turn(0.02, "y")
    pose[:3, 3] = (
        RADIUS_M * math.cos(angle) + 500 * clip,
        RADIUS_M * math.sin(angle),
        0.3,
    )
    return pose


def turn(angle: float, axis: str) -> np.ndarray:
    """Rotation about an axis."""
    c = math.cos(angle)
    s = math.sin(angle)
    return np.array(
        {
            "z": [[c, -s, 0], [s, c, 0], [0, 0, 1]],
            "y": [[c, 0, s], [0, 1, 0], [-s, 0, c]],
        }[axis]
    )


def make_world(
    num_clips: int = 2,
    num_frames: int = 4,
    *,
    cameras: dict[str, tuple[int, int]] | None = None,
    lidars: tuple[str, ...] = ("lidar_top",),
    num_boxes: int = 3,
    num_points: int = 50,
    noise: bool = False,
) -> World:
    """Make the world; ``noise`` makes images large for their number of pixels."""
    sizes = cameras or {
        "cam_front": (64, 48),
        "cam_left": (64, 48),
        "cam_back": (48, 64),
    }
    rng = np.random.default_rng(7)
    world = World(
        [WorldClip(f"drive-{number}") for number in range(num_clips)],
        sizes,
        lidars,
    )
    for number, clip in enumerate(world.clips):
        for frame in range(num_frames):
            time_ns = START_NS + number * 60_000_000_000 + frame * PERIOD_NS
            images = {
                name: _image(
                    rng,
                    clip=number,
                    time_ns=time_ns,
                    camera_index=camera_index,
                    size=size,
                    noise=noise,
                )
                for camera_index, (name, size) in enumerate(sizes.items())
            }
            sweeps = {}
            for name in lidars:
                lidar2ego = np.eye(4)
                lidar2ego[:3, :3], lidar2ego[:3, 3] = (
                    turn(-math.pi / 2, "z"),
                    (0.9, 0.0, 1.8),
                )
                points = np.concatenate(
                    [
                        rng.uniform(-30, 30, (num_points, 3)),
                        rng.integers(0, 255, (num_points, 2)),
                    ],
                    1,
                ).astype(np.float32)
                sweeps[name] = WorldSweep(points, time_ns, lidar2ego, ego_at(number, time_ns))
            boxes = [_box(number, track, time_ns) for track in range(num_boxes)]
            clip.frames.append(
                WorldFrame(
                    timestamp_ns=time_ns,
                    ego2global=ego_at(number, time_ns),
                    images=images,
                    sweeps=sweeps,
                    boxes=boxes,
                )
            )
    return world


def _image(
    rng: np.random.Generator,
    clip: int,
    time_ns: int,
    camera_index: int,
    size: tuple[int, int],
    noise: bool,
) -> WorldImage:
    width, height = size
    pixels = rng.integers(0, 255, (height, width, 3), np.uint8)
    if not noise:
        pixels = np.kron(
            pixels[: height // 8 + 1, : width // 8 + 1],
            np.ones((8, 8, 1), np.uint8),
        )[:height, :width]
    jpeg = simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), 100 if noise else 90, "RGB", "444")
    intrinsics = np.array(
        [
            [width * 0.8, 0, width / 2 - 0.5],
            [0, width * 0.8, height / 2 - 0.5],
            [0, 0, 1],
        ]
    )
    cam2ego = np.eye(4)
    cam2ego[:3, :3], cam2ego[:3, 3] = (
        turn(camera_index * math.pi / 2, "z") @ OPTICAL,
        (1.5 - camera_index, 0.3 * camera_index, 1.6),
    )
    exposed_ns = time_ns + (camera_index * 7 - 5) * 1_000_000
    return WorldImage(
        jpeg=jpeg,
        timestamp_ns=exposed_ns,
        intrinsics=intrinsics,
        cam2ego=cam2ego,
        ego2global=ego_at(clip, exposed_ns),
        size=size,
    )


def _box(clip: int, track: int, time_ns: int) -> WorldBox:
    elapsed_s = (time_ns - START_NS) * 1e-9 - 60 * clip
    yaw = 0.4 * track - 1
    velocity = (track - 1) * 2.0 * np.array([math.cos(yaw), math.sin(yaw), 0.0])
    start = ego_at(clip, time_ns - int(elapsed_s * 1e9))[:3, 3] + (
        8.0 + 3 * track,
        4.0 * track - 5,
        0.5,
    )
    return WorldBox(
        centre=start + velocity * elapsed_s,
        size_lwh=np.array([4.0 + track, 1.8, 1.5]),
        yaw=yaw,
        category=CATEGORIES[track % len(CATEGORIES)],
        track=f"track-{track}",
        num_points=5 + track,
        velocity=velocity,
    )


def samples_of(root) -> dict[str, Sample]:
    """All samples of a dataset, by key."""
    dataset = open_dataset(root)
    samples = {}
    for number in range(len(dataset.index)):
        row = dataset.index.row(number)
        path = dataset.shard_path(row)
        span = path.read_bytes()[row.offset : row.offset + row.length]
        members = read_members(row, span, path.name, dictionary=dataset.dictionary)
        fields = {
            channel.field for channel in dataset.manifest.extra_channels if channel.kind != "points"
        }
        samples[row.key] = decode_sample(
            row.key,
            {name: bytes(data) for name, data in members.items()},
            fields,
        )
    return samples


def check_same(
    world: World,
    root,
    *,
    pose_m: float = 1e-6,
    box_m: float = 1e-4,
    pixels: float = 0.1,
    points_m: float = 1e-6,
    same_bytes: bool = True,
    labelled: bool = True,
) -> None:
    """Compare a dataset with the world: times, poses, calibration, projected points, boxes, images, points."""
    manifest = open_dataset(root).manifest
    channels = [camera.channel for camera in manifest.cameras]
    assert channels == list(world.cameras)
    samples = samples_of(root)
    assert len(samples) == sum(len(clip.frames) for clip in world.clips)
    by_time = {
        (sample.meta.clip_name, sample.meta.timestamp_ns): sample for sample in samples.values()
    }
    for clip, number, frame in world.frames():
        sample = by_time[clip.name, frame.timestamp_ns]
        geometry = sample.geometry
        assert sample.meta.frame_idx == number
        np.testing.assert_allclose(geometry.ego2global, frame.ego2global, atol=pose_m, rtol=0)
        for index, name in enumerate(channels):
            image = frame.images[name]
            assert geometry.cam_timestamp_ns[index] == image.timestamp_ns
            assert tuple(geometry.img_wh[index]) == image.size
            np.testing.assert_allclose(
                geometry.intrinsics[index], image.intrinsics, atol=1e-6, rtol=0
            )
            np.testing.assert_allclose(geometry.cam2ego[index], image.cam2ego, atol=pose_m, rtol=0)
            np.testing.assert_allclose(
                geometry.cam_ego2global[index],
                image.ego2global,
                atol=pose_m,
                rtol=0,
            )
            true2seen = np.linalg.inv(geometry.cam_ego2global[index] @ geometry.cam2ego[index]) @ (
                image.ego2global @ image.cam2ego
            )
            expected_pixels = _pixels(image.intrinsics, np.eye(4))
            np.testing.assert_allclose(
                _pixels(geometry.intrinsics[index], true2seen),
                expected_pixels,
                atol=pixels,
                rtol=0,
            )
            if same_bytes:
                assert bytes(sample.images[name]) == image.jpeg
        for index, lidar in enumerate(manifest.lidars):
            sweep = frame.sweeps[lidar.channel]
            assert geometry.lidar_timestamp_ns[index] == sweep.timestamp_ns
            np.testing.assert_allclose(
                geometry.lidar2ego[index], sweep.lidar2ego, atol=pose_m, rtol=0
            )
            points = sample.points[lidar.channel]
            np.testing.assert_allclose(points[:, :3], sweep.points[:, :3], atol=points_m, rtol=0)
        if labelled:
            _check_boxes(sample, frame, list(manifest.classes), box_m)


def _pixels(intrinsics: np.ndarray, true2seen: np.ndarray) -> np.ndarray:
    """Pixels (P, 2) of points 5 to 50 m in front of the true camera, as the camera of the dataset sees them."""
    rng = np.random.default_rng(1)
    depth = rng.uniform(5, 50, 20)
    in_cam = np.stack(
        [
            rng.uniform(-0.5, 0.5, 20) * depth,
            rng.uniform(-0.4, 0.4, 20) * depth,
            depth,
            np.ones(20),
        ]
    )
    projected = intrinsics @ (true2seen @ in_cam)[:3]
    return (projected[:2] / projected[2]).T


def _check_boxes(sample: Sample, frame: WorldFrame, classes: list[str], box_m: float) -> None:
    boxes = sample.boxes
    assert boxes is not None
    assert len(boxes.label) == len(frame.boxes)
    to_ego = np.linalg.inv(frame.ego2global)
    centres = np.array(
        [to_ego[:3, :3] @ box.centre + to_ego[:3, 3] for box in frame.boxes]
    ).reshape(-1, 3)
    distance = np.linalg.norm(boxes.boxes3d[:, None, :3] - centres[None], axis=2)
    order = distance.argmin(0)
    assert sorted(order) == list(range(len(frame.boxes)))
    for row, box, centre in zip(order, frame.boxes, centres, strict=True):
        np.testing.assert_allclose(boxes.boxes3d[row, :3], centre, atol=box_m, rtol=0)
        np.testing.assert_allclose(boxes.boxes3d[row, 3:6], box.size_lwh, atol=box_m, rtol=0)
        nose = to_ego[:3, :3] @ (math.cos(box.yaw), math.sin(box.yaw), 0)
        yaw = float(boxes.boxes3d[row, 6])
        np.testing.assert_allclose(yaw, math.atan2(nose[1], nose[0]), atol=1e-3, rtol=0)
        assert classes[boxes.label[row]] == box.category
        assert boxes.num_lidar_pts[row] in (-1, box.num_points)
        if not np.isnan(boxes.velocity[row]).any():
            np.testing.assert_allclose(
                boxes.velocity[row],
                to_ego[:3, :3] @ box.velocity,
                atol=1e-3,
                rtol=0,
            )
