"""ROS 2 messages: CDR (OMG DDS-XTypes 7.4), read by rosbags; of pictures and clouds the head is
read here.
"""

from __future__ import annotations

import functools
import math
import operator
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.logs.messages.records import (
    RAWS,
    UNKNOWN,
    CameraInfo,
    Cloud,
    Edge,
    Edges,
    Marks,
    Picture,
    PointField,
    Shape,
)

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.pipeline.sample.schema import F64, I64
    from fuelrail.sharding.sources.logs.files.log_file import Topic

_LITTLE, _BIG = (
    tuple(struct.Struct(order + kind).unpack_from for kind in ("I", "II", "7d"))
    for order in ("<", ">")
)
"""What reads a u32, a stamp, and a translation with a rotation, by the order of bytes."""
_TIMES: Final = (
    "std_msgs/msg/Header",
    "builtin_interfaces/msg/Time",
    "builtin_interfaces/msg/Duration",
)
_POSE_BYTES: Final = 56
_STAMP: Final = slice(4, 12)
"""The place of the stamp in a message that begins with one."""
_FIRST_STAMP: Final = slice(8, 16)
"""The place of the first stamp in a list."""
_PADDING: Final = 3
_MOST_LINES = 10_000
_MOST_VALUES = 1000
"""The limits of a definition: larger ones take the library seconds."""
_KINDS: Final = dict(enumerate(("i1", "u1", "i2", "u2", "i4", "u4", "f4", "f8"), 1))


