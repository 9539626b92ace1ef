"""Logs do what a source must do: each storage, with and without indexes and compression."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

from fuelrail.sharding.sources.logs.files.mcap_file import McapFile
from fuelrail.sharding.sources.registry import SourceSpec
from fuelrail.sharding.sources.shared.files import source_files
from support.log_world import (
    Ros,
    foxglove_messages,
    ros_messages,
    video_messages,
    write_bag,
    write_mcap,
    write_rosbag2,
)
from support.source_suite import DAMAGES, SourceSuite

CAMERAS = ("cam_front", "cam_left", "cam_back")
ROS = {"cameras": {name: f"/{name}/image_raw/compressed" for name in CAMERAS}}


class TestUncompressed(SourceSuite):
    kind = "mcap"
    impossible = ("no file",)
    options: ClassVar = ROS
    compare: ClassVar = {"labelled": False}
    writing: ClassVar = {"compression": "NONE"}
    writer = staticmethod(write_mcap)
    extension = "mcap"

    def write(self, world, root):
        for clip in world.clips:
            self.write_log(root, clip.name, self.messages(world, clip))
        return str(root)

    def messages(self, world, clip):
        return ros_messages(world, clip)

    def write_log(self, root, name, sent):
        self.writer(root / f"{name}.{self.extension}", sent, **self.writing)

    def faulty(self, option, tmp_path):
        """A log whose poses' clock is set back; logs of which a chunk has a wrong byte."""
        options = {**self.options, "missing_camera": "mask"}
        if option == "clock_jumps":
            world = self.world(num_clips=1, num_frames=12)
            sent = self.messages(world, world.clips[0])
            for entry in sent:
                elapsed_ns = entry.stamp_ns - world.clips[0].frames[0].timestamp_ns
                if entry.topic == "/tf" and elapsed_ns > 950_000_000:
                    earlier = Ros().time(entry.stamp_ns - 800_000_000)
                    entry.message.transforms[0].header.stamp = earlier
            root = tmp_path / "jumping"
            root.mkdir()
            self.write_log(root, "log", sent)
            return SourceSpec(self.kind, str(root), options)
        if option == "damaged" and self.kind == "mcap":
            spec = self.spec(tmp_path)
            path = tmp_path / "source" / "drive-0.mcap"
            chunk = McapFile(source_files(str(path.parent)), path.name)._summary.chunks[-1]
            data = bytearray(path.read_bytes())
            data[chunk.position + chunk.length // 2] ^= 4
            path.write_bytes(data)
            return spec._replace(options={**options, "checksums": True})
        return None


class TestCompressed(TestUncompressed):
    reads_heads = False
    writing: ClassVar = {"compression": "ZSTD"}


class TestLz4(TestUncompressed):
    reads_heads = False
    writing: ClassVar = {"compression": "LZ4"}


class TestWithoutSummary(TestUncompressed):
    """Write the file of a recorder that writes neither chunks nor a summary."""

    reads_heads = False

    def write_log(self, root, name, sent):
        from mcap.writer import IndexType

        write_mcap(
            root / f"{name}.mcap",
            sent,
            compression="NONE",
            use_chunking=False,
            use_statistics=False,
            use_summary_offsets=False,
            repeat_channels=False,
            repeat_schemas=False,
            index_types=IndexType.NONE,
        )

    def faulty(self, option, tmp_path):
        if option == "damaged":
            pytest.skip("without chunks there are no checksums")
        return super().faulty(option, tmp_path)


class TestRosbag2(TestUncompressed):
    kind = "rosbag2"

    def write_log(self, root, name, sent):
        write_rosbag2(root / name, sent)


class TestPackedRosbag2(TestRosbag2):
    """Write messages that are compressed one by one."""

    reads_heads = False

    def write_log(self, root, name, sent):
        storage = "MCAP" if name == "drive-1" else "SQLITE3"
        write_rosbag2(root / name, sent, packed=True, storage=storage)


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
    refused: ClassVar = {"damaged_image": ("mask", "drop")}
    impossible = ("no file", "no record", *DAMAGES)
    compare: ClassVar = {"labelled": False, "same_bytes": False}

    def messages(self, world, clip):
        return video_messages(world, clip)


class TestVideo(TestUncompressed):
    """Each camera's pictures as H.264 with a keyframe every third message."""

    writing: ClassVar = {}
    reads_heads = False
    options: ClassVar = {"cameras": {name: f"/{name}/video" for name in CAMERAS}}
    refused: ClassVar = {"damaged_image": ("mask", "drop")}
    impossible = ("no file", "no record", *DAMAGES)
    compare: ClassVar = {"labelled": False, "same_bytes": False}

    def messages(self, world, clip):
        return video_messages(world, clip)


class TestFoxglove(TestUncompressed):
    options: ClassVar = {"cameras": {name: f"/{name}/image" for name in CAMERAS}}

    def world(self, **changes):
        world = super().world(**changes)
        for _, _, frame in world.frames():  # clouds are in base_link
            for sweep in frame.sweeps.values():
                sweep.lidar2ego = np.eye(4)
        return world

    def messages(self, world, clip):
        return foxglove_messages(world, clip)

    def faulty(self, option, tmp_path):
        if option in ("clock_jumps", "damaged"):
            pytest.skip("the files are as those of ROS 2, and these messages are hard to change")
        return super().faulty(option, tmp_path)
