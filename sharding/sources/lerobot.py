"""LeRobot datasets, v2.0, v2.1 and v3.0: episodes are clips, videos are cameras, states and actions
are channels.

``meta/info.json`` names the features and says where files are. v2 has a Parquet file and a video
for each episode, v3 has many episodes in each; frame n of an episode is then frame
``round((from_timestamp + timestamp) * fps)`` of its video. Images may be in the Parquet files too
(the dtype "image").
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fuelrail.pipeline.channels.sensors import RESERVED
from fuelrail.pipeline.channels.series import series_channel
from fuelrail.pipeline.channels.table import DTYPES, Channel
from fuelrail.pipeline.errors import ImageError, SourceError
from fuelrail.pipeline.sample.image_header import ImageInfo, probe
from fuelrail.pipeline.text import shortened
from fuelrail.sharding.sources.adapter.channels import value_channel
from fuelrail.sharding.sources.adapter.frame import (
    FRAME,
    Absent,
    Clip,
    Frame,
    Image,
    Sensors,
)
from fuelrail.sharding.sources.adapter.rows import (
    COMMON_COLUMNS,
    may_be_attribute,
)
from fuelrail.sharding.sources.adapter.videos import VideoSource
from fuelrail.sharding.sources.shared.arrow import is_list, open_parquet, read_parquet
from fuelrail.sharding.sources.shared.foreign import parsing, read_json
from fuelrail.sharding.sources.shared.pictures import (
    CONVERTED,
    EXTENSION_OF,
    ConvertiblePng,
    convertible_png,
    plain_or_damaged,
)
from fuelrail.sharding.sources.shared.video import (
    VideoSettings,
    check_decoder,
    libraries,
)

if TYPE_CHECKING:
    from collections import Counter

    from fuelrail.sharding.sources.shared.files import SourceFiles

_INFO: Final = "meta/info.json"
_EPISODES: Final = "meta/episodes"
_OWN_COLUMNS: Final = (
    "timestamp",
    "frame_index",
    "episode_index",
    "index",
    "task_index",
)
"""Columns of every dataset; all but the last say where a frame is."""
_FIELD: Final = re.compile(r"\{(\w+)(?::0(\d)d)?\}")
_FIRST_ROWS: Final = 16
"""Rows whose images are tried for the size of a feature's images."""
_ROW: Final = re.compile(r"(.+)#row=(\d{1,18})&(.+)\Z", re.DOTALL)
_SPLIT: Final = re.compile(r"(\d{1,18}):(\d{1,18})\Z")
_SPLITS: Final = {"validation": "val", "eval": "val"}
_SCALARS: Final = {"b": bool, "i": int, "u": int, "f": float}


class _Feature(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...] = ()
    names: Any = None
    info: dict[str, Any] | None = None

    @property
    def is_picture(self) -> bool:
        return self.dtype in ("video", "image")

    @property
    def scalar(self) -> type | None:
        """The type of a single number; None for what is none."""
        is_one = self.shape in ((), (1,)) and self.dtype in DTYPES
        if is_one:
            return _SCALARS[np.dtype(self.dtype).kind]
        return None


class _Info(msgspec.Struct, frozen=True):
    codebase_version: str
    fps: float
    features: dict[str, _Feature]
    data_path: str
    video_path: str | None = None
    chunks_size: int = 1000
    splits: dict[str, str] = {}
    robot_type: str | None = None
    total_episodes: int | None = None
    total_frames: int | None = None


class _Line(msgspec.Struct, frozen=True):
    """A line of v2's ``meta/episodes.jsonl``."""

    episode_index: int
    length: int


class _Task(msgspec.Struct, frozen=True):
    """A line of v2's ``meta/tasks.jsonl``."""

    task_index: int
    task: str


class _Episode(NamedTuple):
    """An episode: its rows are in the file ``data``, its videos by camera begin at a time [s] of
    a file.
    """

    number: int
    length: int
    data: str
    videos: Mapping[str, tuple[str, float]]


