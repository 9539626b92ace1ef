"""Writes the synthetic world of `source_world` as logs: ROS 2 messages in MCAP or SQLite, and foxglove's protobuf."""

from __future__ import annotations

import functools
import struct
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

import av
import numpy as np
import simplejpeg
from scipy.spatial.transform import Rotation

from fuelrail.sharding.sources.registry import SourceSpec

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from support.source_world import World, WorldClip

LAG_NS = 37_000_000
"""The recorder writes this much later: its times are not the clock."""


class Sent(NamedTuple):
    """A message: topic, type, stamp [ns], and the message itself (rosbags), or its bytes with a descriptor."""

    topic: str
    type: str
    stamp_ns: int
    message: object


@functools.cache
def store():
    """The types of ROS 2, foxglove's and those of boxes in images."""
    from rosbags.typesys import Stores, get_types_from_msg, get_typestore

    type_store = get_typestore(Stores.ROS2_HUMBLE)
    for name, text in {**OTHER_TYPES, **VISION}.items():
        type_store.register(get_types_from_msg(text, name.replace("/", "/msg/")))
    return type_store


OTHER_TYPES = {
    "foxglove_msgs/CompressedVideo": (
        "builtin_interfaces/Time timestamp\nstring frame_id\nuint8[] data\nstring format\n"
    ),
    "foxglove_msgs/Point2": "float64 x\nfloat64 y\n",
    "foxglove_msgs/PointsAnnotation": "builtin_interfaces/Time timestamp\nuint8 type\nfoxglove_msgs/Point2[] points\n",
    "foxglove_msgs/TextAnnotation": "builtin_interfaces/Time timestamp\nfoxglove_msgs/Point2 position\nstring text\n",
    "foxglove_msgs/ImageAnnotations": "foxglove_msgs/PointsAnnotation[] points\nfoxglove_msgs/TextAnnotation[] texts\n",
}
"""Definitions that are none of ROS 2's own; of annotations the fields that matter."""
VISION = {
    "vision_msgs/ObjectHypothesis": "string class_id\nfloat64 score\n",
    "vision_msgs/ObjectHypothesisWithPose": "ObjectHypothesis hypothesis\ngeometry_msgs/PoseWithCovariance pose\n",
    "vision_msgs/Point2D": "float64 x\nfloat64 y\n",
    "vision_msgs/Pose2D": "Point2D position\nfloat64 theta\n",
    "vision_msgs/BoundingBox2D": "Pose2D center\nfloat64 size_x\nfloat64 size_y\n",
    "vision_msgs/Detection2D": (
        "std_msgs/Header header\nObjectHypothesisWithPose[] results\nBoundingBox2D bbox\nstring id\n"
    ),
    "vision_msgs/Detection2DArray": "std_msgs/Header header\nDetection2D[] detections\n",
}
"""Version 4, of ROS 2 Humble and later."""


