"""The kinds ``mcap`` and ``rosbag2``: cameras, lidars and poses of a robot's logs, synchronised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.errors import ConfigError, SourceError
from fuelrail.sharding.sources.adapter.channels import signals_channel
from fuelrail.sharding.sources.adapter.frame import Clip, Frame, Sensors
from fuelrail.sharding.sources.adapter.poses import Trajectory
from fuelrail.sharding.sources.adapter.source import FrameSource
from fuelrail.sharding.sources.logs import sync
from fuelrail.sharding.sources.logs.files.recordings import Recordings
from fuelrail.sharding.sources.logs.frames import FIX_COLUMNS, FrameMaker
from fuelrail.sharding.sources.logs.geometry.transforms import edges_trajectory
from fuelrail.sharding.sources.logs.index import LogIndex
from fuelrail.sharding.sources.logs.members import Job, Members
from fuelrail.sharding.sources.logs.messages.clouds import COLUMNS, radar_channel
from fuelrail.sharding.sources.logs.messages.reader import Reader
from fuelrail.sharding.sources.logs.messages.records import CLOUDS, FIXES, MARKS, PICTURES, POSES, VIDEOS
from fuelrail.sharding.sources.logs.settings import LogSettings
from fuelrail.sharding.sources.shared.video import check_decoder, libraries

if TYPE_CHECKING:
    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.sharding.sources.source import Reads


_YEAR_2000_NS: Final = 946_684_800_000_000_000


class LogSource(FrameSource[LogSettings]):
    """MCAP logs of ROS 2 and foxglove: one file, or a folder of files and of rosbag2 folders."""

    kind = "mcap"
    settings = LogSettings
    requires: ClassVar = {"mcap": "fuelrail[ros]", "rosbags": "fuelrail[ros]", "lz4": "fuelrail[ros]"}
    suffixes: ClassVar[tuple[str, ...]] = (".mcap",)

    def __init__(self, location: str, options: dict[str, Any]) -> None:
        """Take the options and the root; reads nothing."""
        super().__init__(location, options)
        self.has_poses = self.given.poses != "none"
        self.given.check_libraries()
        self.recordings = Recordings(
            self.files, self.file, self.suffixes, skip_damaged=self.given.damaged == "skip",
            check_all=self.given.checksums,
        )  # fmt: skip
        self._index: LogIndex | None = None
        self._cuts: dict[str, tuple[str, NDArray[np.int64]]] = {}

    @property
    def options(self) -> dict[str, Any]:
        """All options; the versions of libraries where there is video."""
        return {**super().options, "libraries": libraries() if _has_video(self) else ""}

    @property
    def reads(self) -> Reads:  # type: ignore[override]  # of these logs, not of the kind
        """By clip where chunks are compressed, or where there is video."""
        found = self.recordings
        in_order = any(found.log_file(name).reads_in_order for _, files in found.logs for name in files)
        return "clip" if in_order or _has_video(self) else "random"

    def sensors(self) -> Sensors:
        """Cameras and lidars by their channels; a lidar has the columns x, y, z, intensity, ring, time."""
        assert self.channels is not None, "they are checked first"
        _check_channels(self)
        self.time_base = "unix" if _is_unix(self, self._indexed(self.recordings.logs[0][0])) else "boot"
        self.image_boxes = {channel: f"of topic {topic}; row is -1" for channel, topic in self.given.boxes2d.items()}
        return Sensors.of(self.camera_topics, dict.fromkeys(self.lidar_topics, COLUMNS))

    def clips(self) -> Iterator[Clip]:
        """The parts of each log: cut at gaps of the reference, and after ``clip_seconds``."""
        given = self.given
        reference = _reference(self)
        for name, files in self.recordings.logs:
            index = self._indexed(name)
            if _is_unix(self, index) != (self.time_base == "unix"):
                first = self.recordings.logs[0][0]
                raise SourceError(
                    f"the times of log '{name}' and those of log '{first}' are not of one kind: of one they count from "
                    "1970, of the other from a start of the machine; shard them apart, or with clock=log_time"
                )
            topic = {**self.camera_topics, **self.lidar_topics}[reference]
            stamps = sync.thinned(index.series[topic].stamps, given.rate)
            parts = sync.cuts(
                stamps, max(given.max_gap_s, 1.5 / given.rate if given.rate else 0) * 1e9, given.clip_seconds * 1e9
            )
            for number, part in enumerate(parts):
                clip = name if len(parts) == 1 else f"{name}-{number:04d}"
                self._cuts[clip] = name, part
                yield Clip(name=clip, log_id=name, files=tuple(files))
            self.noted.update(index.noted)

    def poses(self, clip: Clip) -> Trajectory | None:
        """Of the log's transforms, or of the Odometry topic."""
        given, index = self.given, self._indexed(clip.log_id)
        if not self.has_poses:
            return None
        if given.poses == "tf":
            return index.tree.trajectory(given.ego_frame, given.global_frame, given.max_gap_s)
        child = next((part.child for part in index.poses), "").lstrip("/")
        moved = edges_trajectory(index.poses, f"log '{clip.log_id}': {given.poses}", given.max_gap_s)
        if child in ("", given.ego_frame):
            return moved
        times = np.unique(np.concatenate([part.stamp_ns for part in index.poses]))
        ego2child = index.tree.sensor2ego(given.ego_frame, child)
        return Trajectory(times, moved.at(times) @ ego2child, clip.name, max_gap_s=given.max_gap_s)

    def frames(self, clip: Clip) -> Iterator[Frame]:
        """One for each message of the reference that is left."""
        log, times = self._cuts[clip.name]
        maker = FrameMaker(
            self._indexed(log), self.given, self.recordings.topics, self.camera_topics, self.lidar_topics,
            _reference(self), self.noted, self.channels, self.poses(clip) if self.given.radars else None,
        )  # fmt: skip
        return maker.frames(times)

    def points(self, ref: str) -> NDArray[np.float32]:
        """Read a sweep."""
        return self._members.points(Job.of(ref))

    def make_images(self, refs: Sequence[str]) -> Iterator[tuple[str, Buffer]]:
        """Read pictures out of chunks, encode raw ones, and decode video."""
        jobs = {Job.of(ref): ref for ref in refs}
        for job, data in self._members.read(list(jobs)):
            yield jobs[job], data

    def read_clip(self, refs: Sequence[str]) -> Iterator[tuple[str, Buffer]]:
        """Yield members in the order of the recording, so that a chunk is decompressed once."""
        jobs, rest = Members.split(refs)
        for job, data in self._members.read(list(jobs)):
            yield jobs[job], data
        for ref in rest:
            yield ref, self.open(ref)

    # What the logs have.

    @cached_property
    def camera_topics(self) -> dict[str, str]:
        """Channel to topic, in the order of the rig."""
        named = self.given.cameras
        return self.recordings.chosen("cameras", {} if isinstance(named, tuple) else named, PICTURES)

    @cached_property
    def lidar_topics(self) -> dict[str, str]:
        """Channel to topic."""
        found = self.recordings.chosen("lidars", self.given.lidars, CLOUDS)
        radars = self.given.radars.values()
        return {channel: topic for channel, topic in found.items() if topic not in radars}

    @property
    def columns(self) -> dict[str, type]:  # type: ignore[override]  # of these logs, not of the kind
        """Of the position, where it is recorded."""
        return dict.fromkeys(FIX_COLUMNS, float) if _gps(self) else {}

    @cached_property
    def channels(self) -> tuple[Channel, ...]:  # type: ignore[override]  # of these logs, not of the kind
        """Of the signals, and of radars."""
        topics, found = self.recordings.topics, []
        for name, topic in self.given.signals.items():
            if topic not in topics or topic in (*self.camera_topics.values(), *self.lidar_topics.values()):
                listed = ", ".join(sorted(topics))
                raise ConfigError(f"signals: '{topic}' of {name} is no topic of messages of numbers; topics: {listed}")
            units = {path.replace(".", "_"): "" for path in Reader(topics[topic]).columns}
            found.append(signals_channel(f"can_{name}", units, topic, has_unknown=True))
        return (*found, *_radar_channels(self))

    def _indexed(self, log: str) -> LogIndex:
        """What is known of a log; that of the last one is kept."""
        if self._index is None or self._index.name != log:
            files = next(files for name, files in self.recordings.logs if name == log)
            self._index = LogIndex(
                log, [self.recordings.log_file(name) for name in files],
                cameras=list(self.camera_topics.values()),
                lidars=[*self.lidar_topics.values(), *self.given.radars.values()],
                gps=_gps(self), levels=_levels(self), options=self.given,
            )  # fmt: skip
        return self._index

    @cached_property
    def _members(self) -> Members:
        return Members(
            self.recordings.log_file,
            lambda: self.recordings.topics,
            lambda: dict(self.recordings.logs),
            self.given.video_quality,
            _levels(self),
        )