class Ros:
    """Reads the messages of one topic."""

    def __init__(self, topic: Topic) -> None:
        self._topic = topic
        self._type = topic.type.replace("/", "/msg/")
        self._calibrated: tuple[Buffer, CameraInfo] | None = None
        self._pictured: tuple[Buffer, Buffer, Picture] = (
            b"",
            b"",
            Picture(0, "", 0, 0),
        )

    def _read(self, data: Buffer) -> Any:
        store = type_store(self._type, self._topic.schema)
        return store.deserialize_cdr(bytes(data), self._type)

    def picture(self, data: Buffer) -> Picture:
        """Read the head of a picture; parse one again only if more than stamp and length
        changed.
        """
        order, text, last = self._pictured
        length_at = last.offset - 4
        is_alike = data[_STAMP.stop : length_at] == text and data[: _STAMP.start] == order
        if is_alike:
            (length,) = _readers(data)[0](data, length_at)
            return Picture(
                stamp_ns=_stamp_ns(data, _STAMP.start),
                frame_id=last.frame_id,
                offset=last.offset,
                length=length,
                encoding=last.encoding,
                width=last.width,
                height=last.height,
                step=last.step,
                big_endian=last.big_endian,
            )
        cdr = _Cdr(data)
        stamp_ns = cdr.stamp()
        frame_id = cdr.text()
        if self._topic.type in RAWS:
            height = cdr.u32()
            width = cdr.u32()
            encoding = cdr.text()
            big_endian = bool(data[cdr.position])
            cdr.position += 1
            step = cdr.u32()
            length = cdr.u32()
            head = Picture(
                stamp_ns=stamp_ns,
                frame_id=frame_id,
                offset=cdr.position,
                length=length,
                encoding=encoding,
                width=width,
                height=height,
                step=step,
                big_endian=big_endian,
            )
        else:
            form = b""
            if self._topic.type == "sensor_msgs/CompressedImage":
                form = bytes(cdr.chars()).rstrip(b"\0")  # free text that is often wrong
            length = cdr.u32()
            head = Picture(
                stamp_ns=stamp_ns,
                frame_id=frame_id,
                offset=cdr.position,
                length=length,
                encoding=str(form, "utf-8", "replace"),
            )
        self._pictured = (
            data[: _STAMP.start],
            data[_STAMP.stop : head.offset - 4],
            head,
        )
        return head

    def video_format(self, data: Buffer) -> str:
        """Read the codec of a video."""
        return str(self._read(data).format)

    def calibrations(self, messages: Sequence[Buffer]) -> Iterator[tuple[int, CameraInfo]]:
        """Yield each calibration with its stamp; one that equals the one before it is the same
        record.
        """
        for data in messages:
            text = data[_STAMP.stop :]
            if self._calibrated is None or self._calibrated[0] != text:
                self._calibrated = text, self.calibration(data)
            yield _stamp_ns(data, _STAMP.start), self._calibrated[1]

    def calibration(self, data: Buffer) -> CameraInfo:
        """Read a CameraInfo, or foxglove's CameraCalibration."""
        info = self._read(data)
        is_foxglove = self._topic.type != "sensor_msgs/CameraInfo"
        names = "DKRP" if is_foxglove else "dkrp"
        d, k, r, p = (tuple(map(float, getattr(info, name))) for name in names)
        calibration = CameraInfo(
            stamp_ns=_time_ns(info.timestamp if is_foxglove else info.header.stamp),
            frame_id=info.frame_id if is_foxglove else info.header.frame_id,
            width=info.width,
            height=info.height,
            model=info.distortion_model,
            d=d,
            k=k,
            r=r,
            p=p,
        )
        if is_foxglove:
            return calibration
        roi = info.roi
        return calibration._replace(
            binning=(max(info.binning_x, 1), max(info.binning_y, 1)),
            roi=(roi.x_offset, roi.y_offset, roi.width, roi.height),
        )

    def transforms(self, data: Buffer) -> list[Edge]:
        """Read a TFMessage, or foxglove's FrameTransform and FrameTransforms."""
        if self._topic.type == "tf2_msgs/TFMessage":
            cdr = _Cdr(data)
            edges = [cdr.edge() for _ in range(cdr.u32())]
            if len(data) - cdr.position > _PADDING:
                raise ValueError(
                    f"{len(data) - cdr.position} bytes are left after {len(edges)} transforms"
                )
            return edges
        message = self._read(data)
        return [
            Edge(
                parent=edge.parent_frame_id,
                child=edge.child_frame_id,
                stamp_ns=_time_ns(edge.timestamp),
                wxyz=_wxyz(edge.rotation),
                xyz=_xyz(edge.translation),
            )
            for edge in getattr(message, "transforms", [message])
        ]

    def edges(self, messages: Sequence[Buffer]) -> list[Edges]:
        """Read the transforms of many messages.

        TFMessages of one transform that differ in stamp and pose alone are read together.
        """
        alike: dict[tuple[int, bytes], list[int]] = {}
        for row, data in enumerate(messages):
            pose_offset = _last_pose(data)
            key = (
                len(data),
                bytes(data[: _FIRST_STAMP.start]) + bytes(data[_FIRST_STAMP.stop : pose_offset]),
            )
            alike.setdefault(key, []).append(row)
        edges_read: list[Edges] = []
        loose: list[tuple[int, Edge]] = []
        for rows in alike.values():
            edges = self.transforms(messages[rows[0]])
            if len(edges) != 1 or self._topic.type != "tf2_msgs/TFMessage":
                loose += [(row, edge) for row in rows for edge in self.transforms(messages[row])]
                continue
            data = messages[rows[0]]
            pose_offset = _last_pose(data)
            order = "<" if data[1] & 1 else ">"
            joined = b"".join([messages[row] for row in rows])
            table = np.frombuffer(joined, np.uint8).reshape(len(rows), -1)
            stamp_bytes = np.ascontiguousarray(table[:, _FIRST_STAMP])
            stamps = stamp_bytes.view(f"{order}u4").astype(np.int64)
            poses = (
                np.ascontiguousarray(table[:, pose_offset : pose_offset + _POSE_BYTES])
                .view(f"{order}f8")
                .astype(np.float64)
            )
            stamp_ns = stamps @ np.array([1_000_000_000, 1])
            message_rows = np.array(rows)
            edges_read.append(
                Edges(
                    parent=edges[0].parent,
                    child=edges[0].child,
                    row=message_rows,
                    stamp_ns=stamp_ns,
                    wxyz=poses[:, [6, 3, 4, 5]],
                    xyz=poses[:, :3],
                )
            )
        return Edges.joined([*edges_read, *Edges.from_pairs(loose)])

    def pose(self, data: Buffer) -> Edge:
        """Read an Odometry, a PoseStamped, or one with covariance."""
        message = self._read(data)
        pose = (
            message.pose if self._topic.type == "geometry_msgs/PoseStamped" else message.pose.pose
        )
        child = getattr(message, "child_frame_id", "")
        stamp_ns = _time_ns(message.header.stamp)
        return Edge(
            parent=message.header.frame_id,
            child=child,
            stamp_ns=stamp_ns,
            wxyz=_wxyz(pose.orientation),
            xyz=_xyz(pose.position),
        )

    @functools.cached_property
    def columns(self) -> list[str]:
        """Places of the single numbers of a message, such as ``twist.linear.x``; none in lists,
        as of covariances.
        """
        fields = type_store(self._type, self._topic.schema).fielddefs

        def paths(kind: str) -> Iterator[str]:
            for name, (node, field_kind) in fields[kind][1]:
                if node.name == "NAME" and field_kind not in _TIMES:
                    yield from (f"{name}.{path}" for path in paths(field_kind))
                elif node.name == "BASE" and field_kind[0] != "string":
                    yield name

        return list(paths(self._type))

    def signals(self, messages: Sequence[Buffer]) -> tuple[I64, F64]:
        """Read stamps (N,) [ns], and the numbers (N, C) of :attr:`columns`."""
        read = [operator.attrgetter(path) for path in self.columns]
        records = [self._read(data) for data in messages]
        stamps = [
            _time_ns(record.header.stamp if hasattr(record, "header") else record.stamp)
            for record in records
        ]
        return np.array(stamps, np.int64), np.array(
            [[get(record) for get in read] for record in records], np.float64
        )

    def marks(self, data: Buffer) -> Marks:
        """Read a Detection2DArray of any version, or foxglove's ImageAnnotations.

        The bounds of a box that is turned, and the category of the best score.
        """
        message = self._read(data)
        if self._topic.type != "vision_msgs/Detection2DArray":
            shapes = [
                Shape(
                    stamp_ns=_time_ns(shape.timestamp),
                    kind=shape.type,
                    x=[point.x for point in shape.points],
                    y=[point.y for point in shape.points],
                    metadata={pair.key: pair.value for pair in getattr(shape, "metadata", ())},
                )
                for shape in message.points
            ]
            stamp_ns = _time_ns(message.timestamp) if hasattr(message, "timestamp") else 0
            return Marks.from_shapes(
                stamp_ns,
                shapes,
                [text.text for text in getattr(message, "texts", ())],
            )
        marks = Marks(_time_ns(message.header.stamp), [], [], [])
        for detection in message.detections:
            centre = detection.bbox.center
            size = (detection.bbox.size_x / 2, detection.bbox.size_y / 2)
            place = getattr(centre, "position", centre)
            c = abs(math.cos(centre.theta))
            s = abs(math.sin(centre.theta))
            half = (
                size[0] * c + size[1] * s,
                size[0] * s + size[1] * c,
            )
            marks.box.append(
                (
                    place.x - half[0],
                    place.y - half[1],
                    place.x + half[0],
                    place.y + half[1],
                )
            )
            results = [getattr(result, "hypothesis", result) for result in detection.results]
            best = max(results, key=lambda result: result.score, default=None)
            name = "" if best is None else str(getattr(best, "class_id", getattr(best, "id", "")))
            marks.category.append(name or UNKNOWN)
            marks.track.append(
                getattr(detection, "id", "") or getattr(detection, "tracking_id", "")
            )
        return marks

    def cloud_head(
        self,
        data: Buffer,
        length: int,  # noqa: ARG002 - foxglove's needs it
    ) -> tuple[int, str, int]:
        """Read stamp, frame and number of points, at least 1."""
        cdr = _Cdr(data)
        stamp = cdr.stamp()
        frame = cdr.text()
        height = cdr.u32()
        width = cdr.u32()
        return stamp, frame, max(height * width, 1)

    def cloud(self, data: Buffer) -> Cloud:
        """Read a PointCloud2."""
        message = self._read(data)
        columns = tuple(
            PointField(field.name, field.offset, _KINDS[field.datatype]) for field in message.fields
        )
        return Cloud(
            stamp_ns=_time_ns(message.header.stamp),
            frame_id=message.header.frame_id,
            height=message.height,
            width=message.width,
            fields=columns,
            big_endian=bool(message.is_bigendian),
            step=message.point_step,
            row_step=message.row_step,
            data=message.data,
        )


