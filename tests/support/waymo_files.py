"""Writes the synthetic world as Waymo's TFRecord files: messages field by field, records with their checksums."""

from __future__ import annotations

import math
import struct
import zlib

import google_crc32c
import numpy as np
from scipy.spatial.transform import Rotation

from support.source_world import OPTICAL, WorldSweep

CAMERAS = {
    "cam_front": 1,
    "cam_front_left": 2,
    "cam_front_right": 3,
    "cam_side_left": 4,
    "cam_side_right": 5,
}
TYPES = {"vehicle": 1, "pedestrian": 2}


def varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def field(number: int, value) -> bytes:
    """A field: an int as varint, a float as double, text and bytes with their length."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 1) + struct.pack("<d", value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def message(*pairs) -> bytes:
    return b"".join(field(number, value) for number, value in pairs)


def transform(matrix) -> bytes:
    return message(*((1, float(value)) for value in np.asarray(matrix).ravel()))


def masked(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + masked(length) + data + masked(data)


def to_camera_axes(cam2ego) -> np.ndarray:
    """The extrinsic of a camera whose axes are x forward, y left, z up."""
    extrinsic = np.array(cam2ego)
    extrinsic[:3, :3] = extrinsic[:3, :3] @ OPTICAL.T
    return extrinsic


def context(name, frame, without=()) -> bytes:
    calibrations = []
    for camera, image in frame.images.items():
        k = image.intrinsics
        lens = [
            k[0, 0],
            k[1, 1],
            k[0, 2] + 0.5,
            k[1, 2] + 0.5,
            0.04,
            -0.3,
            1e-3,
            -1e-3,
            0.0,
        ]
        if camera not in without:
            calibrations.append(
                message(
                    (1, CAMERAS[camera]),
                    *((2, float(value)) for value in lens),
                    (3, transform(to_camera_axes(image.cam2ego))),
                    (4, image.size[0]),
                    (5, image.size[1]),
                    (6, 2),
                )
            )
    stats = message((2, "Night"), (3, "location_sf"), (4, "rain"))
    return message(
        (1, name),
        *((2, calibration) for calibration in calibrations),
        *((3, calibration) for calibration in LASERS.values()),
        (4, stats),
    )


TOP_MOUNT = np.eye(4)
FRONT_MOUNT = np.eye(4)
TOP_MOUNT[:3, :3], TOP_MOUNT[:3, 3] = (
    Rotation.from_euler("z", 2.6).as_matrix(),
    (1.4, 0, 2.2),
)
FRONT_MOUNT[:3, 3] = 4, 0, 0.7
INCLINATIONS = (-0.3, -0.2, -0.05, 0.04)
LASERS = {
    1: message(
        (1, 1),
        *((2, value) for value in INCLINATIONS),
        (5, transform(TOP_MOUNT)),
    ),
    2: message((1, 2), (3, -0.4), (4, 0.2), (5, transform(FRONT_MOUNT))),
}


def add_sweep(frame) -> None:
    """Give a frame range images, and the points that they are, worked out pixel by pixel."""
    rng = np.random.default_rng(frame.timestamp_ns // 1_000_000)
    points = []
    frame.lasers = []
    frame.range_images = {}
    late = frame.ego2global.copy()
    late[:3, 3] += (0.5, -0.25, 0.125)
    for number, (rows, columns), mount in (
        (1, (4, 8), TOP_MOUNT),
        (2, (2, 3), FRONT_MOUNT),
    ):
        image = rng.uniform(1, 60, (rows, columns, 4)).astype(np.float32)
        image[0, 1] = -1
        yaw, pitch, roll = Rotation.from_matrix(late[:3, :3]).as_euler("ZYX")
        poses = np.tile(
            np.array([roll, pitch, yaw, *late[:3, 3]], np.float32),
            (rows, columns, 1),
        )
        for row in range(rows):
            inclination = (
                INCLINATIONS[rows - 1 - row]
                if number == 1
                else -0.4 + 0.6 * (rows - row - 0.5) / rows
            )
            for column in range(columns):
                distance = float(image[row, column, 0])
                if distance < 0:
                    continue
                azimuth = math.pi * (2 * (columns - column - 0.5) / columns - 1) - math.atan2(
                    mount[1, 0], mount[0, 0]
                )
                in_lidar = [
                    distance * math.cos(azimuth) * math.cos(inclination),
                    distance * math.sin(azimuth) * math.cos(inclination),
                    distance * math.sin(inclination),
                    1,
                ]
                in_ego = mount @ in_lidar
                if number == 1:
                    in_ego = np.linalg.inv(frame.ego2global) @ late @ in_ego
                points.append([*in_ego[:3], *image[row, column, 1:3]])
        frame.range_images[number] = image, poses if number == 1 else None
        images = [
            (2, matrix(image)),
            *([(4, matrix(poses))] if number == 1 else []),
        ]
        frame.lasers.append(message((1, number), (2, message(*images))))
    frame.sweeps = {
        "lidar": WorldSweep(
            np.array(points, np.float32),
            frame.timestamp_ns,
            np.eye(4),
            frame.ego2global,
        )
    }


def matrix(values) -> bytes:
    """A compressed MatrixFloat."""
    shape = message(*((1, size) for size in values.shape))
    return zlib.compress(message((1, values.tobytes()), (2, shape)))


def image_message(camera, image) -> bytes:
    seconds = image.timestamp_ns / 1e9
    return message(
        (1, CAMERAS[camera]),
        (2, image.jpeg),
        (3, transform(image.ego2global)),
        (4, b"\x0d\0\0\0\0"),
        (5, seconds),
        (6, 0.0025),
        (7, seconds - 0.02),
        (8, seconds + 0.025),
    )


def box_message(box, ego2global) -> bytes:
    to_ego = np.linalg.inv(ego2global)
    centre = to_ego[:3, :3] @ box.centre + to_ego[:3, 3]
    nose = to_ego[:3, :3] @ (np.cos(box.yaw), np.sin(box.yaw), 0)
    length, width, height = box.size_lwh
    values = (*centre, width, length, height, np.arctan2(nose[1], nose[0]))
    return message(*((number, float(value)) for number, value in enumerate(values, 1)))


def camera_labels(camera, boxes) -> bytes:
    """Labels in one image: of each the centre and the sides along x and y, a type and a track."""
    return message(
        (1, CAMERAS[camera]),
        *(
            (
                2,
                message(
                    (1, message((1, x), (2, y), (4, high), (5, wide))),
                    (3, TYPES[kind]),
                    (4, track),
                ),
            )
            for x, y, wide, high, kind, track in boxes
        ),
    )


IMAGE_BOXES = {
    "cam_front": [
        (20.5, 10.5, 8.0, 4.0, "vehicle", "a"),
        (5.5, 6.5, 2.0, 3.0, "pedestrian", "b"),
    ]
}
"""Of every frame: centre x and y, width, height [px], whose pixel 0 is the left edge of the first one."""


def frame_message(name, frame, *, boxes=True, **options) -> bytes:
    labels = [
        message(
            (1, box_message(box, frame.ego2global)),
            (3, TYPES[box.category]),
            (4, box.track),
            (7, box.num_points),
            *([(12, box_message(box, frame.ego2global))] if index else []),
        )
        for index, box in enumerate(frame.boxes if boxes else ())
    ]
    return message(
        (1, context(name, frame, **options)),
        (2, frame.timestamp_ns // 1000),
        (3, transform(frame.ego2global)),
        *((4, image_message(camera, image)) for camera, image in frame.images.items()),
        *((5, laser) for laser in getattr(frame, "lasers", ())),
        *((6, label) for label in labels),
        *(
            (8, camera_labels(camera, camera_boxes))
            for camera, camera_boxes in IMAGE_BOXES.items()
            if boxes
        ),
        (9, bytes(500)),
        *((10, feature) for feature in getattr(frame, "map_features", ())),
        *([(11, map_point(frame.map_offset))] if hasattr(frame, "map_offset") else []),
    )


MAP_KINDS = {
    "lane": (3, 8),
    "road_line": (4, 2),
    "road_edge": (5, 2),
    "stop_sign": (7, 2),
    "crosswalk": (8, 1),
    "speed_bump": (9, 1),
    "driveway": (10, 1),
}
"""Of a feature its field, and that of its points."""


def map_point(xyz) -> bytes:
    return message(*((number, float(value)) for number, value in enumerate(xyz, 1)))


def map_feature(number, kind, points) -> bytes:
    """A feature of the map; a lane has fields before and behind its points, as in the dataset."""
    feature_field, point_field = MAP_KINDS[kind]
    before = ((1, 25.0), (2, 2))
    behind = ((9, varint(7)), (13, message((1, 0), (2, 5), (3, 9))))
    is_lane = kind == "lane"
    pairs = (
        *(before if is_lane else ()),
        *((point_field, map_point(point)) for point in points),
        *(behind if is_lane else ()),
    )
    return message((1, number), (feature_field, message(*pairs)))


def write_segment(path, clip, **options) -> None:
    """One file for one clip."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        b"".join(record(frame_message(clip.name, frame, **options)) for frame in clip.frames)
    )