class Ros:
    """Makes messages."""

    def __init__(self) -> None:
        self.types = store().types

    def of(self, name: str, *values):
        package, _, kind = name.partition("/")
        return self.types[f"{package}/msg/{kind}"](*values)

    def time(self, stamp_ns: int):
        return self.of("builtin_interfaces/Time", *divmod(stamp_ns, 1_000_000_000))

    def header(self, stamp_ns: int, frame: str):
        return self.of("std_msgs/Header", self.time(stamp_ns), frame)

    def tf(self, edges: Iterable[tuple[str, str, int, np.ndarray]]):
        transforms = []
        for parent, child, stamp_ns, matrix in edges:
            q = Rotation.from_matrix(matrix[:3, :3]).as_quat()
            moved = self.of(
                "geometry_msgs/Transform",
                self.of("geometry_msgs/Vector3", *matrix[:3, 3].tolist()),
                self.of("geometry_msgs/Quaternion", *q.tolist()),
            )
            transforms.append(
                self.of(
                    "geometry_msgs/TransformStamped",
                    self.header(stamp_ns, parent),
                    child,
                    moved,
                )
            )
        return self.of("tf2_msgs/TFMessage", transforms)

    def info(
        self,
        stamp_ns,
        frame,
        size,
        k,
        *,
        d=(),
        model="plumb_bob",
        p=None,
        r=None,
        binning=(0, 0),
        roi=(0, 0, 0, 0),
    ):
        x, y, width, height = roi
        region = self.of("sensor_msgs/RegionOfInterest", x, y, height, width, False)
        p = np.hstack([k, np.zeros((3, 1))]) if p is None else p
        flat = [
            np.asarray(values, np.float64).ravel()
            for values in (d, k, np.eye(3) if r is None else r, p)
        ]
        return self.of(
            "sensor_msgs/CameraInfo",
            self.header(stamp_ns, frame),
            size[1],
            size[0],
            model,
            *flat,
            *binning,
            region,
        )

    def cloud(self, stamp_ns, frame, points, *, pad: int = 3):
        """x, y, z, intensity as float32, ring as uint16, and bytes of padding."""
        dtype = np.dtype(
            [
                ("x", "<f4"),
                ("y", "<f4"),
                ("z", "<f4"),
                ("intensity", "<f4"),
                ("ring", "<u2"),
                ("_", f"V{pad}"),
            ]
        )
        rows = np.zeros(len(points), dtype)
        for column, name in enumerate(("x", "y", "z", "intensity", "ring")):
            rows[name] = points[:, column]
        fields = [
            self.of(
                "sensor_msgs/PointField",
                name,
                dtype.fields[name][1],
                7 if name != "ring" else 4,
                1,
            )
            for name in ("x", "y", "z", "intensity", "ring")
        ]
        data = np.frombuffer(rows.tobytes(), np.uint8)
        return self.of(
            "sensor_msgs/PointCloud2",
            self.header(stamp_ns, frame),
            1,
            len(points),
            fields,
            False,
            dtype.itemsize,
            dtype.itemsize * len(points),
            data,
            True,
        )


def ros_messages(world: World, clip: WorldClip) -> list[Sent]:
    """The messages of one clip, in the order in which a recorder gets them."""
    ros = Ros()
    sent = []
    first = clip.frames[0]
    fixed = [
        ("base_link", f"{name}_optical", 0, image.cam2ego) for name, image in first.images.items()
    ]
    fixed += [("base_link", name, 0, sweep.lidar2ego) for name, sweep in first.sweeps.items()]
    sent.append(
        Sent(
            "/tf_static",
            "tf2_msgs/TFMessage",
            first.timestamp_ns,
            ros.tf(fixed),
        )
    )
    poses = {}
    for frame in clip.frames:
        poses[frame.timestamp_ns] = frame.ego2global
        for name, image in frame.images.items():
            poses[image.timestamp_ns] = image.ego2global
            head = ros.header(image.timestamp_ns, f"{name}_optical")
            data = np.frombuffer(image.jpeg, np.uint8)
            picture = ros.of(
                "sensor_msgs/CompressedImage",
                head,
                "rgb8; jpeg compressed bgr8",
                data,
            )
            sent.append(
                Sent(
                    f"/{name}/image_raw/compressed",
                    "sensor_msgs/CompressedImage",
                    image.timestamp_ns,
                    picture,
                )
            )
            info = ros.info(
                image.timestamp_ns,
                f"{name}_optical",
                image.size,
                image.intrinsics,
            )
            sent.append(
                Sent(
                    f"/{name}/camera_info",
                    "sensor_msgs/CameraInfo",
                    image.timestamp_ns,
                    info,
                )
            )
        for name, sweep in frame.sweeps.items():
            cloud = ros.cloud(sweep.timestamp_ns, name, sweep.points)
            sent.append(
                Sent(
                    f"/{name}/points",
                    "sensor_msgs/PointCloud2",
                    sweep.timestamp_ns,
                    cloud,
                )
            )
    sent += [
        Sent(
            "/tf",
            "tf2_msgs/TFMessage",
            stamp_ns,
            ros.tf([("map", "base_link", stamp_ns, pose)]),
        )
        for stamp_ns, pose in poses.items()
    ]
    return sorted(sent, key=lambda entry: entry.stamp_ns)