@functools.cache
def _standard() -> Any:
    """Return ROS 2's own types; making them takes tens of milliseconds."""
    from rosbags.typesys import Stores, get_typestore

    return get_typestore(Stores.ROS2_HUMBLE)


@functools.cache
def type_store(name: str, schema: bytes) -> Any:
    """Return the types that include this one: ROS 2's own, else by the log's text."""
    from rosbags.interfaces import Nodetype
    from rosbags.typesys import Stores, get_types_from_msg, get_typestore

    if name in _standard().types:
        return _standard()
    if not schema:
        raise SourceError(
            f"the log has no definition of the type {name}, which is none of ROS 2's own; "
            "`ros2 bag convert` of ROS 2 Iron or later writes one that has"
        )
    text = schema.decode()
    if text.count("\n") > _MOST_LINES:
        raise ValueError(f"its definition has over {_MOST_LINES} lines")
    types = get_types_from_msg(text, name)
    store = get_typestore(Stores.ROS2_HUMBLE)
    header = types.get("std_msgs/msg/Header", ((), ()))
    if [field for field, _ in header[1]] == ["seq", "stamp", "frame_id"]:
        # A header of ROS 1: CDR made of it has no number.
        del types["std_msgs/msg/Header"]
    sizes: dict[str, int] = {}

    def num_values(kind: str, inside: tuple[str, ...]) -> int:
        """Count the values of a message (numbers, texts, lists), for each of which the library
        writes code.
        """
        if kind in inside:
            raise ValueError(f"in its definition {kind} has itself as a field")
        if kind not in sizes:
            fields: Any = types[kind][1] if kind in types else store.fielddefs[kind][1]
            sizes[kind] = 1 + sum(
                count_values(node, detail, (*inside, kind)) for _, (node, detail) in fields
            )
            if sizes[kind] > _MOST_VALUES:
                raise ValueError(f"in its definition {kind} has over {_MOST_VALUES} values")
        return sizes[kind]

    def count_values(node: Any, detail: Any, inside: tuple[str, ...]) -> int:
        if node in (Nodetype.ARRAY, Nodetype.SEQUENCE):
            (node, detail), number = detail
            is_numbers = node == Nodetype.BASE and detail[0] != "string"
            number = 1 if is_numbers or node == Nodetype.SEQUENCE else max(number, 1)
        else:
            number = 1
        return int(number) * (num_values(detail, inside) if node == Nodetype.NAME else 1)

    num_values(name, ())
    store.register(types)
    return store


