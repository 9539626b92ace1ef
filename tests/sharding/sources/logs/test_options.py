"""Options of logs: positions as attributes, keyframes alone, raw encodings that are refused."""

from __future__ import annotations

import io
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
import simplejpeg
from mcap.writer import Writer
from PIL import Image

from fuelrail.pipeline.channels.selection import decode_values
from fuelrail.pipeline.errors import ConfigError, SourceError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.sample.schema import decode_points
from fuelrail.sharding.api import check_source
from fuelrail.sharding.engines.local import LocalEngine
from fuelrail.sharding.planning.recipe import make_recipe
from fuelrail.sharding.progress import Quiet
from fuelrail.sharding.run import scan_source, shard
from fuelrail.sharding.sources.logs.members import LogMembers
from fuelrail.sharding.sources.registry import SourceSpec
from support.log_world import (
    Ros,
    Sent,
    logged,
    ros_messages,
    video_messages,
    with_raw_pictures,
    write_bag,
    write_mcap,
)
from support.sharding import scanned
from support.source_suite import SourceSuite, bytes_read
from support.source_world import ego_at, make_world, samples_of, turn


def test_positions_become_attributes(tmp_path):
    """The nearest one within max_gap_s; without a fix, or far from one, null."""
    world = make_world(1, 6)
    ros = Ros()
    frames = world.clips[0].frames
    sent = ros_messages(world, world.clips[0])
    for number, frame in enumerate(frames[:4]):
        status = ros.of("sensor_msgs/NavSatStatus", -1 if number == 1 else 0, 1)
        place = (49.0 + number * 1e-5, 8.4, 120.0 + number)
        stamp_ns = frame.timestamp_ns + 7_000_000
        fix = ros.of(
            "sensor_msgs/NavSatFix",
            ros.header(stamp_ns, "gps"),
            status,
            *place,
            np.zeros(9),
            0,
        )
        sent.append(Sent("/gps/fix", "sensor_msgs/NavSatFix", stamp_ns, fix))
    sent.sort(key=lambda message: message.stamp_ns)
    spec = logged(tmp_path, sent, {"max_gap_s": 0.15, "poses": "none"})
    SourceSuite().make(spec, tmp_path / "out")
    rows = pq.read_table(tmp_path / "out" / "attributes.parquet").sort_by("key").to_pylist()
    positions = [(row["latitude"], row["longitude"], row["altitude_m"]) for row in rows]
    none = (None, None, None)
    assert positions == [
        (49.0, 8.4, 120.0),
        none,
        (49.0 + 2e-5, 8.4, 122.0),
        (49.0 + 3e-5, 8.4, 123.0),
        (49.0 + 3e-5, 8.4, 123.0),
        none,
    ]
    with pytest.raises(ConfigError, match=r"gps: '/imu' is not one of: /gps/fix"):
        scan_source(spec._replace(options={"gps": "/imu"}))


def test_messages_after_a_clock_was_set_back_are_dropped_and_counted(tmp_path):
    """Of the camera's clock, and of that of the poses: no pose is a mixture of both."""
    world = make_world(1, 12)
    sent = []
    ros = Ros()
    for record in ros_messages(world, world.clips[0]):
        elapsed_ns = record.stamp_ns - world.clips[0].frames[0].timestamp_ns
        if record.topic == "/cam_front/image_raw/compressed" and elapsed_ns > 750_000_000:
            record.message.header.stamp.sec -= 100
        elif record.topic == "/tf" and elapsed_ns > 950_000_000:
            record.message.transforms[0].header.stamp = ros.time(record.stamp_ns - 800_000_000)
        sent.append(record)
    spec = logged(tmp_path, sent, {"missing_camera": "mask"})
    with pytest.raises(
        SourceError,
        match=r"cam_front.*goes back in time by 99.* s.*clock_jumps=drop",
    ):
        scan_source(spec)
    with pytest.raises(
        SourceError,
        match=r"topic '/tf \(base_link\)' goes back in time by 0.[67]",
    ):
        scan_source(
            spec._replace(options={"cameras": {"cam_left": "/cam_left/image_raw/compressed"}})
        )
    dropped = spec._replace(options={**spec.options, "clock_jumps": "drop"})
    report = scan_source(dropped).report
    assert (
        report.noted["/cam_front/image_raw/compressed: messages after the clock was set back"] == 4
    )
    assert report.noted["/tf (base_link): messages after the clock was set back"] > 5
    SourceSuite().make(dropped, tmp_path / "out")
    by_time = {frame.timestamp_ns: frame for frame in world.clips[0].frames}
    samples = samples_of(tmp_path / "out").values()
    assert len(samples) >= 9
    for sample in samples:
        expected = by_time[sample.meta.timestamp_ns].ego2global
        np.testing.assert_allclose(sample.geometry.ego2global, expected, atol=1e-6)


