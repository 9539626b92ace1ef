"""The adapter for tables of the user's own, which name files."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import numpy as np
from msgspec import Meta

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.settings import did_you_mean
from fuelrail.sharding.sources.adapter.channels import ValueForms
from fuelrail.sharding.sources.adapter.frame import (
    FRAME,
    Absent,
    Clip,
    FileMember,
    Frame,
    Image,
    Sensors,
    Sweep,
)
from fuelrail.sharding.sources.adapter.masks import (
    mask_channel,
    mask_dtype,
    mask_member,
)
from fuelrail.sharding.sources.adapter.members import Part
from fuelrail.sharding.sources.adapter.poses import Trajectory
from fuelrail.sharding.sources.adapter.rows import attribute_types
from fuelrail.sharding.sources.adapter.source import FrameSource
from fuelrail.sharding.sources.shared.files import source_files
from fuelrail.sharding.sources.shared.pictures import JpegForm
from fuelrail.sharding.sources.shared.points import parse_points
from fuelrail.sharding.sources.shared.tars import OF_IGNORE_ZEROS
from fuelrail.sharding.sources.shared.video import (
    VideoSettings,
    check_decoder,
    libraries,
)
from fuelrail.sharding.sources.tables.boxes import (
    BOX_TYPES,
    boxes_of_frames,
    check_box_columns,
)
from fuelrail.sharding.sources.tables.calibration import (
    CalibrationTable,
    read_calibration,
    shared,
)
from fuelrail.sharding.sources.tables.columns import (
    MASK_COLUMN,
    OF_CLIP,
    SENSOR,
    VALUE,
    attribute_type,
    check_column,
    is_known,
    is_path,
    type_of,
)
from fuelrail.sharding.sources.tables.matching import SensorRows, ascending
from fuelrail.sharding.sources.tables.members import (
    Paths,
    RowFiles,
)
from fuelrail.sharding.sources.tables.tables import (
    EXTENSIONS,
    Table,
    distinct,
    find_table,
    has_text,
    read_batches,
    table_schema,
)
from fuelrail.sharding.sources.tables.values import TIME_COLUMNS, Rows

if TYPE_CHECKING:
    import pyarrow as pa

    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.pipeline.sample.schema import F32, I64
    from fuelrail.sharding.sources.adapter.frame import Calibration
    from fuelrail.sharding.sources.shared.scan_table import ScanWriter
    from fuelrail.sharding.sources.source import Reads, ScanInfo
    from fuelrail.sharding.sources.tables.tables import TypeOf

TABLES: Final = ("frames", "sensor_data", "calibration", "ego_pose", "boxes")
_AXES = Literal["optical", "flu"]


class ManifestSettings(VideoSettings, frozen=True, kw_only=True):
    """Options of the adapter."""

    root: Annotated[
        str,
        Meta(description="folder or URL that all paths are below; empty: the folder of the tables"),
    ] = ""
    pixel_origin: Annotated[
        Literal["center", "corner"],
        Meta(
            description=(
                "where pixel (0, 0) of the intrinsics is: the center of the top-left pixel, or "
                "its corner"
            )
        ),
    ] = "center"
    camera_axes: Annotated[
        _AXES | dict[str, _AXES],
        Meta(
            description=(
                "axes of cameras: optical (right, down, forward) or flu (forward, left, up); or "
                "a mapping of camera to axes, the others are optical"
            )
        ),
    ] = "optical"
    boxes_in: Annotated[
        Literal["ego", "global"],
        Meta(description="frame of reference of boxes: ego at the frame's time, or global"),
    ] = "ego"
    lidar_columns: Annotated[
        tuple[str, ...],
        Meta(description="columns of lidar files, as [x, y, z, intensity]"),
    ] = (
        "x",
        "y",
        "z",
        "intensity",
    )
    time_base: Annotated[
        Literal["unix", "relative"],
        Meta(
            description=(
                "unix: times are since 1970, between 2000 and 2100; relative: a clock of the "
                "data's own"
            )
        ),
    ] = "unix"
    ego_origin: Annotated[
        str,
        Meta(description="where in the vehicle ego is, such as rear_axle_ground"),
    ] = "unknown"
    reference: Annotated[
        str,
        Meta(
            description=(
                "sensor of sensor_data whose times are those of frames; empty: first lidar, "
                "else first camera"
            )
        ),
    ] = ""
    tolerance_ms: Annotated[
        float,
        Meta(
            ge=0,
            description="largest time between a frame and a sensor's file in sensor_data",
        ),
    ] = 50.0
    ignore_zeros: Annotated[bool, Meta(description=f"{OF_IGNORE_ZEROS}; for paths into tars")] = (
        False
    )
    max_gap_s: Annotated[
        float,
        Meta(
            gt=0,
            description="largest gap between two ego poses in which poses are interpolated",
        ),
    ] = 0.5


class Manifest(FrameSource[ManifestSettings]):
    """Tables of your own (Parquet, JSON lines, CSV) that name files, ranges of files, members of
    tars, video frames.

    PATH is a folder with the table `frames`, or a file that is read as `frames`. Tables are Parquet
    (`.parquet`), JSON lines (`.jsonl`) or CSV (`.csv`, with commas), in UTF-8, also mixed. CSV has
    no lists: give each number its own column, such as `fx` or `tx`. Rows are copied to the
    temporary folder.

    Each row of `frames` is a frame. NAME is a sensor (letters, digits and `_`); in lower case it is
    the channel. Sensors have the columns' order. Columns:

    - `clip_id`: the drive; its rows must be together, and are sorted by time.
    - A time, and the pose `ego2global`, are the frame's. Without any pose, poses are the identity.
    - `cam.NAME.path`: a JPEG or PNG. Null: no image (option `missing_camera`).
    - `cam.NAME.` + a time, `.ego2global`: of the exposure; default: the frame's time, the pose
      interpolated.
    - `cam.NAME.intrinsics`, or `.fx`, `.fy`, `.cx`, `.cy`: K, 9 numbers row by row, or 3 lists of
      3.
    - `cam.NAME.cam2ego`: a pose. Without any calibration the camera is not calibrated.
    - `cam.NAME.width`, `.height`, `.num_bytes`: checked. Without a size or a known suffix the scan
      reads the image's head.
    - `cam.NAME.dist_model`, `.dist`: lens model and coefficients, as FORMAT.md has them.
    - `lidar.NAME.path`, a time, `.lidar2ego`, `.ego2global`: a sweep, `.npy` [P, C], raw float32
      rows, or PCD (text or binary).
    - `...path` with `...byte_offset`, `...byte_length`: bytes inside a file.
    - `boxes`: a list of structs. Null: not labelled; empty: labelled, no boxes.
    - `split`, `log_id`, `vehicle`: of the clip, equal in all its rows.
    - `mask.NAME.path`, `mask.NAME.KIND.path`: channel `mask_NAME` or `KIND_NAME`
      (`instance_front`), a PNG of the image's size, gray (8 or 16 bits) or with a palette, stored
      with 8 bits at least. Null: none.
    - `value.NAME`: channel NAME, a number, a text, a list of texts, or lists of numbers. Type and
      shape are equal in all rows; only a list's first dimension may vary. Null: none.
    - Any other: an attribute, for `--select` and filters: number, text, true or false.

    In these columns:

    - Attributes have names of letters, digits and `_`, except `clip_name`, `num_cameras`,
      `num_boxes`, `key`, `clip` and `frame`. `speed_mps` and `hour_utc` are computed, unless a
      column of numbers gives them.
    - Texts of CSV and JSON lines become numbers only without loss: `007` and `12345678901234567890`
      stay texts.
    - A path is below the tables' folder, or below `-o root=s3://bucket/drives`, a folder or URL: it
      is relative, or begins with the root. Datasets do not store the root, so only `fuelrail shard`
      repairs them. `FILE#OFFSET+LENGTH` are bytes of a file, such as an uncompressed zip;
      `tar:FILE#MEMBER` is a member of an uncompressed tar (`-o ignore_zeros=true`); `FILE#frame=N`
      is a frame of a video.
    - A time is one column: integers `timestamp_ns`, `timestamp_us` or `timestamp_s` (also float,
      rounded to microseconds), or `timestamp` of Arrow's type timestamp. Times lie between 2000 and
      2100; `-o time_base=relative` allows other clocks.
    - A pose P is a 4x4 matrix P (16 numbers row by row, or 4 lists of 4); or `P.t` with `P.q_wxyz`
      or `P.q_xyzw`; or `P.tx`, `P.ty`, `P.tz`, `P.qw`, `P.qx`, `P.qy`, `P.qz`. `P.q` is refused:
      its order is unknown.
    - Boxes have `x`, `y`, `z` or `centre`; `length`, `width`, `height` or `size_lwh`; `qw` to `qz`,
      `q_wxyz`, `q_xyzw`, or `yaw`; `category`; optionally `track`, `vx`, `vy`, `vz` or `velocity`,
      `num_lidar_pts`, `num_radar_pts`, `visibility`. They are in ego at the frame's time (`-o
      boxes_in=global`: in global).
    - Conventions: m, rad; ego x forward, y left, z up; cameras x right, y down, z forward (`-o
      camera_axes=flu`: forward, left, up); pixel (0, 0) is the centre of the top-left pixel (`-o
      pixel_origin=corner`: its corner).

    Further tables, for calibrations that clips share and for sensors with their own times; each has
    `clip_id`:

    - `sensor_data`, a row a file: `sensor`, a time, `path`, `byte_offset`, `byte_length`,
      `num_bytes`, `ego2global`.
    - `calibration`, a row a sensor, of a clip or (without `clip_id`) of all: `sensor`,
      `sensor2ego`, `intrinsics` or `fx` ..., `width`, `height`, `dist_model`, `dist`.
    - `ego_pose`, a row a pose: a time, `ego2global`.
    - `boxes`, a row a box: its frame's time, columns of boxes. Without `category`: labelled, no
      boxes.

    `sensor_data` replaces `frames`: frames are at the times of the reference sensor (`-o
    reference=NAME`; else the first lidar or camera). Each file belongs to the nearest frame, within
    `-o tolerance_ms` (50). A sensor without intrinsics is a lidar. Ego poses are interpolated
    (linearly, and by slerp) within their range and across gaps up to `-o max_gap_s` (0.5).

    A video's frames have the tables' times, not the container's. The scan refuses a frame beyond
    the last, and a size other than the table's.
    """

    kind = "manifest"
    settings_type = ManifestSettings
    leaves_out = False
    """Whether columns of values that can be no channel are left out, and counted, not refused."""

    def __init__(self, location: str, options: dict[str, Any]) -> None:
        super().__init__(location, options)
        self.settings.check_libraries()
        self.time_base = self.settings.time_base
        self.ego_origin = self.settings.ego_origin
        self._is_unix = self.time_base == "unix"
        self._table_files = self.files
        folder = location
        if self.file is not None:
            folder = str(Path(location.removeprefix("file://")).parent)
        if self.settings.root:
            self.files = source_files(self.settings.root)
        only_keyframes = self.settings.frames == "keyframes"
        self._paths = Paths(
            self.files,
            self.settings.root or folder,
            only_keyframes=only_keyframes,
            ignore_zeros=self.settings.ignore_zeros,
        )
        self._tables: dict[str, Table] = {}
        self._values: list[str] = []
        self._masks: dict[str, Channel] = {}
        self._calibrations: CalibrationTable | None = None
        # Prefixes of the columns of each sensor in frames, such as "cam.front.".
        self._prefixes: list[str] = []

    @cached_property
    def _names(self) -> dict[str, str]:
        """Names of the existing tables."""
        names = {
            stem: name
            for stem in TABLES
            if (name := find_table(self._table_files, stem)) is not None
        }
        if self.file is not None:
            if not self.file.endswith(tuple(f".{extension}" for extension in EXTENSIONS)):
                raise SourceError(
                    f"the table '{self._table_files.shown}/{self.file}' must end with "
                    f".{', .'.join(EXTENSIONS)} (JSON lines: one object a line); write it "
                    "in one of these forms"
                )
            names["frames"] = self.file
        if not names.keys() & {"frames", "sensor_data"}:
            raise SourceError(
                f"the manifest source '{self._table_files.shown}' has no table frames or "
                "sensor_data with the ending .parquet, .jsonl or .csv"
            )
        return names

    @cached_property
    def _free(self) -> dict[str, type]:
        """Columns of attributes: all of ``frames`` that are not known by name."""
        if "frames" not in self._names:
            return {}
        name = self._names["frames"]
        columns: dict[str, type] = {}
        for field in table_schema(self._table_files, name, type_of):
            if not is_known(field.name):
                columns[field.name] = attribute_type(
                    f"table '{self._table_files.shown}/{name}'", field
                )
        return columns

    @cached_property
    def _has_video(self) -> bool:
        """Whether a path names a frame of a video."""
        named = [name for stem, name in self._names.items() if stem in ("frames", "sensor_data")]
        return any(has_text(self._table_files, name, FRAME, is_path) for name in named)

    @property
    def options(self) -> dict[str, Any]:
        """All options but ``root``, on which no byte depends; the versions of libraries where
        there is video.
        """
        values = {
            **super().options,
            "libraries": libraries() if self._has_video else "",
        }
        del values["root"]
        return values

    @property
    def reads(self) -> Reads:  # type: ignore[override]  # of these tables, not of the kind
        """ "clip" where there is video."""
        return "clip" if self._has_video else "random"

    def make_images(self, refs: Sequence[str]) -> Iterator[tuple[str, Buffer]]:
        """Decode frames of video, each once."""
        form = self.stored or JpegForm(self.settings.video_quality)
        return self._paths.videos.jpegs(refs, form)

    @property
    def attribute_types(self) -> dict[str, type]:
        """Columns of attributes: those of all sources, and the free columns of ``frames``."""
        return attribute_types(self._classes().names, self._free)

    def scan(self, out: ScanWriter) -> ScanInfo:
        """Write a row for each frame that is kept."""
        self.columns = self._free
        if self._has_video:
            check_decoder(f"'{self.files.shown}'")
        with tempfile.TemporaryDirectory(prefix="fuelrail-") as scratch:
            for stem, name in self._names.items():
                batches = self._batches(name, BOX_TYPES.get if stem == "boxes" else type_of)
                self._tables[stem] = Table(
                    f"{self._table_files.shown}/{name}",
                    batches,
                    Path(scratch),
                    has_clips=stem != "calibration",
                )
            matches = (SENSOR.match(column) for column in _list_columns(self._tables.get("frames")))
            self._prefixes = list(
                dict.fromkeys(f"{match[1]}.{match[2]}." for match in matches if match is not None)
            )
            if "boxes" in self._tables:
                check_box_columns(
                    self._tables["boxes"].name,
                    self._tables["boxes"].schema.names,
                )
            if "calibration" in self._tables:
                axes_option = self.settings.camera_axes
                axes = (
                    {"": axes_option}
                    if isinstance(axes_option, str)
                    else {"": "optical", **axes_option}
                )
                corner = self.settings.pixel_origin == "corner"
                self._calibrations = CalibrationTable(
                    self._tables["calibration"],
                    axes,
                    is_corner=corner,
                )
            self.has_poses = "ego_pose" in self._tables or any(
                name.partition(".")[0] == "ego2global"
                for name in _list_columns(self._tables.get("frames"))
            )
            if not self.has_poses and any(
                name.startswith("ego2global")
                for name in _list_columns(self._tables.get("sensor_data"))
            ):
                raise SourceError(
                    f"table '{self._tables['sensor_data'].name}' has poses of files, but "
                    "none of frames: give the table ego_pose"
                )
            try:
                table = self._tables.get("frames")
                forms = ValueForms()
                names = [column for column in _list_columns(table) if column.startswith(VALUE)]
                if table is not None and names:
                    for rows in table.parts():
                        for column in names:
                            for value in rows.column(column).to_pylist():
                                forms.learn(column.removeprefix(VALUE), value)
                for name, why in forms.refused.items():
                    if not self.leaves_out:
                        where = f"table '{self._tables['frames'].name}': the column {VALUE}{name}"
                        raise SourceError(f"{where} cannot become a channel: {why}")
                    self.noted[f"column {name} left out, {why}"] += 1
                values = forms.channels()
                self._values = [channel.name for channel in values]
                self._masks = self._find_mask_channels()
                self.channels = (*values, *self._masks.values())
                return super().scan(out)
            finally:
                self._tables = {}
                self._calibrations = None

    def _find_mask_channels(self) -> dict[str, Channel]:
        """Return the channels of the columns of masks; the first mask of a column says its
        dtype.
        """
        channels: dict[str, Channel] = {}
        table = self._tables.get("frames")
        cameras = [
            camera.source_name for camera in (self.sensors().cameras if table is not None else ())
        ]
        for column in _list_columns(table):
            match = MASK_COLUMN.fullmatch(column)
            if match is None or table is None:
                continue
            if match[1] not in cameras:
                raise SourceError(
                    f"table '{table.name}': the column {column} is of the camera "
                    f"'{match[1]}', which no other column names{did_you_mean(match[1], cameras)}"
                )
            dtype = self._find_mask_dtype(table, column) or "uint8"
            channel = mask_channel(match[1].lower(), match[2] or "mask", dtype)
            channels[column] = channel
        names = [channel.name for channel in channels.values()]
        twice = {*self._values} & {*names} or {name for name in names if names.count(name) > 1}
        if twice:
            raise SourceError(f"two columns become the channel {min(twice)}: rename one of them")
        return channels

    def _find_mask_dtype(self, table: Table, column: str) -> str | None:
        """Return the dtype of the first mask of a column that is there."""
        for rows in table.parts():
            for row, path in enumerate(rows.texts(column)):
                if not path:
                    continue
                ref = self._paths.reference(rows, row, path)
                part = Part.parse(ref)
                facts = self.files.facts(part.name)
                if facts is not None and facts.num_bytes:
                    where = f"table '{table.name}', column {column}: '{ref}'"
                    head = self.files.read(part.name, part.offset, 32)
                    return mask_dtype(head, where)
        return None

    def _batches(self, name: str, types: TypeOf) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a table by 1024; a source of other tables has its own."""
        return read_batches(self._table_files, name, types, self.noted)

    def sensors(self) -> Sensors:
        """Return the sensors that the columns name, or the rows of ``calibration``."""
        cameras: dict[str, None] = {}
        lidars: dict[str, None] = {}
        if "sensor_data" in self._tables:
            data = self._tables["sensor_data"]
            if self._calibrations is None:
                raise SourceError(
                    f"'{self._table_files.shown}' has sensor_data, which needs a table "
                    "calibration beside it"
                )
            sensors_known = self._calibrations.sensors
            for name in distinct(data.parts(), "sensor"):
                if name not in sensors_known:
                    raise SourceError(
                        f"table '{data.name}': sensor '{name}' has no row in "
                        f"'{self._calibrations.table.name}'{did_you_mean(name, sensors_known)}"
                    )
            for name, is_camera in sensors_known.items():
                (cameras if is_camera else lidars)[name] = None
        for column in _list_columns(self._tables.get("frames")):
            match = SENSOR.match(column)
            if match is not None:
                check_column(self._tables["frames"].name, match)
                (cameras if match[1] == "cam" else lidars)[match[2]] = None
        if not cameras:
            raise SourceError(
                f"the manifest source '{self.files.shown}' names no camera: cam.NAME.path, "
                "or sensor_data"
            )
        names = (*cameras, *lidars)
        channels = [name.lower() for name in names]
        for name, channel in zip(names, channels, strict=True):
            is_word = re.fullmatch(r"[a-z0-9_]+", channel) is not None
            if not is_word or channels.count(channel) > 1:
                raise SourceError(
                    f"sensor '{name}': names have letters, digits and _, each once, upper "
                    "or lower case"
                )
        columns = dict.fromkeys(lidars, self.settings.lidar_columns)
        return Sensors.from_names(cameras, columns)

    def clips(self) -> Iterator[Clip]:
        """Yield the clips in the order of the first table."""
        main = self._tables["frames" if "frames" in self._tables else "sensor_data"]
        for table in self._tables.values():
            missing_clips = table.clips.keys() - main.clips.keys() - {""}
            for clip in missing_clips:
                raise SourceError(
                    f"table '{table.name}', row {table.clips[clip][0]}: clip '{clip}' is "
                    f"not in '{main.name}'"
                )
        for clip in main.clips:
            rows = main.rows(clip)
            assert rows is not None, "it has rows"
            facts: dict[str, Any] = {}
            if "frames" in self._tables:
                for name in OF_CLIP:
                    if name not in rows:
                        continue
                    texts = rows.texts(name)
                    facts[name] = texts[0] or ""
                    for row, text in enumerate(texts):
                        if text != texts[0]:
                            problem = f"'{text}', but '{texts[0]}' in row {rows.first}"
                            rows.fail(row, name, f"{problem}: a clip has one {name}")
            named = [
                self._tables[stem].rows(clip)
                for stem in ("frames", "sensor_data")
                if stem in self._tables
            ]
            videos = (
                self._paths.videos_of(rows for rows in named if rows is not None)
                if self._has_video
                else ()
            )
            yield Clip(name=clip, files=videos, **facts)

    def poses(self, clip: Clip) -> Trajectory | None:
        """Return the poses of ``ego_pose``, else those of the frames."""
        table = self._tables.get("ego_pose") or self._tables.get("frames")
        rows = None if table is None else table.rows(clip.name)
        matrices = None if rows is None else rows.poses("ego2global")
        if rows is None or matrices is None:
            return None
        times = _read_times(rows, is_unix=self._is_unix)
        is_known = ~np.isnan(matrices[:, 0, 0])
        order = ascending(rows, times, np.flatnonzero(is_known))
        return Trajectory(
            times[order],
            matrices[order],
            rows.table,
            max_gap_s=self.settings.max_gap_s,
        )

    def frames(self, clip: Clip) -> Iterable[Frame]:
        """Yield the clip's frames by time."""
        rows = None
        if "frames" in self._tables:
            rows = self._tables["frames"].rows(clip.name)
        data = None
        if "sensor_data" in self._tables:
            data = self._tables["sensor_data"].rows(clip.name)
        sensors = None
        if data is not None and self._calibrations is not None:
            sensors = SensorRows(
                clip.name,
                RowFiles(
                    self._paths,
                    data,
                    "",
                    _read_times(data, is_unix=self._is_unix),
                ),
                self._calibrations,
            )
        if rows is None:
            assert sensors is not None, "there is one of the two"
            times = sensors.reference_times(self.settings.reference)
            order = np.arange(len(times))
        else:
            times = _read_times(rows, is_unix=self._is_unix)
            order = ascending(rows, times, np.arange(len(times)))
        images: list[dict[str, Image | Absent]] = [{} for _ in times]
        sweeps: list[dict[str, Sweep]] = [{} for _ in times]
        if rows is not None:
            for prefix in self._prefixes:
                calibrations = self._complete_calibration(clip, rows, prefix)
                sensor_times = rows.times(prefix, is_unix=self._is_unix)
                if sensor_times is None:
                    sensor_times = times
                files = RowFiles(
                    self._paths,
                    rows,
                    prefix,
                    np.where(sensor_times < 0, times, sensor_times),
                    is_calibrated=self._calibrations is not None,
                )
                kind, name, _ = prefix.split(".")
                for row, calibration in enumerate(calibrations):
                    if kind == "cam":
                        images[row][name.lower()] = files.image(row, calibration)
                    elif (sweep := files.sweep(row, calibration)) is not None:
                        sweeps[row][name.lower()] = sweep
        if sensors is not None:
            into = [(images[row], sweeps[row]) for row in order.tolist()]
            sensors.add(times[order], self.settings.tolerance_ms, into)
        stated = (
            [None] * len(times) if rows is None else shared(rows.poses("ego2global"), len(times))
        )
        table = self._tables.get("boxes")
        boxes = boxes_of_frames(
            rows,
            None if table is None else table.rows(clip.name),
            times,
            order,
            in_global=self.settings.boxes_in == "global",
            is_unix=self._is_unix,
        )
        attributes: dict[str, list[Any]] = {}
        values: dict[str, list[Any]] = {}
        masks: list[list[FileMember]] = [[] for _ in times]
        if rows is not None:
            attributes = {name: rows.column(name).to_pylist() for name in self._free}
            values = {name: rows.column(VALUE + name).to_pylist() for name in self._values}
            for column, channel in self._masks.items():
                hint = f"leave the column {column} empty where there is no mask"
                for row, path in enumerate(rows.texts(column)):
                    if path:
                        ref = self._paths.reference(rows, row, path)
                        masks[row].append(mask_member(channel, ref, hint))
        for number, row in enumerate(order.tolist()):
            yield Frame(
                timestamp_ns=int(times[row]),
                ego2global=stated[row],
                images=images[row],
                sweeps=sweeps[row],
                boxes=boxes[number],
                members=masks[row],
                values={name: column[row] for name, column in values.items()},
                attributes={name: column[row] for name, column in attributes.items()},
            )

    def _complete_calibration(
        self,
        clip: Clip,
        rows: Rows,
        prefix: str,
    ) -> list[Calibration]:
        """Return the calibration of the sensor with this prefix of columns, completed from
        ``calibration``.
        """
        _, name, _ = prefix.split(".")
        is_camera = prefix.startswith("cam.")
        axes_option = self.settings.camera_axes
        axes = axes_option if isinstance(axes_option, str) else axes_option.get(name, "optical")
        calibrations = read_calibration(
            rows,
            prefix,
            "cam2ego" if is_camera else "lidar2ego",
            is_corner=self.settings.pixel_origin == "corner",
            is_flu=is_camera and axes == "flu",
        )
        fallback = None
        if self._calibrations is not None:
            fallback = self._calibrations.find(clip.name, name)
        if fallback is None:
            return calibrations
        return [calibration.completed(fallback) for calibration in calibrations]

    def points(self, ref: str) -> F32:
        """Read a lidar file, or a range of a file."""
        return parse_points(
            Part.parse(ref).read(self.files),
            self.settings.lidar_columns,
            f"lidar '{self.files.shown}/{ref}'",
        )


def _list_columns(table: Table | None) -> list[str]:
    """Return the names of a table's columns; none where the table does not exist."""
    if table is None:
        return []
    return list(table.schema.names)


def _read_times(rows: Rows, *, is_unix: bool) -> I64:
    """Return the times of all rows [ns]; raise SourceError where one has none."""
    times = rows.times(is_unix=is_unix)
    if times is None:
        raise SourceError(
            f"table '{rows.table}' has no column of time, one of {', '.join(TIME_COLUMNS)}"
        )
    is_negative = times < 0
    if is_negative.any():
        rows.fail(int(np.argmax(is_negative)), "timestamp", "it is empty")
    return times
