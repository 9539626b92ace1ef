"""NVIDIA's PhysicalAI-Autonomous-Vehicles: seven f-theta cameras as video in zips of about 100
clips, lidar, egomotion.

The layout is that of https://huggingface.co/datasets/nvidia/PhysicalAI-Autonomous-Vehicles, as a
download keeps it: ``clip_index.parquet`` has the chunk of each clip, ``features.csv`` says which
files a chunk has. Ego is the rig frame, global the clip's anchor frame; the dataset's own times may
be negative. The lidar is a Parquet file a clip, with a row for each spin and its points as Draco
has them; a radar is one with a row for each return, at azimuth, elevation [rad] and distance [m] in
the sensor's axes (x forward, y left, z up).
"""

from __future__ import annotations

import contextlib
import csv
import io
import re
import shutil
import tempfile
import zipfile
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from fuelrail.pipeline.channels.series import series_channel
from fuelrail.pipeline.channels.table import Channel, Law
from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.rigid import invert_rigid
from fuelrail.sharding.sources.adapter.frame import (
    FRAME,
    Absent,
    Calibration,
    Clip,
    FileMember,
    Frame,
    Image,
    Sensors,
    Sweep,
)
from fuelrail.sharding.sources.adapter.members import POINTS
from fuelrail.sharding.sources.adapter.poses import Trajectory, pose
from fuelrail.sharding.sources.adapter.source import FrameSource
from fuelrail.sharding.sources.shared.arrow import BoundedParquet
from fuelrail.sharding.sources.shared.foreign import parsing, read_json, read_text
from fuelrail.sharding.sources.shared.pictures import JpegForm
from fuelrail.sharding.sources.shared.video import VideoSettings, libraries, video_frames

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CAMERAS = (
    "camera_front_wide_120fov",
    "camera_front_tele_30fov",
    "camera_cross_left_120fov",
    "camera_cross_right_120fov",
    "camera_rear_left_70fov",
    "camera_rear_right_70fov",
    "camera_rear_tele_30fov",
)
MOTION = ("vx", "vy", "vz", "ax", "ay", "az", "curvature")
LIDAR = "lidar_top_360fov"
LIDAR_COLUMNS = ("x", "y", "z", "intensity", "ring", "time")
SPIN = ("spin_start_timestamp", "reference_timestamp")
"""Columns of a spin's time, of which the first that a file has counts."""
POINTS_BYTES = 4_000_000
"""About those of a spin."""
RADAR = {
    "x": "m",
    "y": "m",
    "z": "m",
    "vx": "m/s",
    "vy": "m/s",
    "vz": "m/s",
    "radial_velocity": "m/s",
    "rcs": "dBsm",
    "snr": "dB",
    "exist_probb": "%",
    "doppler_ambiguity": "m/s",
    "dt_s": "s",
}
"""Columns of a radar's channel, with their units."""
MEASURED = tuple(RADAR)[6:-1]
"""Columns of a radar's file that are stored as they are."""
FIRST_US = 1_000_000
"""Added to times, which count from the beginning of the clip."""
MOST_BYTES = 1 << 30
"""Of a member of a zip; a clip's video has about 40 MB."""


class PhysicalAiSettings(VideoSettings, frozen=True, kw_only=True):
    """Options of the adapter."""

    radars: Annotated[
        bool, msgspec.Meta(description="true stores radars as channels of their names")
    ] = False


class _Member(NamedTuple):
    """A file in a zip."""

    path: Path
    name: str

    @property
    def label(self) -> str:
        """How errors name it."""
        return f"file '{self.path.name}': {self.name}"


class _Scans(NamedTuple):
    """The scans of a radar: times (S,) [ns], and sensor to global at each (S, 4, 4)."""

    times: np.ndarray
    sensor2global: np.ndarray


