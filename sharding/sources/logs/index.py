"""What a scan keeps of one log: the heads of pictures and sweeps, and all calibrations,
transforms and poses.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from fuelrail.pipeline.errors import ImageError, SourceError
from fuelrail.sharding.sources.logs.files.log_file import NOT_DESCRIBED, Locator
from fuelrail.sharding.sources.logs.geometry.transforms import FrameTree
from fuelrail.sharding.sources.logs.messages.pictures import (
    EncodedHead,
    check_encoding,
    check_no_depth,
    encoded_head,
    raw_fault,
)
from fuelrail.sharding.sources.logs.messages.reader import Reader
from fuelrail.sharding.sources.logs.messages.records import (
    CALIBRATIONS,
    RAWS,
    TRANSFORMS,
    VIDEOS,
    CameraInfo,
    Edges,
    Marks,
    Picture,
)
from fuelrail.sharding.sources.logs.sync import matched
from fuelrail.sharding.sources.shared.foreign import parsing
from fuelrail.sharding.sources.shared.video import is_keyframe, stream_size

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.schema import F64, I64, Mask
    from fuelrail.sharding.sources.logs.files.log_file import (
        LogFile,
        Message,
        Topic,
    )
    from fuelrail.sharding.sources.logs.topics import LogTopics


_Signals: TypeAlias = "tuple[I64, F64]"
_AT_ONCE: Final = 4096
"""Messages that are kept until they are read together."""


class Shot(msgspec.Struct, frozen=True, gc=False):
    """A picture: its message, size [px] and bytes; ``offset`` is in its file, -1 where they are not
    in it as they are.

    ``kind`` is that of the job which makes it: "bytes", "palette" (a PNG that is converted), "raw",
    or "video", whose ``key`` is the keyframe to decode from: None if there is none. ``fault`` is
    why its bytes are no picture.
    """

    place: Locator
    length: int
    offset: int = -1
    width: int = 0
    height: int = 0
    extension: str = "jpg"
    kind: Literal["bytes", "palette", "raw", "video"] = "bytes"
    key: Locator | None = None
    fault: str = ""


class LogSweep(NamedTuple):
    """A sweep: its message, and about how many points it has."""

    place: Locator
    num_points: int


class Series(NamedTuple):
    """The pictures or sweeps of one topic in time order: stamps (N,) [ns], ascending, and what
    is there.
    """

    stamps: I64
    items: list[Shot] | list[LogSweep]


class LogIndex:
    """One log: files in the order of recording; ``topics`` says which of its topics count.

    Raises SourceError.

    ``noted`` counts what was found odd on the way, ``num_read`` the messages by topic. By topic,
    ``videos`` are the packets of video and their bytes,
    ``signals`` are stamps [ns] and numbers in time order, also those of the position; ``columns``
    are their names.
    """

    def __init__(self, name: str, files: Sequence[LogFile], topics: LogTopics) -> None:
        options = topics.settings
        self.name = name
        self._clock = options.clock
        self._max_gap_ns = options.max_gap_s * 1e9
        self._clock_jumps = options.clock_jumps
        self._latest = dict[str, tuple[int, int]]()
        self._only_keyframes = options.frames == "keyframes"
        self._levels = topics.levels
        self.noted = Counter[str]()
        self.num_read = Counter[str]()
        self.videos = dict[str, tuple[int, int]]()
        self.frame_ids: dict[str, str] = {}
        self.calibrations: dict[str, list[tuple[int, CameraInfo]]] = {}
        self.poses: list[Edges] = []
        self.marks = {topic: list[Marks]() for topic in options.boxes2d.values()}
        self._marked = dict[tuple[str, str], dict[int, Marks]]()
        self._signals = {
            topic: list[_Signals]()
            for topic in (
                *options.signals.values(),
                *filter(None, [topics.gps]),
            )
        }
        self.columns = dict[str, list[str]]()
        self.tree = FrameTree(f"log '{name}'")
        cameras = topics.cameras.values()
        lidars = (*topics.lidars.values(), *options.radars.values())
        sensors = (*cameras, *lidars)
        self._found: dict[str, list[tuple[int, int, Shot | LogSweep]]] = {
            topic: [] for topic in sensors
        }
        self._items: dict[str, list[Any]] = {topic: [] for topic in sensors}
        self._stamped: dict[str, list[I64]] = {topic: [] for topic in sensors}
        self._keys: dict[str, Locator] = {}
        self._sizes: dict[str, tuple[int, int]] = {}
        self._heads: dict[str, EncodedHead] = {}
        self._codecs: dict[str, str] = {}
        for file in files:
            with parsing(f"log '{name}'"):  # times, lengths and numbers that no type of ours holds
                self._read_file(
                    file,
                    cameras=set(cameras),
                    lidars=set(lidars),
                    poses=options.poses,
                )
        self.tree.settle()
        self.series: dict[str, Series] = {}
        for topic in sensors:
            items = self._items.pop(topic)
            stamps = np.concatenate([np.empty(0, np.int64), *self._stamped.pop(topic)])
            if self._only_keyframes and topic in self._codecs:
                keys = [isinstance(item, Shot) and item.key == item.place for item in items]
                items = list(itertools.compress(items, keys))
                stamps = stamps[np.array(keys, np.bool_)]
            times, first = np.unique(stamps, return_index=True)
            num_backward = int(np.count_nonzero(np.diff(stamps) < 0))
            num_repeated = len(stamps) - len(times)
            for fault, number in (
                ("out of order", num_backward),
                ("with the stamp of another", num_repeated),
            ):
                if number:
                    self.noted[f"{topic}: messages {fault}"] = number
            self.series[topic] = Series(times, [items[row] for row in first.tolist()])
        self.signals = {}
        for topic, parts in self._signals.items():
            if parts:
                stamps, values = map(np.concatenate, zip(*parts, strict=True))
                order = np.argsort(stamps, kind="stable")
                self.signals[topic] = (stamps[order], values[order])

    def _read_file(
        self,
        file: LogFile,
        cameras: set[str],
        lidars: set[str],
        poses: str,
    ) -> None:
        topics = file.topics
        chosen = {*cameras, *lidars, *self._signals, *self.marks, poses}
        readers = {
            name: Reader(topic)
            for name, topic in topics.items()
            if name in chosen or topic.type in CALIBRATIONS | TRANSFORMS
        }
        heads = readers.keys() & (cameras | lidars)
        num_lost = 0
        pending: dict[str, list[Message]] = {name: [] for name in readers.keys() - heads}
        num_pending = 0
        num_read = dict.fromkeys(readers, 0)
        for message in file.walk(heads, pending.keys()):
            name = message.topic
            num_read[name] += 1
            if name in cameras:
                if file.lost and sum(file.lost.values()) != num_lost:
                    num_lost = sum(file.lost.values())
                    # a part of a video is lost: the rest of the group cannot be decoded
                    self._keys.clear()
                stamp_ns, shot = self._make_shot(file, topics[name], readers[name], message)
                self._found[name].append((stamp_ns, message.log_ns, shot))
            elif name in lidars:
                stamp_ns, frame_id, number = readers[name].cloud_head(message)
                self.frame_ids.setdefault(name, frame_id)
                stamp_ns = self._choose_stamp(name, message, stamp_ns)
                self._found[name].append(
                    (stamp_ns, message.log_ns, LogSweep(message.place, number))
                )
            else:
                pending[name].append(message)
                num_pending += 1
                if num_pending == _AT_ONCE:
                    self._read_pending(topics, readers, pending, poses)
                    num_pending = 0
        self._read_pending(topics, readers, pending, poses)
        for name, number in file.num_stated.items():
            num_lacking = number - num_read.get(name, 0 if name == NOT_DESCRIBED else number)
            if num_lacking > 0:
                self.noted[f"{name}: messages that the file counts and does not have"] += (
                    num_lacking
                )
        self.num_read.update(num_read)
        self.noted.update(+file.lost)
        self.noted.update(file.noted)

    def _read_pending(
        self,
        topics: Mapping[str, Topic],
        readers: Mapping[str, Reader],
        pending: Mapping[str, list[Message]],
        poses: str,
    ) -> None:
        """Read the messages of each topic together, and forget them."""
        for name, entries in self._found.items():
            pairs = [entry[:2] for entry in entries]
            times_ns = np.array(pairs, np.int64).reshape(-1, 2)
            stamps, log_ns = times_ns.T
            items = [entry[2] for entry in entries]
            mask = self._ascending_mask(
                name,
                stamps=stamps,
                log_ns=log_ns,
                places=[item.place for item in items],
            )
            self._stamped[name].append(stamps[mask])
            self._items[name] += itertools.compress(items, mask.tolist())
            entries.clear()
        for name, messages in pending.items():
            reader = readers[name]
            if not messages:
                continue
            if name in self._signals:
                stamps, values = reader.signals(messages)
                self.columns[name] = reader.columns
                stamps, mask = self._select_times(
                    name,
                    messages=messages,
                    stamp_ns=stamps,
                    part=" (signals)",
                )
                self._signals[name].append((stamps[mask], values[mask]))
            if name in self.marks:
                # Of annotations, those without boxes may have no stamp.
                marked = messages
                marks = [reader.marks(message) for message in messages]
                if self._clock == "header":
                    stamped = [
                        number for number, mark in enumerate(marks) if mark.stamp_ns or mark.box
                    ]
                    if len(stamped) < len(marks):
                        self.noted[f"{name}: messages without boxes or stamp"] += len(marks) - len(
                            stamped
                        )
                    marked = [marked[number] for number in stamped]
                    marks = [marks[number] for number in stamped]
                stamps, mask = self._select_times(
                    name,
                    marked,
                    np.array([mark.stamp_ns for mark in marks], np.int64),
                )
                self.marks[name] += [
                    marks[number]._replace(stamp_ns=int(stamps[number]))
                    for number in np.flatnonzero(mask).tolist()
                ]
            elif name == poses:
                self.poses += self._drop_reset_edges(name, messages, reader.poses(messages))
            elif topics[name].type in CALIBRATIONS:
                calibrations = reader.calibrations(messages)
                self.calibrations.setdefault(name, []).extend(calibrations)
            elif topics[name].type in TRANSFORMS:
                is_static = name.endswith("static")
                parts = reader.edges(messages)
                for part in parts if is_static else self._drop_reset_edges(name, messages, parts):
                    self.tree.add(part, is_static=is_static)
            messages.clear()

    def marks_of(
        self,
        pictures: str,
        topic: str,
        offset_ns: int,
        tolerance_ns: int,
    ) -> dict[int, Marks]:
        """Return the boxes of pictures by row: each message belongs to the picture nearest to
        it, less its delay.
        """
        marked = self._marked.get((pictures, topic))
        if marked is None:
            by_time = {mark.stamp_ns: mark for mark in self.marks[topic]}
            stamps = np.array(sorted(by_time), np.int64)
            rows = matched(
                self.series[pictures].stamps,
                stamps_ns=stamps,
                offset_ns=offset_ns,
                tolerance_ns=tolerance_ns,
            ).tolist()
            marked = {
                row_number: by_time[int(stamps[row])]
                for row_number, row in enumerate(rows)
                if row >= 0
            }
            number = len(self.marks[topic]) - len(marked)
            if number:
                self.noted[f"{topic}: messages of no picture"] = number
            self._marked[pictures, topic] = marked
        return marked

    def _make_shot(
        self,
        file: LogFile,
        topic: Topic,
        reader: Reader,
        message: Message,
    ) -> tuple[int, Shot]:
        picture = reader.picture(message)
        if reader.is_proto and not picture.stamp_ns and self._clock == "header":
            data = file.read(message.place).data
            message = msgspec.structs.replace(message, data=data)
            picture = reader.picture(message)  # protobuf may have the stamp behind the picture
        if picture.frame_id:  # where it is behind the picture, that of the calibration counts
            self.frame_ids.setdefault(topic.name, picture.frame_id)
        stamp_ns = self._choose_stamp(topic.name, message, picture.stamp_ns)
        start = picture.offset
        length = picture.length
        cached_head = self._heads.get(topic.name)
        offset = message.offset + start if message.offset >= 0 else -1
        is_whole = 0 < length <= message.length - start
        if (
            cached_head
            and is_whole
            and bytes(message.data[start : start + len(cached_head.text)]) == cached_head.text
        ):
            return stamp_ns, Shot(
                place=message.place,
                offset=offset,
                length=length,
                width=cached_head.width,
                height=cached_head.height,
                extension=cached_head.extension,
            )
        where = f"topic '{topic.name}', message {message.place}"
        if not is_whole:
            fault = f"a picture of {length} bytes in a message of {message.length}"
            self._keys.pop(topic.name, None)  # of a video, which cannot be decoded on from here
            return stamp_ns, Shot(place=message.place, length=length, fault=fault)
        if topic.type in VIDEOS:
            return stamp_ns, self._make_frame(
                file,
                topic=topic,
                message=message,
                picture=picture,
                where=where,
            )
        if topic.type in RAWS:
            check_encoding(picture.encoding, where, has_levels=topic.name in self._levels)
            return stamp_ns, Shot(
                place=message.place,
                length=length,
                width=picture.width,
                height=picture.height,
                kind="raw",
                fault=raw_fault(picture),
            )

        def first_bytes(number: int) -> memoryview:
            data = message.data
            if start + number > len(data) < message.length:
                data = file.read(message.place, start + number).data
            return memoryview(data)[start : start + number]

        try:
            head = encoded_head(first_bytes, length)
        except ImageError as error:
            check_no_depth(topic.name, picture.encoding, first_bytes(64))
            return stamp_ns, Shot(place=message.place, length=length, fault=error.message)
        if head.text:
            self._heads[topic.name] = head
        return stamp_ns, Shot(
            place=message.place,
            offset=-1 if head.is_converted else offset,
            length=length,
            width=head.width,
            height=head.height,
            extension=head.extension,
            kind="palette" if head.is_converted else "bytes",
        )

    def _make_frame(
        self,
        file: LogFile,
        topic: Topic,
        message: Message,
        picture: Picture,
        where: str,
    ) -> Shot:
        end = picture.offset + picture.length
        data = memoryview(message.data)[picture.offset : end]
        number, num_bytes = self.videos.get(topic.name, (0, 0))
        self.videos[topic.name] = number + 1, num_bytes + picture.length
        codec = self._codecs.get(topic.name)
        if codec is None:  # the first message states it behind the picture
            whole_message = file.read(message.place)
            codec = Reader(topic).video_format(whole_message)
            self._codecs[topic.name] = codec
        if is_keyframe(data, codec, where):
            self._keys[topic.name] = message.place
            if topic.name not in self._sizes:
                packet = memoryview(file.read(message.place).data)[
                    picture.offset : picture.offset + picture.length
                ]
                self._sizes[topic.name] = stream_size(packet, codec, where)
        key = self._keys.get(topic.name)
        width, height = self._sizes.get(topic.name, (0, 0))
        return Shot(
            place=message.place,
            length=picture.length,
            width=width,
            height=height,
            kind="video",
            key=key,
        )

    def _ascending_mask(
        self,
        topic_name: str,
        stamps: I64,
        log_ns: I64,
        places: Sequence[Locator],
    ) -> Mask:
        """Return which messages (N,) of a topic are not before others by a set clock; raise
        SourceError if an error.

        A clock that was set forward, so that stamps went on by more than the recording did, is a
        gap, and noted.
        """
        if not len(stamps):
            return np.ones(0, np.bool_)
        first_times = (int(stamps[0]), int(log_ns[0]))
        latest, recorded_ns = self._latest.get(topic_name, first_times)
        all_stamps = np.concatenate([[latest], stamps])
        latest_before = np.maximum.accumulate(all_stamps)[:-1]
        passed_ns = stamps - latest_before
        newest = np.flatnonzero(passed_ns >= 0)
        jumps = np.flatnonzero(passed_ns > self._max_gap_ns)
        if len(jumps):
            before = np.searchsorted(newest, jumps) - 1
            before_ns = np.where(before < 0, recorded_ns, log_ns[newest[before]])
            since_ns = log_ns[jumps] - before_ns
            gap_ns = passed_ns[jumps] - self._max_gap_ns
            is_reset = (since_ns > 0) & (since_ns < gap_ns)
            number = int(np.count_nonzero(is_reset))
            if number:
                self.noted[f"{topic_name}: clock set forward"] += number
        if len(newest):
            self._latest[topic_name] = (
                int(stamps[newest[-1]]),
                int(log_ns[newest[-1]]),
            )
        mask = np.asarray(passed_ns >= -self._max_gap_ns)
        if mask.all():
            return mask
        if self._clock_jumps == "error":
            first_bad = int(np.argmin(mask))
            raise SourceError(
                (
                    f"log '{self.name}': topic '{topic_name}' goes back in time by "
                    f"{-passed_ns[first_bad] / 1e9:.3f} s at {places[first_bad]}: "
                )
                + (
                    (
                        "the file is not in the order of recording: sort it, as by `mcap sort`, "
                        "or try clock_jumps=drop"
                    )
                    if self._clock == "log_time"
                    else (
                        "its clock was set; cut the log there, or try the options "
                        "clock_jumps=drop or clock=log_time"
                    )
                )
            )
        self.noted[f"{topic_name}: messages after the clock was set back"] += int(
            np.count_nonzero(~mask)
        )
        return mask

    def _drop_reset_edges(
        self,
        topic: str,
        messages: Sequence[Message],
        parts: Sequence[Edges],
    ) -> list[Edges]:
        """Drop edges of a clock that was set back: frames of a topic have clocks of their own."""
        edges = []
        for part in parts:
            part_messages = [messages[row] for row in part.row.tolist()]
            stamps, mask = self._select_times(
                topic,
                messages=part_messages,
                stamp_ns=part.stamp_ns,
                part=f" ({part.child})",
            )
            if mask.any():
                edges.append(part._replace(stamp_ns=stamps).rows(mask))
        return edges

    def _select_times(
        self,
        topic: str,
        messages: Sequence[Message],
        stamp_ns: I64,
        part: str = "",
    ) -> tuple[I64, Mask]:
        """Return the times that count (N,) [ns], and which messages to keep
        (:meth:`_ascending_mask`).

        Raises SourceError also for a stamp of 0 where stamps count.
        """
        log_ns = np.array([message.log_ns for message in messages], np.int64)
        if self._clock == "log_time":
            stamp_ns = log_ns
        elif not stamp_ns.all():
            row = int(np.argmin(stamp_ns != 0))
            self._choose_stamp(topic, messages[row], 0)
        return stamp_ns, self._ascending_mask(
            topic + part,
            stamp_ns,
            log_ns,
            [message.place for message in messages],
        )

    def _choose_stamp(self, topic: str, message: Message, stamp_ns: int) -> int:
        if self._clock == "log_time":
            return message.log_ns
        if not stamp_ns:
            raise SourceError(
                f"log '{self.name}': topic '{topic}' has a message without a stamp "
                f"({message.place}); the option clock=log_time takes the times of the recording"
            )
        return stamp_ns