def video_messages(world: World, clip: WorldClip) -> list[Sent]:
    """The messages of one clip, whose pictures are H.264 with a keyframe every third message."""
    packets = {}
    for name in world.cameras:
        images = [frame.images[name] for frame in clip.frames]
        for image, packet in zip(images, encoded([image.jpeg for image in images]), strict=True):
            packets[f"/{name}/image_raw/compressed", image.timestamp_ns] = packet
    sent = []
    ros = Ros()
    for entry in ros_messages(world, clip):
        packet = packets.get((entry.topic, entry.stamp_ns))
        if packet is not None:
            head = entry.message.header
            data = np.frombuffer(packet, np.uint8)
            video = ros.of(
                "foxglove_msgs/CompressedVideo",
                head.stamp,
                head.frame_id,
                data,
                "h264",
            )
            topic = entry.topic.replace("image_raw/compressed", "video")
            entry = Sent(topic, "foxglove_msgs/CompressedVideo", entry.stamp_ns, video)
        sent.append(entry)
    return sent


def with_raw_pictures(
    sent: Iterable[Sent],
    name: str,
    encoding: str,
    size: tuple[int, int],
    rows: np.ndarray,
    *,
    big: bool = False,
) -> list[Sent]:
    """The messages, the pictures of a camera replaced by uncompressed ones; ``rows`` (H, row bytes) uint8."""
    ros = Ros()
    entries = []
    for entry in sent:
        if entry.topic == f"/{name}/image_raw/compressed":
            values = (
                entry.message.header,
                size[1],
                size[0],
                encoding,
                int(big),
                rows.shape[1],
                rows.ravel(),
            )
            entry = entry._replace(
                message=ros.of("sensor_msgs/Image", *values),
                type="sensor_msgs/Image",
            )
        entries.append(entry)
    return entries


def encoded(jpegs: list[bytes]) -> list[bytes]:
    """One packet of Annex B for each picture."""
    options = {
        "g": "3",
        "bf": "0",
        "tune": "zerolatency",
        "x264-params": "scenecut=0:repeat-headers=1:annexb=1",
    }
    encoder = av.CodecContext.create("libx264", "w")
    packets = []
    for number, jpeg in enumerate(jpegs):
        image = simplejpeg.decode_jpeg(jpeg)
        if not number:
            encoder.height, encoder.width, encoder.pix_fmt = (
                *image.shape[:2],
                "yuv420p",
            )
            encoder.time_base = Fraction(1, 10)
            encoder.options = options
        frame = av.VideoFrame.from_ndarray(image, "rgb24")
        frame.pts = number
        packets += encoder.encode(frame)
    return [bytes(packet) for packet in [*packets, *encoder.encode(None)]]


def write_mcap(
    path: Path,
    sent: Iterable[Sent],
    *,
    compression: str = "ZSTD",
    chunk_size: int = 1 << 14,
    **options,
) -> None:
    """Write messages with the public library; ``options`` are of its writer."""
    from mcap.writer import CompressionType, Writer

    types = store()
    channels = {}
    with path.open("wb") as file:
        writer = Writer(
            file,
            chunk_size=chunk_size,
            compression=CompressionType[compression],
            **options,
        )
        writer.start("ros2")
        for entry in sent:
            if entry.topic not in channels:
                if isinstance(entry.message, bytes):
                    schema = writer.register_schema(entry.type, "protobuf", DESCRIPTOR)
                    channels[entry.topic] = writer.register_channel(entry.topic, "protobuf", schema)
                else:
                    schema = writer.register_schema(
                        entry.message.__msgtype__,
                        "ros2msg",
                        definition(types, entry.message),
                    )
                    channels[entry.topic] = writer.register_channel(entry.topic, "cdr", schema)
            data = entry.message
            if not isinstance(data, bytes):
                data = bytes(types.serialize_cdr(data, data.__msgtype__))
            writer.add_message(
                channels[entry.topic],
                entry.stamp_ns + LAG_NS,
                data,
                entry.stamp_ns,
            )
        writer.finish()


def logged(
    folder: Path,
    sent: Iterable[Sent],
    source_options: dict | None = None,
    **options,
) -> SourceSpec:
    """A source of one log of these messages; ``options`` are those of `write_mcap`."""
    write_mcap(folder / "log.mcap", sent, **options)
    return SourceSpec("mcap", str(folder / "log.mcap"), source_options or {})


def definition(types, message) -> bytes:
    return types.generate_msgdef(message.__msgtype__, ros_version=2)[0].encode()


