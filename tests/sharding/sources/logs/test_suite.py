"""Logs do what a source must do: each storage, with and without indexes and compression."""

from __future__ import annotations

from fractions import Fraction
from typing import ClassVar

import av
import numpy as np
import simplejpeg

from support.log_world import Ros, Sent, foxglove_messages, ros_messages, write_mcap, write_rosbag2
from support.source_suite import SourceSuite

CAMERAS = ("cam_front", "cam_left", "cam_back")
ROS = {"cameras": {name: f"/{name}/image_raw/compressed" for name in CAMERAS}}


class TestUncompressed(SourceSuite):
    kind = "mcap"
    options: ClassVar = ROS
    compare: ClassVar = {"labelled": False}
    writing: ClassVar = {"compression": "NONE"}

    def write(self, world, root):
        for clip in world.clips:
            write_mcap(root / f"{clip.name}.mcap", ros_messages(world, clip), **self.writing)
        return str(root)


class TestCompressed(TestUncompressed):
    reads_heads = False
    writing: ClassVar = {"compression": "ZSTD"}


class TestLz4(TestUncompressed):
    reads_heads = False
    writing: ClassVar = {"compression": "LZ4"}


class TestWithoutSummary(TestUncompressed):
    """As a recorder leaves it that writes neither chunks nor a summary."""

    reads_heads = False

    def write(self, world, root):
        from mcap.writer import IndexType

        for clip in world.clips:
            write_mcap(
                root / f"{clip.name}.mcap", ros_messages(world, clip), compression="NONE", use_chunking=False,
                use_statistics=False, use_summary_offsets=False, repeat_channels=False, repeat_schemas=False,
                index_types=IndexType.NONE,
            )  # fmt: skip
        return str(root)


class TestRosbag2(TestUncompressed):
    kind = "rosbag2"

    def write(self, world, root):
        for clip in world.clips:
            write_rosbag2(root / clip.name, ros_messages(world, clip))
        return str(root)


class TestVideo(TestUncompressed):
    """Each camera's pictures as H.264 with a keyframe every third message."""

    reads_heads = False
    options: ClassVar = {"cameras": {name: f"/{name}/video" for name in CAMERAS}}
    compare: ClassVar = {"labelled": False, "same_bytes": False}

    def write(self, world, root):
        for clip in world.clips:
            packets = {}
            for name in world.cameras:
                images = [frame.images[name] for frame in clip.frames]
                for image, packet in zip(images, encoded([image.jpeg for image in images]), strict=True):
                    packets[f"/{name}/image_raw/compressed", image.timestamp_ns] = packet
            sent, ros = [], Ros()
            for one in ros_messages(world, clip):
                packet = packets.get((one.topic, one.stamp_ns))
                if packet is not None:
                    head, data = one.message.header, np.frombuffer(packet, np.uint8)
                    video = ros.of("foxglove_msgs/CompressedVideo", head.stamp, head.frame_id, data, "h264")
                    topic = one.topic.replace("image_raw/compressed", "video")
                    one = Sent(topic, "foxglove_msgs/CompressedVideo", one.stamp_ns, video)
                sent.append(one)
            write_mcap(root / f"{clip.name}.mcap", sent)
        return str(root)


def encoded(jpegs):
    """One packet of Annex B for each picture."""
    options = {"g": "3", "bf": "0", "tune": "zerolatency", "x264-params": "scenecut=0:repeat-headers=1:annexb=1"}
    encoder = av.CodecContext.create("libx264", "w")
    packets = []
    for number, jpeg in enumerate(jpegs):
        image = simplejpeg.decode_jpeg(jpeg)
        if not number:
            encoder.height, encoder.width, encoder.pix_fmt = *image.shape[:2], "yuv420p"
            encoder.time_base, encoder.options = Fraction(1, 10), options
        frame = av.VideoFrame.from_ndarray(image, "rgb24")
        frame.pts = number
        packets += encoder.encode(frame)
    return [bytes(packet) for packet in [*packets, *encoder.encode(None)]]


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
            write_mcap(root / f"{clip.name}.mcap", foxglove_messages(world, clip), compression="NONE")
        return str(root)
