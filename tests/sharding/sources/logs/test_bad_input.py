"""What is wrong with a log is named, or counted; no pose is silently wrong."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import simplejpeg
import zstandard

from fuelrail.pipeline.errors import ConfigError, SourceError
from fuelrail.sharding.run import scan_source
from fuelrail.sharding.sources.logs.files.log_file import (
    Locator,
    Message,
    Topic,
)
from fuelrail.sharding.sources.logs.files.mcap_file import McapFile
from fuelrail.sharding.sources.logs.messages.reader import Reader
from fuelrail.sharding.sources.registry import SourceSpec, make_source
from fuelrail.sharding.sources.shared.files import source_files
from support.log_world import (
    Ros,
    Sent,
    logged,
    ros_messages,
    store,
    with_raw_pictures,
    write_bag,
    write_mcap,
    write_rosbag2,
)
from support.source_suite import SourceSuite
from support.source_world import make_world, samples_of

CAMERA = "/cam_front/image_raw/compressed"


@pytest.fixture
def world():
    return make_world(1, 8)


def sent_of(world):
    return ros_messages(world, world.clips[0])


def scanned(tmp_path, sent, compression="NONE", options=None, **writing):
    write_mcap(tmp_path / "log.mcap", sent, compression=compression, **writing)
    return scan_source(SourceSpec("mcap", str(tmp_path / "log.mcap"), options or {}))


def replace_messages(sent, topic, change):
    """Messages of which those of a topic go through ``change``: (number, message) to a message or None."""
    messages = []
    number = 0
    for record in sent:
        if record.topic == topic:
            replacement = change(number, record.message)
            number += 1
            if replacement is not None:
                messages.append(record._replace(message=replacement))
        else:
            messages.append(record)
    return messages


@pytest.mark.parametrize("compression", ["NONE", "ZSTD", "LZ4"])
def test_of_a_cut_file_whole_chunks_are_kept(tmp_path, world, compression):
    write_mcap(
        tmp_path / "whole.mcap",
        sent_of(world),
        compression=compression,
        chunk_size=4000,
    )
    data = (tmp_path / "whole.mcap").read_bytes()
    (tmp_path / "log.mcap").write_bytes(data[: len(data) * 6 // 10])
    info = scan_source(SourceSpec("mcap", str(tmp_path / "log.mcap"), {}))
    assert 0 < info.num_samples < 8
    assert info.report.noted["bytes after a cut"] > 0


def test_a_damaged_chunk_is_named_or_left_out(tmp_path, world):
    write_mcap(tmp_path / "log.mcap", sent_of(world), chunk_size=4000)
    files = source_files(str(tmp_path))
    chunk = McapFile(files, "log.mcap")._summary.chunks[2]
    data = bytearray((tmp_path / "log.mcap").read_bytes())
    data[chunk.position + chunk.length // 2] ^= 4
    (tmp_path / "log.mcap").write_bytes(data)
    spec = SourceSpec("mcap", str(tmp_path / "log.mcap"), {})
    with pytest.raises(
        SourceError,
        match=rf"log.mcap': the chunk at byte {chunk.position} is damaged.*damaged=skip",
    ):
        scan_source(spec)
    info = scan_source(spec._replace(options={"damaged": "skip"}))
    assert 0 < info.num_samples < 8
    assert info.report.noted["bytes in damaged chunks"] == chunk.length


def test_uncompressed_chunks_are_checked_on_demand(tmp_path, world):
    write_mcap(tmp_path / "log.mcap", sent_of(world), compression="NONE")
    data = bytearray((tmp_path / "log.mcap").read_bytes())
    position = data.index(world.clips[0].frames[3].images["cam_left"].jpeg) + 300
    data[position] ^= 4
    (tmp_path / "log.mcap").write_bytes(data)
    spec = SourceSpec("mcap", str(tmp_path / "log.mcap"), {})
    assert scan_source(spec).num_samples == 8
    with pytest.raises(SourceError, match="is damaged"):
        scan_source(spec._replace(options={"checksums": True}))


def test_a_scan_decompresses_each_chunk_once(tmp_path, world):
    write_mcap(tmp_path / "log.mcap", sent_of(world), chunk_size=4000)
    source = make_source(SourceSpec("mcap", str(tmp_path / "log.mcap"), {}))
    frames = [frame for clip in source.clips() for frame in source.frames(clip)]
    file = source.recordings.log_file("log.mcap")
    assert len(frames) == 8
    assert file.num_decompressed == len(file._summary.chunks) > 3
    refs = [f"made:{image.ref}" for frame in frames for image in frame.images.values()]
    refs += [f"points:{sweep.ref}" for frame in frames for sweep in frame.sweeps.values()]
    assert len(list(source.read_clip(refs))) == 8 * 4
    assert file.num_decompressed <= 2 * len(file._summary.chunks)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"#ROSBAG V2.0\n", "ROS 1 bag: read it by the kind rosbag1"),
        (b"", "is empty"),
        (
            b"version https://git-lfs.github.com/spec/v1\n",
            "is not an MCAP file",
        ),
    ],
)
def test_what_is_not_a_log_is_named(tmp_path, data, message):
    (tmp_path / "log.mcap").write_bytes(data)
    with pytest.raises(SourceError, match=message):
        scan_source(SourceSpec("mcap", str(tmp_path / "log.mcap"), {}))


def test_an_unknown_compression_is_named(tmp_path, world):
    write_mcap(tmp_path / "log.mcap", sent_of(world))
    (tmp_path / "log.mcap").write_bytes(
        (tmp_path / "log.mcap").read_bytes().replace(b"\4\0\0\0zstd", b"\4\0\0\0abcd")
    )
    with pytest.raises(SourceError, match="compression 'abcd'; zstd and lz4 are read"):
        scan_source(SourceSpec("mcap", str(tmp_path / "log.mcap"), {}))


def test_a_split_bag_with_a_file_missing_is_named(tmp_path, world):
    write_rosbag2(tmp_path / "bag", sent_of(world))
    (tmp_path / "bag" / "bag.db3").unlink()
    with pytest.raises(
        SourceError,
        match=r"metadata.yaml' names the file 'bag.db3', which is not there",
    ):
        scan_source(SourceSpec("rosbag2", str(tmp_path / "bag"), {}))


def clear_stamp(_, message):
    message.header.stamp.sec = message.header.stamp.nanosec = 0
    return message


def test_a_zero_stamp_is_refused_and_the_recording_has_times(tmp_path, world):
    sent = replace_messages(sent_of(world), CAMERA, clear_stamp)
    with pytest.raises(SourceError, match=r"cam_front.*without a stamp.*clock=log_time"):
        scanned(tmp_path, sent)
    assert scanned(tmp_path, sent, options={"clock": "log_time"}).num_samples >= 6


def test_a_clock_that_was_set_back_is_named(tmp_path, world):
    def back(number, message):
        message.header.stamp.sec -= 100 if number > 4 else 0
        return message

    with pytest.raises(SourceError, match=r"cam_front.*goes back in time by 99.* s"):
        scanned(tmp_path, replace_messages(sent_of(world), CAMERA, back))


def test_a_camera_that_drops_out_is_dropped_or_masked(tmp_path, world):
    sent = replace_messages(
        sent_of(world),
        CAMERA,
        lambda number, message: message if number not in (3, 4) else None,
    )
    info = scanned(tmp_path, sent)
    assert info.num_samples == 6
    assert info.report.dropped_samples == {"cam_front: no message in time": 2}
    info = scanned(tmp_path, sent, options={"missing_camera": "mask"})
    assert (info.num_samples, info.report.masked) == (
        8,
        {"cam_front": {"no message in time": 2}},
    )


def test_poses_do_not_reach_across_a_gap(tmp_path):
    world = make_world(1, 20)
    sent = [
        message
        for message in sent_of(world)
        if message.topic != "/tf" or not 5 < (message.stamp_ns // 10**8) % 100 < 14
    ]
    info = scanned(tmp_path, sent)
    assert info.report.dropped_samples["no ego pose"] >= 7
    assert info.num_samples < 13


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": np.zeros(9)}, "the camera is not calibrated"),
        (
            {"width": 640},
            r"is for pictures of 640x48 px, and a picture has 64x48",
        ),
        (
            {"d": np.ones(5), "distortion_model": "wide"},
            "the lens 'wide' with 5 coefficients is not known",
        ),
    ],
)
def test_a_wrong_calibration_is_named(tmp_path, world, change, message):
    def wrong(_, info):
        for name, value in change.items():
            setattr(info, name, value)
        return info

    with pytest.raises(SourceError, match=message):
        scanned(
            tmp_path,
            replace_messages(sent_of(world), "/cam_front/camera_info", wrong),
        )


def test_a_camera_without_calibration_or_transform_is_named(tmp_path, world):
    sent = [message for message in sent_of(world) if message.topic != "/cam_front/camera_info"]
    with pytest.raises(
        SourceError,
        match=r"camera cam_front .* is without calibration; looked for /cam_front",
    ):
        scanned(tmp_path, sent)
    sent = [message for message in sent_of(world) if message.topic != "/tf_static"]
    with pytest.raises(SourceError, match=r"no static transform connects the sensor frame"):
        scanned(tmp_path, sent)


def test_without_poses_they_are_the_identity_and_the_manifest_says_so(tmp_path, world):
    sent = [message for message in sent_of(world) if message.topic != "/tf"]
    with pytest.raises(SourceError, match=r"do not say how 'base_link' moves.*poses=none"):
        scanned(tmp_path, sent)
    info = scanned(tmp_path, sent, options={"poses": "none"})
    assert (info.num_samples, info.facts["poses"]) == (8, "none")


def test_poses_of_an_odometry_topic(tmp_path, world):
    ros = Ros()
    sent = [record for record in sent_of(world) if record.topic != "/tf"]
    for record in sent_of(world):
        if record.topic == "/tf":
            (edge,) = record.message.transforms
            t = edge.transform.translation
            q = edge.transform.rotation
            pose = ros.of(
                "geometry_msgs/Pose",
                ros.of("geometry_msgs/Point", t.x, t.y, t.z),
                q,
            )
            zero = ros.of("geometry_msgs/Vector3", 0.0, 0.0, 0.0)
            twist = ros.of(
                "geometry_msgs/TwistWithCovariance",
                ros.of("geometry_msgs/Twist", zero, zero),
                np.zeros(36),
            )
            with_covariance = ros.of("geometry_msgs/PoseWithCovariance", pose, np.zeros(36))
            odometry = ros.of(
                "nav_msgs/Odometry",
                edge.header,
                "base_link",
                with_covariance,
                twist,
            )
            sent.append(Sent("/odom", "nav_msgs/Odometry", record.stamp_ns, odometry))
    SourceSuite().make(logged(tmp_path, sent, {"poses": "/odom"}), tmp_path / "out")
    for sample in samples_of(tmp_path / "out").values():
        frame = next(
            frame_of_sample
            for frame_of_sample in world.clips[0].frames
            if frame_of_sample.timestamp_ns == sample.meta.timestamp_ns
        )
        np.testing.assert_allclose(sample.geometry.ego2global, frame.ego2global, atol=1e-6)


def test_options_that_name_nothing_are_refused(tmp_path, world):
    sent = sent_of(world)
    for options, message in (
        ({"reference": "cam"}, "no channel 'cam'"),
        ({"offsets_ms": {"cam": 1.0}}, "no channel 'cam'"),
        ({"poses": "/nothing"}, "'/nothing' is not tf, none"),
        ({"cameras": {"a": "/nothing"}}, "topic '/nothing' of a is not there"),
        ({"libraries": "PyAV 1"}, "decoded with PyAV 1"),
    ):
        with pytest.raises((ConfigError, SourceError), match=message):
            scanned(tmp_path, sent, options=options)


@pytest.mark.parametrize(
    ("encoding", "pixels"),
    [("rgb8", 3), ("bgr8", 3), ("mono8", 1), ("bayer_rggb8", 1), ("yuv422", 2)],
)
def test_raw_pictures_have_their_colours(tmp_path, world, encoding, pixels):
    width = 64
    height = 48
    colour = (180, 90, 40)
    values = {
        "rgb8": colour,
        "bgr8": colour[::-1],
        "mono8": (111,),
        "bayer_rggb8": None,
        "yuv422": (
            93,
            112,
            171,
            112,
        ),  # U Y V Y of the colour by BT.601, limited range
    }[encoding]
    if values is None:
        rows = np.zeros((height, width), np.uint8)
        rows[::2, ::2], rows[::2, 1::2], rows[1::2, ::2], rows[1::2, 1::2] = (
            colour[0],
            colour[1],
            colour[1],
            colour[2],
        )
    else:
        rows = np.tile(np.array(values, np.uint8), width * pixels // len(values) * height).reshape(
            height, -1
        )

    sent = with_raw_pictures(
        sent_of(world),
        name="cam_front",
        encoding=encoding,
        size=(64, 48),
        rows=np.pad(rows, ((0, 0), (0, 4))),
    )
    SourceSuite().make(logged(tmp_path, sent, compression="NONE"), tmp_path / "out")
    sample = next(iter(samples_of(tmp_path / "out").values()))
    mean_rgb = simplejpeg.decode_jpeg(sample.images["cam_front"])[8:-8, 8:-8].reshape(-1, 3).mean(0)
    np.testing.assert_allclose(mean_rgb, (111, 111, 111) if encoding == "mono8" else colour, atol=6)


def test_rectified_pictures_have_the_projection_and_raw_ones_binning(tmp_path, world):
    from fuelrail.sharding.sources.logs.geometry.calibration import camera_calibration
    from fuelrail.sharding.sources.logs.messages.records import CameraInfo

    p = (50.0, 0, 31.5, -5.0, 0, 50.0, 23.5, 0, 0, 0, 1, 0)
    k = (100.0, 0, 63.5, 0, 100.0, 47.5, 0, 0, 1)
    camera_info = CameraInfo(
        stamp_ns=0,
        frame_id="c",
        width=128,
        height=96,
        model="plumb_bob",
        d=(0.1,) * 5,
        k=k,
        r=tuple(np.eye(3).ravel()),
        p=p,
    )
    rectified = camera_calibration("t", camera_info, np.eye(4), is_rectified=True)
    assert rectified.intrinsics[0, 0] == 50.0
    assert (rectified.dist, rectified.dist_model) == ((), "none")
    # The second camera of a pair is 0.1 m to the right.
    np.testing.assert_allclose(rectified.sensor2ego[:3, 3], (0.1, 0, 0))
    binned_info = camera_info._replace(binning=(2, 2))
    binned = camera_calibration("t", binned_info, np.eye(4), is_rectified=False)
    np.testing.assert_allclose(binned.intrinsics, [[50, 0, 31.5], [0, 50, 23.5], [0, 0, 1]])
    assert (binned.width, binned.height, binned.dist_model) == (64, 48, "opencv_radtan")


def by_log_time(path):
    """What the public reader yields: topic and time of each message, in the order of time."""
    from mcap.reader import make_reader

    with path.open("rb") as file:
        return [
            (channel.topic, message.log_time)
            for _, channel, message in make_reader(file).iter_messages()
        ]


@pytest.mark.parametrize("compression", ["NONE", "ZSTD"])
@pytest.mark.parametrize("order", ["topic by topic", "backwards", "in turns"])
def test_records_in_another_order_than_that_of_time_are_read_by_the_index(
    tmp_path, world, order, compression
):
    sent = sent_of(world)
    moved = {
        "topic by topic": sorted(sent, key=lambda record: record.topic),
        "backwards": sent[::-1],
        "in turns": [*sent[1::2], *sent[::2]],
    }[order]
    expected = scanned(tmp_path, sent, compression, chunk_size=4000)
    info = scanned(tmp_path, moved, compression, chunk_size=4000)
    assert info.num_samples == expected.num_samples == 8
    assert info.report.noted == expected.report.noted
    file = McapFile(source_files(str(tmp_path)), "log.mcap")
    records = [(record.topic, record.log_ns) for record in file.walk(file.topics.keys(), ())]
    assert [time for _, time in records] == [time for _, time in by_log_time(tmp_path / "log.mcap")]
    assert sorted(records) == sorted(by_log_time(tmp_path / "log.mcap"))
    for topic in file.topics:
        places = file.places(topic)
        assert places == [record.place for record in file.walk([topic], ())]


def test_messages_that_wait_for_earlier_ones_are_bounded(tmp_path, world, monkeypatch):
    from fuelrail.sharding.sources.logs.files import log_file

    monkeypatch.setattr(log_file, "_MOST_PENDING", 1 << 14)
    scanned(tmp_path, sent_of(world), chunk_size=4000)
    with pytest.raises(
        SourceError,
        match=r"log.mcap' has messages so far out of the order of time.*mcap sort",
    ):
        scanned(
            tmp_path,
            sorted(sent_of(world), key=lambda message: message.topic),
            chunk_size=4000,
        )


def test_clocks_that_differ_are_named(tmp_path, world):
    late_ns = 18_000_000_000
    ros = Ros()

    def late(_, message):
        time = ros.time(message.header.stamp.sec * 10**9 + message.header.stamp.nanosec + late_ns)
        message.header.stamp = time
        return message

    sent = sent_of(world)
    for camera in world.cameras:
        sent = replace_messages(sent, f"/{camera}/image_raw/compressed", late)
    with pytest.raises(
        SourceError,
        match=r"no camera image \(.*1[67]\.\d s after one of lidar_top: their clocks",
    ):
        scanned(tmp_path, sent, options={"poses": "none"})


def test_times_since_a_start_are_not_taken_for_unix_times(tmp_path, world):
    from fuelrail.sharding.sources.logs.source import _YEAR_2000_NS

    assert scanned(tmp_path, sent_of(world)).time_base == "unix"
    (tmp_path / "logs").mkdir()
    write_mcap(tmp_path / "logs/a.mcap", sent_of(world))
    spec = SourceSpec("mcap", str(tmp_path / "logs"), {"clock": "log_time"})
    since_boot = [
        message._replace(stamp_ns=message.stamp_ns - 1_599_999_000 * 10**9)
        for message in sent_of(world)
    ]
    assert since_boot[0].stamp_ns < _YEAR_2000_NS
    write_mcap(tmp_path / "boot.mcap", since_boot)
    alone = scan_source(
        SourceSpec(
            "mcap",
            str(tmp_path / "boot.mcap"),
            {"clock": "log_time", "poses": "none"},
        )
    )
    assert (alone.time_base, alone.num_samples) == ("boot", 8)
    (tmp_path / "boot.mcap").rename(tmp_path / "logs/b.mcap")
    with pytest.raises(
        SourceError,
        match="times of log 'b' and those of log 'a' are not of one kind",
    ):
        scan_source(spec._replace(options={"clock": "log_time", "poses": "none"}))


def test_bags_of_another_kind_and_packed_messages_without_metadata_are_named(tmp_path, world):
    (tmp_path / "bags").mkdir()
    (tmp_path / "bags/drive.bag").write_bytes(b"#ROSBAG V2.0\n")
    for kind in ("mcap", "rosbag2"):
        with pytest.raises(
            SourceError,
            match=r"has ROS 1 bags \(\.bag\): read them by the kind rosbag1",
        ):
            scan_source(SourceSpec(kind, str(tmp_path / "bags"), {}))
    pack = zstandard.ZstdCompressor().compress
    topic = Topic("/cam", "sensor_msgs/CompressedImage", "cdr", b"")
    packed = pack(
        bytes(
            store().serialize_cdr(sent_of(world)[1].message, sent_of(world)[1].message.__msgtype__)
        )
    )
    with pytest.raises(
        SourceError,
        match=r"topic '/cam': messages are compressed one by one.*ros2 bag convert",
    ):
        Reader(topic).picture(
            Message(
                topic="/cam",
                log_ns=0,
                place=Locator("a", 0, 0),
                data=packed,
                length=len(packed),
            )
        )


@pytest.mark.parametrize("compression", ["NONE", "BZ2", "LZ4"])
def test_a_damaged_bag_is_an_error_that_names_it(tmp_path, world, compression):
    path = tmp_path / "drive.bag"
    write_bag(path, sent_of(world), compression)
    content = path.read_bytes()
    spec = SourceSpec("rosbag1", str(path), {"poses": "none"})
    for length in (0, 5, 100, len(content) // 2, len(content) - 10):
        path.write_bytes(content[:length])
        with pytest.raises(SourceError, match=r"drive\.bag"):
            scan_source(spec)
    rng = np.random.default_rng(3)
    num_refused = 0
    for _ in range(60):
        data = bytearray(content)
        for position in rng.integers(0, len(content), 8):
            data[position] ^= 1 << rng.integers(0, 8)
        path.write_bytes(data)
        with contextlib.suppress(SourceError):
            scan_source(spec)
            num_refused -= 1
        num_refused += 1
    assert num_refused or compression == "NONE"


def test_a_packed_bag_with_plain_messages_and_other_packings_are_named(tmp_path, world):
    write_rosbag2(tmp_path / "bag", sent_of(world))
    path = tmp_path / "bag" / "metadata.yaml"
    text = path.read_text()
    for mode, form, says in (
        (
            "MESSAGE",
            "zstd",
            "is not compressed by zstd, though its metadata says so",
        ),
        (
            "FILE",
            "zstd",
            "the bag is compressed by FILE and zstd; messages by zstd are read",
        ),
        ("MESSAGE", "lz4", "compressed by MESSAGE and lz4"),
    ):
        packed = text.replace("compression_mode: ''", f"compression_mode: {mode}")
        path.write_text(packed.replace("compression_format: ''", f"compression_format: {form}"))
        with pytest.raises(SourceError, match=says):
            scan_source(SourceSpec("rosbag2", str(tmp_path / "bag"), {}))
