"""Real and made logs compared with mcap-ros2-support, rosbags and the truth that the logs were written from."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.run import scan_source
from fuelrail.sharding.sources.adapter.frame import Image
from fuelrail.sharding.sources.logs.files.mcap_file import McapFile
from fuelrail.sharding.sources.logs.files.sqlite_file import SqliteFile
from fuelrail.sharding.sources.logs.messages.reader import Reader
from fuelrail.sharding.sources.registry import SourceSpec, make_source
from fuelrail.sharding.sources.shared.files import source_files
from support.shared_data import shared_data
from support.source_suite import SourceSuite
from support.source_world import samples_of

pytestmark = pytest.mark.real


def make_samples(tmp_path, kind, location, **options):
    SourceSuite().make(SourceSpec(kind, str(location), options), tmp_path / "out")
    return list(samples_of(tmp_path / "out").values())


@pytest.mark.parametrize(("kind", "name"), [("mcap", "clean_zstd.mcap"), ("rosbag2", "sqlite")])
def test_samples_are_those_that_were_written(tmp_path, kind, name):
    root = shared_data("ros2-made")
    truth = json.loads((root / "truth.json").read_text())
    sha256 = {
        (frame["camera"].lower(), frame["stamp"]): frame["sha256"] for frame in truth["frames"]
    }
    sweeps = {sweep["stamp"]: sweep for sweep in truth["sweeps"]}
    cameras = {name.lower(): camera for name, camera in truth["cameras"].items()}
    samples = make_samples(tmp_path, kind, root / name, missing_camera="mask")
    assert len(samples) == len(sweeps) == 12
    num_images = 0
    for sample in samples:
        geometry = sample.geometry
        sweep = sweeps[sample.meta.timestamp_ns]
        np.testing.assert_allclose(geometry.ego2global[:3, 3], sweep["ego2global_xyz"], atol=1e-3)
        points = sample.points["top"]
        assert len(points) == sweep["num_points"]
        np.testing.assert_allclose(points[0, :3], sweep["first_xyz"], atol=1e-6)
        for index, channel in enumerate(sorted(cameras)):
            if not geometry.cam_valid[index]:
                continue
            num_images += 1
            camera = cameras[channel]
            stamp = int(geometry.cam_timestamp_ns[index])
            assert hashlib.sha256(sample.images[channel]).hexdigest() == sha256[channel, stamp]
            np.testing.assert_allclose(geometry.intrinsics[index], camera["K"], atol=1e-9)
            np.testing.assert_allclose(
                geometry.cam2ego[index][:3, 3], camera["translation"], atol=1e-9
            )
            w, x, y, z = camera["rotation_wxyz"]
            expected = Rotation.from_quat([x, y, z, w]).as_matrix()
            np.testing.assert_allclose(geometry.cam2ego[index][:3, :3], expected, atol=1e-6)
            dist = geometry.dist[index][np.isfinite(geometry.dist[index])]
            assert dist.tolist() == (camera["D"] if any(camera["D"]) else [])
    assert num_images >= 65


def test_messages_are_those_of_mcap_ros2_support():
    from mcap.reader import make_reader
    from mcap_ros2.decoder import DecoderFactory

    root = shared_data("ros2-made")
    ours = McapFile(source_files(str(root)), "clean_zstd.mcap")
    entries = {(entry.topic, entry.log_ns): entry for entry in ours.walk((), ours.topics)}
    readers = {name: Reader(topic) for name, topic in ours.topics.items()}
    assert ours.num_decompressed == 3
    number = 0
    with (root / "clean_zstd.mcap").open("rb") as file:
        reader = make_reader(file, decoder_factories=[DecoderFactory()])
        for _, channel, message, theirs in reader.iter_decoded_messages():
            matching = entries[channel.topic, message.log_time]
            number = number + 1
            if channel.topic.endswith("compressed"):
                picture = readers[channel.topic].picture(matching)
                assert picture.frame_id == theirs.header.frame_id
                assert (
                    picture.stamp_ns
                    == theirs.header.stamp.sec * 10**9 + theirs.header.stamp.nanosec
                )
                assert bytes(
                    matching.data[picture.offset : picture.offset + picture.length]
                ) == bytes(theirs.data)
            elif channel.topic.endswith("camera_info"):
                info = readers[channel.topic].calibrations([matching])[0][1]
                assert (info.width, info.height, list(info.d)) == (
                    theirs.width,
                    theirs.height,
                    list(theirs.d),
                )
                assert (list(info.k), list(info.p), list(info.r)) == (
                    list(theirs.k),
                    list(theirs.p),
                    list(theirs.r),
                )
            elif channel.topic.startswith("/tf"):
                edges = {edge.child: edge for edge in readers[channel.topic].edges([matching])}
                assert len(edges) == len(theirs.transforms)
                for transform in theirs.transforms:
                    edge = edges[transform.child_frame_id]
                    assert edge.parent == transform.header.frame_id
                    q = transform.transform.rotation
                    t = transform.transform.translation
                    assert (*edge.wxyz[0], *edge.xyz[0]) == (
                        q.w,
                        q.x,
                        q.y,
                        q.z,
                        t.x,
                        t.y,
                        t.z,
                    )
    assert number == len(entries) == 251


def test_both_storages_of_a_recorder_are_read():
    files = source_files(str(shared_data("rosbags-rs")))
    mcap = McapFile(files, "test_bag_mcap/test_bag_mcap.mcap")
    sqlite = SqliteFile(files, "test_bag_sqlite3/test_bag_sqlite3.db3")
    assert {name: topic.type for name, topic in mcap.topics.items()} == {
        name: topic.type for name, topic in sqlite.topics.items()
    }
    ours = sorted((entry.topic, entry.length) for entry in mcap.walk((), mcap.topics))
    assert ours == sorted((entry.topic, entry.length) for entry in sqlite.walk((), sqlite.topics))
    assert len(ours) == 188
    for message in mcap.walk((), mcap.topics):
        topic = mcap.topics[message.topic]
        if topic.type == "sensor_msgs/PointCloud2":
            assert Reader(topic).cloud(message).step > 0


def test_video_is_decoded_once_and_its_frames_are_those_of_the_messages():
    import av
    import simplejpeg
    from mcap.reader import make_reader
    from mcap_ros2.decoder import DecoderFactory

    file = shared_data("ros2-made") / "video_h264_gop5.mcap"
    source = make_source(SourceSpec("mcap", str(file), {"missing_camera": "mask"}))
    assert source.reads == "clip"
    assert "libavcodec" in source.options["libraries"]
    images = {
        f"made:{image.ref}": (channel, image.timestamp_ns)
        for clip in source.clips()
        for frame in source.frames(clip)
        for channel, image in frame.images.items()
        if isinstance(image, Image)
    }
    decoded = {
        images[ref]: simplejpeg.decode_jpeg(data) for ref, data in source.read_clip(list(images))
    }
    assert len(decoded) == len(images) >= 22
    assert source._members.num_decoded <= 24
    decoders = {}
    theirs = {}
    with file.open("rb") as data:
        reader = make_reader(data, decoder_factories=[DecoderFactory()])
        for _, channel, _, message in reader.iter_decoded_messages(log_time_order=False):
            if channel.topic.endswith("video"):
                name = channel.topic.split("/")[3]
                decoder = decoders.setdefault(name, av.CodecContext.create("h264", "r"))
                packet = av.Packet(bytes(message.data))
                packet.pts = message.timestamp.sec * 10**9 + message.timestamp.nanosec
                theirs.update({(name, frame.pts): frame for frame in decoder.decode(packet)})
    for name, decoder in decoders.items():
        theirs.update({(name, frame.pts): frame for frame in decoder.decode(None)})
    for key, image in decoded.items():
        expected = theirs[key].to_ndarray(format="rgb24").astype(float)
        assert np.abs(expected - image).mean() < 3.5, key
        neighbours = [
            frame
            for neighbour, frame in theirs.items()
            if neighbour[0] == key[0] and neighbour != key
        ]
        nearest = min(
            np.abs(frame.to_ndarray(format="rgb24").astype(float) - image).mean()
            for frame in neighbours
        )
        assert nearest > np.abs(expected - image).mean(), "this is another frame"


def test_a_log_without_cameras_is_named():
    root = shared_data("rosbag2") / "rosbag2_py" / "test" / "resources"
    for storage in ("mcap", "sqlite3"):
        with pytest.raises(SourceError, match=r"no image topic; topics: .*AAA"):
            scan_source(SourceSpec("rosbag2", str(root / storage / "wbag"), {}))
