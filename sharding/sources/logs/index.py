"""What a scan keeps of one log: the heads of pictures and sweeps, and all calibrations, transforms and poses."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.logs.geometry.transforms import FrameTree
from fuelrail.sharding.sources.logs.messages.pictures import EncodedHead, check_encoding, encoded_head
from fuelrail.sharding.sources.logs.messages.reader import Reader
from fuelrail.sharding.sources.logs.messages.records import (
    CALIBRATIONS,
    RAWS,
    TRANSFORMS,
    VIDEOS,
    Calibration,
    Edge,
    Fix,
    Picture,
)
from fuelrail.sharding.sources.logs.video import is_keyframe, stream_size

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from fuelrail.sharding.sources.logs.files.log_file import Locator, LogFile, Message, Topic
    from fuelrail.sharding.sources.logs.settings import LogSettings


class Shot(msgspec.Struct, frozen=True, gc=False):
    """A picture: its message, size [px] and bytes; ``offset`` is in its file, -1 where they are not in it as they are.

    ``extension`` is "" of a raw picture and of video, whose ``key`` is the keyframe to decode from: None if there is
    none.
    """

    place: Locator
    offset: int
    length: int
    width: int
    height: int
    extension: str
    key: Locator | None = None


class Sweep(NamedTuple):
    """A sweep: its message, and about how many points it has."""

    place: Locator
    num_points: int


class Series(NamedTuple):
    """The pictures or sweeps of one topic in time order: stamps (N,) [ns], ascending, and what is there."""

    stamps: NDArray[np.int64]
    items: list[Shot] | list[Sweep]


class LogIndex:
    """One log: files in the order of recording. ``noted`` counts what was found odd on the way.

    ``cameras`` and ``lidars`` are topics, and ``gps`` is one of positions, or "". ``levels`` are topics whose
    pictures may have 16 bits. ``options`` are the source's: its
    ``poses``, ``clock``, ``clock_jumps``, ``frames`` and ``max_gap_s`` count here. Raises SourceError.
    """

    def __init__(
        self, name: str, files: Sequence[LogFile], *, cameras: Sequence[str], lidars: Sequence[str], gps: str,
        levels: Collection[str], options: LogSettings,
    ) -> None:  # fmt: skip
        self.name, self._clock, self._max_gap_ns = name, options.clock, options.max_gap_s * 1e9
        self._clock_jumps, self._latest = options.clock_jumps, dict[str, tuple[int, int]]()
        self._only_keyframes, self._gps, self._levels = options.frames == "keyframes", gps, levels
        self.noted = Counter[str]()
        self.frame_ids: dict[str, str] = {}
        self.calibrations: dict[str, list[Calibration]] = {}
        self.poses: list[Edge] = []
        self.fixes: list[Fix] = []
        self.tree = FrameTree(f"log '{name}'")
        self._found: dict[str, list[tuple[int, Shot | Sweep]]] = {}
        self._keys: dict[str, Locator] = {}
        self._sizes: dict[str, tuple[int, int]] = {}
        self._heads: dict[str, EncodedHead] = {}
        self._codecs: dict[str, str] = {}
        for file in files:
            self._read(file, set(cameras), set(lidars), options.poses)
        self.tree.settle()
        self.series = {topic: self._sorted(topic, self._found.get(topic, [])) for topic in (*cameras, *lidars)}

    def _read(self, file: LogFile, cameras: set[str], lidars: set[str], poses: str) -> None:
        topics = file.topics
        readers = {
            name: Reader(topic)
            for name, topic in topics.items()
            if name in cameras
            or name in lidars
            or name in (poses, self._gps)
            or topic.type in CALIBRATIONS | TRANSFORMS
        }
        heads, num_lost = readers.keys() & (cameras | lidars), 0
        for message in file.walk(heads, readers.keys() - heads):
            topic = topics[message.topic]
            reader = readers[topic.name]
            if topic.name in cameras:
                if file.lost and sum(file.lost.values()) != num_lost:
                    num_lost = sum(file.lost.values())
                    self._keys.clear()  # a part of a video is lost: the rest of the group cannot be decoded
                self._add(message, *self._shot(file, topic, reader, message))
            elif topic.name in lidars:
                stamp_ns, frame_id, number = reader.cloud_head(message)
                self.frame_ids.setdefault(topic.name, frame_id)
                self._add(message, self._stamp(topic, message, stamp_ns), Sweep(message.place, number))
            elif topic.name == poses:
                self.poses += self._edges(topic, message, [reader.pose(message)])
            elif topic.name == self._gps:
                fix = reader.fix(message)
                stamp_ns = self._stamp(topic, message, fix.stamp_ns)
                if not self._is_set_back(topic.name, message, stamp_ns):
                    self.fixes.append(fix._replace(stamp_ns=stamp_ns))
            elif topic.type in CALIBRATIONS:
                self.calibrations.setdefault(topic.name, []).append(reader.calibration(message))
            else:
                is_static, edges = topic.name.endswith("static"), reader.transforms(message)
                self.tree.add(edges if is_static else self._edges(topic, message, edges), is_static=is_static)
        self.noted.update(file.lost)

    def _shot(self, file: LogFile, topic: Topic, reader: Reader, message: Message) -> tuple[int, Shot]:
        picture = reader.picture(message)
        if reader.is_proto and not picture.stamp_ns and self._clock == "header":
            message = msgspec.structs.replace(message, data=file.read(message.place).data)
            picture = reader.picture(message)  # protobuf may have the stamp behind the picture
        if picture.frame_id:  # where it is behind the picture, that of the calibration counts
            self.frame_ids.setdefault(topic.name, picture.frame_id)
        stamp_ns = self._stamp(topic, message, picture.stamp_ns)
        start, length = picture.offset, picture.length
        known, offset = self._heads.get(topic.name), message.offset + start if message.offset >= 0 else -1
        is_whole = 0 < length <= message.length - start
        if known and is_whole and bytes(message.data[start : start + len(known.text)]) == known.text:
            return stamp_ns, Shot(message.place, offset, length, known.width, known.height, known.extension)
        where = f"topic '{topic.name}', message {message.place}"
        if not is_whole:
            raise SourceError(f"{where}: a picture of {length} bytes in a message of {message.length}")
        if topic.type in VIDEOS:
            return stamp_ns, self._frame(file, topic, message, picture, where)
        if topic.type in RAWS:
            check_encoding(picture.encoding, where, has_levels=topic.name in self._levels)
            return stamp_ns, Shot(message.place, -1, picture.length, picture.width, picture.height, "")

        def first_bytes(number: int) -> memoryview:
            data = message.data
            if start + number > len(data) < message.length:
                data = file.read(message.place, start + number).data
            return memoryview(data)[start : start + number]

        head = encoded_head(first_bytes, length, where)
        if head.text:
            self._heads[topic.name] = head
        return stamp_ns, Shot(message.place, offset, length, head.width, head.height, head.extension)

    def _frame(self, file: LogFile, topic: Topic, message: Message, picture: Picture, where: str) -> Shot:
        data = memoryview(message.data)[picture.offset : picture.offset + picture.length]
        codec = self._codec(file, topic, message)
        if is_keyframe(data, codec, where):
            self._keys[topic.name] = message.place
            if topic.name not in self._sizes:
                whole = memoryview(file.read(message.place).data)[picture.offset : picture.offset + picture.length]
                self._sizes[topic.name] = stream_size(whole, codec, where)
        key = self._keys.get(topic.name)
        return Shot(message.place, -1, picture.length, *self._sizes.get(topic.name, (0, 0)), "", key)

    def _codec(self, file: LogFile, topic: Topic, message: Message) -> str:
        """The codec of a topic, by its first message, which states it behind the picture."""
        found = self._codecs.get(topic.name)
        if found is None:
            found = self._codecs[topic.name] = Reader(topic).video_format(file.read(message.place))
        return found

    def _add(self, message: Message, stamp_ns: int, item: Shot | Sweep) -> None:
        if not self._is_set_back(message.topic, message, stamp_ns):
            self._found.setdefault(message.topic, []).append((stamp_ns, item))

    def _is_set_back(self, what: str, message: Message, stamp_ns: int) -> bool:
        """Whether a message is before others of its topic by a clock that was set; raises SourceError if an error.

        A clock that was set forward, so that stamps went on by more than the recording did, is a gap, and noted.
        """
        latest, recorded_ns = self._latest.get(what, (stamp_ns, message.log_ns))
        passed_ns = stamp_ns - latest
        if passed_ns >= -self._max_gap_ns:
            if passed_ns > self._max_gap_ns and 0 < message.log_ns - recorded_ns < passed_ns - self._max_gap_ns:
                self.noted[f"{what}: clock set forward"] += 1
            if passed_ns >= 0:
                self._latest[what] = stamp_ns, message.log_ns
            return False
        if self._clock_jumps == "error":
            raise SourceError(
                f"log '{self.name}': topic '{what}' goes back in time by {-passed_ns / 1e9:.3f} s at {message.place}: "
                "its clock was set; cut the log there, or try the options clock_jumps=drop or clock=log_time"
            )
        self.noted[f"{what}: messages after the clock was set back"] += 1
        return True

    def _sorted(self, topic: str, found: list[tuple[int, Shot | Sweep]]) -> Series:
        if self._only_keyframes and topic in self._codecs:
            found = [(stamp, one) for stamp, one in found if isinstance(one, Shot) and one.key == one.place]
        stamps = np.array([stamp for stamp, _ in found], np.int64)
        times, first = np.unique(stamps, return_index=True)
        for what, number in (
            ("out of order", int(np.count_nonzero(np.diff(stamps) < 0))),
            ("with the stamp of another", len(stamps) - len(times)),
        ):
            if number:
                self.noted[f"{topic}: messages {what}"] = number
        return Series(times, [found[at][1] for at in first.tolist()])

    def _edges(self, topic: Topic, message: Message, edges: Sequence[Edge]) -> list[Edge]:
        """Those of a message that are not of a clock that was set back: frames of a topic have clocks of their own."""
        found = []
        for edge in edges:
            stamp_ns = self._stamp(topic, message, edge.stamp_ns)
            if not self._is_set_back(f"{topic.name} ({edge.child})", message, stamp_ns):
                found.append(edge if edge.stamp_ns == stamp_ns else edge._replace(stamp_ns=stamp_ns))
        return found

    def _stamp(self, topic: Topic, message: Message, stamp_ns: int) -> int:
        if self._clock == "log_time":
            return message.log_ns
        if not stamp_ns:
            raise SourceError(
                f"log '{self.name}': topic '{topic.name}' has a message without a stamp ({message.place}); the option "
                "clock=log_time takes the times of the recording"
            )
        return stamp_ns