class _Metadata:
    """What the folder ``meta`` says: features, tasks and episodes.

    ``noted`` counts what is left out.
    """

    def __init__(self, files: SourceFiles, noted: Counter[str]) -> None:
        self.files = files
        self.noted = noted

    @cached_property
    def info(self) -> _Info:
        """Return what ``info.json`` states; raise SourceError for another version."""
        where = f"file '{self.files.shown}/{_INFO}'"
        if self.files.facts(_INFO) is None:
            raise SourceError(f"{where} is not there: is this the folder of a LeRobot dataset?")
        info = read_json(
            self.files.read(_INFO),
            where,
            _Info,
            noted=self.noted,
        )
        if info.codebase_version.removeprefix("v") not in ("2.0", "2.1", "3.0"):
            raise SourceError(
                f"{where} has the codebase_version '{shortened(info.codebase_version)}'; "
                "v2.0, v2.1 and v3.0 are read: convert it with LeRobot"
            )
        if not (0 < info.fps < 1e6 and info.chunks_size > 0):
            raise SourceError(
                f"{where} has fps {info.fps} and chunks_size {info.chunks_size}; both must "
                "be positive"
            )
        return info

    @property
    def _is_v3(self) -> bool:
        return self.info.codebase_version.endswith("3.0")

    @cached_property
    def cameras(self) -> dict[str, str]:
        """Return the feature of each camera by its channel."""
        feature_of: dict[str, str] = {}
        for name, feature in self.info.features.items():
            if not feature.is_picture:
                continue
            if (feature.info or {}).get("video.is_depth_map"):
                self.noted[f"feature {shortened(name)} left out, a video of depths"] += 1
                continue
            camera = _normalize_name(re.sub(r"^observation\.(images?\.)?", "", name))
            if camera in feature_of:
                raise SourceError(
                    f"{_INFO}: features '{shortened(feature_of[camera])}' and "
                    f"'{shortened(name)}' are both {camera}"
                )
            feature_of[camera] = name
        return feature_of

    @property
    def has_videos(self) -> bool:
        """Whether a camera's images are frames of videos."""
        return any(self.info.features[name].dtype == "video" for name in self.cameras.values())

    @cached_property
    def values(self) -> dict[str, str]:
        """Return the features that are no images and not of all datasets, by the names that they
        have in samples.
        """
        feature_of: dict[str, str] = {}
        reserved = {"task", *RESERVED, *COMMON_COLUMNS}
        for name, feature in self.info.features.items():
            if name in _OWN_COLUMNS or feature.is_picture:
                continue
            column = _normalize_name(name)
            where = f"feature {shortened(name)} left out"
            if feature.dtype not in (*DTYPES, "string"):
                self.noted[f"{where}, of dtype {shortened(feature.dtype)}"] += 1
            elif column in feature_of or column in reserved or not may_be_attribute(column):
                self.noted[f"{where}, {column} is the name of something else"] += 1
            else:
                feature_of[column] = name
        return feature_of

    @cached_property
    def tasks(self) -> dict[int, str]:
        """Return the texts of tasks by number."""
        if self._is_v3:
            name = "meta/tasks.parquet"
            with open_parquet(self.files, name, read_whole=True) as file:
                texts = [
                    field.name
                    for field in file.schema_arrow
                    if field.type in (pa.string(), pa.large_string())
                ]
            if not texts:
                raise SourceError(f"table '{self.files.shown}/{name}' has no column of texts")
            columns = read_parquet(
                self.files,
                name,
                {"task_index": pa.int64(), texts[0]: pa.string()},
                read_whole=True,
            )
            return dict(
                zip(
                    columns["task_index"].tolist(),
                    columns[texts[0]],
                    strict=True,
                )
            )
        return {
            field.task_index: field.task for field in self._read_lines("meta/tasks.jsonl", _Task)
        }

    def _read_lines(self, name: str, kind: Any) -> Iterator[Any]:
        where = f"file '{self.files.shown}/{name}'"
        lines = self.files.read(name).split(b"\n")
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield read_json(line, f"{where}, line {number}", kind, noted=self.noted)

    def episodes(self) -> Iterator[_Episode]:
        """Yield the episodes, in the order of the files."""
        info = self.info
        videos = [name for name in self.cameras.values() if info.features[name].dtype == "video"]
        if not self._is_v3:
            for line in self._read_lines("meta/episodes.jsonl", _Line):
                numbers = {
                    "episode_chunk": line.episode_index // info.chunks_size,
                    "episode_index": line.episode_index,
                }
                files = {
                    name: (
                        _fill_path(info.video_path or "", numbers | {"video_key": name}),
                        0.0,
                    )
                    for name in videos
                }
                yield _Episode(
                    line.episode_index,
                    line.length,
                    _fill_path(info.data_path, numbers),
                    files,
                )
            return
        integer_type = pa.int64()
        types = dict.fromkeys(
            ("episode_index", "length", "data/chunk_index", "data/file_index"),
            integer_type,
        )
        for name in videos:
            types |= {
                f"videos/{name}/chunk_index": integer_type,
                f"videos/{name}/file_index": integer_type,
            }
            types[f"videos/{name}/from_timestamp"] = pa.float64()
        for folder in self.files.folders(_EPISODES):
            for file in self.files.listed(f"{_EPISODES}/{folder}"):
                columns = read_parquet(self.files, f"{_EPISODES}/{folder}/{file}", types)
                for row in range(len(columns["length"])):
                    values = {name: column[row].item() for name, column in columns.items()}
                    starts = {}
                    for name in videos:
                        numbers = {
                            "chunk_index": values[f"videos/{name}/chunk_index"],
                            "file_index": values[f"videos/{name}/file_index"],
                            "video_key": name,
                        }
                        starts[name] = (
                            _fill_path(info.video_path or "", numbers),
                            values[f"videos/{name}/from_timestamp"],
                        )
                    numbers = {
                        "chunk_index": values["data/chunk_index"],
                        "file_index": values["data/file_index"],
                    }
                    yield _Episode(
                        values["episode_index"],
                        values["length"],
                        _fill_path(info.data_path, numbers),
                        starts,
                    )


