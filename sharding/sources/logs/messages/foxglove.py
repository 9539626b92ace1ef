"""foxglove's messages as protobuf (https://docs.foxglove.dev/docs/sdk/schemas)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from fuelrail.sharding.sources.logs.messages.records import (
    CameraInfo,
    Cloud,
    Edge,
    Edges,
    Marks,
    Picture,
    PointField,
    Shape,
)
from fuelrail.sharding.sources.shared.protobuf import Names, Proto, descriptor

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.sharding.sources.logs.files.log_file import Topic

_KINDS: Final = dict(enumerate(("u1", "i1", "u2", "i2", "u4", "i4", "f4", "f8"), 1))


class Foxglove:
    """Reads the messages of one topic."""

    def __init__(self, topic: Topic) -> None:
        self._topic = topic

    @functools.cached_property
    def _names(self) -> Names:
        return descriptor(self._topic.schema)

    def _read(self, data: Buffer) -> Proto:
        return Proto(data, self._names, self._topic.type)

    def picture(self, data: Buffer) -> Picture:
        """Read the head of a picture."""
        message = self._read(data)
        return Picture(message.stamp_ns, message.text("frame_id"), *message.span("data"))

    def video_format(self, data: Buffer) -> str:
        """Read the codec of a video."""
        return self._read(data).text("format")

    def calibration(self, data: Buffer) -> CameraInfo:
        """Read a CameraCalibration."""
        message = self._read(data)
        d, k, r, p = (tuple(message.doubles(name)) for name in "DKRP")
        width = message.number("width")
        height = message.number("height")
        model = message.text("distortion_model")
        return CameraInfo(
            stamp_ns=message.stamp_ns,
            frame_id=message.text("frame_id"),
            width=width,
            height=height,
            model=model,
            d=d,
            k=k,
            r=r,
            p=p,
        )

    def calibrations(self, messages: Sequence[Buffer]) -> Iterator[tuple[int, CameraInfo]]:
        """Yield each calibration with its stamp."""
        return ((info.stamp_ns, info) for info in map(self.calibration, messages))

    def transforms(self, data: Buffer) -> list[Edge]:
        """Read a FrameTransform or FrameTransforms."""
        message = self._read(data)
        return [
            Edge(
                parent=edge.text("parent_frame_id"),
                child=edge.text("child_frame_id"),
                stamp_ns=edge.stamp_ns,
                wxyz=_quaternion(edge.message("rotation")),
                xyz=_vector(edge.message("translation")),
            )
            for edge in (
                message.messages("transforms")
                if self._topic.type.endswith("FrameTransforms")
                else [message]
            )
        ]

    def edges(self, messages: Sequence[Buffer]) -> list[Edges]:
        """Read the transforms of many messages."""
        return Edges.from_pairs(
            (row, edge) for row, data in enumerate(messages) for edge in self.transforms(data)
        )

    def marks(self, data: Buffer) -> Marks:
        """Read an ImageAnnotations."""
        message = self._read(data)
        shapes = [
            Shape(
                stamp_ns=shape.stamp_ns,
                kind=shape.number("type"),
                x=[point.double("x") for point in shape.messages("points")],
                y=[point.double("y") for point in shape.messages("points")],
                metadata={
                    pair.text("key"): pair.text("value") for pair in shape.messages("metadata")
                },
            )
            for shape in message.messages("points")
        ]
        return Marks.from_shapes(
            message.stamp_ns,
            shapes,
            [text.text("text") for text in message.messages("texts")],
        )

    def cloud_head(self, data: Buffer, length: int) -> tuple[int, str, int]:
        """Read stamp, frame and number of points, the number by the length of the message."""
        message = self._read(data)
        return (
            message.stamp_ns,
            message.text("frame_id"),
            max(length // max(message.number("point_stride"), 1), 1),
        )

    def cloud(self, data: Buffer) -> Cloud:
        """Read a PointCloud."""
        message = self._read(data)
        pose = message.message("pose")
        frame_id = message.text("frame_id")
        step = message.number("point_stride")
        columns = tuple(
            PointField(
                field.text("name"),
                field.number("offset"),
                _KINDS[field.number("type")],
            )
            for field in message.messages("fields")
        )
        start, length = message.span("data")
        points = memoryview(data)[start : start + length]
        width = length // max(step, 1)
        turn = _quaternion(pose.message("orientation"))
        moved = _vector(pose.message("position"))
        if any(turn):
            edge = Edge(
                parent=frame_id,
                child=frame_id,
                stamp_ns=message.stamp_ns,
                wxyz=turn,
                xyz=moved,
            )
        else:
            edge = None
        return Cloud(
            stamp_ns=message.stamp_ns,
            frame_id=frame_id,
            height=1,
            width=width,
            fields=columns,
            big_endian=False,
            step=step,
            row_step=width * step,
            data=points,
            pose=edge,
        )


def _quaternion(q: Proto) -> tuple[float, float, float, float]:
    return q.double("w"), q.double("x"), q.double("y"), q.double("z")


def _vector(v: Proto) -> tuple[float, float, float]:
    return v.double("x"), v.double("y"), v.double("z")