def test_a_clock_that_was_set_forward_is_counted_and_ends_the_clip(tmp_path):
    """A pause of the recording is none: stamps and the recorder's times pass together."""
    world = make_world(1, 12)
    first = world.clips[0].frames[0].timestamp_ns
    sent = []
    for record in ros_messages(world, world.clips[0]):
        elapsed_ns = record.stamp_ns - first
        later_ns = 0
        if elapsed_ns > 350_000_000:
            later_ns = 5_000_000_000  # a pause
        if elapsed_ns > 750_000_000 and record.topic.endswith(("points", "/tf", "compressed")):
            head = (
                record.message.transforms[0].header
                if record.topic == "/tf"
                else record.message.header
            )
            head.stamp.sec += 100
        if later_ns and record.topic != "/tf_static":
            head = (
                record.message.transforms[0].header
                if record.topic == "/tf"
                else record.message.header
            )
            head.stamp.sec += 5
        sent.append(record._replace(stamp_ns=record.stamp_ns + later_ns))
    write_mcap(tmp_path / "log.mcap", sent)
    info = scan_source(SourceSpec("mcap", str(tmp_path / "log.mcap"), {}))
    assert [clip.num_samples for clip in info.clips] == [4, 4, 4]
    forward = {topic: number for topic, number in info.report.noted.items() if "forward" in topic}
    topics = [f"/{name}/image_raw/compressed" for name in world.cameras]
    assert forward == {
        f"{topic}: clock set forward": 1
        for topic in (*topics, "/lidar_top/points", "/tf (base_link)")
    }


def test_keyframes_alone_take_one_decode_each(tmp_path, monkeypatch):
    world = make_world(1, 9, cameras={"cam_front": (64, 48), "cam_left": (64, 48)}, lidars=())
    write_mcap(tmp_path / "log.mcap", video_messages(world, world.clips[0]))
    decoded: list[LogMembers] = []
    init = LogMembers.__init__
    monkeypatch.setattr(
        LogMembers,
        "__init__",
        lambda self, *arguments: (init(self, *arguments), decoded.append(self))[0],
    )
    cameras = {name: f"/{name}/video" for name in world.cameras}
    spec = SourceSpec(
        "mcap",
        str(tmp_path / "log.mcap"),
        {"cameras": cameras, "frames": "keyframes"},
    )
    SourceSuite().make(spec, tmp_path / "out")
    info = scan_source(spec)
    assert info.num_samples == 3, "a keyframe every third message"
    assert sum(members.num_decoded for members in decoded) == 3 * 2
    assert scan_source(spec._replace(options={"cameras": cameras})).num_samples == 9


@pytest.mark.parametrize(
    ("kind", "frames"),
    [("mcap", "all"), ("mcap", "keyframes"), ("rosbag1", "all")],
)
def test_a_check_says_what_jpegs_cost_against_the_video(tmp_path, kind, frames):
    """By log and topic: the packets of the messages, and the JPEGs of the kept frames."""
    world = make_world(2, 30, cameras={"cam_front": (64, 48), "cam_left": (64, 48)})
    num_bytes = 0
    for clip in world.clips:
        sent = video_messages(world, clip)
        num_bytes += sum(
            len(record.message.data) for record in sent if record.topic.endswith("/video")
        )
        (write_bag if kind == "rosbag1" else write_mcap)(
            tmp_path / f"{clip.name}.{'bag' if kind == 'rosbag1' else 'mcap'}",
            sent,
        )
    cameras = {name: f"/{name}/video" for name in world.cameras}
    options = {
        "cameras": cameras,
        "rate": 5,
        "frames": frames,
        "missing_camera": "drop",
    }
    recipe = make_recipe(images={"resize": 0.5, "quality": 92})
    report = check_source(f"{kind}:{tmp_path}", options=options, recipe=recipe)
    video = report.video
    assert (video.num_videos, video.num_frames, video.num_bytes) == (
        4,
        120,
        num_bytes,
    )
    assert f"video: 4 streams of 120 frames, {num_bytes / 1e6:,.1f} MB" in report.as_text()
    SourceSuite().make(SourceSpec(kind, str(tmp_path), options), tmp_path / "out")
    jpegs = [
        data for sample in samples_of(tmp_path / "out").values() for data in sample.images.values()
    ]
    all_frames, full, half, as_given = video.options
    assert (all_frames.num_images, full.num_images, as_given.num_images) == (
        120,
        len(jpegs),
        len(jpegs),
    )
    assert full.num_bytes == pytest.approx(sum(map(len, jpegs)), rel=0.15)
    assert half.num_bytes < full.num_bytes < all_frames.num_bytes
    assert min(option.cpu_hours for option in video.options) > 0


