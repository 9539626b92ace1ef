"""The logs at a location: which there are, their files and topics, and what sensors the topics
are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from functools import cache, cached_property
from typing import TYPE_CHECKING, Final

import msgspec

from fuelrail.pipeline.errors import ConfigError, SourceError
from fuelrail.sharding.sources.logs.files.bag_file import BagFile
from fuelrail.sharding.sources.logs.files.mcap_file import McapFile
from fuelrail.sharding.sources.logs.files.sqlite_file import SqliteFile
from fuelrail.sharding.sources.shared.foreign import parsing, read_yaml

if TYPE_CHECKING:
    from fuelrail.sharding.sources.logs.files.log_file import LogFile, Topic
    from fuelrail.sharding.sources.shared.files import SourceFiles

METADATA: Final = "metadata.yaml"
_GENERIC: Final = re.compile(
    r"(compressed|image|video|raw|rect|color|colour|points?|point_?cloud|packets|data|sensing"
    r"|camera|lidar|sensors?)"
    r"(_?(raw|rect|color|colour|compressed|mono|video|points?|[0-9]))*\Z"
)


class _TopicMetadata(msgspec.Struct):
    name: str


class _TopicCount(msgspec.Struct):
    topic_metadata: _TopicMetadata
    message_count: int


class _Information(msgspec.Struct):
    relative_file_paths: list[str]
    compression_mode: str | None = None
    compression_format: str | None = None
    topics_with_message_count: list[_TopicCount] = []


class _Metadata(msgspec.Struct):
    rosbag2_bagfile_information: _Information


class Recordings:
    """The logs at a location: ``file`` alone, or those of a folder whose names end with
    ``suffixes``.

    A folder with ``metadata.yaml`` is one log, whose files that names. Errors are SourceError.
    ``noted`` counts files and folders of logs that are not read; ``num_stated`` are the messages of
    a log by topic, as its metadata has them.
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
        self._files = files
        self._file = file
        self._suffixes = suffixes
        self._skip_damaged = skip_damaged
        self._check_all = check_all
        self._packed: set[str] = set()
        self.noted = Counter[str]()
        self.num_stated = dict[str, dict[str, int]]()
        self.log_file = cache(self._open)
        """Return the file of a log that has this name; open it once."""

    @cached_property
    def logs(self) -> list[tuple[str, list[str]]]:
        """Logs by name, with their files in the order of recording."""
        if self._file is not None:
            return [(_stem(self._file), [self._file])]
        names = self._files.listed()
        if METADATA in names:
            log = self._files.shown.rstrip("/").rpartition("/")[2]
            return [(log, self._split_files("", log))]
        logs_found = [(_stem(name), [name]) for name in names if name.endswith(self._suffixes)]
        for name in names:
            if name.endswith(self._suffixes):
                continue
            if self._files.facts(f"{name}/{METADATA}") is not None:
                logs_found.append((name, self._split_files(f"{name}/", name)))
        for name in self._files.folders():
            is_log = any(log == name for log, _ in logs_found)
            is_read = is_log or name.endswith(self._suffixes)
            if not is_read and any(map(self._is_log, self._files.listed(name))):
                self.noted[
                    f"folders of logs without {METADATA}, which are not read (`ros2 bag reindex` "
                    "writes it, or name one as the source)"
                ] += 1
        if not logs_found:
            has_bags = any(name.endswith(".bag") for name in names)
            if has_bags and ".bag" not in self._suffixes:
                raise SourceError(
                    f"source '{self._files.shown}' has ROS 1 bags (.bag): read them by the "
                    "kind rosbag1"
                )
            raise SourceError(
                f"source '{self._files.shown}' has no logs: it is empty, or none of its "
                f"files ends with {' or '.join(self._suffixes)}, and no folder has a {METADATA}"
            )
        return sorted(logs_found)

    @cached_property
    def topics(self) -> dict[str, Topic]:
        """Topics of all logs by name."""
        topics_found: dict[str, Topic] = {}
        for name in (name for _, files in self.logs for name in files):
            with parsing(f"file '{self._files.shown}/{name}'"):
                topics_found |= self.log_file(name).topics
        return topics_found

    def list_topics(self, types: Collection[str]) -> list[str]:
        """Return the names of the topics of these types, sorted."""
        return sorted(name for name, topic in self.topics.items() if topic.type in types)

    def _open(self, name: str) -> LogFile:
        if name.endswith((".bag", ".db3")) and (self._skip_damaged or self._check_all):
            option = "damaged=skip" if self._skip_damaged else "checksums=true"
            raise ConfigError(
                f"{option} is not for '{self._files.shown}/{name}': it is about checksums of "
                "chunks, which MCAP has; leave the option out"
            )
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
        self,
        option: str,
        selection: Mapping[str, str],
        types: frozenset[str],
    ) -> dict[str, str]:
        """Return channel to topic: what the option gives, else all topics of these types, by
        name.
        """
        for channel, topic in selection.items():
            entry = self.topics.get(topic)
            if entry is None or entry.type not in types:
                names_known = ", ".join(self.list_topics(types)) or "none"
                problem = "is not there" if entry is None else f"has the type {entry.type}"
                raise SourceError(
                    f"the option {option}: topic '{topic}' of {channel} {problem}; such "
                    f"topics: {names_known}"
                )
        if selection:
            return {channel.lower(): topic for channel, topic in selection.items()}
        names: dict[str, str] = {}
        for topic in self.list_topics(types):
            if not topic.endswith(("compressedDepth", "/theora")):
                # The last part that says which sensor it is.
                parts = [part for part in topic.lower().split("/") if part]
                telling = [part for part in parts if not _GENERIC.match(part)] or parts
                name = re.sub(r"[^a-z0-9]+", "_", telling[-1]).strip("_")
                channel = name or "camera"
                if channel in names:
                    raise SourceError(
                        f"the topics '{names[channel]}' and '{topic}' would both be "
                        f"{channel}: name them with -o '{option}={{{channel}: {topic}, ...}}'"
                    )
                names[channel] = topic
        return names

    def _is_log(self, name: str) -> bool:
        return name.endswith(self._suffixes)

    def _split_files(self, folder: str, log: str) -> list[str]:
        """Return the files of a rosbag2 folder by its metadata; raise SourceError where one is
        missing.
        """
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
                f"{where}: the bag is compressed by {facts.compression_mode} and "
                f"{facts.compression_format}; messages by zstd are read, and an MCAP file "
                "with compressed chunks, which `ros2 bag convert` makes of it"
            )
        paths = []
        for name in facts.relative_file_paths:
            inside = f"{folder}{name}"
            if self._files.facts(inside) is None:
                # Older versions put the name of the folder in front.
                inside = f"{folder}{name.rpartition('/')[2]}"
            if self._files.facts(inside) is None:
                raise SourceError(f"{where} names the file '{name}', which is not there")
            paths.append(inside)
        self._packed.update(paths if mode == "message" else ())
        self.num_stated[log] = {
            count.topic_metadata.name: count.message_count
            for count in facts.topics_with_message_count
        }
        names = self._files.listed(folder.rstrip("/"))
        num_other = sum(self._is_log(name) and f"{folder}{name}" not in paths for name in names)
        if num_other:
            self.noted[f"files of logs that the {METADATA} beside them does not name"] += num_other
        return paths


def _stem(name: str) -> str:
    return name.rpartition(".")[0] or name
