"""The logs at a location: which there are, their files and topics, and what sensors the topics are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, cached_property
from typing import TYPE_CHECKING, Final

import msgspec

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.logs.files.bag_file import BagFile
from fuelrail.sharding.sources.logs.files.mcap_file import McapFile
from fuelrail.sharding.sources.logs.files.sqlite_file import SqliteFile
from fuelrail.sharding.sources.shared.foreign import parsing, read_yaml

if TYPE_CHECKING:
    from fuelrail.sharding.sources.logs.files.log_file import LogFile, Topic
    from fuelrail.sharding.sources.shared.files import SourceFiles

METADATA: Final = "metadata.yaml"
_GENERIC: Final = re.compile(
    r"(compressed|image|video|raw|rect|color|colour|points?|point_?cloud|packets|data|sensing|camera|lidar|sensors?)"
    r"(_?(raw|rect|color|colour|compressed|mono|video|points?|[0-9]))*\Z"
)


class _Information(msgspec.Struct):
    relative_file_paths: list[str]
    compression_mode: str | None = None
    compression_format: str | None = None


class _Metadata(msgspec.Struct):
    rosbag2_bagfile_information: _Information


class Recordings:
    """The logs at a location: ``file`` alone, or those of a folder whose names end with ``suffixes``.

    A folder with ``metadata.yaml`` is one log, whose files that names. Errors are SourceError.
    """

    def __init__(
        self,
        files: SourceFiles,
        file: str | None,
        suffixes: tuple[str, ...],
        *,
        skip_damaged: bool,
        check_all: bool,
    ) -> None:
        self._files, self._file, self._suffixes = files, file, suffixes
        self._skip_damaged, self._check_all = skip_damaged, check_all
        self._packed: set[str] = set()
        self.log_file = cache(self._open)
        """Return the file of a log that has this name; open it once."""

    @cached_property
    def logs(self) -> list[tuple[str, list[str]]]:
        """Logs by name, with their files in the order of recording."""
        if self._file is not None:
            return [(_stem(self._file), [self._file])]
        names = self._files.listed()
        if METADATA in names:
            return [(self._files.shown.rstrip("/").rpartition("/")[2], self._split_files(""))]
        found = [(_stem(name), [name]) for name in names if name.endswith(self._suffixes)]
        found += [
            (name, self._split_files(f"{name}/"))
            for name in names
            if not name.endswith(self._suffixes)
            and self._files.facts(f"{name}/{METADATA}") is not None
        ]
        if not found:
            if ".bag" not in self._suffixes and any(name.endswith(".bag") for name in names):
                raise SourceError(
                    f"source '{self._files.shown}' has ROS 1 bags (.bag): read them by the kind rosbag1"
                )
            raise SourceError(
                f"source '{self._files.shown}' has no logs: it is empty, or none of its files ends with "
                f"{' or '.join(self._suffixes)}, and no folder has a {METADATA}"
            )
        return sorted(found)

    @cached_property
    def topics(self) -> dict[str, Topic]:
        """Topics of all logs by name."""
        found: dict[str, Topic] = {}
        for name in (name for _, files in self.logs for name in files):
            with parsing(f"file '{self._files.shown}/{name}'"):
                found |= self.log_file(name).topics
        return found

    def _open(self, name: str) -> LogFile:
        if name.endswith(".bag"):
            return BagFile(self._files, name)
        is_packed = name in self._packed
        if name.endswith(".db3"):
            return SqliteFile(self._files, name, is_packed=is_packed)
        return McapFile(
            self._files,
            name,
            is_packed=is_packed,
            skip_damaged=self._skip_damaged,
            check_all=self._check_all,
        )

    def chosen(
        self, option: str, given: Mapping[str, str], types: frozenset[str]
    ) -> dict[str, str]:
        """Return channel to topic: what the option gives, else all topics of these types, by name."""
        for channel, topic in given.items():
            found = self.topics.get(topic)
            if found is None or found.type not in types:
                known = (
                    ", ".join(
                        sorted(name for name, one in self.topics.items() if one.type in types)
                    )
                    or "none"
                )
                what = "is not there" if found is None else f"has the type {found.type}"
                raise SourceError(
                    f"the option {option}: topic '{topic}' of {channel} {what}; such topics: {known}"
                )
        if given:
            return {channel.lower(): topic for channel, topic in given.items()}
        names: dict[str, str] = {}
        for topic in sorted(name for name, one in self.topics.items() if one.type in types):
            if not topic.endswith(("compressedDepth", "/theora")):
                channel = _channel(topic)
                if channel in names:
                    raise SourceError(
                        f"the topics '{names[channel]}' and '{topic}' would both be {channel}: name them with -o "
                        f"'{option}={{{channel}: {topic}, ...}}'"
                    )
                names[channel] = topic
        return names

    def _split_files(self, folder: str) -> list[str]:
        """Return the files of a rosbag2 folder by its metadata; raise SourceError where one is missing."""
        where = f"file '{self._files.shown}/{folder}{METADATA}'"
        data = self._files.read(f"{folder}{METADATA}")
        facts = read_yaml(
            data, where, _Metadata, "is not metadata of rosbag2"
        ).rosbag2_bagfile_information
        mode = (facts.compression_mode or "").lower()
        if mode not in ("", "none", "message") or (
            mode == "message" and facts.compression_format != "zstd"
        ):
            raise SourceError(
                f"{where}: the bag is compressed by {facts.compression_mode} and {facts.compression_format}; messages "
                "by zstd are read, and an MCAP file with compressed chunks, which `ros2 bag convert` makes of it"
            )
        found = []
        for name in facts.relative_file_paths:
            inside = f"{folder}{name}"
            if (
                self._files.facts(inside) is None
            ):  # older versions put the name of the folder in front
                inside = f"{folder}{name.rpartition('/')[2]}"
            if self._files.facts(inside) is None:
                raise SourceError(f"{where} names the file '{name}', which is not there")
            found.append(inside)
        self._packed.update(found if mode == "message" else ())
        return found


def _stem(name: str) -> str:
    return name.rpartition(".")[0] or name


def _channel(topic: str) -> str:
    """Return a channel's name by its topic: the last part that says which sensor it is."""
    parts = [part for part in topic.lower().split("/") if part]
    telling = [part for part in parts if not _GENERIC.match(part)]
    name = re.sub(r"[^a-z0-9]+", "_", telling[-1] if telling else parts[-1]).strip("_")
    return name or "camera"
