"""Signals of logs as series: windows in seconds against a plain reading of the files by timestamps, with rosbags."""

from __future__ import annotations

import numpy as np
import pytest

from fuelrail import DataLoader, ImageAugment, Transforms
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.sharding.sources.registry import SourceSpec
from support.log_world import (
    Ros,
    Sent,
    ros_messages,
    write_bag,
    write_mcap,
    write_rosbag2,
)
from support.source_suite import SourceSuite
from support.source_world import make_world

MS = 1_000_000
BESIDE_NS = 500 * MS
WINDOW = {
    "can_speed": {"from": -1.6, "to": 0, "hz": 10},
    "can_imu": {"seconds": [-0.03, 0, 0.2]},
}
WRITERS = {
    "mcap": ("log.mcap", write_mcap),
    "rosbag2": ("log", write_rosbag2),
    "rosbag1": ("log.bag", write_bag),
}


def messages():
    """Twelve frames at 10 Hz, a speed at 50 Hz with jitter, and an IMU at 100 Hz that is silent for a while."""
    world = make_world(1, 12)
    ros = Ros()
    rng = np.random.default_rng(4)
    sent = ros_messages(world, world.clips[0])
    first = world.clips[0].frames[0].timestamp_ns
    vector = "geometry_msgs/Vector3"
    for time_ns in range(first - 800 * MS, first + 2200 * MS, 20 * MS):
        stamp_ns = time_ns + int(rng.integers(0, 9)) * MS
        twist = ros.of(
            "geometry_msgs/Twist",
            *(ros.of(vector, *rng.normal(size=3)) for _ in range(2)),
        )
        message = ros.of(
            "geometry_msgs/TwistStamped",
            ros.header(stamp_ns, "base_link"),
            twist,
        )
        sent.append(Sent("/speed", "geometry_msgs/TwistStamped", stamp_ns, message))
        if time_ns == first:  # a second message of one stamp
            sent.append(sent[-1])
    for stamp_ns in range(first - 200 * MS, first + 1300 * MS, 10 * MS):
        if not 300 * MS <= stamp_ns - first < 600 * MS:
            turned = (
                ros.of("geometry_msgs/Quaternion", *rng.normal(size=4)),
                np.zeros(9),
            )
            moved = (
                np.zeros(9) if axis % 2 else ros.of(vector, *rng.normal(size=3))
                for axis in range(4)
            )
            message = ros.of("sensor_msgs/Imu", ros.header(stamp_ns, "imu"), *turned, *moved)
            sent.append(Sent("/imu", "sensor_msgs/Imu", stamp_ns, message))
    return sorted(sent, key=lambda entry: entry.stamp_ns)


def read_by_rosbags(path, kind):
    """Stamps and numbers of both topics, in the order of the stamps."""
    from rosbags.highlevel import AnyReader
    from rosbags.typesys import Stores, get_typestore

    series = {"/speed": {}, "/imu": {}}
    store = get_typestore(Stores.ROS1_NOETIC if kind == "rosbag1" else Stores.ROS2_HUMBLE)
    with AnyReader([path], default_typestore=store) as reader:
        for connection, _, data in reader.messages():
            if connection.topic in series:
                message = reader.deserialize(data, connection.msgtype)
                parts = (
                    (message.twist.linear, message.twist.angular)
                    if connection.topic == "/speed"
                    else (
                        message.orientation,
                        message.angular_velocity,
                        message.linear_acceleration,
                    )
                )
                names = [(part, axis) for part in parts for axis in "xyzw" if hasattr(part, axis)]
                stamp = message.header.stamp
                numbers = np.array([getattr(part, axis) for part, axis in names])
                series[connection.topic].setdefault(stamp.sec * 10**9 + stamp.nanosec, numbers)
    return {topic: sorted(rows.items()) for topic, rows in series.items()}


