"""Makes members of messages: bytes out of chunks, raw pictures, frames of video, and points.

All that is asked for is read in the order of the recording: a chunk is decompressed once, and a
frame of video decoded once, from the keyframe before it on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.sample.schema import F32, encode_points
from fuelrail.sharding.sources.logs.files.log_file import Locator
from fuelrail.sharding.sources.logs.messages.clouds import (
    RadarSweep,
    points_of,
    radar_points,
)
from fuelrail.sharding.sources.logs.messages.pictures import FULL, raw_jpeg
from fuelrail.sharding.sources.logs.messages.reader import Reader
from fuelrail.sharding.sources.shared.pictures import plain_or_damaged
from fuelrail.sharding.sources.shared.video import StreamDecoder

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.sharding.sources.logs.files.recordings import Recordings
    from fuelrail.sharding.sources.logs.topics import LogTopics
    from fuelrail.sharding.sources.shared.pictures import JpegForm


class Job(NamedTuple):
    """What a member is made of: ``kind`` is "bytes", "palette", "raw", "video", "points" or
    "radar".

    ``key`` and ``log`` are of video; ``log`` of a radar is a :class:`RadarSweep` in JSON.
    """

    kind: str
    topic: str
    place: Locator
    key: Locator | None = None
    log: str = ""

    @property
    def ref(self) -> str:
        """The text of the job as a reference."""
        more = f"|{self.key or ''}|{self.log}" if self.log else ""
        return f"{self.kind}|{self.topic}|{self.place}{more}"

    @classmethod
    def parse(cls, ref: str) -> Job:
        """Parse a reference."""
        kind, topic, place, key, log = (*ref.split("|", 4), "", "")[:5]
        return cls(
            kind=kind,
            topic=topic,
            place=Locator.parse(place),
            key=Locator.parse(key) if key else None,
            log=log,
        )


class _Group(NamedTuple):
    """Messages of one video that are decoded one after the other.

    ``jobs`` maps a number in ``places`` to the job that wants its image; it empties as these are
    yielded.
    """

    topic: str
    places: Sequence[Locator]
    first: int
    last: int
    jobs: dict[int, Job]


class LogMembers:
    """Reads members of logs; ``num_decoded`` counts frames of video."""

    def __init__(
        self,
        recordings: Recordings,
        topics: LogTopics,
        form: JpegForm,
    ) -> None:
        self._recordings = recordings
        self._topics = topics
        self._form = form
        self._file = recordings.log_file
        self._reader = cache(lambda topic: Reader(recordings.topics[topic]))
        self._all_places = cache(self._list_places)
        self.num_decoded = 0

    def points(self, job: Job) -> F32:
        """Read a sweep: (P, 6), or that of a radar."""
        where = f"topic '{job.topic}', message {job.place}"
        message = self._file(job.place.file).read(job.place)
        cloud = self._reader(job.topic).cloud(message)
        if job.kind == "points":
            return points_of(cloud, where)
        sweep = msgspec.json.decode(job.log, type=RadarSweep)
        return radar_points(cloud, sweep, where)

    def following(self, first: Job, number: int) -> list[Job]:
        """Return up to ``number`` frames of the video of this one, from its keyframe on."""
        places = self._all_places(first.log, first.topic)
        first_place = places.index(first.key or first.place)
        places = places[first_place : first_place + number]
        return [first._replace(place=place) for place in places]

    def jpegs(self, jobs: Sequence[Job], form: JpegForm) -> Iterator[tuple[Job, Buffer]]:
        """Read frames of video as JPEGs of this form."""
        self._form = form
        return self.read(jobs)

    def read(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Buffer]]:
        """Yield each member with its job, in the order of the recording."""
        todo: dict[Locator, list[Job | tuple[_Group, int]]] = {}
        videos: dict[tuple[str, str], list[Job]] = {}
        for job in jobs:
            if job.kind == "video":
                videos.setdefault((job.log, job.topic), []).append(job)
            else:
                todo.setdefault(job.place, []).append(job)
        # The runs of messages from a keyframe to the last one wanted; runs that touch are one.
        groups: list[_Group] = []
        for (log, topic), topic_jobs in videos.items():
            places = self._all_places(log, topic)
            number_of = {place: number for number, place in enumerate(places)}
            rows = sorted(
                (number_of[job.key or job.place], number_of[job.place], job) for job in topic_jobs
            )
            last = -2
            for key, number, job in rows:
                if key > last + 1:
                    groups.append(
                        _Group(
                            topic=topic,
                            places=places,
                            first=key,
                            last=number,
                            jobs={},
                        )
                    )
                last = number
                groups[-1].jobs[number] = job
                groups[-1] = groups[-1]._replace(last=number)
        for group in groups:
            for number in range(group.first, group.last + 1):
                todo.setdefault(group.places[number], []).append((group, number))
        decoders: dict[int, StreamDecoder] = {}
        rank = {
            name: file_rank
            for file_rank, name in enumerate(
                name for _, files in self._recordings.logs for name in files
            )
        }
        for place in sorted(
            todo,
            key=lambda place: (rank[place.file], place.chunk, place.position),
        ):
            for task in todo[place]:
                if isinstance(task, Job):
                    yield task, self._make_member(task)
                    continue
                # Push a message of a video into its group's decoder; the last one flushes it.
                group, number = task
                where = f"topic '{group.topic}'"
                place = group.places[number]
                message = self._file(place.file).read(place)
                reader = self._reader(group.topic)
                decoder = decoders.get(id(group))
                if decoder is None:
                    decoder = decoders[id(group)] = StreamDecoder(
                        reader.video_format(message), self._form, where
                    )
                picture = reader.picture(message)
                end = picture.offset + picture.length
                data = memoryview(message.data)[picture.offset : end]
                remaining = set(group.jobs)
                jpegs = list(decoder.push(number, data, remaining))
                if number == group.last:
                    jpegs += decoder.flush(remaining)
                    self.num_decoded += decoder.num_decoded
                    del decoders[id(group)]
                for frame, jpeg in jpegs:
                    yield group.jobs.pop(frame), jpeg
                if number == group.last and group.jobs:
                    raise SourceError(
                        f"{where}: message {group.places[min(group.jobs)]} cannot be decoded"
                    )

    def _make_member(self, job: Job) -> Buffer:
        if job.kind in ("points", "radar"):
            return encode_points(self.points(job))
        message = self._file(job.place.file).read(job.place)
        picture = self._reader(job.topic).picture(message)
        if job.kind == "raw":
            where = f"topic '{job.topic}', message {job.place}"
            return raw_jpeg(
                message.data,
                picture,
                where,
                self._topics.levels.get(job.topic, FULL),
            )
        end = picture.offset + picture.length
        data = memoryview(message.data)[picture.offset : end]
        if job.kind == "palette":
            return plain_or_damaged(data)
        return data

    def _list_places(self, log: str, topic: str) -> list[Locator]:
        files = dict(self._recordings.logs)[log]
        parts = [self._file(name).places(topic) for name in files]
        if any(part != sorted(part) for part in parts):
            raise SourceError(
                f"log '{log}': the video of topic '{topic}' is not stored in the order of "
                "its times: sort the file, as by `mcap sort`"
            )
        return list(itertools.chain.from_iterable(parts))
