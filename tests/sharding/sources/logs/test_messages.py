"""Heads of messages: one that is like the last is not parsed again, and one that differs is read as itself."""

from __future__ import annotations

import numpy as np
import pytest

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.run import scan_source
from fuelrail.sharding.sources.logs.files.log_file import Topic
from fuelrail.sharding.sources.logs.messages.ros import Ros as Reader
from fuelrail.sharding.sources.registry import SourceSpec
from support.log_world import Ros, ros_messages, store, write_mcap
from support.source_world import make_world

ROS = Ros()
TYPES = store()


def encoded(message, *, little=True) -> bytes:
    return bytes(TYPES.serialize_cdr(message, message.__msgtype__, little_endian=little))


def read_twice(name: str, messages: list, read: str) -> list:
    """What one reader says of all messages, checked against a new reader for each."""
    topic = Topic("/t", name, "cdr")
    reader = Reader(topic)
    values = [getattr(reader, read)(data) for data in messages]
    assert values == [getattr(Reader(topic), read)(data) for data in messages]
    return values


def test_pictures_that_differ_from_the_last():
    def picture(stamp_ns, frame, text, size, little=True):
        head = ROS.header(stamp_ns, frame)
        message = ROS.of("sensor_msgs/CompressedImage", head, text, np.zeros(size, np.uint8))
        return encoded(message, little=little)

    pictures = read_twice(
        "sensor_msgs/CompressedImage",
        [
            picture(1, "front", "jpeg", 10),
            picture(2, "front", "jpeg", 11),
            picture(3, "left0", "jpeg", 12),
            picture(4, "left0", "jpeg; a longer text", 13),
            picture(5, "left0", "jpeg", 14, little=False),
            picture(6, "left0", "jpeg", 15, little=False),
        ],
        "picture",
    )
    assert [(entry.stamp_ns, entry.frame_id, entry.length) for entry in pictures] == [
        (1, "front", 10),
        (2, "front", 11),
        (3, "left0", 12),
        (4, "left0", 13),
        (5, "left0", 14),
        (6, "left0", 15),
    ]


def test_raw_pictures_that_differ_from_the_last():
    def picture(stamp_ns, height, width, encoding):
        head = ROS.header(stamp_ns, "front")
        data = np.zeros(height * width, np.uint8)
        return encoded(
            ROS.of(
                "sensor_msgs/Image",
                head,
                height,
                width,
                encoding,
                0,
                width,
                data,
            )
        )

    messages = [
        picture(1, 4, 6, "mono8"),
        picture(2, 4, 6, "mono8"),
        picture(3, 6, 4, "mono8"),
        picture(4, 6, 4, "x"),
    ]
    pictures = read_twice("sensor_msgs/Image", messages, "picture")
    assert [(entry.height, entry.width, entry.encoding) for entry in pictures] == [
        (4, 6, "mono8"),
        (4, 6, "mono8"),
        (6, 4, "mono8"),
        (6, 4, "x"),
    ]


def test_transforms_that_differ_from_the_last():
    poses = np.array([np.eye(4) for _ in range(5)])
    poses[:, 0, 3] = range(5)
    messages = [
        encoded(ROS.tf([("map", "base_link", 1, poses[0])])),
        encoded(ROS.tf([("map", "base_link", 2, poses[1])])),
        encoded(ROS.tf([("odo", "base_link", 3, poses[2])])),
        encoded(ROS.tf([("odo", "base_link", 4, poses[3]), ("map", "odo", 4, poses[4])])),
        encoded(ROS.tf([("odo", "base_link", 5, poses[4])])),
    ]
    transforms = read_twice("tf2_msgs/TFMessage", messages, "transforms")
    assert [
        [(edge.parent, edge.stamp_ns, edge.xyz[0]) for edge in edges] for edges in transforms
    ] == [
        [("map", 1, 0.0)],
        [("map", 2, 1.0)],
        [("odo", 3, 2.0)],
        [("odo", 4, 3.0), ("map", 4, 4.0)],
        [("odo", 5, 4.0)],
    ]
    reader = Reader(Topic("/t", "tf2_msgs/TFMessage", "cdr"))
    reader.transforms(messages[0])
    with pytest.raises(ValueError, match="bytes are left"):
        reader.transforms(messages[1] + bytes(8))


def test_a_picture_of_another_size_is_seen(tmp_path):
    """Although the heads of the pictures before it were all the same."""
    world = make_world(1, 6, cameras={"cam_front": (64, 48)})
    upright = (
        make_world(1, 6, cameras={"cam_front": (48, 64)}).clips[0].frames[4].images["cam_front"]
    )
    world.clips[0].frames[4].images["cam_front"].jpeg = upright.jpeg
    write_mcap(tmp_path / "log.mcap", ros_messages(world, world.clips[0]))
    with pytest.raises(
        SourceError,
        match="is for pictures of 64x48 px, and a picture has 48x64",
    ):
        scan_source(SourceSpec("mcap", str(tmp_path / "log.mcap"), {}))