class PhysicalAi(FrameSource[PhysicalAiSettings]):
    """PhysicalAI-AV clips: frames at the front camera's times, nearest images, spins and scans,
    poses, egomotion.

    PATH is NVIDIA's PhysicalAI-Autonomous-Vehicles as downloaded: videos of seven cameras
    (`ftheta`), poses, and `egomotion` as a series. Missing chunks are left out; missing cameras are
    absent: `-o 'cameras=[camera_front_wide_120fov]'`. Times count from one second before the clip.
    It was not tested on a file of the dataset.

    - Lidar needs its chunks and `pip install './configs/sources/physical_ai[lidar]'` (DracoPy),
      else it is left out. A frame has the nearest spin, within half a period, in the lidar's axes:
      x, y, z, intensity (0 to 1), ring (row of the lidar's model), time [s] since the spin began;
      NaN for unknown. Above 10 Hz frames share spins: give `rate=10`.
    - Radars become channels such as `radar_front_center_srr_0`: the nearest scan, within half a
      period. `x`, `y`, `z` and the radial velocity along the ray (`vx`, `vy`, `vz`, not compensated
      for ego's motion) are in ego at the sample's time; other columns as measured, and `dt_s`.
    """

    kind = "physical_ai"
    settings_type = PhysicalAiSettings
    requires: ClassVar = {"av": "fuelrail[video]"}
    reads = "clip"
    time_base = "clip"
    ego_origin = "rig"
    license = "NVIDIA Autonomous Vehicle Dataset License Agreement"
    columns: ClassVar = {"chunk": int}

    def __init__(self, location: str, options: dict[str, Any]) -> None:
        super().__init__(location, options)
        self.settings.check_libraries()
        # What was read last: tables of calibrations by file; all else by the name of the clip.
        self._calibrations: dict[str, dict[tuple[str, ...], dict[str, Any]]] = {}
        self._motions: dict[str, dict[str, np.ndarray]] = {}
        self._radar_tables: dict[str, dict[str, dict[str, np.ndarray]]] = {}
        self._spins: dict[str, BoundedParquet] = {}

    @property
    def options(self) -> dict[str, Any]:
        return {**super().options, "libraries": libraries()}

    @property
    def channels(self) -> tuple[Channel, ...]:  # type: ignore[override]
        """The egomotion, and radars where they are asked for."""
        text = f"in the anchor frame, SI units: {', '.join(MOTION)}"
        motion = series_channel("egomotion", "float64", (len(MOTION),), description=text)
        return (motion, *map(radar_channel, self._radars))

    @cached_property
    def _radars(self) -> list[str]:
        """The radars of which a chunk is downloaded."""
        if not self.settings.radars:
            return []
        names = [name for name in self._features if name.startswith("radar_")]
        return [name for name in names if self._has_chunk(name)]

    def _has_chunk(self, feature: str) -> bool:
        """Return whether a chunk of a feature is downloaded."""
        with parsing(f"file '{self.files.shown}/features.csv'"):
            folder, _, name = self._features[feature]["chunk_path"].rpartition("/")
            number = re.escape("{chunk_id:04d}")
            pattern = re.compile(re.escape(name).replace(number, r"\d+"))
        names: list[str] = []
        with contextlib.suppress(SourceError):  # no such folder
            names = self.files.listed(folder)
        return any(pattern.fullmatch(name) for name in names)

    @cached_property
    def _has_lidar(self) -> bool:
        """Whether spins are downloaded, and can be decoded."""
        if not self.settings.points or LIDAR not in self._features or not self._has_chunk(LIDAR):
            return False
        with contextlib.suppress(ImportError):
            import DracoPy  # noqa: F401

            return True
        self.noted["lidar left out, its points are Draco's: pip install DracoPy"] += 1
        return False

    def sensors(self) -> Sensors:
        lidars = {LIDAR: LIDAR_COLUMNS} if self._has_lidar else {}
        return Sensors.from_names(CAMERAS, lidars)

    @cached_property
    def _features(self) -> dict[str, dict[str, str]]:
        """Rows of ``features.csv`` by feature."""
        where = f"file '{self.files.shown}/features.csv'"
        text = read_text(self.files.read("features.csv"), where)
        with parsing(where):
            return {row["feature"]: row for row in csv.DictReader(io.StringIO(text))}

    def _name_chunk(self, feature: str, chunk: int) -> str:
        """Return the name of the file that has a chunk of a feature."""
        with parsing(f"file '{self.files.shown}/features.csv'"):
            path = self._features[feature]["chunk_path"]
            return path.replace("{chunk_id:04d}", f"{chunk:04d}")

    def clips(self) -> Iterator[Clip]:
        """Yield the clips whose egomotion and at least one camera are downloaded."""
        with parsing(f"download '{self.files.shown}'"):
            for (clip_id,), row in sorted(self._read_indexed("clip_index.parquet").items()):
                chunk = int(row["chunk"])
                videos = self._list_downloaded(CAMERAS, chunk)
                motion_file = self._name_chunk("egomotion", chunk)
                if not row.get("clip_is_valid", True):
                    self.noted["clips left out, not valid by clip_index.parquet"] += 1
                    continue
                if not videos or self.files.facts(motion_file) is None:
                    self.noted["clips left out, not downloaded"] += 1
                    continue
                lidars = [LIDAR] if self._has_lidar else []
                scans = self._list_downloaded([*lidars, *self._radars], chunk)
                clip = Clip(
                    name=clip_id,
                    token=str(chunk),
                    split=row.get("split") or "",
                    files=(motion_file, *videos, *scans),
                )
                motion = self._read_motion(clip)
                values = np.stack([motion[name] for name in MOTION], 1)
                yield msgspec.structs.replace(
                    clip,
                    attributes={"chunk": chunk},
                    series={"egomotion": (motion["timestamp"], values)},
                )

    def _list_downloaded(self, features: Sequence[str], chunk: int) -> list[str]:
        """Return the files that have a chunk of these features, of those that are downloaded."""
        names = [self._name_chunk(name, chunk) for name in features if name in self._features]
        return [name for name in names if self.files.facts(name) is not None]

    def _find_member(self, feature: str, clip: Clip, alias: str) -> _Member:
        """Return a file of a clip's feature in its zip; without ``alias`` the only table."""
        path = self.files.path(self._name_chunk(feature, int(clip.token)))
        if path is None:
            raise SourceError(f"'{self.files.shown}' is a URL: copy the chunks to a folder")
        text = self._features[feature]["clip_files_in_zip"]
        where = f"file '{self.files.shown}/features.csv'"
        names = read_json(text.encode(), where, dict[str, str])
        tables = (name for name in names.values() if name.endswith(".parquet"))
        name = names[alias] if alias else next(tables)
        return _Member(Path(path), name.replace("{clip_id}", clip.name))

    def _has_table(self, feature: str, clip: Clip) -> bool:
        """Return whether a clip has the table of a lidar or radar."""
        if self._name_chunk(feature, int(clip.token)) not in clip.files:
            return False
        path, name = self._find_member(feature, clip, "")
        with parsing(f"file '{path.name}'"), zipfile.ZipFile(path) as file:
            return name in file.namelist()

    def _read_table(
        self,
        feature: str,
        clip: Clip,
        alias: str,
        columns: Sequence[str],
    ) -> dict[str, np.ndarray]:
        """Read columns of a Parquet file in a zip; times in nanoseconds."""
        member = self._find_member(feature, clip, alias)
        with parsing(member.label), zipfile.ZipFile(member.path) as file:
            if file.getinfo(member.name).file_size > MOST_BYTES:
                raise ValueError(f"it has over {MOST_BYTES} bytes")
            content = pa.BufferReader(file.read(member.name))
            table = BoundedParquet(content, member.label).read(list(columns))
            arrays = {name: table.column(name).to_numpy() for name in columns}
            arrays["timestamp"] = _to_ns(arrays["timestamp"])
            return arrays

    def _read_indexed(self, name: str) -> dict[tuple[str, ...], dict[str, Any]]:
        """Read a table that pandas wrote: its rows by their index."""
        where = f"file '{self.files.shown}/{name}'"
        with parsing(where):
            content = pa.BufferReader(self.files.read(name))
            table = BoundedParquet(content, where).read()
            index = table.schema.pandas_metadata["index_columns"]
            rows = {}
            for row in table.to_pylist():
                key = tuple(str(row[column]) for column in index)
                rows[key] = row
            return rows

    def _read_calibration(self, feature: str, clip: Clip) -> dict[str, dict[str, float]]:
        """Return a clip's rows of a chunk's table by sensor; the last tables are kept."""
        name = self._name_chunk(feature, int(clip.token))
        if name not in self._calibrations:
            if len(self._calibrations) > 1:
                self._calibrations.clear()
            self._calibrations[name] = self._read_indexed(name)
        rows = {}
        for (clip_id, sensor), row in self._calibrations[name].items():
            if clip_id == clip.name:
                rows[sensor] = row
        return rows

    def _read_motion(self, clip: Clip) -> dict[str, np.ndarray]:
        """Return the columns of a clip's egomotion; those of the last clip are kept."""
        if clip.name not in self._motions:
            columns = ("timestamp", "qx", "qy", "qz", "qw", "x", "y", "z", *MOTION)
            motion = self._read_table("egomotion", clip, "egomotion", columns)
            self._motions = {clip.name: motion}
        return self._motions[clip.name]

    def poses(self, clip: Clip) -> Trajectory:
        with parsing(f"egomotion of clip '{self.files.shown}/{clip.name}'"):
            motion = self._read_motion(clip)
            rotation = np.stack([motion[name] for name in ("qw", "qx", "qy", "qz")], 1)
            translation = np.stack([motion[name] for name in ("x", "y", "z")], 1)
            ego2global = pose(rotation, translation, clip.name)
            return Trajectory(motion["timestamp"], ego2global, clip.name)

    def frames(self, clip: Clip) -> Iterator[Frame]:
        """Yield a frame for each time of the first downloaded camera that lies within the
        egomotion.
        """
        with parsing(f"clip '{self.files.shown}/{clip.name}'"):
            yield from self._make_frames(clip)

    def _make_frames(self, clip: Clip) -> Iterator[Frame]:
        chunk = int(clip.token)
        place = f"{clip.token}/{clip.name}"
        where = f"clip {clip.name}"
        intrinsics = self._read_calibration("camera_intrinsics", clip)
        mounts = self._read_calibration("sensor_extrinsics", clip)
        times: dict[str, np.ndarray] = {}
        for camera in CAMERAS:
            if camera in self._features and self._name_chunk(camera, chunk) in clip.files:
                table = self._read_table(camera, clip, "frame_timestamps", ["timestamp"])
                times[camera] = table["timestamp"]
        # The first and the last time of the egomotion.
        span = self._read_motion(clip)["timestamp"][[0, -1]]
        reference = next(iter(times.values()))
        half_period = _compute_half_period(reference)
        spins = np.empty(0, np.int64)
        if self._has_lidar and self._has_table(LIDAR, clip):
            spins = self._read_spin_times(clip, span)
        lidar2ego = _make_mount(mounts[LIDAR], where) if len(spins) else None
        scans = {
            name: self._read_scans(name, clip, mounts=mounts, span=span)
            for name in self._radars
            if self._has_table(name, clip)
        }
        trajectory = self.poses(clip)
        calibrations = {
            camera: _make_calibration(intrinsics[camera], mounts[camera], where) for camera in times
        }
        is_inside = (reference >= span[0]) & (reference <= span[1])
        for time in reference[is_inside].tolist():
            images: dict[str, Image | Absent] = {}
            for camera, image_times in times.items():
                number = int(np.abs(image_times - time).argmin())
                image_time = int(image_times[number])
                is_near = abs(image_time - time) <= half_period
                if not is_near or not span[0] <= image_time <= span[1]:
                    images[camera] = Absent("no frame within half a period")
                    continue
                calibration = calibrations[camera]
                images[camera] = Image(
                    ref=f"{camera}/{place}{FRAME}{number}",
                    timestamp_ns=image_time,
                    calibration=calibration,
                    num_bytes=calibration.width * calibration.height // 5,
                    made=True,
                    encoded_of="video",
                    extension="jpg",
                )
            sweeps: dict[str, Sweep] = {}
            spin = _find_nearest(spins, time)
            if spin is not None and lidar2ego is not None:
                sweeps[LIDAR] = Sweep(
                    ref=f"{LIDAR}/{place}/{spin}",
                    timestamp_ns=int(spins[spin]),
                    lidar2ego=lidar2ego,
                    num_bytes=POINTS_BYTES,
                )
            members = []
            for name, (scan_times, sensor2global) in scans.items():
                scan = _find_nearest(scan_times, time)
                if scan is None:
                    continue
                scan_time = int(scan_times[scan])
                sensor2ego = invert_rigid(trajectory.at(time)[0]) @ sensor2global[scan]
                numbers = [(time - scan_time) * 1e-9, *sensor2ego[:3].ravel().tolist()]
                text = ",".join(map(repr, numbers))
                member = FileMember(
                    name=f"{name}.npy",
                    ref=f"{POINTS}{name}/{place}/{scan_time}|{text}",
                    files=(self._name_chunk(name, chunk),),
                    num_bytes=50 * len(RADAR) * 4,
                )
                members.append(member)
            yield Frame(
                timestamp_ns=time,
                images=images,
                sweeps=sweeps,
                members=members,
                attributes={"chunk": chunk},
            )

    def _read_spin_times(self, clip: Clip, span: np.ndarray) -> np.ndarray:
        """Return the times (S,) [ns] of all spins; -1 for those outside ``span``, which have no
        ego pose.
        """
        with parsing(self._find_member(LIDAR, clip, "").label):
            spins = self._open_spins(clip)
            column = next(name for name in SPIN if name in spins.schema_arrow.names)
            times = _to_ns(spins.read([column]).column(0).to_numpy())
            is_inside = (times >= span[0]) & (times <= span[1])
            return np.where(is_inside, times, -1)

    def _open_spins(self, clip: Clip) -> BoundedParquet:
        """Return a clip's spins, taken from the zip into a temporary file; those of the last
        clip are kept.
        """
        if clip.name not in self._spins:
            path, name = self._find_member(LIDAR, clip, "")
            with tempfile.NamedTemporaryFile(suffix=".parquet") as copy:
                with zipfile.ZipFile(path) as file, file.open(name) as content:
                    shutil.copyfileobj(content, copy, 1 << 20)
                copy.flush()
                mapped = pa.memory_map(copy.name)  # it outlives the name
                self._spins = {clip.name: BoundedParquet(mapped, f"clip {clip.name}: spins")}
        return self._spins[clip.name]

    def _read_scans(
        self,
        name: str,
        clip: Clip,
        mounts: dict[str, dict[str, float]],
        span: np.ndarray,
    ) -> _Scans:
        """Return the scans of a radar within ``span`` that have an ego pose."""
        times = np.unique(self._read_radar(name, clip)["timestamp"])
        times = times[(times >= span[0]) & (times <= span[1])]
        ego2global = self.poses(clip).at(times)
        has_pose = ~np.isnan(ego2global).any((1, 2))
        sensor2ego = _make_mount(mounts[name], f"clip {clip.name}")
        return _Scans(times[has_pose], ego2global[has_pose] @ sensor2ego)

    def _read_radar(self, name: str, clip: Clip) -> dict[str, np.ndarray]:
        """Return the columns of a radar's returns; those of the last clip are kept."""
        if clip.name not in self._radar_tables:
            self._radar_tables = {clip.name: {}}
        tables = self._radar_tables[clip.name]
        if name not in tables:
            columns = ("timestamp", "azimuth", "elevation", "distance", *MEASURED)
            tables[name] = self._read_table(name, clip, "", columns)
        return tables[name]

    def points(self, ref: str) -> np.ndarray:
        """Read a spin in the lidar's axes, or a radar's scan in ego at the sample's time."""
        place, _, text = ref.partition("|")
        feature, chunk, name, number = place.split("/")
        clip = Clip(name=name, token=chunk)
        if feature == LIDAR:
            with parsing(f"clip {name}: spin {number}"):
                return _decode_spin(self._open_spins(clip), int(number))
        dt_s, *numbers = map(float, text.split(","))
        table = self._read_radar(feature, clip)
        sensor2ego = np.array(numbers).reshape(3, 4)
        rotation = sensor2ego[:, :3]
        is_of_scan = table["timestamp"] == int(number)
        columns = {key: values[is_of_scan].astype(np.float64) for key, values in table.items()}
        azimuth = columns["azimuth"]
        elevation = columns["elevation"]
        distance = columns["distance"]
        flat = np.cos(elevation)
        ray = np.stack(
            [
                flat * np.cos(azimuth),
                flat * np.sin(azimuth),
                np.sin(elevation),
            ],
            1,
        )
        xyz = ray * distance[:, None] @ rotation.T + sensor2ego[:, 3]
        velocity = ray * columns["radial_velocity"][:, None] @ rotation.T
        measured = [columns[key] for key in MEASURED]
        times = np.full(len(xyz), dt_s)
        points = np.column_stack([xyz, velocity, *measured, times]).astype(np.float32)
        return points[distance > 0]

    def make_images(self, refs: Sequence[str]) -> Iterator[tuple[str, bytes]]:
        """Decode frames: each video is taken from its zip into a temporary file."""
        numbers_of_video: dict[str, list[int]] = {}
        for ref in refs:
            video, _, digits = ref.rpartition(FRAME)
            numbers_of_video.setdefault(video, []).append(int(digits))
        form = self.stored or JpegForm(self.settings.video_quality)
        for video, numbers in numbers_of_video.items():
            camera, chunk, clip_id = video.split("/")
            member = self._find_member(camera, Clip(name=clip_id, token=chunk), "video")
            with tempfile.NamedTemporaryFile(suffix=".mp4") as copy:
                with (
                    parsing(member.label),
                    zipfile.ZipFile(member.path) as file,
                    file.open(member.name) as content,
                ):
                    shutil.copyfileobj(content, copy, 1 << 20)
                copy.flush()
                for number, data in video_frames(copy.name, numbers, form):
                    yield f"{video}{FRAME}{number}", data