class LeRobot(VideoSource[VideoSettings]):
    """LeRobot datasets v2.0 to v3.0: episodes as clips, videos as cameras, states and actions as
    channels.

    PATH has `meta/info.json`, which also names splits. There are no poses and no calibration.

    - An episode is a clip, whose times begin at 0; its videos are cameras: `observation.images.top`
      is `top`. A row gets the frame that LeRobot reads for its `timestamp`. Depth videos are left
      out.
    - States and actions become channels, with `_` for other characters (`observation_state`,
      `action`); the task's text is `task`. Single numbers, such as `next_reward`, become
      attributes.
    - A chunk of actions is a window in seconds: `window={"action": {"from": 0, "to": 0.3, "hz":
      10}}`. With `-o rate=10` (or `-o frames=keyframes`), states and actions are series at their
      own rate.
    """

    kind = "lerobot"
    time_base = "relative"
    has_poses = False
    requires: ClassVar[Mapping[str, str]] = {}  # sets of images need no decoder of videos

    def __init__(self, location: str, options: dict[str, Any]) -> None:
        super().__init__(location, options)
        self._meta = _Metadata(self.files, self.noted)
        self._of: dict[str, _Episode] = {}
        self._last: dict[str, pa.Table] = {}

    @property
    def channels(self) -> Sequence[Channel]:  # type: ignore[override]
        """The channels of states, actions and texts, and the task."""
        channels_found = [value_channel("task", description="what the robot is to do")]
        for name, feature in self._meta.values.items():
            feature_info = self._meta.info.features[feature]
            if feature_info.dtype == "string":
                channels_found.append(value_channel(name))
            elif feature_info.scalar is None:
                # At a lower rate of frames, states and actions keep their own.
                make = series_channel if self.settings.rate else value_channel
                names = feature_info.names
                if isinstance(names, dict):
                    names = next(iter(names.values()), None)
                channels_found.append(
                    make(
                        name,
                        feature_info.dtype,
                        feature_info.shape,
                        description=(
                            ", ".join(map(str, names))[:500] if isinstance(names, list) else ""
                        ),
                    )
                )
        return tuple(channels_found)

    @property
    def columns(self) -> Mapping[str, type]:  # type: ignore[override]
        """The columns of single numbers, and the numbers of episode and task."""
        types = {
            name: self._meta.info.features[feature].scalar
            for name, feature in self._meta.values.items()
        }
        scalar_types = {name: kind for name, kind in types.items() if kind is not None}
        return {"episode_index": int, "task_index": int, **scalar_types}

    @property
    def options(self) -> dict[str, Any]:
        """All options, and the versions of the libraries that decode, where there are videos."""
        return {
            **super().options,
            "libraries": libraries() if self._meta.has_videos else "",
        }

    def sensors(self) -> Sensors:
        """Return the cameras; their own names are those of the features.

        Raises ConfigError where there are videos, and no library that decodes them.
        """
        if self._meta.has_videos:
            check_decoder(f"'{self.files.shown}'")
        return Sensors.from_names(self._meta.cameras)

    def clips(self) -> Iterator[Clip]:
        """Yield the episodes."""
        ranges = {}
        for name, text in self._meta.info.splits.items():
            match = _SPLIT.match(text)
            if match is None:
                raise SourceError(
                    f"{_INFO}: split '{shortened(name)}' is '{shortened(text)}', expected "
                    "FIRST:END of episodes"
                )
            split = _SPLITS.get(name, name)
            ranges[split] = range(int(match[1]), int(match[2]))
        self._of.clear()
        num_frames = 0
        episodes = sorted(self._meta.episodes(), key=lambda episode: episode.number)
        for episode in episodes:
            name = f"episode-{episode.number:06d}"
            if name in self._of:
                raise SourceError(f"'{self.files.shown}' has episode {episode.number} twice")
            self._of[name] = episode
            num_frames += episode.length
            videos = [
                file for file, _ in episode.videos.values() if self.files.facts(file) is not None
            ]
            yield Clip(
                name=name,
                vehicle=self._meta.info.robot_type or "",
                split=next(
                    (split for split, numbers in ranges.items() if episode.number in numbers),
                    "",
                ),
                attributes={"episode_index": episode.number},
                files=(_INFO, episode.data, *videos),
            )
        counts = {"total_episodes": len(self._of), "total_frames": num_frames}
        for name, count in counts.items():
            stated = getattr(self._meta.info, name)
            if stated is not None and stated != count:
                self.noted[f"{_INFO} states the {name} {stated}, and its tables have"] = count

    def frames(self, clip: Clip) -> Iterator[Frame]:
        """Yield the frames of the episode, by time."""
        episode = self._of[clip.name]
        info = self._meta.info
        where = f"table '{self.files.shown}/{episode.data}'"
        # The last table is kept, for v3 has many episodes in a file.
        if episode.data not in self._last:
            self._last.clear()
            with (
                open_parquet(self.files, episode.data) as file,
                parsing(f"table '{self.files.shown}/{episode.data}'"),
            ):
                selected = {*_OWN_COLUMNS, *self._meta.values.values()}
                stored = [name for name in file.schema_arrow.names if name in selected]
                self._last[episode.data] = file.read(stored, use_threads=False)
        table = self._last[episode.data]
        numbers = _read_array(table, "episode_index", (), where)
        rows = np.flatnonzero(numbers == episode.number)
        frame_index = _read_array(table, "frame_index", (), where)[rows]
        is_whole = len(rows) == episode.length  # before anything of that length is made
        if not is_whole or not np.array_equal(frame_index, np.arange(episode.length)):
            raise SourceError(
                f"{where}: episode {episode.number} has {len(rows)} rows, expected "
                f"{episode.length}, with frame_index from 0 on in order"
            )
        part = table.take(rows)
        times_s = _read_array(part, "timestamp", (), where).astype(np.float64)
        exact_s = frame_index / info.fps
        # A float32 is off by up to 1e-5 s at 100 s.
        times_s = np.where(abs(times_s - exact_s) < 1e-4, exact_s, times_s)
        tasks = _read_array(part, "task_index", (), where).tolist()
        columns: dict[str, Any] = {}
        for name, feature in self._meta.values.items():
            feature_info = info.features[feature]
            if feature_info.dtype == "string":
                columns[name] = part.column(feature).to_pylist()
            else:
                columns[name] = _read_array(
                    part,
                    feature,
                    () if feature_info.scalar else feature_info.shape,
                    where,
                )
        names = self.columns
        for number in range(episode.length):
            time_ns = round(times_s[number] * 1e9)
            values = {name: column[number] for name, column in columns.items() if name not in names}
            attributes = {
                name: column[number].item() for name, column in columns.items() if name in names
            }
            yield Frame(
                timestamp_ns=time_ns,
                images={
                    camera: self._make_image(
                        episode,
                        feature,
                        float(times_s[number]),
                        int(rows[number]),
                    )
                    for camera, feature in self._meta.cameras.items()
                },
                values={**values, "task": self._meta.tasks.get(tasks[number])},
                attributes={
                    **attributes,
                    "episode_index": episode.number,
                    "task_index": tasks[number],
                },
            )

    def _make_image(
        self,
        episode: _Episode,
        feature: str,
        time_s: float,
        row: int,
    ) -> Image | Absent:
        time_ns = round(time_s * 1e9)
        if feature in episode.videos:
            file, first_s = episode.videos[feature]
            ref = f"{file}{FRAME}{round((first_s + time_s) * self._meta.info.fps)}"
            return self.video_frame(Image(ref=ref, timestamp_ns=time_ns))
        head = self._heads[feature]
        if isinstance(head, ConvertiblePng):
            self.noted[CONVERTED] += 1
        ref = f"{episode.data}#row={row}&{feature}"
        return Image(
            ref=ref,
            timestamp_ns=time_ns,
            width=head.width,
            height=head.height,
            num_bytes=head.width * head.height,
            made=True,
            extension=EXTENSION_OF[head.format],
        )

    @cached_property
    def _heads(self) -> dict[str, ImageInfo]:
        """Size and format of the features of images, which all images of a feature have: from
        the first sound one.
        """
        first = next(iter(self._of.values())).data
        names = [
            name
            for name in self._meta.cameras.values()
            if self._meta.info.features[name].dtype == "image"
        ]
        heads: dict[str, ImageInfo] = {}
        for name in names:
            fault: ImageError | None = None
            for row in range(_FIRST_ROWS):
                stored = dict(self._iter_stored_images([f"{first}#row={row}&{name}"]))
                try:
                    data = next(iter(stored.values()), b"")
                    heads[name] = convertible_png(data) or probe(data)
                    break
                except ImageError as error:
                    fault = fault or error
            if name not in heads:
                raise SourceError(
                    f"table '{self.files.shown}/{first}': none of the first {_FIRST_ROWS} "
                    f"images of '{shortened(name)}' can be read: {fault}"
                )
        return heads

    def make_images(self, refs: Sequence[str]) -> Iterator[tuple[str, bytes]]:
        """Decode frames of video, and read images of the Parquet files, each once."""
        stored = [ref for ref in refs if _ROW.match(ref)]
        frames = [ref for ref in refs if not _ROW.match(ref)]
        yield from super().make_images(frames)
        for ref, data in self._iter_stored_images(stored):
            yield ref, bytes(plain_or_damaged(data))

    def _iter_stored_images(self, refs: Sequence[str]) -> Iterator[tuple[str, bytes]]:
        """Yield images of Parquet files: of each row group and feature its images at once."""
        rows_by_column: dict[tuple[str, str], list[int]] = {}
        for ref in refs:
            match = _ROW.match(ref)
            if match:
                place = (match[1], match[3])
                row = int(match[2])
                rows_by_column.setdefault(place, []).append(row)
        for (name, feature), rows in rows_by_column.items():
            where = f"table '{self.files.shown}/{name}'"
            begin = 0
            with open_parquet(self.files, name) as file:
                for group in range(file.metadata.num_row_groups):
                    end = begin + file.metadata.row_group(group).num_rows
                    chosen = [row for row in rows if begin <= row < end]
                    if chosen:
                        with parsing(
                            where,
                            f"has no images in column '{shortened(feature)}'",
                        ):
                            column = file.read_row_group(
                                group,
                                [feature],
                                use_threads=False,
                            ).column(0)
                            images = (
                                column.take([row - begin for row in chosen])
                                .combine_chunks()
                                .field("bytes")
                            )
                        for row, data in zip(chosen, images, strict=True):
                            yield (
                                f"{name}#row={row}&{feature}",
                                data.as_py() or b"",
                            )
                    begin = end