def at_time(rows, wanted_ns):
    """The value between the measurements before and after a time; None beyond them."""
    before = [row for row in rows if row[0] <= wanted_ns][-1:]
    after = [row for row in rows if row[0] >= wanted_ns][:1]
    if not before or not after:
        return None
    ((low_ns, low),), ((high_ns, high),) = before, after
    return (
        low
        if low_ns == high_ns
        else low + (high - low) * ((wanted_ns - low_ns) / (high_ns - low_ns))
    )


@pytest.mark.parametrize("kind", WRITERS)
def test_windows_are_those_of_the_messages(tmp_path, kind):
    name, write = WRITERS[kind]
    write(tmp_path / name, messages())
    # mcap: clips of six frames, of which two stay; the messages between them stay too.
    cut = {"clip_seconds": 0.55, "rate": 3.4} if kind == "mcap" else {}
    options = {
        "signals": {"speed": "/speed", "imu": "/imu"},
        "series": True,
        **cut,
    }
    SourceSuite().make(SourceSpec(kind, str(tmp_path / name), options), tmp_path / "out")
    dataset = open_dataset(tmp_path / "out")
    table = {channel.name: channel for channel in dataset.manifest.extra_channels}
    assert table["can_speed"].description.startswith("columns: twist_linear_x, twist_linear_y")
    assert [table[name].arrays[1].shape for name in WINDOW] == [(6,), (10,)]
    truth = read_by_rosbags(tmp_path / name, kind)
    assert (len(truth["/speed"]), len(truth["/imu"])) == (150, 120)
    times = {}
    for sample in map(dataset.__getitem__, range(len(dataset))):
        times.setdefault(sample.key.rpartition("-")[0], []).append(sample.meta.timestamp_ns)
    assert sorted(map(len, times.values())) == ([2, 2] if cut else [12])
    image = ImageAugment(height=16, width=24, resize="stretch")
    transforms = Transforms(image=image, select=list(WINDOW))
    offsets = {
        "can_speed": [step * 100 * MS - 1600 * MS for step in range(17)],
        "can_imu": [-30 * MS, 0, 200 * MS],
    }
    num_there = 0
    with DataLoader(
        tmp_path / "out", 2, transforms=transforms, window=WINDOW, num_workers=1
    ) as loader:
        for batch in loader:
            for position, (clip, now) in enumerate(
                zip(
                    batch["clip_id"],
                    batch["timestamp_ns"].tolist(),
                    strict=True,
                )
            ):
                low = min(times[clip]) - BESIDE_NS
                high = max(times[clip]) + BESIDE_NS
                for name, topic in (
                    ("can_speed", "/speed"),
                    ("can_imu", "/imu"),
                ):
                    rows = [row for row in truth[topic] if low <= row[0] <= high]
                    expected = [at_time(rows, now + offset) for offset in offsets[name]]
                    is_known = [value is not None for value in expected]
                    num_there += sum(is_known)
                    assert batch[f"{name}_valid"][position].tolist() == is_known, (name, clip, now)
                    values = batch[name][position].numpy()[is_known]
                    np.testing.assert_allclose(
                        values,
                        [value for value in expected if value is not None],
                        atol=1e-6,
                    )
    assert num_there > 30


def test_a_log_without_the_topic_has_no_such_member(tmp_path):
    sent = messages()
    (tmp_path / "logs").mkdir()
    write_mcap(tmp_path / "logs" / "a.mcap", sent)
    write_mcap(
        tmp_path / "logs" / "b.mcap",
        [message for message in sent if message.topic != "/imu"],
    )
    for series in (False, True):
        options = {
            "signals": {"speed": "/speed", "imu": "/imu"},
            "series": series,
        }
        SourceSuite().make(
            SourceSpec("mcap", str(tmp_path / "logs"), options),
            tmp_path / f"out-{series}",
        )
        dataset = open_dataset(tmp_path / f"out-{series}")
        names = {
            sample.key[0]: set(sample.extra)
            for sample in map(dataset.__getitem__, range(len(dataset)))
        }
        extension = "safetensors" if series else "npy"
        assert names == {
            "a": {f"can_imu.{extension}", f"can_speed.{extension}"},
            "b": {f"can_speed.{extension}"},
        }