def radar_channel(name: str) -> Channel:
    """Return the entry of the table for a radar."""
    return Channel(
        name=name,
        kind="points",
        field=f"{name}.npy",
        law=Law(
            "ego_points",
            roles={
                "positions": (("x", "y", "z"),),
                "vectors": (("vx", "vy", "vz"),),
            },
        ),
        dtype="float32",
        axes=("point", "column"),
        shape=(None, len(RADAR)),
        columns=tuple(RADAR),
        units=tuple(RADAR.values()),
        frame="ego",
        sensor="radar",
        allows_nan=True,
        optional=True,
        source_name=name,
        description="one scan, in ego at the sample's time; vx, vy, vz: the radial velocity along its "
        "ray, away from the sensor, not compensated for ego's motion; dt_s since measured",
    )


def _to_ns(times_us: np.ndarray) -> np.ndarray:
    """Return times [ns] of those of a file [us], which count from the beginning of the clip."""
    return (times_us.astype(np.int64) + FIRST_US) * 1000


def _compute_half_period(times: np.ndarray) -> int:
    """Return half the period of times that ascend; 0 of fewer than two."""
    if len(times) < 2:
        return 0
    return int(np.median(np.diff(times))) // 2


def _find_nearest(times: np.ndarray, time: int) -> int | None:
    """Return which time is nearest, None for one of over half a period away.

    Negative times are none.
    """
    numbers = np.flatnonzero(times >= 0)
    if not len(numbers):
        return None
    differences = np.abs(times[numbers] - time)
    nearest = int(numbers[differences.argmin()])
    tolerance = 0
    if len(numbers) > 1:
        tolerance = _compute_half_period(times[numbers]) + 1_000_000
    return nearest if abs(int(times[nearest]) - time) <= tolerance else None