def test_video_of_a_log_is_scaled_as_it_is_decoded(tmp_path, monkeypatch):
    world = make_world(1, 9, cameras={"cam_front": (64, 48)}, lidars=())
    write_mcap(tmp_path / "log.mcap", video_messages(world, world.clips[0]))
    spec = SourceSpec(
        "mcap",
        str(tmp_path / "log.mcap"),
        {"cameras": {"cam_front": "/cam_front/video"}, "rate": 5},
    )
    monkeypatch.setattr(
        "fuelrail.sharding.write.members.transcode", None
    )  # no second way through pixels
    recipe = make_recipe(images={"size": [32, 24]}, splits={"train": 1.0})
    shard(
        spec,
        out=tmp_path / "out",
        recipe=recipe,
        num_workers=1,
        progress=Quiet(),
        engine=LocalEngine(1, "threads"),
    )
    samples = samples_of(tmp_path / "out").values()
    assert len(samples) == scan_source(spec).num_samples
    assert {
        simplejpeg.decode_jpeg(bytes(sample.images["cam_front"])).shape for sample in samples
    } == {(24, 32, 3)}
    assert {tuple(sample.geometry.img_wh[0].tolist()) for sample in samples} == {(32, 24)}


@pytest.mark.parametrize("encoding", ["mono16", "16UC1", "bayer_rggb16", "32FC1"])
def test_raw_pictures_of_over_8_bits_are_refused_by_name(tmp_path, encoding):
    world = make_world(1, 4)
    rows = np.zeros((48, 128), np.uint8)
    sent = with_raw_pictures(
        ros_messages(world, world.clips[0]),
        name="cam_front",
        encoding=encoding,
        size=(64, 48),
        rows=rows,
    )
    write_mcap(tmp_path / "log.mcap", sent)
    said = (
        "; raw pictures are read of rgb8"
        if encoding == "32FC1"
        else " of 16 bits.*the option levels"
    )
    spec = SourceSpec("mcap", str(tmp_path / "log.mcap"), {})
    with pytest.raises(SourceError, match=rf"cam_front.*the encoding '{encoding}'{said}"):
        scan_source(spec)
    for levels in ({"cam_front": [5, 5]}, {"cam": [0, 5]}):
        with pytest.raises(
            ConfigError,
            match=r"levels: cam.*must be a camera and ascending; cameras: cam_back",
        ):
            scan_source(spec._replace(options={"levels": levels}))


@pytest.mark.parametrize(
    ("encoding", "order"),
    [("mono16", "<"), ("16UC1", ">"), ("bayer_rggb16", "<")],
)
def test_levels_make_8_bits_of_16(tmp_path, encoding, order):
    """A ramp from below black to above white, in rows with padding."""
    world = make_world(1, 4)
    ramp = np.broadcast_to(np.linspace(0, 1200, 66).astype(f"{order}u2"), (48, 66)).copy()
    ramp[:, 64:] = 65_535
    sent = ros_messages(world, world.clips[0])
    sent = with_raw_pictures(
        sent,
        name="cam_front",
        encoding=encoding,
        size=(64, 48),
        rows=ramp.view(np.uint8),
        big=order == ">",
    )
    spec = logged(tmp_path, sent, {"levels": {"cam_front": [200, 1000]}})
    SourceSuite().make(spec, tmp_path / "out")
    sample = next(iter(samples_of(tmp_path / "out").values()))
    expected = np.clip((ramp[:, :64].astype(np.float64) - 200) * 255 / 800, 0, 255)
    luma = simplejpeg.decode_jpeg(sample.images["cam_front"], "GRAY")[..., 0]
    assert np.abs(luma - expected).max() <= (3 if encoding != "bayer_rggb16" else 12)