class Rosbag2Source(LogSource):
    """rosbag2 folders with SQLite or MCAP files: one folder, or a folder of them."""

    kind = "rosbag2"
    suffixes: ClassVar[tuple[str, ...]] = (".db3", ".mcap")


def _reference(source: LogSource) -> str:
    """The channel that makes the frames."""
    return source.given.reference or next(iter(source.lidar_topics), "") or next(iter(source.camera_topics))


def _is_unix(source: LogSource, index: LogIndex) -> bool:
    """Whether the times of a log count from 1970: they are after the year 2000, or there are none."""
    topics = {**source.camera_topics, **source.lidar_topics}
    stamps = index.series[topics[_reference(source)]].stamps
    return not len(stamps) or bool(stamps[0] >= _YEAR_2000_NS)


def _has_video(source: LogSource) -> bool:
    return any(source.recordings.topics[topic].type in VIDEOS for topic in source.camera_topics.values())


def _levels(source: LogSource) -> dict[str, tuple[int, int]]:
    """By topic the values that become black and white, of raw pictures of 16 bits."""
    return {source.camera_topics[channel]: levels for channel, levels in source.given.levels.items()}


def _radar_channels(source: LogSource) -> list[Channel]:
    """By the first message of each topic; raises SourceError where there is none."""
    if not source.given.radars:
        return []
    topics = source.recordings.chosen("radars", source.given.radars, CLOUDS)
    taken = {*source.camera_topics, *source.lidar_topics}
    if bad := [name for name in source.given.radars if name in taken or name not in topics]:
        raise ConfigError(f"radars: '{bad[0]}' must be in lower case, and no other channel: {', '.join(sorted(taken))}")
    found = []
    for channel, name in topics.items():
        files = (source.recordings.log_file(file) for _, files in source.recordings.logs for file in files)
        first = next(((file, place) for file in files for place in file.places(name)[:1]), None)
        if first is None:
            raise SourceError(f"radars: topic '{name}' of {channel} has no messages")
        file, place = first
        found.append(radar_channel(channel, Reader(source.recordings.topics[name]).cloud(file.read(place)), name))
    return found