def _decode_spin(spins: BoundedParquet, row: int) -> np.ndarray:
    """Decode the points of a spin (P, 6), :data:`LIDAR_COLUMNS`; NaN for what a spin does not
    state.
    """
    import DracoPy

    columns = ["draco_encoded_pointcloud"]
    if SPIN[0] in spins.schema_arrow.names:
        columns.append(SPIN[0])
    first = 0
    for group in range(spins.num_row_groups):
        num_rows = spins.metadata.row_group(group).num_rows
        if row < first + num_rows:
            (spin,) = spins.read_row_group(group, columns).slice(row - first, 1).to_pylist()
            break
        first += num_rows
    cloud = DracoPy.decode(spin["draco_encoded_pointcloud"])
    points = np.full((len(cloud.points), len(LIDAR_COLUMNS)), np.nan, np.float32)
    points[:, :3] = cloud.points
    values = {}
    for attribute in cloud.attributes:
        if attribute["name"]:
            values[attribute["name"]] = attribute["data"].reshape(len(points), -1)[:, 0]
    if "intensity" in values:
        points[:, 3] = values["intensity"] / 255
    if "model_element" in values:
        points[:, 4] = values["model_element"]
    if "timestamp" in values and SPIN[0] in spin:
        times_us = values["timestamp"].astype(np.float64) - spin[SPIN[0]]
        points[:, 5] = times_us * 1e-6
    return points


def _make_mount(row: dict[str, float], where: str) -> np.ndarray:
    """Return sensor to rig (4, 4) of a row of ``sensor_extrinsics``."""
    rotation = [row[name] for name in ("qw", "qx", "qy", "qz")]
    translation = [row[name] for name in ("x", "y", "z")]
    return pose(rotation, translation, where)


def _make_calibration(
    intrinsics: dict[str, float],
    mount: dict[str, float],
    where: str,
) -> Calibration:
    """Return the calibration of a camera: the forward polynomial, in units of its slope, is the
    lens.
    """
    with parsing(where, "has no f-theta calibration"):
        polynomial = [float(intrinsics[f"fw_poly_{power}"]) for power in range(5)]
        focal = polynomial[1]
        k = np.array(
            [
                [focal, 0, intrinsics["cx"]],
                [0, focal, intrinsics["cy"]],
                [0, 0, 1],
            ]
        )
        return Calibration(
            intrinsics=k,
            sensor2ego=_make_mount(mount, where),
            width=int(intrinsics["width"]),
            height=int(intrinsics["height"]),
            dist=tuple(coefficient / focal for coefficient in polynomial),
            dist_model="ftheta",
        )
