"""The frames of one log: for each time of the reference, the message of each sensor that belongs
to it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.rigid import invert_rigid
from fuelrail.sharding.sources.adapter.channels import signals
from fuelrail.sharding.sources.adapter.frame import (
    Absent,
    Frame,
    Image,
    ImageBoxRows,
    Sweep,
)
from fuelrail.sharding.sources.adapter.members import POINTS
from fuelrail.sharding.sources.logs import sync
from fuelrail.sharding.sources.logs.geometry.calibration import (
    camera_calibrations,
    size_fault,
)
from fuelrail.sharding.sources.logs.index import LogIndex, LogSweep, Shot
from fuelrail.sharding.sources.logs.members import Job
from fuelrail.sharding.sources.logs.messages.clouds import COLUMNS, RadarSweep
from fuelrail.sharding.sources.shared.pictures import CONVERTED
from fuelrail.sharding.sources.shared.scan_table import Reference
from fuelrail.sharding.sources.shared.times import nearest

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.schema import I64
    from fuelrail.sharding.sources.adapter.frame import Calibration
    from fuelrail.sharding.sources.adapter.poses import Trajectory
    from fuelrail.sharding.sources.logs.topics import LogTopics


FIX_COLUMNS: Final = ("latitude", "longitude", "altitude_m")
"""Attributes of a position [degrees, m above the ellipsoid]."""


class FrameMaker:
    """Makes frames of one log.

    ``noted`` takes estimated delays, ``poses`` are the clip's, None without any.
    """

    def __init__(
        self,
        index: LogIndex,
        chosen: LogTopics,
        noted: dict[str, int],
        poses: Trajectory | None,
    ) -> None:
        self._index = index
        self._settings = chosen.settings
        self._noted = noted
        self._channels = chosen.channels
        self._poses = poses
        self._apart = dict[str, float]()
        self._gps = chosen.gps
        self._cameras = chosen.cameras
        self._lidars = chosen.lidars
        self._reference = chosen.reference
        self._all = {**self._cameras, **self._lidars, **self._settings.radars}

    def frames(self, times: I64) -> Iterator[Frame]:
        """Yield a frame for each of these times of the reference [ns]; raise SourceError."""
        index = self._index
        rows = {
            channel: self._match_messages(channel, topic, times).tolist()
            for channel, topic in self._all.items()
        }
        stamps = {topic: index.series[topic].stamps.tolist() for topic in self._cameras.values()}
        lidar2ego = {
            channel: index.tree.sensor2ego(
                index.frame_ids[topic].lstrip("/"), self._settings.ego_frame
            )
            for channel, topic in self._lidars.items()
            if topic in index.frame_ids and self._settings.points
        }
        calibrations = {}
        calibration_names = {}
        for channel, topic in self._cameras.items():
            if not len(index.series[topic].stamps):
                continue
            info_topic = self._find_info_topic(channel, topic)
            calibration_names[channel] = f"log '{index.name}', {channel}: {info_topic}"
            calibrations[channel] = camera_calibrations(
                index,
                where=calibration_names[channel],
                topic=topic,
                info_topic=info_topic,
                ego=self._settings.ego_frame,
            )
        marks = {}
        for channel, topic in self._settings.boxes2d.items():
            offset_ms = self._settings.offsets_ms.get(f"boxes2d_{channel}", 0)
            marks[channel] = index.marks_of(
                self._cameras[channel],
                topic,
                round(offset_ms * 1e6),
                round(self._settings.tolerance_ms * 1e6),
            )
        fixes = self._match_fixes(times)
        members = self._find_members(times.tolist(), rows)
        for number, time in enumerate(times.tolist()):
            images = {}
            for channel, by_time in calibrations.items():
                topic = self._cameras[channel]
                images[channel] = self._make_image(
                    topic,
                    row=rows[channel][number],
                    stamps=stamps[topic],
                    calibrations=by_time,
                    calibration_name=calibration_names[channel],
                )
            sweeps = {}
            for channel, matrix in lidar2ego.items():
                row = rows[channel][number]
                if row >= 0:
                    swept, items = index.series[self._lidars[channel]]
                    num_bytes = 128 + items[row].num_points * 4 * len(COLUMNS)
                    job = Job("points", self._lidars[channel], items[row].place)
                    ref = job.ref
                    sweeps[channel] = Sweep(
                        ref=ref,
                        timestamp_ns=int(swept[row]),
                        lidar2ego=matrix,
                        num_bytes=num_bytes,
                    )
            boxes2d = {}
            for channel, marks_by_row in marks.items():
                mark = marks_by_row.get(rows[channel][number])
                if mark is not None:
                    # The centre of the first pixel is 0: in messages, its left edge is.
                    box = np.array(mark.box).reshape(-1, 4) - 0.5
                    boxes2d[channel] = ImageBoxRows(
                        box=box,
                        category=mark.category,
                        track=mark.track,
                    )
            yield Frame(
                timestamp_ns=time,
                images=images,
                boxes2d=boxes2d,
                sweeps=sweeps,
                attributes=fixes[number] if fixes else {},
                members=members[number],
            )

    def _find_members(
        self, times: Sequence[int], rows: Mapping[str, Sequence[int]]
    ) -> list[list[Reference]]:
        """Return the members of each time's radars, by the rows of each channel, and signals."""
        index = self._index
        members: list[list[Reference]] = [[] for _ in times]
        for channel in self._channels:
            topic = channel.source_name
            if channel.name not in self._settings.radars:
                if topic in index.signals and not self._settings.series:
                    parts = signals(channel, *index.signals[topic], times)
                    for time_members, more in zip(members, parts, strict=True):
                        time_members += more
                continue
            vectors = channel.law.roles.get("vectors", ())
            stamps, items = index.series[topic]
            mount = np.eye(4)
            if len(stamps):
                frame_id = index.frame_ids.get(topic, "").lstrip("/")
                mount = index.tree.sensor2ego(frame_id, self._settings.ego_frame)
            for number, (row, time) in enumerate(zip(rows[channel.name], times, strict=True)):
                item = items[row] if row >= 0 else None
                if not isinstance(item, LogSweep):
                    continue
                sensor2ego = mount
                if self._poses is not None:
                    # To ego at the sample's time, by the poses at both times.
                    times_of_both = np.array([stamps[row], time])
                    measured, sampled = self._poses.at(times_of_both)
                    sensor2ego = invert_rigid(sampled) @ measured @ mount
                if np.isnan(sensor2ego).any():
                    continue
                sweep = RadarSweep(
                    channel.columns,
                    vectors,
                    (time - int(stamps[row])) * 1e-9,
                    sensor2ego.ravel().tolist(),
                )
                job = Job(
                    kind="radar",
                    topic=topic,
                    place=item.place,
                    key=None,
                    log=msgspec.json.encode(sweep).decode(),
                )
                num_bytes = 128 + item.num_points * 4 * len(channel.columns)
                members[number].append(
                    Reference(channel.field, POINTS + job.ref, num_bytes, is_estimate=True)
                )
        return members

    def _match_fixes(self, times: I64) -> list[dict[str, float | None]]:
        """Return the position nearest to each time, at most ``max_gap_s`` away; None where there
        is none.
        """
        if self._gps not in self._index.signals:
            return []
        stamps, values = self._index.signals[self._gps]
        column = self._index.columns[self._gps].index
        place_columns = [column(name) for name in ("latitude", "longitude", "altitude")]
        places = values[:, place_columns]
        rows = nearest(stamps, times)
        apart_ns = np.abs(stamps[rows] - times)
        has_place = ~np.isnan(places[rows]).any(1)
        is_known = has_place & (apart_ns <= self._settings.max_gap_s * 1e9)
        is_known &= values[rows, column("status.status")] >= 0  # -1 is without a fix
        pairs = zip(is_known.tolist(), places[rows].tolist(), strict=True)
        return [
            dict(zip(FIX_COLUMNS, place if has_fix else (None,) * 3, strict=True))
            for has_fix, place in pairs
        ]

    def _match_messages(self, channel: str, topic: str, times: I64) -> NDArray[np.intp]:
        """Return the row of a channel's message for each time, -1 for none.

        Note the delay that was estimated.
        """
        index = self._index
        stamps = index.series[topic].stamps
        if channel == self._reference:
            return sync.matched(times, stamps, 0, 0)
        stated_ms = self._settings.offsets_ms.get(channel)
        tolerance_ns = round(self._settings.tolerance_ms * 1e6)
        all_times = index.series[self._all[self._reference]].stamps
        offset_ns = (
            sync.estimated_offset_ns(all_times, stamps)
            if stated_ms is None
            else round(stated_ms * 1e6)
        )
        if stated_ms is None:
            self._noted[f"{channel}: estimated delay in {index.name} [us]"] = offset_ns // 1000
        rows = sync.matched(times, stamps, offset_ns, tolerance_ns)
        if len(stamps) and (rows < 0).all():
            apart_ns = stamps[nearest(stamps, times)] - times
            closest = np.abs(apart_ns).argmin()
            self._apart[topic] = float(apart_ns[closest]) * 1e-9
        return rows

    def _find_info_topic(self, channel: str, topic: str) -> str:
        """Return the topic of a camera's calibration."""
        index = self._index
        stated = self._settings.camera_infos.get(channel)
        parts = topic.split("/")
        if stated:
            beside = [stated]
        else:
            beside = [
                "/".join([*parts[:end], name])
                for end in (-1, -2, -3)
                for name in ("camera_info", "calibration")
            ]
        frame = index.frame_ids.get(topic, "")
        info_topic = next((name for name in beside if name in index.calibrations), None)
        if info_topic is None and not stated:
            same = [
                name
                for name, calibrations in index.calibrations.items()
                if calibrations[0][1].frame_id == frame
            ]
            info_topic = same[0] if len(same) == 1 else None
        if info_topic is None:
            names = ", ".join(sorted(index.calibrations)) or "none"
            raise SourceError(
                f"log '{index.name}': camera {channel} ('{topic}') is without calibration; "
                f"looked for {beside[0]}; topics with calibrations: {names}; the options "
                "camera_infos and cameras choose"
            )
        return info_topic

    def _make_image(
        self,
        topic: str,
        row: int,
        stamps: list[int],
        calibrations: Mapping[int, Calibration],
        calibration_name: str,
    ) -> Image | Absent:
        if row < 0:
            apart_s = self._apart.get(topic)
            if apart_s is None:
                return Absent("no message in time")
            return Absent(
                f"the nearest message is {abs(apart_s):.1f} s "
                f"{'after' if apart_s > 0 else 'before'} one of {self._reference}: their "
                "clocks differ; see the options clock, offsets_ms and reference"
            )
        shot = self._index.series[topic].items[row]
        stamp_ns = stamps[row]
        assert isinstance(shot, Shot), "a topic of pictures"
        if shot.kind == "video" and shot.key is None and not shot.fault:
            return Absent("no keyframe before it")
        times_ns = list(calibrations)
        number = bisect_right(times_ns, stamp_ns) - 1
        calibration = calibrations[times_ns[max(number, 0)]]  # the first for earlier pictures
        log = self._index.name if shot.kind == "video" else ""
        ref = Job(
            kind=shot.kind,
            topic=topic,
            place=shot.place,
            key=shot.key,
            log=log,
        ).ref
        if shot.offset >= 0:
            ref = f"{shot.place.file}#{shot.offset}+{shot.length}"
        pixels = shot.width * shot.height
        if shot.kind == "palette":
            self._noted[CONVERTED] = self._noted.get(CONVERTED, 0) + 1
        estimates = {
            "video": pixels // 5,
            "raw": pixels // 2,
            "palette": pixels,
        }
        num_bytes = estimates.get(shot.kind, shot.length)
        return Image(
            ref=ref,
            timestamp_ns=stamp_ns,
            calibration=calibration,
            width=shot.width,
            height=shot.height,
            num_bytes=max(num_bytes, 1),
            made=shot.offset < 0,
            encoded_of=shot.kind if shot.kind in ("raw", "video") else "",
            fault=shot.fault or size_fault(calibration, calibration_name, shot.width, shot.height),
            extension=shot.extension,
        )