def _normalize_name(name: str) -> str:
    """Return a feature's name in lower case, with an underscore for each character that names of
    channels lack.
    """
    return re.sub(r"[^a-z0-9_]", "_", name.lower())[:100]


def _fill_path(template: str, values: Mapping[str, Any]) -> str:
    """Fill ``{name}`` and ``{name:06d}`` of a path; raise SourceError for other fields."""

    def text(field: re.Match[str]) -> str:
        if field[1] not in values:
            raise SourceError(
                f"{_INFO}: path '{shortened(template)}' has the field '{field[1]}', not of "
                f"{', '.join(values)}"
            )
        value = values[field[1]]
        if field[2] and isinstance(value, int):
            return f"{value:0{field[2]}d}"
        return str(value)

    return _FIELD.sub(text, template)


def _read_array(
    table: pa.Table,
    name: str,
    shape: tuple[int, ...],
    where: str,
) -> NDArray[Any]:
    """Return a column of numbers as an array (rows, *shape); raise SourceError where it is no
    such column.
    """
    if name not in table.column_names:
        raise SourceError(
            f"{where} has no column '{shortened(name)}'; it has "
            f"{', '.join(map(shortened, table.column_names))}"
        )
    with parsing(
        where,
        f"has no numbers of shape {list(shape)} in column '{shortened(name)}'",
    ):
        array = table.column(name).combine_chunks()
        while is_list(array.type):
            array = array.flatten()
        if array.null_count:
            raise ValueError(f"{array.null_count} values are null")
        values: NDArray[Any] = array.to_numpy(zero_copy_only=False)
        return values.reshape(len(table), *shape)
