"""Reads the messages of a topic, of ROS 2 or of foxglove."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.logs.messages.foxglove import Foxglove
from fuelrail.sharding.sources.logs.messages.records import Edges
from fuelrail.sharding.sources.logs.messages.ros import Ros
from fuelrail.sharding.sources.shared.foreign import parsing

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.schema import F64, I64
    from fuelrail.sharding.sources.logs.files.log_file import Message, Topic
    from fuelrail.sharding.sources.logs.messages.records import (
        CameraInfo,
        Cloud,
        Marks,
        Picture,
    )

_ZSTD: Final = b"\x28\xb5\x2f\xfd"
"""Begins a frame of zstd; CDR begins with 0."""
D = TypeVar("D")
T = TypeVar("T")


class Reader:
    """Reads the messages of one topic. Errors are SourceError naming the topic."""

    def __init__(self, topic: Topic) -> None:
        self._topic = topic
        self.is_proto = topic.encoding == "protobuf"
        if topic.encoding not in ("cdr", "protobuf"):
            raise SourceError(
                f"topic '{topic.name}' has the encoding '{topic.encoding}'; cdr (ROS 2) and "
                "protobuf are read"
            )
        self._is_first = not self.is_proto
        self._form: Foxglove | Ros = Foxglove(topic) if self.is_proto else Ros(topic)

    def picture(self, message: Message) -> Picture:
        """Read the head of a picture, for which the first bytes of the message are enough."""
        return self._guard(self._form.picture, message.data)

    def video_format(self, message: Message) -> str:
        """Read the codec from a whole CompressedVideo."""
        return self._guard(self._form.video_format, message.data)

    def calibrations(self, messages: Sequence[Message]) -> list[tuple[int, CameraInfo]]:
        """Read whole calibrations with their stamps; successive equal ones may be one record."""
        return self._guard(
            lambda data: list(self._form.calibrations(data)),
            [message.data for message in messages],
        )

    def edges(self, messages: Sequence[Message]) -> list[Edges]:
        """Read whole transforms of many messages, by parent and child."""
        return self._guard(self._form.edges, [message.data for message in messages])

    def poses(self, messages: Sequence[Message]) -> list[Edges]:
        """Read whole Odometry or PoseStamped messages; the child frame of a PoseStamped is ""."""
        assert isinstance(self._form, Ros), "a type of ROS"
        return Edges.from_pairs(
            enumerate(self._guard(self._form.pose, message.data) for message in messages)
        )

    def marks(self, message: Message) -> Marks:
        """Read all boxes in a picture."""
        return self._guard(self._form.marks, message.data)

    @property
    def columns(self) -> list[str]:
        """Places of single numbers in a message of ROS; raises SourceError where it has none, or
        no stamp.
        """
        names = (
            self._guard(lambda form: form.columns, self._form)
            if isinstance(self._form, Ros)
            else []
        )
        if not names:
            raise SourceError(
                f"topic '{self._topic.name}' has the type {self._topic.type}, not a message "
                "of ROS 2 with numbers"
            )
        return names

    def signals(self, messages: Sequence[Message]) -> tuple[I64, F64]:
        """Read stamps (N,) [ns], and the numbers (N, C) of :attr:`columns`."""
        assert isinstance(self._form, Ros), "a type of ROS"
        return self._guard(self._form.signals, [message.data for message in messages])

    def cloud(self, message: Message) -> Cloud:
        """Read a whole point cloud."""
        return self._guard(self._form.cloud, message.data)

    def cloud_head(self, message: Message) -> tuple[int, str, int]:
        """Read stamp, frame and number of points; for protobuf the number of 16-byte points that
        fit the message.
        """
        return self._guard(
            lambda data: self._form.cloud_head(data, message.length),
            message.data,
        )

    def _guard(self, read: Callable[[D], T], data: D) -> T:
        if self._is_first:
            # A message that is compressed by itself: no topic of MCAP states it.
            first = data[0] if isinstance(data, list) and data else data
            if isinstance(first, bytes | bytearray | memoryview) and bytes(first[:4]) == _ZSTD:
                raise SourceError(
                    f"topic '{self._topic.name}': messages are compressed one by one, as rosbag2 "
                    "does by compression_mode MESSAGE: `ros2 bag convert` makes a file with "
                    "compressed chunks of them, which is read"
                )
            self._is_first = False
        with parsing(
            f"topic '{self._topic.name}': a message",
            f"is not a {self._topic.type}",
        ):
            return read(data)