def write_rosbag2(
    folder: Path,
    sent: Iterable[Sent],
    *,
    packed: bool = False,
    storage: str = "SQLITE3",
) -> None:
    """Write messages as a folder with SQLite or MCAP, with the public library; ``packed``: compressed one by one."""
    from rosbags.rosbag2 import (
        CompressionFormat,
        CompressionMode,
        StoragePlugin,
        Writer,
    )

    types = store()
    connections = {}
    bag = Writer(folder, version=9, storage_plugin=StoragePlugin[storage])
    if packed:
        bag.set_compression(CompressionMode.MESSAGE, CompressionFormat.ZSTD)
    with bag as writer:
        for entry in sent:
            kind = entry.message.__msgtype__
            if entry.topic not in connections:
                connections[entry.topic] = writer.add_connection(entry.topic, kind, typestore=types)
            writer.write(
                connections[entry.topic],
                entry.stamp_ns + LAG_NS,
                types.serialize_cdr(entry.message, kind),
            )


def write_bag(
    path: Path,
    sent: Iterable[Sent],
    compression: str = "NONE",
    *,
    old: bool = False,
) -> None:
    """Write messages as a bag of ROS 1, with the public library and its types of ROS 1; ``old``: before ROS Hydro."""
    from rosbags.rosbag1 import Writer
    from rosbags.typesys import Stores, get_types_from_msg, get_typestore

    types = get_typestore(Stores.ROS1_NOETIC)
    connections = {}
    transforms = dict.fromkeys(
        ("tf2_msgs/TFMessage", "tf/tfMessage"),
        "geometry_msgs/TransformStamped[] transforms\n",
    )
    for name, text in {**transforms, **OTHER_TYPES}.items():
        types.register(get_types_from_msg(text, name.replace("/", "/msg/")))

    def as_ros1(value):
        """The message with the fields of ROS 1: headers have a number, CameraInfo's matrices have capitals."""
        if isinstance(value, list):
            return [as_ros1(item) for item in value]
        kind = getattr(value, "__msgtype__", None)
        if kind is None:
            return value
        names = [name for name, _ in types.fielddefs[kind][1]]
        fields = {name: 77 if name == "seq" else as_ros1(_field(value, name)) for name in names}
        return types.types[kind](**fields)

    bag = Writer(path)
    if compression != "NONE":
        bag.set_compression(Writer.CompressionFormat[compression])
    with bag as writer:
        for entry in sent:
            kind = entry.message.__msgtype__
            kind = "tf/msg/tfMessage" if old and entry.type == "tf2_msgs/TFMessage" else kind
            if entry.topic not in connections:
                connections[entry.topic] = writer.add_connection(entry.topic, kind, typestore=types)
            data = types.serialize_ros1(as_ros1(entry.message), kind)
            writer.write(connections[entry.topic], entry.stamp_ns + LAG_NS, data)


def _field(message, name):
    return getattr(message, name if hasattr(message, name) else name.lower())


# foxglove's protobuf, written by hand: number, wire type, value.


def _key(number: int, wire: int) -> bytes:
    return _varint(number << 3 | wire)


def _varint(value: int) -> bytes:
    encoded = b""
    while value > 0x7F:
        encoded = encoded + bytes([value & 0x7F | 0x80])
        value = value >> 7
    return encoded + bytes([value])


def part(number: int, data: bytes | str) -> bytes:
    """A field of bytes, text or a message."""
    data = data.encode() if isinstance(data, str) else data
    return _key(number, 2) + _varint(len(data)) + data


def _doubles(number: int, values) -> bytes:
    return part(number, struct.pack(f"<{len(values)}d", *values))


def _xyz(*values: float) -> bytes:
    return b"".join(
        _key(number, 1) + struct.pack("<d", value) for number, value in enumerate(values, 1)
    )


def _stamp(stamp_ns: int) -> bytes:
    seconds, nanos = divmod(stamp_ns, 1_000_000_000)
    return part(
        1,
        _key(1, 0) + _varint(seconds) + (_key(2, 0) + _varint(nanos) if nanos else b""),
    )


def _fixed(number: int, value: int) -> bytes:
    return _key(number, 5) + struct.pack("<I", value)