class _Cdr:
    """Reads the head of a CDR message; numbers are aligned to their size from byte 4 on."""

    def __init__(self, data: Buffer) -> None:
        self._data = memoryview(data)
        self.position = 4
        self._u32 = _readers(data)[0]

    def u32(self) -> int:
        position = self.position + -self.position % 4
        self.position = position + 4
        (value,) = self._u32(self._data, position)
        return int(value)

    def text(self) -> str:
        text = bytes(self.chars()).rstrip(b"\0")
        return text.decode("utf-8", "replace")

    def chars(self) -> memoryview:
        """Read a text with its end mark."""
        start = self.position + -self.position % 4 + 4
        (length,) = self._u32(self._data, start - 4)
        self.position = start + length
        return self._data[start : start + length]

    def stamp(self) -> int:
        position = self.position + -self.position % 4
        self.position = position + 8
        return _stamp_ns(self._data, position)

    def edge(self) -> Edge:
        """Read a TransformStamped."""
        stamp_at = self.position + -self.position % 4
        self.position = stamp_at + 8
        parent = self.text()
        child = self.text()
        position = self.position + (4 - self.position) % 8
        self.position = position + _POSE_BYTES
        x, y, z, qx, qy, qz, w = _readers(self._data)[2](self._data, position)
        return Edge(
            parent=parent,
            child=child,
            stamp_ns=_stamp_ns(self._data, stamp_at),
            wxyz=(w, qx, qy, qz),
            xyz=(x, y, z),
        )


def _readers(data: Buffer) -> tuple[Callable[..., tuple[Any, ...]], ...]:
    return _LITTLE if data[1] & 1 else _BIG


def _last_pose(data: Buffer) -> int:
    """Return where the last transform of a TFMessage has its translation: padding to 4 bytes
    follows it.
    """
    return len(data) - _POSE_BYTES - (len(data) - 4) % 8


def _stamp_ns(data: Buffer, position: int) -> int:
    seconds, rest = _readers(data)[1](data, position)
    return int(seconds * 1_000_000_000 + rest)


def _time_ns(time: Any) -> int:
    return int(time.sec) * 1_000_000_000 + int(time.nanosec)


def _wxyz(q: Any) -> tuple[float, float, float, float]:
    return q.w, q.x, q.y, q.z


def _xyz(v: Any) -> tuple[float, float, float]:
    return v.x, v.y, v.z
