"""ROS 2 messages: CDR (OMG DDS-XTypes 7.4), read by rosbags; of pictures and clouds the head is read here."""

from __future__ import annotations

import functools
import struct
from typing import TYPE_CHECKING, Any, Final

from fuelrail.sharding.sources.logs.messages.records import RAWS, Calibration, Cloud, Edge, Picture, PointField

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.sharding.sources.logs.files.log_file import Topic

_LITTLE, _BIG = (tuple(struct.Struct(order + kind).unpack_from for kind in ("I", "II", "7d")) for order in ("<", ">"))
"""What reads a u32, a stamp, and a translation with a rotation, by the order of bytes."""
_POSE_BYTES: Final = 56
_STAMP: Final = slice(4, 12)
"""Where the stamp of a message is that begins with one."""
_PADDING: Final = 3
_KINDS: Final = dict(enumerate(("i1", "u1", "i2", "u2", "i4", "u4", "f4", "f8"), 1))


class Ros:
    """Reads the messages of one topic."""

    def __init__(self, topic: Topic) -> None:
        self._topic = topic
        self._type = topic.type.replace("/", "/msg/")
        self._same: tuple[bytes, Calibration] | None = None

    def _read(self, data: Buffer) -> Any:  # noqa: ANN401 - rosbags
        return _store(self._type, self._topic.schema).deserialize_cdr(bytes(data), self._type)

    def picture(self, data: Buffer) -> Picture:
        """The head of a picture."""
        cdr = _Cdr(data)
        stamp_ns, frame_id = cdr.stamp(), cdr.text()
        if self._topic.type in RAWS:
            height, width, encoding = cdr.u32(), cdr.u32(), cdr.text()
            cdr.at += 1  # is_bigendian
            step, length = cdr.u32(), cdr.u32()
            return Picture(stamp_ns, frame_id, cdr.at, length, encoding, width, height, step)
        if self._topic.type == "sensor_msgs/CompressedImage":
            cdr.chars()  # the format: free text that is often wrong
        length = cdr.u32()
        return Picture(stamp_ns, frame_id, cdr.at, length)

    def video_format(self, data: Buffer) -> str:
        """The codec."""
        return str(self._read(data).format)

    def calibration(self, data: Buffer) -> Calibration:
        """A CameraInfo, or foxglove's CameraCalibration: one that says the same as the last is not parsed again."""
        text = bytes(data)
        rest = text[: _STAMP.start] + text[_STAMP.stop :]
        if self._same is None or self._same[0] != rest:
            self._same = rest, self._calibration(text)
        return self._same[1]._replace(stamp_ns=_Cdr(text).stamp())

    def _calibration(self, data: Buffer) -> Calibration:
        info = self._read(data)
        size = info.width, info.height, info.distortion_model
        is_foxglove = self._topic.type != "sensor_msgs/CameraInfo"
        names = "DKRP" if is_foxglove else "dkrp"
        d, k, r, p = (tuple(map(float, getattr(info, name))) for name in names)
        if is_foxglove:
            return Calibration(_time_ns(info.timestamp), info.frame_id, *size, d, k, r, p)
        binning, roi = (max(info.binning_x, 1), max(info.binning_y, 1)), info.roi
        part = (roi.x_offset, roi.y_offset, roi.width, roi.height)
        return Calibration(_time_ns(info.header.stamp), info.header.frame_id, *size, d, k, r, p, binning, part)

    def transforms(self, data: Buffer) -> list[Edge]:
        """A TFMessage, or foxglove's FrameTransform and FrameTransforms."""
        if self._topic.type == "tf2_msgs/TFMessage":
            cdr = _Cdr(data)
            edges = [cdr.edge() for _ in range(cdr.u32())]
            if len(memoryview(data)) - cdr.at > _PADDING:
                raise ValueError(f"{len(memoryview(data)) - cdr.at} bytes are left after {len(edges)} transforms")
            return edges
        one = self._read(data)
        return [
            Edge(
                edge.parent_frame_id, edge.child_frame_id, _time_ns(edge.timestamp), _wxyz(edge.rotation),
                _xyz(edge.translation),
            )
            for edge in getattr(one, "transforms", [one])
        ]  # fmt: skip

    def pose(self, data: Buffer) -> Edge:
        """An Odometry, a PoseStamped, or one with covariance."""
        one = self._read(data)
        pose = one.pose if self._topic.type == "geometry_msgs/PoseStamped" else one.pose.pose
        child = getattr(one, "child_frame_id", "")
        stamp_ns = _time_ns(one.header.stamp)
        return Edge(one.header.frame_id, child, stamp_ns, _wxyz(pose.orientation), _xyz(pose.position))

    def cloud_head(self, data: Buffer, length: int) -> tuple[int, str, int]:  # noqa: ARG002 - foxglove's needs it
        """Stamp, frame and number of points."""
        cdr = _Cdr(data)
        return cdr.stamp(), cdr.text(), max(cdr.u32() * cdr.u32(), 1)

    def cloud(self, data: Buffer) -> Cloud:
        """A PointCloud2."""
        one = self._read(data)
        columns = tuple(PointField(field.name, field.offset, _KINDS[field.datatype]) for field in one.fields)
        return Cloud(
            _time_ns(one.header.stamp), one.header.frame_id, one.height, one.width, columns, bool(one.is_bigendian),
            one.point_step, one.row_step, one.data,
        )  # fmt: skip