_TYPES = {
    "google.protobuf.Timestamp": ["seconds", "nanos"],
    "foxglove.Vector3": ["x", "y", "z"],
    "foxglove.Quaternion": ["x", "y", "z", "w"],
    "foxglove.Pose": [
        ("position", "foxglove.Vector3"),
        ("orientation", "foxglove.Quaternion"),
    ],
    "foxglove.Point2": ["x", "y"],
    "foxglove.KeyValuePair": ["key", "value"],
    "foxglove.PointsAnnotation": [
        ("timestamp", "google.protobuf.Timestamp"),
        "type",
        ("points", "foxglove.Point2"),
        "outline_color",
        "outline_colors",
        "fill_color",
        "thickness",
        ("metadata", "foxglove.KeyValuePair"),
    ],
    "foxglove.TextAnnotation": [
        ("timestamp", "google.protobuf.Timestamp"),
        ("position", "foxglove.Point2"),
        "text",
    ],
    "foxglove.ImageAnnotations": [
        "circles",
        ("points", "foxglove.PointsAnnotation"),
        ("texts", "foxglove.TextAnnotation"),
    ],
    "foxglove.PackedElementField": ["name", "offset", "type"],
    "foxglove.CompressedImage": [
        ("timestamp", "google.protobuf.Timestamp"),
        "data",
        "format",
        "frame_id",
    ],
    "foxglove.CameraCalibration": [
        ("timestamp", "google.protobuf.Timestamp"),
        "width",
        "height",
        "distortion_model",
        "D",
        "K",
        "R",
        "P",
        "frame_id",
    ],
    "foxglove.FrameTransform": [
        ("timestamp", "google.protobuf.Timestamp"),
        "parent_frame_id",
        "child_frame_id",
        ("translation", "foxglove.Vector3"),
        ("rotation", "foxglove.Quaternion"),
    ],
    "foxglove.PointCloud": [
        ("timestamp", "google.protobuf.Timestamp"),
        "frame_id",
        ("pose", "foxglove.Pose"),
        "point_stride",
        ("fields", "foxglove.PackedElementField"),
        "data",
    ],
}


def _descriptor() -> bytes:
    """A FileDescriptorSet with a file for each package."""
    files = b""
    for package in ("google.protobuf", "foxglove"):
        file = part(2, package)
        for name, fields in _TYPES.items():
            if name.rpartition(".")[0] == package:
                message = part(1, name.rpartition(".")[2])
                for number, field in enumerate(fields, 1):
                    label, kind = (field, "") if isinstance(field, str) else field
                    typed = part(6, f".{kind}") if kind else b""
                    message += part(2, part(1, label) + _key(3, 0) + _varint(number) + typed)
                file += part(4, message)
        files += part(1, file)
    return files


DESCRIPTOR = _descriptor()


def foxglove_messages(world: World, clip: WorldClip) -> list[Sent]:
    """The messages of one clip in foxglove's schemas; static transforms are sent once, on the topic of the others."""
    sent = []
    poses = {}

    def transform(parent: str, child: str, stamp_ns: int, matrix: np.ndarray) -> Sent:
        turned = _xyz(*Rotation.from_matrix(matrix[:3, :3]).as_quat().tolist())
        data = (
            _stamp(stamp_ns)
            + part(2, parent)
            + part(3, child)
            + part(4, _xyz(*matrix[:3, 3].tolist()))
            + part(5, turned)
        )
        return Sent("/tf", "foxglove.FrameTransform", stamp_ns, data)

    first = clip.frames[0]
    sent += [
        transform("base_link", name, first.timestamp_ns, image.cam2ego)
        for name, image in first.images.items()
    ]
    for frame in clip.frames:
        poses[frame.timestamp_ns] = frame.ego2global
        for name, image in frame.images.items():
            poses[image.timestamp_ns] = image.ego2global
            data = (
                _stamp(image.timestamp_ns) + part(2, image.jpeg) + part(3, "jpeg") + part(4, name)
            )
            sent.append(
                Sent(
                    f"/{name}/image",
                    "foxglove.CompressedImage",
                    image.timestamp_ns,
                    data,
                )
            )
            k = image.intrinsics.ravel().tolist()
            data = (
                _stamp(image.timestamp_ns)
                + _fixed(2, image.size[0])
                + _fixed(3, image.size[1])
                + _doubles(6, k)
            )
            sent.append(
                Sent(
                    f"/{name}/calibration",
                    "foxglove.CameraCalibration",
                    image.timestamp_ns,
                    data + part(9, name),
                )
            )
        for (
            name,
            sweep,
        ) in frame.sweeps.items():  # a cloud in base_link, with the lidar's pose
            points = sweep.points[:, :4]
            fields = b"".join(
                part(
                    5,
                    part(1, column) + _fixed(2, 4 * column_index) + _key(3, 0) + _varint(7),
                )
                for column_index, column in enumerate(("x", "y", "z", "intensity"))
            )
            data = (
                _stamp(sweep.timestamp_ns)
                + part(2, "base_link")
                + _fixed(4, 16)
                + fields
                + part(6, points.tobytes())
            )
            sent.append(
                Sent(
                    f"/{name}/points",
                    "foxglove.PointCloud",
                    sweep.timestamp_ns,
                    data,
                )
            )
    sent += [transform("map", "base_link", stamp_ns, pose) for stamp_ns, pose in poses.items()]
    return sorted(sent, key=lambda entry: entry.stamp_ns)