@pytest.mark.skipif(
    not sys.platform.startswith("linux"),
    reason="bytes read are counted in /proc",
)
def test_a_scan_by_indexes_reads_less_than_two_percent(tmp_path):
    """An uncompressed log with a summary, whose pictures and clouds are as large as real ones."""
    cameras = {f"cam_{number}": (640, 480) for number in range(2)}
    world = make_world(1, 6, cameras=cameras, num_points=20_000, noise=True)
    path = tmp_path / "log.mcap"
    write_mcap(
        path,
        ros_messages(world, world.clips[0]),
        compression="NONE",
        chunk_size=1 << 20,
    )
    spec = SourceSpec("mcap", str(path), {})
    scan_source(spec)  # modules that are imported on the way are not counted
    before = bytes_read()
    assert scan_source(spec).num_samples == 6
    assert bytes_read() - before < path.stat().st_size / 50


def test_types_may_be_spelled_without_msg(tmp_path, monkeypatch):
    world = make_world(1, 4)
    register = Writer.register_schema

    def plain(self, name, encoding, data):
        return register(self, name.replace("/msg/", "/"), encoding, data)

    monkeypatch.setattr(Writer, "register_schema", plain)
    SourceSuite().make(logged(tmp_path, ros_messages(world, world.clips[0])), tmp_path / "out")
    assert len(samples_of(tmp_path / "out")) == 4


def test_frames_of_video_before_the_first_keyframe_are_absent(tmp_path):
    world = make_world(1, 9, cameras={"cam_front": (64, 48), "cam_left": (64, 48)}, lidars=())
    sent = video_messages(world, world.clips[0])
    first = next(message for message in sent if message.topic == "/cam_left/video")
    write_mcap(
        tmp_path / "log.mcap",
        [message for message in sent if message is not first],
    )
    cameras = {name: f"/{name}/video" for name in world.cameras}
    spec = SourceSpec(
        "mcap",
        str(tmp_path / "log.mcap"),
        {"cameras": cameras, "missing_camera": "mask"},
    )
    report = scan_source(spec).report
    assert report.masked["cam_left"] == {
        "no keyframe before it": 2,
        "no message in time": 1,
    }


def test_video_that_is_not_stored_in_the_order_of_its_times_is_refused(
    tmp_path,
):
    """A legal file of MCAP; pictures and sweeps in any order are read, but a decoder wants a video's own order."""
    world = make_world(1, 9, cameras={"cam_front": (64, 48), "cam_left": (64, 48)}, lidars=())
    write_mcap(tmp_path / "log.mcap", video_messages(world, world.clips[0])[::-1])
    cameras = {name: f"/{name}/video" for name in world.cameras}
    said = r"log 'log': the video of topic '/cam_\w+/video' is not stored in the order of its times.*`mcap sort`"
    with pytest.raises(SourceError, match=said):
        SourceSuite().make(
            SourceSpec("mcap", str(tmp_path / "log.mcap"), {"cameras": cameras}),
            tmp_path / "out",
        )


def test_a_transform_that_is_cut_off_is_named(tmp_path, monkeypatch):
    world = make_world(1, 4)
    add = Writer.add_message

    def cut(self, channel, log_time, data, *times):
        add(
            self,
            channel,
            log_time,
            data[:-9] if b"map\0" in data else data,
            *times,
        )

    monkeypatch.setattr(Writer, "add_message", cut)
    write_mcap(tmp_path / "log.mcap", ros_messages(world, world.clips[0]))
    with pytest.raises(SourceError, match=r"topic '/tf': a message is not a tf2_msgs/TFMessage"):
        scan_source(SourceSpec("mcap", str(tmp_path / "log.mcap"), {}))