def _gps(source: LogSource) -> str:
    """The topic of positions; empty: there is none. Raises ConfigError for another one that is asked for."""
    topics = sorted(name for name, topic in source.recordings.topics.items() if topic.type in FIXES)
    if source.given.gps and source.given.gps not in topics:
        raise ConfigError(f"gps: '{source.given.gps}' is not one of: {', '.join(topics) or '-'}")
    return source.given.gps or next(iter(topics), "")


def _check_channels(source: LogSource) -> None:
    if not source.camera_topics:
        listed = (
            ", ".join(sorted(f"{topic.name} ({topic.type})" for topic in source.recordings.topics.values())) or "none"
        )
        raise SourceError(f"the {source.kind} source '{source.files.shown}' has no image topic; topics: {listed}")
    of_boxes = sorted(name for name, one in source.recordings.topics.items() if one.type in MARKS)
    for channel, name in source.given.boxes2d.items():
        if channel not in source.camera_topics or name not in of_boxes:
            raise ConfigError(
                f"boxes2d: '{name}' of {channel} must be a topic of boxes, and of a camera; such topics: "
                f"{', '.join(of_boxes) or 'none'}; cameras: {', '.join(source.camera_topics)}"
            )
    known = [*source.camera_topics, *source.lidar_topics, *source.given.radars]
    for channel, (black, white) in source.given.levels.items():
        if channel not in source.camera_topics or not black < white:
            listed = ", ".join(source.camera_topics)
            raise ConfigError(
                f"levels: {channel}: [{black}, {white}] must be a camera and ascending; cameras: {listed}"
            )
    for option in ("offsets_ms", "camera_infos"):
        for channel in getattr(source.given, option):
            if channel not in (*known, *(f"boxes2d_{camera}" for camera in source.given.boxes2d)):
                raise ConfigError(f"{option}: there is no channel '{channel}'; channels: {', '.join(known)}")
    if _reference(source) not in known or _reference(source) in source.given.radars:
        raise ConfigError(f"reference: there is no channel '{_reference(source)}'; channels: {', '.join(known)}")
    if source.given.poses not in ("tf", "none"):
        topic = source.recordings.topics.get(source.given.poses)
        if topic is None or topic.type not in POSES:
            names = sorted(name for name, one in source.recordings.topics.items() if one.type in POSES)
            raise ConfigError(f"poses: '{source.given.poses}' is not tf, none or one of: {', '.join(names) or '-'}")
    needs_video = [topic for topic in source.camera_topics.values() if source.recordings.topics[topic].type in VIDEOS]
    if needs_video:
        check_decoder(f"topic '{needs_video[0]}'")