Box = tuple[float, float, float, float, str, str]
"""Left, top, right, bottom [px], where 0 is the left edge of the first pixel; category, track."""


def detections(stamp_ns: int, boxes: Iterable[Box]):
    """A Detection2DArray of version 4; of each box's hypotheses, the second has the better score."""
    ros = Ros()
    detected = []
    point = ros.of("geometry_msgs/Point", 0, 0, 0)
    turned = ros.of("geometry_msgs/Quaternion", 0, 0, 0, 1)
    pose = ros.of(
        "geometry_msgs/PoseWithCovariance",
        ros.of("geometry_msgs/Pose", point, turned),
        np.zeros(36),
    )
    for left, top, right, bottom, category, track in boxes:
        names = (("other", 0.2), (category, 0.7)) if category else ()
        results = [
            ros.of(
                "vision_msgs/ObjectHypothesisWithPose",
                ros.of("vision_msgs/ObjectHypothesis", *name),
                pose,
            )
            for name in names
        ]
        centre = ros.of("vision_msgs/Point2D", (left + right) / 2, (top + bottom) / 2)
        box = ros.of(
            "vision_msgs/BoundingBox2D",
            ros.of("vision_msgs/Pose2D", centre, 0.0),
            right - left,
            bottom - top,
        )
        detected.append(
            ros.of(
                "vision_msgs/Detection2D",
                ros.header(stamp_ns, "camera"),
                results,
                box,
                track,
            )
        )
    return ros.of("vision_msgs/Detection2DArray", ros.header(stamp_ns, "camera"), detected)


def annotations(stamp_ns: int, boxes: Iterable[Box]):
    """An ImageAnnotations of ROS 2: a loop and a text for each box, and lines that are no boxes."""
    ros = Ros()
    boxes = list(boxes)
    stamp = ros.time(stamp_ns)
    texts = []
    loops = (
        [
            ros.of(
                "foxglove_msgs/PointsAnnotation",
                stamp,
                3,
                [ros.of("foxglove_msgs/Point2", 1, 1)] * 2,
            )
        ]
        if boxes
        else []
    )
    for *sides, category, _ in boxes:
        points = [ros.of("foxglove_msgs/Point2", *corner) for corner in corners(sides)]
        loops.append(ros.of("foxglove_msgs/PointsAnnotation", stamp, 2, points))
        texts.append(ros.of("foxglove_msgs/TextAnnotation", stamp, points[0], category))
    return ros.of("foxglove_msgs/ImageAnnotations", loops, texts)


def proto_annotations(stamp_ns: int, boxes: Iterable[Box]) -> bytes:
    """The same as protobuf, with categories and tracks in metadata."""
    encoded = b""
    for *sides, category, track in boxes:
        points = b"".join(part(3, _xyz(*corner)) for corner in corners(sides))
        metadata = {"category": category, "track": track}.items()
        pairs = b"".join(part(8, part(1, key) + part(2, value)) for key, value in metadata if value)
        encoded += part(2, _stamp(stamp_ns) + _key(2, 0) + _varint(2) + points + pairs)
    return encoded


def corners(sides) -> list[tuple[float, float]]:
    left, top, right, bottom = sides
    return [(left, top), (right, top), (right, bottom), (left, bottom)]