@functools.cache
def _standard() -> Any:  # noqa: ANN401 - rosbags
    """ROS 2's own types; making them takes tens of milliseconds."""
    from rosbags.typesys import Stores, get_typestore

    return get_typestore(Stores.ROS2_HUMBLE)


@functools.cache
def _store(name: str, schema: bytes) -> Any:  # noqa: ANN401 - rosbags
    """Types that have this one: ROS 2's own, else by the log's text."""
    from rosbags.typesys import Stores, get_types_from_msg, get_typestore

    if name in _standard().types:
        return _standard()
    found = get_typestore(Stores.ROS2_HUMBLE)
    found.register(get_types_from_msg(schema.decode(), name))
    return found


class _Cdr:
    """Reads the head of a CDR message; numbers are aligned to their size from byte 4 on."""

    def __init__(self, data: Buffer) -> None:
        self._data, self.at = memoryview(data), 4
        self._u32, self._stamp, self._pose = _LITTLE if self._data[1] & 1 else _BIG

    def u32(self) -> int:
        at = self.at + -self.at % 4
        self.at = at + 4
        (value,) = self._u32(self._data, at)
        return int(value)

    def text(self) -> str:
        return bytes(self.chars()).rstrip(b"\0").decode("utf-8", "replace")

    def chars(self) -> memoryview:
        """A text as it is, with its end mark."""
        start = self.at + -self.at % 4 + 4
        (length,) = self._u32(self._data, start - 4)
        self.at = start + length
        return self._data[start : start + length]

    def stamp(self) -> int:
        at = self.at + -self.at % 4
        self.at = at + 8
        seconds, rest = self._stamp(self._data, at)
        return int(seconds * 1_000_000_000 + rest)

    def edge(self) -> Edge:
        """A TransformStamped."""
        stamp_ns, parent, child = self.stamp(), self.text(), self.text()
        self.at += (4 - self.at) % 8
        x, y, z, qx, qy, qz, w = self._pose(self._data, self.at)
        self.at += _POSE_BYTES
        return Edge(parent, child, stamp_ns, (w, qx, qy, qz), (x, y, z))


def _time_ns(time: Any) -> int:  # noqa: ANN401 - rosbags
    return int(time.sec) * 1_000_000_000 + int(time.nanosec)


def _wxyz(q: Any) -> tuple[float, float, float, float]:  # noqa: ANN401 - rosbags
    return (q.w, q.x, q.y, q.z)


def _xyz(v: Any) -> tuple[float, float, float]:  # noqa: ANN401 - rosbags
    return (v.x, v.y, v.z)