def test_signals_are_stored_between_samples(tmp_path):
    world = make_world(1, 4)
    ros = Ros()
    sent = ros_messages(world, world.clips[0])
    first = world.clips[0].frames[0].timestamp_ns
    times = range(first - 60_000_000, first + 300_000_000, 20_000_000)
    for number, time_ns in enumerate(times):
        linear, angular = (
            ros.of("geometry_msgs/Vector3", *np.arange(3.0) + number + offset) for offset in (0, 10)
        )
        linear.z = np.nan  # not measured
        twist = ros.of("geometry_msgs/Twist", linear, angular)
        message = ros.of(
            "geometry_msgs/TwistStamped",
            ros.header(time_ns, "base_link"),
            twist,
        )
        sent.append(Sent("/speed", "geometry_msgs/TwistStamped", time_ns, message))
    write_mcap(tmp_path / "log.mcap", sorted(sent, key=lambda entry: entry.stamp_ns))
    spec = SourceSpec("mcap", str(tmp_path / "log.mcap"), {"signals": {"speed": "/speed"}})
    SourceSuite().make(spec, tmp_path / "out")
    dataset = open_dataset(tmp_path / "out")
    (channel,) = dataset.manifest.extra_channels
    assert channel.columns == (
        "dt_s",
        *(f"twist_{part}_{axis}" for part in ("linear", "angular") for axis in "xyz"),
    )
    samples = sorted(
        map(dataset.__getitem__, range(len(dataset))),
        key=lambda sample: sample.meta.timestamp_ns,
    )
    rows = [decode_values(sample.extra, (channel,), sample.key)["can_speed"] for sample in samples]
    assert [len(signal_rows) for signal_rows in rows] == [4, 5, 5, 4]
    np.testing.assert_allclose(rows[0][:, 0], [0.06, 0.04, 0.02, 0], atol=1e-9)
    np.testing.assert_array_equal(np.concatenate(rows)[:, 1], np.arange(len(times)))
    assert np.isnan(np.concatenate(rows)[:, 3]).all()
    np.testing.assert_array_equal(np.concatenate(rows)[:, 6], np.arange(len(times)) + 12)
    with pytest.raises(
        ConfigError,
        match="'/x' of speed is not a topic with numbers; topics: /cam",
    ):
        scan_source(spec._replace(options={"signals": {"speed": "/x"}}))
    with pytest.raises(SourceError, match="not a message of ROS 2 with numbers"):
        scan_source(spec._replace(options={"signals": {"speed": "/tf"}}))


