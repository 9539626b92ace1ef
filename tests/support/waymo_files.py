"""Writes the synthetic world as Waymo's TFRecord files: messages field by field, records with their checksums."""

from __future__ import annotations

import struct

import google_crc32c
import numpy as np

from support.source_world import OPTICAL

CAMERAS = {"cam_front": 1, "cam_front_left": 2, "cam_front_right": 3, "cam_side_left": 4, "cam_side_right": 5}
TYPES = {"vehicle": 1, "pedestrian": 2}


def varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


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
    found = np.array(cam2ego)
    found[:3, :3] = found[:3, :3] @ OPTICAL.T
    return found


def context(name, frame, without=()) -> bytes:
    calibrations = []
    for camera, image in frame.images.items():
        k = image.intrinsics
        lens = [k[0, 0], k[1, 1], k[0, 2] + 0.5, k[1, 2] + 0.5, 0.04, -0.3, 1e-3, -1e-3, 0.0]
        if camera not in without:
            calibrations.append(message(
                (1, CAMERAS[camera]), *((2, float(value)) for value in lens),
                (3, transform(to_camera_axes(image.cam2ego))), (4, image.size[0]), (5, image.size[1]), (6, 2),
            ))  # fmt: skip
    stats = message((2, "Night"), (3, "location_sf"), (4, "rain"))
    return message((1, name), *((2, one) for one in calibrations), (4, stats))


def image_message(camera, image) -> bytes:
    seconds = image.timestamp_ns / 1e9
    return message(
        (1, CAMERAS[camera]), (2, image.jpeg), (3, transform(image.ego2global)), (4, b"\x0d\0\0\0\0"), (5, seconds),
        (6, 0.0025), (7, seconds - 0.02), (8, seconds + 0.025),
    )  # fmt: skip


def box_message(box, ego2global) -> bytes:
    to_ego = np.linalg.inv(ego2global)
    centre = to_ego[:3, :3] @ box.centre + to_ego[:3, 3]
    nose = to_ego[:3, :3] @ (np.cos(box.yaw), np.sin(box.yaw), 0)
    length, width, height = box.size_lwh
    values = (*centre, width, length, height, np.arctan2(nose[1], nose[0]))
    return message(*((number, float(value)) for number, value in enumerate(values, 1)))


def frame_message(name, frame, *, boxes=True, **options) -> bytes:
    labels = [
        message((1, box_message(box, frame.ego2global)), (3, TYPES[box.category]), (4, box.track), (7, box.num_points),
                *([(12, box_message(box, frame.ego2global))] if at else []))
        for at, box in enumerate(frame.boxes if boxes else ())
    ]  # fmt: skip
    return message(
        (1, context(name, frame, **options)), (2, frame.timestamp_ns // 1000), (3, transform(frame.ego2global)),
        *((4, image_message(camera, image)) for camera, image in frame.images.items()),
        (5, message((1, 1), (2, bytes(3000)))), *((6, label) for label in labels), (9, bytes(500)),
    )  # fmt: skip


def write_segment(path, clip, **options) -> None:
    """One file for one clip."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(record(frame_message(clip.name, frame, **options)) for frame in clip.frames))
