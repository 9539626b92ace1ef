"""Logs do what a source must do: each storage, with and without indexes and compression."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from support.log_world import (
    foxglove_messages,
    ros_messages,
    video_messages,
    write_bag,
    write_mcap,
    write_rosbag2,
)
from support.source_suite import SourceSuite

CAMERAS = ("cam_front", "cam_left", "cam_back")
ROS = {"cameras": {name: f"/{name}/image_raw/compressed" for name in CAMERAS}}


class TestUncompressed(SourceSuite):
    kind = "mcap"
    options: ClassVar = ROS
    compare: ClassVar = {"labelled": False}
    writing: ClassVar = {"compression": "NONE"}
    writer = staticmethod(write_mcap)
    extension = "mcap"

    def write(self, world, root):
        for clip in world.clips:
            self.writer(
                root / f"{clip.name}.{self.extension}", ros_messages(world, clip), **self.writing
            )
        return str(root)


class TestCompressed(TestUncompressed):
    reads_heads = False
    writing: ClassVar = {"compression": "ZSTD"}


class TestLz4(TestUncompressed):
    reads_heads = False
    writing: ClassVar = {"compression": "LZ4"}


class TestWithoutSummary(TestUncompressed):
    """Write the file of a recorder that writes neither chunks nor a summary."""

    reads_heads = False

    def write(self, world, root):
        from mcap.writer import IndexType

        for clip in world.clips:
            write_mcap(
                root / f"{clip.name}.mcap",
                ros_messages(world, clip),
                compression="NONE",
                use_chunking=False,
                use_statistics=False,
                use_summary_offsets=False,
                repeat_channels=False,
                repeat_schemas=False,
                index_types=IndexType.NONE,
            )
        return str(root)


class TestRosbag2(TestUncompressed):
    kind = "rosbag2"

    def write(self, world, root):
        for clip in world.clips:
            write_rosbag2(root / clip.name, ros_messages(world, clip))
        return str(root)


class TestPackedRosbag2(TestRosbag2):
    """Write messages that are compressed one by one."""

    reads_heads = False

    def write(self, world, root):
        for clip, storage in zip(world.clips, ("SQLITE3", "MCAP"), strict=True):
            write_rosbag2(root / clip.name, ros_messages(world, clip), packed=True, storage=storage)
        return str(root)


class TestRosbag1(TestUncompressed):
    kind = "rosbag1"
    reads_heads = False
    writer = staticmethod(write_bag)
    extension = "bag"


class TestRosbag1Bz2(TestRosbag1):
    writing: ClassVar = {"compression": "BZ2", "old": True}


class TestRosbag1Lz4(TestRosbag1):
    writing: ClassVar = {"compression": "LZ4"}


class TestRosbag1Video(TestRosbag1):
    """A type that is none of ROS's own: its text is in the bag."""

    options: ClassVar = {"cameras": {name: f"/{name}/video" for name in CAMERAS}}
    damaged = "refused"
    compare: ClassVar = {"labelled": False, "same_bytes": False}

    def write(self, world, root):
        for clip in world.clips:
            write_bag(root / f"{clip.name}.bag", video_messages(world, clip))
        return str(root)


class TestVideo(TestUncompressed):
    """Each camera's pictures as H.264 with a keyframe every third message."""

    reads_heads = False
    options: ClassVar = {"cameras": {name: f"/{name}/video" for name in CAMERAS}}
    damaged = "refused"
    compare: ClassVar = {"labelled": False, "same_bytes": False}

    def write(self, world, root):
        for clip in world.clips:
            write_mcap(root / f"{clip.name}.mcap", video_messages(world, clip))
        return str(root)


class TestFoxglove(TestUncompressed):
    options: ClassVar = {"cameras": {name: f"/{name}/image" for name in CAMERAS}}

    def world(self, **changes):
        world = super().world(**changes)
        for _, _, frame in world.frames():  # clouds are in base_link
            for sweep in frame.sweeps.values():
                sweep.lidar2ego = np.eye(4)
        return world

    def write(self, world, root):
        for clip in world.clips:
            write_mcap(
                root / f"{clip.name}.mcap", foxglove_messages(world, clip), compression="NONE"
            )
        return str(root)