def test_radars_are_channels_with_all_their_columns(tmp_path):
    """In ego at the sample's time, by the poses at both times; velocities turn with the points."""
    world = make_world(1, 4)
    ros = Ros()
    sent = ros_messages(world, world.clips[0])
    late_ns = 30_000_000
    mount = np.eye(4)
    mount[:3, :3], mount[:3, 3] = turn(0.4, "z"), (3.5, 0.2, 0.6)
    sent.append(
        Sent(
            "/tf_static",
            "tf2_msgs/TFMessage",
            sent[0].stamp_ns,
            ros.tf([("base_link", "radar", sent[0].stamp_ns, mount)]),
        )
    )
    names = ("x", "y", "z", "vx", "vy", "id", "timestamp")
    types = (7, 7, 7, 7, 7, 4, 8)
    sizes = {7: "<f4", 4: "<u2", 8: "<f8"}
    dtype = np.dtype([(name, sizes[kind]) for name, kind in zip(names, types, strict=True)])
    rows = np.zeros(2, dtype)
    for name, values in (
        ("x", (10, np.nan)),
        ("y", (-2, 1)),
        ("vx", (5, 0)),
        ("vy", (2, 0)),
        ("id", (9, 1)),
    ):
        rows[name] = values
    fields = [
        ros.of("sensor_msgs/PointField", name, dtype.fields[name][1], kind, 1)
        for name, kind in zip(names, types, strict=True)
    ]
    data = np.frombuffer(rows.tobytes(), np.uint8)
    for frame in world.clips[0].frames[:-1]:
        stamp_ns = frame.timestamp_ns + late_ns
        cloud = ros.of(
            "sensor_msgs/PointCloud2",
            ros.header(stamp_ns, "radar"),
            1,
            2,
            fields,
            False,
            dtype.itemsize,
            2 * dtype.itemsize,
            data,
            True,
        )
        sent.append(Sent("/radar", "sensor_msgs/PointCloud2", stamp_ns, cloud))
        sent.append(
            Sent(
                "/tf",
                "tf2_msgs/TFMessage",
                stamp_ns,
                ros.tf([("map", "base_link", stamp_ns, ego_at(0, stamp_ns))]),
            )
        )
    spec = logged(
        tmp_path,
        sorted(sent, key=lambda message: message.stamp_ns),
        {"radars": {"radar_front": "/radar"}},
    )
    SourceSuite().make(spec, tmp_path / "out")
    dataset = open_dataset(tmp_path / "out")
    assert [lidar.channel for lidar in dataset.manifest.lidars] == ["lidar_top"]
    (channel,) = (entry for entry in dataset.manifest.channels if entry.name == "radar_front")
    assert channel.columns == ("x", "y", "z", "vx", "vy", "id", "dt_s"), "times are dt_s"
    assert channel.law.roles["vectors"] == (("vx", "vy"),)
    samples = sorted(
        samples_of(tmp_path / "out").values(),
        key=lambda sample: sample.meta.timestamp_ns,
    )
    assert ["radar_front" in sample.points for sample in samples] == [
        True,
        True,
        True,
        False,
    ]
    for sample in samples[:3]:
        (point,) = sample.points["radar_front"].astype(np.float64)
        time_ns = sample.meta.timestamp_ns
        moved = np.linalg.inv(ego_at(0, time_ns)) @ ego_at(0, time_ns + late_ns) @ mount
        np.testing.assert_allclose(point[:3], (moved @ (10, -2, 0, 1))[:3], atol=1e-4)
        np.testing.assert_allclose(point[3:6], [*(moved[:2, :2] @ (5, 2)), 9], atol=1e-4)
        assert abs(point[6] + 0.03) < 1e-6
    source, _, table = scanned("mcap", spec.location, tmp_path, **spec.options, poses="none")
    (ref,) = [member.ref for member in table.row(0).members if member.name == channel.field]
    (point,) = decode_points(source.open(ref))
    np.testing.assert_allclose(point[:3], (mount @ (10, -2, 0, 1))[:3], atol=1e-4)
    for name in ("Radar", "cam_front", "lidar_top"):
        with pytest.raises(
            ConfigError,
            match=rf"radars: '{name}' must be in lower case, and no other channel: cam_",
        ):
            scan_source(spec._replace(options={"radars": {name: "/radar"}}))
    for radars, said in (
        ({"radar_front": "/tf"}, "has the type"),
        ({"radar_front": "/none"}, "is not there"),
    ):
        with pytest.raises(
            SourceError,
            match=rf"the option radars: topic '/\w+' of radar_front {said}",
        ):
            scan_source(spec._replace(options={"radars": radars}))


@pytest.mark.parametrize("compression", ["NONE", "ZSTD"])
def test_pngs_with_a_palette_become_pngs_of_8_bits(tmp_path, compression):
    """A damaged one of them is left out as others are."""
    world = make_world(1, 4)
    rng = np.random.default_rng(5)
    pictures = {}
    for number, frame in enumerate(world.clips[0].frames):
        image = frame.images["cam_left"]
        pixels = rng.integers(0, 255, (image.size[1], image.size[0], 3), np.uint8)
        picture = Image.fromarray(pixels).quantize(200)
        blob = io.BytesIO()
        picture.save(blob, "png")
        image.jpeg = blob.getvalue()[: -200 if number == 2 else None]
        pictures[frame.timestamp_ns] = np.asarray(picture.convert("RGB"))
    options = {
        "cameras": {name: f"/{name}/image_raw/compressed" for name in world.cameras},
        "damaged_image": "mask",
        "max_damaged": 0.5,
    }
    sent = ros_messages(world, world.clips[0])
    spec = logged(tmp_path, sent, options, compression=compression)
    SourceSuite().make(spec, tmp_path / "out")
    report = scan_source(spec).report
    assert report.damaged == {"cam_left": 1}
    assert sum(count for text, count in report.noted.items() if "with a palette" in text) == 4
    samples = samples_of(tmp_path / "out").values()
    assert sum("cam_left" not in sample.images for sample in samples) == 1
    for sample in samples:
        if "cam_left" in sample.images:
            stored = Image.open(io.BytesIO(bytes(sample.images["cam_left"])))
            expected = pictures[sample.meta.timestamp_ns]
            np.testing.assert_array_equal(np.asarray(stored.convert("RGB")), expected)
