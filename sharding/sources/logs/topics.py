"""The topics of a source's logs that its options choose, by channel."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from fuelrail.pipeline.errors import ConfigError, SourceError
from fuelrail.sharding.sources.adapter.channels import signals_channel
from fuelrail.sharding.sources.logs.messages.clouds import radar_channel
from fuelrail.sharding.sources.logs.messages.reader import Reader
from fuelrail.sharding.sources.logs.messages.records import (
    CLOUDS,
    FIXES,
    MARKS,
    PICTURES,
    POSES,
    VIDEOS,
)
from fuelrail.sharding.sources.shared.video import check_decoder

if TYPE_CHECKING:
    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.sharding.sources.logs.files.recordings import Recordings
    from fuelrail.sharding.sources.logs.settings import LogSettings


class LogTopics:
    """The topics of cameras, lidars, radars, signals and positions."""

    def __init__(self, recordings: Recordings, settings: LogSettings) -> None:
        """Take the recordings and the options; reads nothing."""
        self._recordings = recordings
        self.settings = settings

    @cached_property
    def cameras(self) -> dict[str, str]:
        """Channel to topic, in the order of the rig."""
        named = self.settings.cameras
        return self._recordings.chosen(
            "cameras", {} if isinstance(named, tuple) else named, PICTURES
        )

    @cached_property
    def lidars(self) -> dict[str, str]:
        """Channel to topic."""
        topics = self._recordings.chosen("lidars", self.settings.lidars, CLOUDS)
        radars = self.settings.radars.values()
        return {channel: topic for channel, topic in topics.items() if topic not in radars}

    @property
    def reference(self) -> str:
        """The channel that makes the frames."""
        if self.settings.reference:
            return self.settings.reference
        return next(iter((*self.lidars, *self.cameras)))

    @property
    def videos(self) -> list[str]:
        """The topics of cameras that record video."""
        return [
            topic
            for topic in self.cameras.values()
            if self._recordings.topics[topic].type in VIDEOS
        ]

    @property
    def levels(self) -> dict[str, tuple[int, int]]:
        """The values that become black and white, of raw pictures of 16 bits, by topic."""
        levels = self.settings.levels
        return {self.cameras[channel]: limits for channel, limits in levels.items()}

    @property
    def gps(self) -> str:
        """The topic of positions, empty without one; raises ConfigError for a missing one that
        the options name.
        """
        topics = self._recordings.list_topics(FIXES)
        if self.settings.gps and self.settings.gps not in topics:
            raise ConfigError(
                f"gps: '{self.settings.gps}' is not one of: {', '.join(topics) or '-'}"
            )
        return self.settings.gps or next(iter(topics), "")

    @cached_property
    def channels(self) -> tuple[Channel, ...]:
        """The channels of signals and of radars."""
        topics = self._recordings.topics
        channels_found = []
        for name, topic in self.settings.signals.items():
            if topic not in topics or topic in (
                *self.cameras.values(),
                *self.lidars.values(),
            ):
                listed = ", ".join(sorted(topics))
                raise ConfigError(
                    f"signals: '{topic}' of {name} is not a topic with numbers; topics: {listed}"
                )
            units = {path.replace(".", "_"): "" for path in Reader(topics[topic]).columns}
            channels_found.append(
                signals_channel(
                    f"can_{name}",
                    units,
                    topic,
                    has_unknown=True,
                    series=self.settings.series,
                )
            )
        if not self.settings.radars:
            return tuple(channels_found)
        radars = self._recordings.chosen("radars", self.settings.radars, CLOUDS)
        names_in_use = {*self.cameras, *self.lidars}
        bad = [name for name in self.settings.radars if name in names_in_use or name not in radars]
        if bad:
            raise ConfigError(
                f"radars: '{bad[0]}' must be in lower case, and no other channel: "
                f"{', '.join(sorted(names_in_use))}"
            )
        for channel, name in radars.items():
            files = (
                self._recordings.log_file(file)
                for _, files in self._recordings.logs
                for file in files
            )
            first = next(
                ((file, place) for file in files for place in file.places(name)[:1]),
                None,
            )
            if first is None:
                raise SourceError(f"radars: topic '{name}' of {channel} has no messages")
            file, place = first
            channels_found.append(
                radar_channel(
                    channel,
                    Reader(self._recordings.topics[name]).cloud(file.read(place)),
                    name,
                )
            )
        return tuple(channels_found)

    def check(self, where: str) -> None:
        """Raise SourceError or ConfigError for options that do not fit the topics of the source
        ``where``.
        """
        if not self.cameras:
            listed = (
                ", ".join(
                    sorted(
                        f"{topic.name} ({topic.type})" for topic in self._recordings.topics.values()
                    )
                )
                or "none"
            )
            raise SourceError(f"{where} has no image topic; topics: {listed}")
        box_topics = self._recordings.list_topics(MARKS)
        for channel, name in self.settings.boxes2d.items():
            if channel not in self.cameras or name not in box_topics:
                raise ConfigError(
                    f"boxes2d: '{name}' of {channel} must be a topic of boxes, and of a "
                    f"camera; such topics: {', '.join(box_topics) or 'none'}; cameras: "
                    f"{', '.join(self.cameras)}"
                )
        channels_known = [*self.cameras, *self.lidars, *self.settings.radars]
        for channel, (black, white) in self.settings.levels.items():
            if channel not in self.cameras or not black < white:
                listed = ", ".join(self.cameras)
                raise ConfigError(
                    f"levels: {channel}: [{black}, {white}] must be a camera and ascending; "
                    f"cameras: {listed}"
                )
        for option in ("offsets_ms", "camera_infos"):
            for channel in getattr(self.settings, option):
                if channel not in (
                    *channels_known,
                    *(f"boxes2d_{camera}" for camera in self.settings.boxes2d),
                ):
                    raise ConfigError(
                        f"{option}: there is no channel '{channel}'; channels: "
                        f"{', '.join(channels_known)}"
                    )
        if self.reference not in channels_known or self.reference in self.settings.radars:
            raise ConfigError(
                f"reference: there is no channel '{self.reference}'; channels: "
                f"{', '.join(channels_known)}"
            )
        if self.settings.poses not in ("tf", "none"):
            topic = self._recordings.topics.get(self.settings.poses)
            if topic is None or topic.type not in POSES:
                names = ", ".join(self._recordings.list_topics(POSES)) or "-"
                raise ConfigError(
                    f"poses: '{self.settings.poses}' is not tf, none or one of: {names}"
                )
        if self.videos:
            check_decoder(f"topic '{self.videos[0]}'")
