"""The kinds ``mcap``, ``rosbag2`` and ``rosbag1``: cameras, lidars and poses of a robot's logs,
synchronised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.adapter.channels import signal_series
from fuelrail.sharding.sources.adapter.frame import (
    Clip,
    Frame,
    Sensors,
    thinned,
)
from fuelrail.sharding.sources.adapter.members import MADE_PREFIX, POINTS
from fuelrail.sharding.sources.adapter.poses import Trajectory
from fuelrail.sharding.sources.adapter.source import FrameSource
from fuelrail.sharding.sources.logs import sync
from fuelrail.sharding.sources.logs.files.recordings import METADATA, Recordings
from fuelrail.sharding.sources.logs.frames import FIX_COLUMNS, FrameMaker
from fuelrail.sharding.sources.logs.geometry.transforms import edges_trajectory
from fuelrail.sharding.sources.logs.index import LogIndex
from fuelrail.sharding.sources.logs.members import Job, LogMembers
from fuelrail.sharding.sources.logs.messages.clouds import COLUMNS
from fuelrail.sharding.sources.logs.settings import LogSettings
from fuelrail.sharding.sources.logs.topics import LogTopics
from fuelrail.sharding.sources.shared.pictures import JpegForm
from fuelrail.sharding.sources.shared.video import libraries
from fuelrail.sharding.sources.source import VideoStart

if TYPE_CHECKING:
    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.pipeline.sample.schema import F32, I64
    from fuelrail.sharding.sources.source import Reads


_YEAR_2000_NS: Final = 946_684_800_000_000_000


class LogSource(FrameSource[LogSettings]):
    """MCAP logs of ROS 2 and foxglove: one file, or a folder of files and of rosbag2 folders.

    A folder with rosbag2's metadata is one log; all files that it names must exist. Topics are
    options: `-o 'cameras={front: /front/image/compressed, back: /back/image/compressed}' -o
    rate=10`. Foxglove's messages may be ROS 2 messages or protobuf.

    - Images: `sensor_msgs/CompressedImage` (JPEG, PNG), `sensor_msgs/Image` (rgb8, bgr8, rgba8,
      bgra8, mono8, Bayer of 8 bits, yuv422; with `levels` mono16 and Bayer of 16 bits; stored as
      JPEG of quality 95), foxglove's CompressedImage and CompressedVideo. Store depth as a layer
      (kind image, 16-bit PNG).
    - Calibration: `sensor_msgs/CameraInfo`, foxglove's CameraCalibration: K and D of raw pictures;
      P and R if a part of the topic contains `rect`; binning and region applied.
    - Poses: `tf2_msgs/TFMessage`, foxglove's FrameTransform(s), or an Odometry or PoseStamped topic
      (`poses=TOPIC`); interpolated between two transforms at each exposure (linear, slerp), not
      beyond them, nor over gaps above `max_gap_s`. Static transforms locate the sensors.
    - Lidar: `sensor_msgs/PointCloud2`, foxglove's PointCloud of any layout, as x, y, z, intensity,
      ring, time [s after the stamp]; NaN for absent columns.
    - Radar: the same messages, with all columns but times: x, y, z and vectors (`vx`, `vy`, also
      with `vz`; `vx_comp`, `vy_comp`; `velocity_x`, `velocity_y`) in ego at the sample's time,
      others as measured, and `dt_s`.
    - Signals: any ROS 2 message with a stamp and single numbers; columns are the numbers' paths
      (`angular_velocity_z`); lists, such as covariances, are left out.
    - 2-D boxes: `vision_msgs/Detection2DArray` of any version: the best category, and bounds of
      turned boxes; foxglove's ImageAnnotations: bounds of closed lines (`LINE_LOOP`), named by
      their metadata `category`, `class` or `label`, and `track`, `track_id` or `id`, else by as
      many texts. They belong to the image with the nearest stamp, within `tolerance_ms`;
      `offsets_ms={boxes2d_cam_front: 40}` says how much later they are stamped. Their pixel 0 is a
      pixel's left edge: 0.5 is subtracted.
    - Position: `sensor_msgs/NavSatFix`: attributes `latitude`, `longitude` and `altitude_m` of the
      nearest fix within `max_gap_s`.
    - Not read: files that `ros2 bag convert` compressed whole (zstd messages are read), encrypted
      MCAP, 16-bit PNG, float images.
    - Order is that of the recording's times, by MCAP's indexes (at most 256 MiB of messages wait
      for earlier ones); without indexes, of the file, and of the times within each chunk.
    - Time is the header's stamp. Stamps before 2000 count from the machine's start (`time_base` is
      `boot`). Refused: a stamp of 0, and a clock set back by more than `max_gap_s`. A jump forward
      makes a gap.
    - Frames are the messages of `reference`. A camera's message is the one nearest to its delay
      (estimated for each log) after the reference. Clips end at gaps of the reference.
    - Checksums of compressed MCAP chunks are always checked. `.db3` and `.bag` have none, and
      refuse `checksums` and `damaged`.
    - Killed recorders: a truncated MCAP is read up to its cut; bytes after its end are refused. A
      `.db3` with a `-wal` is read from a copy in the temporary folder (both of at most 1 GiB
      together); a `-journal` that is not empty is refused. The report counts clock jumps, stamps
      that repeat or come out of order, and messages that files lack.
    """

    kind = "mcap"
    settings_type = LogSettings
    requires: ClassVar = {
        "mcap": "fuelrail[ros]",
        "rosbags": "fuelrail[ros]",
        "lz4": "fuelrail[ros]",
    }
    suffixes: ClassVar[tuple[str, ...]] = (".mcap",)

    def __init__(self, location: str, options: dict[str, Any]) -> None:
        """Take the options and the root; reads nothing."""
        super().__init__(location, options)
        self.has_poses = self.settings.poses != "none"
        self.settings.check_libraries()
        self.recordings = Recordings(
            self.files,
            self.file,
            self.suffixes,
            skip_damaged=self.settings.damaged == "skip",
            check_all=self.settings.checksums,
        )
        self.topics = LogTopics(self.recordings, self.settings)
        self._index: LogIndex | None = None
        self._cuts: dict[str, tuple[str, I64]] = {}
        self._videos: dict[tuple[str, str], tuple[int, int]] = {}

    @property
    def options(self) -> dict[str, Any]:
        """All options; the versions of libraries where there is video."""
        return {
            **super().options,
            "libraries": libraries() if self.topics.videos else "",
        }

    @property
    def reads(self) -> Reads:  # type: ignore[override]  # of these logs, not of the kind
        """ "clip" where chunks are compressed, or where there is video."""
        recordings = self.recordings
        in_order = any(
            recordings.log_file(name).reads_in_order
            for _, files in recordings.logs
            for name in files
        )
        return "clip" if in_order or self.topics.videos else "random"

    def sensors(self) -> Sensors:
        """Return cameras and lidars by their channels; a lidar has the columns x, y, z,
        intensity, ring, time.
        """
        assert self.channels is not None, "they are checked first"
        self.topics.check(f"the {self.kind} source '{self.files.shown}'")
        first_log = self.recordings.logs[0][0]
        is_unix = self._is_unix(self._open_index(first_log))
        self.time_base = "unix" if is_unix else "boot"
        self.image_boxes = {
            channel: f"of topic {topic}; row is -1"
            for channel, topic in self.settings.boxes2d.items()
        }
        lidars = dict.fromkeys(self.topics.lidars, COLUMNS)
        return Sensors.from_names(self.topics.cameras, lidars)

    def clips(self) -> Iterator[Clip]:
        """Yield the parts of each log: cut at gaps of the reference, and after ``clip_seconds``."""
        settings = self.settings
        reference = self.topics.reference
        self.noted.update(self.recordings.noted)
        for name, files in self.recordings.logs:
            index = self._open_index(name)
            if self._is_unix(index) != (self.time_base == "unix"):
                first = self.recordings.logs[0][0]
                raise SourceError(
                    f"the times of log '{name}' and those of log '{first}' are not of one "
                    "kind: of one they count from 1970, of the other from a start of the "
                    "machine; shard them apart, or with clock=log_time"
                )
            topics = {**self.topics.cameras, **self.topics.lidars}
            topic = topics[reference]
            stamps = thinned(index.series[topic].stamps, settings.rate)
            parts = sync.cuts(
                stamps,
                max(
                    settings.max_gap_s,
                    1.5 / settings.rate if settings.rate else 0,
                )
                * 1e9,
                settings.clip_seconds * 1e9,
            )
            for number, part in enumerate(parts):
                clip = name if len(parts) == 1 else f"{name}-{number:04d}"
                self._cuts[clip] = name, part
                series = {
                    f"can_{channel}": signal_series(*index.signals[topic], part.tolist())
                    for channel, topic in settings.signals.items()
                    if settings.series and topic in index.signals
                }
                yield Clip(
                    name=clip,
                    log_id=name,
                    files=tuple(files),
                    series=series,
                )
            self.noted.update(index.noted)
            self._videos |= {(name, topic): facts for topic, facts in index.videos.items()}

    def poses(self, clip: Clip) -> Trajectory | None:
        """Return the poses of the log's transforms, or of the Odometry topic."""
        settings = self.settings
        index = self._open_index(clip.log_id)
        if not self.has_poses:
            return None
        if settings.poses == "tf":
            return index.tree.trajectory(
                settings.ego_frame, settings.global_frame, settings.max_gap_s
            )
        child = next((part.child for part in index.poses), "").lstrip("/")
        moved = edges_trajectory(
            index.poses,
            f"log '{clip.log_id}': {settings.poses}",
            settings.max_gap_s,
        )
        if child in ("", settings.ego_frame):
            return moved
        stamps = [part.stamp_ns for part in index.poses]
        times = np.unique(np.concatenate(stamps))
        ego2child = index.tree.sensor2ego(settings.ego_frame, child)
        return Trajectory(
            times,
            moved.at(times) @ ego2child,
            clip.name,
            max_gap_s=settings.max_gap_s,
        )

    def frames(self, clip: Clip) -> Iterator[Frame]:
        """Yield a frame for each remaining message of the reference."""
        log, times = self._cuts[clip.name]
        poses = self.poses(clip) if self.settings.radars else None
        return FrameMaker(
            index=self._open_index(log),
            chosen=self.topics,
            noted=self.noted,
            poses=poses,
        ).frames(times)

    def points(self, ref: str) -> F32:
        """Read a sweep."""
        return self._members.points(Job.parse(ref))

    def make_images(self, refs: Sequence[str]) -> Iterator[tuple[str, Buffer]]:
        """Read pictures out of chunks, encode raw ones, and decode video."""
        jobs = {Job.parse(ref): ref for ref in refs}
        for job, data in self._members.read(list(jobs)):
            yield jobs[job], data

    def videos(self, refs: Iterable[str], number: int) -> list[VideoStart]:
        """Return the video of each log and topic."""
        first = dict[tuple[str, str], Job]()
        counts = Counter[tuple[str, str]]()
        for job in map(Job.parse, refs):
            if job.kind == "video":
                counts[job.log, job.topic] += 1
                first.setdefault((job.log, job.topic), job)

        # There is one, for it keeps where messages are.
        members = LogMembers(self.recordings, self.topics, JpegForm())
        return [
            VideoStart(
                *self._videos[name],
                counts[name],
                members.following(job, number),
                lambda: members,
            )
            for name, job in first.items()
        ]

    def read_clip(self, refs: Sequence[str]) -> Iterator[tuple[str, Buffer]]:
        """Yield members in the order of the recording, so that a chunk is decompressed once."""
        made_refs = [ref for ref in refs if ref.startswith((MADE_PREFIX, POINTS))]
        jobs = {
            Job.parse(ref.removeprefix(MADE_PREFIX).removeprefix(POINTS)): ref for ref in made_refs
        }
        for job, data in self._members.read(list(jobs)):
            yield jobs[job], data
        for ref in refs:
            if not ref.startswith((MADE_PREFIX, POINTS)):
                yield ref, self.open(ref)

    @property
    def columns(self) -> dict[str, type]:  # type: ignore[override]  # of these logs
        """The columns of the position, where it is recorded."""
        if self.topics.gps:
            return dict.fromkeys(FIX_COLUMNS, float)
        return {}

    @property
    def channels(self) -> tuple[Channel, ...]:  # type: ignore[override]  # of these logs
        """The channels of signals and of radars."""
        return self.topics.channels

    def _is_unix(self, index: LogIndex) -> bool:
        """Return whether the times of a log count from 1970: they are after the year 2000, or
        there are none.
        """
        topics = {**self.topics.cameras, **self.topics.lidars}
        stamps = index.series[topics[self.topics.reference]].stamps
        return not len(stamps) or bool(stamps[0] >= _YEAR_2000_NS)

    def _open_index(self, log: str) -> LogIndex:
        """Return the index of a log; keep that of the last one."""
        if self._index is None or self._index.name != log:
            files = next(files for name, files in self.recordings.logs if name == log)
            self._index = LogIndex(
                log,
                [self.recordings.log_file(name) for name in files],
                self.topics,
            )
            num_read = self._index.num_read
            num_stated = self.recordings.num_stated.get(log, {})
            for topic, number in num_stated.items():
                if topic in num_read and num_read[topic] < number:
                    text = f"{topic}: messages that {METADATA} counts and no file has"
                    self._index.noted[text] += number - num_read[topic]
        return self._index

    @cached_property
    def _members(self) -> LogMembers:
        return LogMembers(
            self.recordings,
            self.topics,
            self.stored or JpegForm(self.settings.video_quality),
        )


class Rosbag2Source(LogSource):
    """rosbag2 folders with SQLite or MCAP files: one folder, or a folder of them.

    All else is as in `mcap`.
    """

    kind = "rosbag2"
    suffixes: ClassVar[tuple[str, ...]] = (".db3", ".mcap")


class Rosbag1Source(LogSource):
    """ROS 1 bags: one file, or a folder of them.

    They are on a local disk, with chunks plain or in bz2 or lz4. All else is as in `mcap`.
    """

    kind = "rosbag1"
    suffixes: ClassVar[tuple[str, ...]] = (".bag",)
