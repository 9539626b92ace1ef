"""Boxes in the pictures of logs: detections and annotations, of which picture they are, and what is wrong with them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from rosbags.typesys import Stores, get_types_from_msg, get_typestore

from fuelrail.pipeline.channels.kinds import KINDS
from fuelrail.pipeline.errors import ConfigError, SourceError
from fuelrail.sharding.run import scan_source
from fuelrail.sharding.sources.adapter.boxes import stable_id
from fuelrail.sharding.sources.logs.files.log_file import (
    Locator,
    Message,
    Topic,
)
from fuelrail.sharding.sources.logs.messages.reader import Reader
from fuelrail.sharding.sources.registry import SourceSpec
from support.log_world import (
    Sent,
    annotations,
    detections,
    foxglove_messages,
    proto_annotations,
    ros_messages,
    write_mcap,
    write_rosbag2,
)
from support.sharding import scanned
from support.source_suite import SourceSuite
from support.source_world import make_world

BOXES = [(16.5, 8, 24.5, 12, "car", "a"), (4, 4.5, 6, 7.5, "", "")]
FORMS = {
    "vision_msgs/Detection2DArray": detections,
    "foxglove_msgs/ImageAnnotations": annotations,
    "foxglove.ImageAnnotations": proto_annotations,
}
OPTIONS = {"boxes2d": {"cam_front": "/front/boxes"}}


def write(
    folder,
    form,
    boxes_of=lambda number: BOXES[number % 2 :],
    late_ns=0,
    storage="mcap",
):
    """A log with boxes of each picture of the front camera, and where it is."""
    world = make_world(1, 4, lidars=())
    sent = (foxglove_messages if form.startswith("foxglove.") else ros_messages)(
        world, world.clips[0]
    )
    for number, frame in enumerate(world.clips[0].frames):
        stamp_ns = frame.images["cam_front"].timestamp_ns + late_ns
        boxes = boxes_of(number)
        if boxes is not None:
            sent.append(Sent("/front/boxes", form, stamp_ns, FORMS[form](stamp_ns, boxes)))
    sent.sort(key=lambda message: message.stamp_ns)
    if storage == "rosbag2":
        write_rosbag2(folder / "bag", sent)
        return SourceSpec("rosbag2", str(folder / "bag"), OPTIONS)
    write_mcap(folder / "log.mcap", sent)
    return SourceSpec("mcap", str(folder / "log.mcap"), OPTIONS)


def read_frames(spec, folder):
    """Classes, report, and by frame the boxes of the front camera, None where there is no member."""
    source, info, table = scanned(spec.kind, spec.location, folder, **spec.options)
    (channel,) = info.channels
    assert channel.name == "boxes2d_cam_front"
    frames = []
    for number in range(len(table)):
        refs = [member.ref for member in table.row(number).members if member.name == channel.field]
        frames.append(KINDS["ragged"].decode(source.open(refs[0]), channel) if refs else None)
    return info.classes, info.report, frames


@pytest.mark.parametrize(
    ("form", "storage"),
    [
        *((form, "mcap") for form in FORMS),
        ("vision_msgs/Detection2DArray", "rosbag2"),
    ],
)
def test_boxes_are_of_the_picture_of_their_stamp(tmp_path, form, storage):
    spec = write(tmp_path, form, storage=storage)
    classes, _, frames = read_frames(spec, tmp_path)
    assert len(frames) == 4
    has_tracks = form != "foxglove_msgs/ImageAnnotations"
    for number, boxes in enumerate(frames):
        expected = BOXES[number % 2 :]
        np.testing.assert_array_equal(boxes["box"], np.array([box[:4] for box in expected]) - 0.5)
        assert [classes[label] for label in boxes["label"]] == [
            box[4] or "unknown" for box in expected
        ]
        tracks = [stable_id(box[5]) if box[5] and has_tracks else -1 for box in expected]
        assert boxes["instance_id"].tolist() == tracks
        assert set(boxes["row"].tolist()) == {-1}
    SourceSuite().make(spec, tmp_path / "out")
    assert not scan_source(spec._replace(options={})).channels


def test_pictures_and_boxes_without_each_other(tmp_path):
    """None for a picture without a message, which is not the same as no boxes; a message of no picture is counted."""
    spec = write(
        tmp_path,
        "vision_msgs/Detection2DArray",
        lambda number: (None, [], BOXES, BOXES[:1])[number],
        20_000_000,
    )
    _, report, frames = read_frames(spec, tmp_path)
    assert [None if boxes is None else len(boxes["box"]) for boxes in frames] == [None, 0, 2, 1]
    assert "/front/boxes: messages of no picture" not in report.noted
    near = spec._replace(options={**OPTIONS, "tolerance_ms": 15.0})
    _, report, frames = read_frames(near, tmp_path)
    assert frames == [None] * 4
    assert report.noted["/front/boxes: messages of no picture"] == 3
    delayed = near._replace(options={**near.options, "offsets_ms": {"boxes2d_cam_front": 20}})
    assert [boxes is None for boxes in read_frames(delayed, tmp_path)[2]] == [
        True,
        False,
        False,
        False,
    ]


def test_annotations_without_boxes_have_no_stamp_and_are_counted(tmp_path):
    spec = write(
        tmp_path,
        "foxglove_msgs/ImageAnnotations",
        lambda number: BOXES if number else [],
    )
    _, report, frames = read_frames(spec, tmp_path)
    assert [boxes is None for boxes in frames] == [True, False, False, False]
    assert report.noted["/front/boxes: messages without boxes or stamp"] == 1


def test_boxes_that_are_wrong_are_named(tmp_path):
    for box, edges in (
        ((9, 8, 4, 12, "car", ""), r"\[8.5, 7.5, 3.5, 11.5\]"),
        ((math.nan, 8, 4, 12, "", ""), "nan"),
    ):
        spec = write(
            tmp_path,
            "vision_msgs/Detection2DArray",
            lambda number, box=box: [box],
        )
        with pytest.raises(
            SourceError,
            match=rf"2-D box 0 of cam_front is .*{edges}.*finite and in order",
        ):
            scan_source(spec)
    for options in (
        {"cam_front": "/tf"},
        {"lidar": "/front/boxes"},
        {"cam_front": "/x"},
    ):
        with pytest.raises(
            ConfigError,
            match="must be a topic of boxes, and of a camera; such topics: /front/boxes",
        ):
            scan_source(spec._replace(options={"boxes2d": options}))


OLD = {
    "vision_msgs/msg/ObjectHypothesisWithPose": "string id\nfloat64 score\ngeometry_msgs/PoseWithCovariance pose\n",
    "vision_msgs/msg/BoundingBox2D": "geometry_msgs/Pose2D center\nfloat64 size_x\nfloat64 size_y\n",
    "vision_msgs/msg/Detection2D": (
        "std_msgs/Header header\nObjectHypothesisWithPose[] results\nBoundingBox2D bbox\nbool is_tracking\n"
        "string tracking_id\n"
    ),
    "vision_msgs/msg/Detection2DArray": "std_msgs/Header header\nDetection2D[] detections\n",
}


def test_a_turned_box_of_an_older_version():
    """Version 2, of ROS 2 Foxy: another centre, hypothesis and track. What is stored is the bounds."""
    store = get_typestore(Stores.ROS2_FOXY)
    for name, text in OLD.items():
        store.register(get_types_from_msg(text, name))
    make = {name.rpartition("/")[2]: message_type for name, message_type in store.types.items()}
    header = make["Header"](make["Time"](5, 7), "camera")
    pose = make["PoseWithCovariance"](
        make["Pose"](make["Point"](0, 0, 0), make["Quaternion"](0, 0, 0, 1)),
        np.zeros(36),
    )
    box = make["BoundingBox2D"](make["Pose2D"](20.0, 10.0, math.pi / 2), 8.0, 4.0)
    detection = make["Detection2D"](
        header,
        [make["ObjectHypothesisWithPose"]("17", 0.5, pose)],
        box,
        True,
        "t9",
    )
    message = make["Detection2DArray"](header, [detection])
    data = bytes(store.serialize_cdr(message, message.__msgtype__))
    schema = store.generate_msgdef(message.__msgtype__, ros_version=2)[0].encode()
    topic = Topic("/d", "vision_msgs/Detection2DArray", "cdr", schema)
    marks = Reader(topic).marks(
        Message(
            topic="/d",
            log_ns=0,
            place=Locator("f", 0, 0),
            data=data,
            length=len(data),
        )
    )
    assert (marks.stamp_ns, marks.category, marks.track) == (
        5_000_000_007,
        ["17"],
        ["t9"],
    )
    np.testing.assert_allclose(marks.box, [(18, 6, 22, 14)])
    with pytest.raises(SourceError, match="a message is not a vision_msgs/Detection2DArray"):
        Reader(topic).marks(
            Message(
                topic="/d",
                log_ns=0,
                place=Locator("f", 0, 0),
                data=data[:40],
                length=40,
            )
        )
    with pytest.raises(
        SourceError,
        match="has no definition of the type vision_msgs/msg/Detection2DArray",
    ):
        Reader(topic._replace(schema=b"")).marks(
            Message(
                topic="/d",
                log_ns=0,
                place=Locator("f", 0, 0),
                data=data,
                length=len(data),
            )
        )
