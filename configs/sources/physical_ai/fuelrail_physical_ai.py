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
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
import numpy as np
import pyarrow as pa

from fuelrail.pipeline.channels.series import series_channel
from fuelrail.pipeline.channels.table import Channel, Law
from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.rigid import invert_rigid
from fuelrail.sharding.sources.adapter.frame import (
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
"""Columns of a spin's time, of which the first that is there counts."""
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
FIRST_US = 1_000_000
"""Added to times, which count from the beginning of the clip."""
MOST_BYTES = 1 << 30
"""Of a member of a zip; a clip's video has about 40 MB."""


class PhysicalAiSettings(VideoSettings, frozen=True, kw_only=True):
    """Options of the adapter."""

    radars: Annotated[
        bool, msgspec.Meta(description="true stores radars as channels of their names")
    ] = False


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
        self._kept: dict[str, dict[tuple[str, ...], dict[str, Any]]] = {}
        self._last: tuple[str, dict[str, np.ndarray]] = "", {}
        self._tables: tuple[str, dict[str, dict[str, np.ndarray]]] = "", {}
        self._spins: tuple[str, BoundedParquet] | None = None

    @property
    def options(self) -> dict[str, Any]:
        return {**super().options, "libraries": libraries()}

    @property
    def channels(self) -> tuple[Channel, ...]:  # type: ignore[override]
        """The egomotion, and radars where they are asked for."""
        text = f"in the anchor frame, SI units: {', '.join(MOTION)}"
        return (
            series_channel("egomotion", "float64", (len(MOTION),), description=text),
            *map(radar_channel, self._radars),
        )

    @cached_property
    def _radars(self) -> list[str]:
        """The radars of which a chunk is downloaded."""
        if not self.settings.radars:
            return []
        return [
            name for name in self._features if name.startswith("radar_") and self._has_chunk(name)
        ]

    def _has_chunk(self, feature: str) -> bool:
        """Return whether a chunk of a feature is downloaded."""
        with parsing(f"file '{self.files.shown}/features.csv'"):
            folder, _, name = self._features[feature]["chunk_path"].rpartition("/")
            pattern = re.compile(re.escape(name).replace(re.escape("{chunk_id:04d}"), r"\d+"))
        listed: list[str] = []
        with contextlib.suppress(SourceError):  # no such folder
            listed = self.files.listed(folder)
        return any(pattern.fullmatch(one) for one in listed)

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
        return Sensors.from_names(CAMERAS, {LIDAR: LIDAR_COLUMNS} if self._has_lidar else {})

    @cached_property
    def _features(self) -> dict[str, dict[str, str]]:
        """Rows of ``features.csv`` by feature."""
        where = f"file '{self.files.shown}/features.csv'"
        text = read_text(self.files.read("features.csv"), where)
        with parsing(where):
            return {row["feature"]: row for row in csv.DictReader(io.StringIO(text))}

    def _chunk_file(self, feature: str, chunk: int) -> str:
        with parsing(f"file '{self.files.shown}/features.csv'"):
            return self._features[feature]["chunk_path"].replace("{chunk_id:04d}", f"{chunk:04d}")

    def clips(self) -> Iterator[Clip]:
        """Yield the clips whose egomotion and at least one camera are downloaded."""
        with parsing(f"download '{self.files.shown}'"):
            yield from self._clips()

    def _clips(self) -> Iterator[Clip]:
        for (clip_id,), row in sorted(self._indexed("clip_index.parquet").items()):
            chunk = int(row["chunk"])
            names = [
                self._chunk_file(camera, chunk) for camera in CAMERAS if camera in self._features
            ]
            files = [name for name in names if self.files.facts(name) is not None]
            motion = self._chunk_file("egomotion", chunk)
            if not row.get("clip_is_valid", True):
                self.noted["clips left out, not valid by clip_index.parquet"] += 1
            elif not files or self.files.facts(motion) is None:
                self.noted["clips left out, not downloaded"] += 1
            else:
                more = [
                    self._chunk_file(one, chunk)
                    for one in (*([LIDAR] if self._has_lidar else []), *self._radars)
                ]
                files += [name for name in more if self.files.facts(name) is not None]
                clip = Clip(
                    name=clip_id,
                    token=str(chunk),
                    split=row.get("split") or "",
                    files=(motion, *files),
                )
                found = self._motion(clip)
                series = found["timestamp"], np.stack([found[name] for name in MOTION], 1)
                yield msgspec.structs.replace(
                    clip, attributes={"chunk": chunk}, series={"egomotion": series}
                )

    def _member(self, feature: str, clip: Clip, alias: str) -> tuple[Path, str]:
        """Return the zip of a clip's feature, and the name of a file in it; without ``alias`` of
        its only table.
        """
        path = self.files.path(self._chunk_file(feature, int(clip.token)))
        if path is None:
            raise SourceError(f"'{self.files.shown}' is a URL: copy the chunks to a folder")
        listed = self._features[feature]["clip_files_in_zip"].encode()
        files = read_json(listed, f"file '{self.files.shown}/features.csv'", dict[str, str])
        name = (
            files[alias]
            if alias
            else next(one for one in files.values() if one.endswith(".parquet"))
        )
        return Path(path), name.replace("{clip_id}", clip.name)

    def _has(self, feature: str, clip: Clip) -> bool:
        """Return whether a clip has the table of a lidar or radar."""
        if self._chunk_file(feature, int(clip.token)) not in clip.files:
            return False
        path, name = self._member(feature, clip, "")
        with parsing(f"file '{path.name}'"), zipfile.ZipFile(path) as file:
            return name in file.namelist()

    def _table(
        self, feature: str, clip: Clip, alias: str, columns: Sequence[str]
    ) -> dict[str, np.ndarray]:
        """Read columns of a Parquet file in a zip; times in nanoseconds."""
        path, name = self._member(feature, clip, alias)
        with parsing(f"file '{path.name}': {name}"), zipfile.ZipFile(path) as file:
            if file.getinfo(name).file_size > MOST_BYTES:
                raise ValueError(f"it has over {MOST_BYTES} bytes")
            content = pa.BufferReader(file.read(name))
            table = BoundedParquet(content, f"file '{path.name}': {name}").read(list(columns))
            found = {column: table.column(column).to_numpy() for column in columns}
            return found | {"timestamp": (found["timestamp"].astype(np.int64) + FIRST_US) * 1000}

    def _indexed(self, name: str) -> dict[tuple[str, ...], dict[str, Any]]:
        """Read a table that pandas wrote: its rows by their index."""
        with parsing(f"file '{self.files.shown}/{name}'"):
            content = pa.BufferReader(self.files.read(name))
            table = BoundedParquet(content, f"file '{self.files.shown}/{name}'").read()
            index = table.schema.pandas_metadata["index_columns"]
            return {tuple(str(row[key]) for key in index): row for row in table.to_pylist()}

    def _calibration(self, feature: str, clip: Clip) -> dict[str, dict[str, float]]:
        """Return a clip's rows of a chunk's table by sensor; the last tables are kept."""
        name = self._chunk_file(feature, int(clip.token))
        if name not in self._kept:
            if len(self._kept) > 1:
                self._kept.clear()
            self._kept[name] = self._indexed(name)
        return {
            sensor: row
            for (clip_id, sensor), row in self._kept[name].items()
            if clip_id == clip.name
        }

    def _motion(self, clip: Clip) -> dict[str, np.ndarray]:
        """Return the egomotion of a clip; that of the last one is kept."""
        if self._last[0] != clip.name:
            columns = ("timestamp", "qx", "qy", "qz", "qw", "x", "y", "z", *MOTION)
            self._last = clip.name, self._table("egomotion", clip, "egomotion", columns)
        return self._last[1]

    def poses(self, clip: Clip) -> Trajectory:
        with parsing(f"egomotion of clip '{self.files.shown}/{clip.name}'"):
            motion = self._motion(clip)
            rotation = np.stack([motion[name] for name in ("qw", "qx", "qy", "qz")], 1)
            place = np.stack([motion[name] for name in ("x", "y", "z")], 1)
            return Trajectory(motion["timestamp"], pose(rotation, place, clip.name), clip.name)

    def frames(self, clip: Clip) -> Iterator[Frame]:
        """Yield a frame for each time of the first camera that is there and lies within the
        egomotion.
        """
        with parsing(f"clip '{self.files.shown}/{clip.name}'"):
            yield from self._frames(clip)

    def _frames(self, clip: Clip) -> Iterator[Frame]:
        intrinsics, mounts = (
            self._calibration(name, clip) for name in ("camera_intrinsics", "sensor_extrinsics")
        )
        times = {
            camera: self._table(camera, clip, "frame_timestamps", ["timestamp"])["timestamp"]
            for camera in CAMERAS
            if camera in self._features and self._chunk_file(camera, int(clip.token)) in clip.files
        }
        known = self._motion(clip)["timestamp"][[0, -1]]
        reference = next(iter(times.values()))
        half = int(np.median(np.diff(reference))) // 2 if len(reference) > 1 else 0
        spins = (
            self._spin_times(clip, known)
            if self._has_lidar and self._has(LIDAR, clip)
            else np.empty(0, np.int64)
        )
        lidar2ego = _mount(mounts[LIDAR], f"clip {clip.name}") if len(spins) else None
        scans = {
            name: self._scans(name, clip, mounts, known)
            for name in self._radars
            if self._has(name, clip)
        }
        poses = self.poses(clip) if scans else None
        calibrations = {
            camera: _camera_calibration(intrinsics[camera], mounts[camera], f"clip {clip.name}")
            for camera in times
        }
        for time in reference[(reference >= known[0]) & (reference <= known[1])].tolist():
            images: dict[str, Image | Absent] = {}
            for camera, stamps in times.items():
                at = int(np.abs(stamps - time).argmin())
                if abs(int(stamps[at]) - time) > half or not known[0] <= stamps[at] <= known[1]:
                    images[camera] = Absent("no frame within half a period")
                    continue
                ref = f"{camera}/{clip.token}/{clip.name}#frame={at}"
                calibration = calibrations[camera]
                images[camera] = Image(
                    ref=ref,
                    timestamp_ns=int(stamps[at]),
                    calibration=calibration,
                    num_bytes=calibration.width * calibration.height // 5,
                    made=True,
                    encoded_of="video",
                    extension="jpg",
                )
            sweeps = {}
            if lidar2ego is not None and (at := _nearest(spins, time)) is not None:
                ref = f"{LIDAR}/{clip.token}/{clip.name}/{at}"
                own = {
                    "timestamp_ns": int(spins[at]),
                    "lidar2ego": lidar2ego,
                    "num_bytes": POINTS_BYTES,
                }
                sweeps[LIDAR] = Sweep(ref=ref, **own)
            members = []
            for name, (stamps, sensor2global) in scans.items():
                at = _nearest(stamps, time)
                if at is not None and poses is not None:
                    matrix = invert_rigid(poses.at(time)[0]) @ sensor2global[at]
                    numbers = ",".join(
                        map(repr, [(time - int(stamps[at])) * 1e-9, *matrix[:3].ravel().tolist()])
                    )
                    ref = f"{POINTS}{name}/{clip.token}/{clip.name}/{stamps[at]}|{numbers}"
                    zips = (self._chunk_file(name, int(clip.token)),)
                    members.append(
                        FileMember(f"{name}.npy", ref, zips, num_bytes=50 * len(RADAR) * 4)
                    )
            yield Frame(
                timestamp_ns=time,
                images=images,
                sweeps=sweeps,
                members=members,
                attributes={"chunk": int(clip.token)},
            )

    def _spin_times(self, clip: Clip, known: np.ndarray) -> np.ndarray:
        """Return the times [ns] of all spins; -1 for those without an ego pose."""
        path, name = self._member(LIDAR, clip, "")
        with parsing(f"file '{path.name}': {name}"):
            spins = self._spin_file(clip)
            column = next(one for one in SPIN if one in spins.schema_arrow.names)
            stamps = spins.read([column]).column(0).to_numpy().astype(np.int64)
            times = (stamps + FIRST_US) * 1000
            return np.where((times >= known[0]) & (times <= known[1]), times, -1)

    def _spin_file(self, clip: Clip) -> BoundedParquet:
        """Return a clip's spins, taken from the zip into a temporary file; those of the last
        clip are kept.
        """
        if self._spins is None or self._spins[0] != clip.name:
            path, name = self._member(LIDAR, clip, "")
            with tempfile.NamedTemporaryFile(suffix=".parquet") as made:
                with zipfile.ZipFile(path) as file, file.open(name) as spins:
                    shutil.copyfileobj(spins, made, 1 << 20)
                made.flush()
                self._spins = (
                    clip.name,
                    BoundedParquet(pa.memory_map(made.name), f"clip {clip.name}: spins"),
                )  # the mapping outlives the name
        return self._spins[1]

    def _scans(
        self, name: str, clip: Clip, mounts: Any, known: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the times [ns] of a radar's scans, and sensor to global at each (S, 4, 4)."""
        times = np.unique(self._radar_table(name, clip)["timestamp"])
        times = times[(times >= known[0]) & (times <= known[1])]
        ego2global = self.poses(clip).at(times)
        placed = ~np.isnan(ego2global).any((1, 2))
        return times[placed], ego2global[placed] @ _mount(mounts[name], f"clip {clip.name}")

    def _radar_table(self, name: str, clip: Clip) -> dict[str, np.ndarray]:
        """Return the returns of a radar; the tables of the last clip are kept."""
        if self._tables[0] != clip.name:
            self._tables = clip.name, {}
        if name not in self._tables[1]:
            columns = ("timestamp", "azimuth", "elevation", "distance", *list(RADAR)[6:-1])
            self._tables[1][name] = self._table(name, clip, "", columns)
        return self._tables[1][name]

    def points(self, ref: str) -> np.ndarray:
        """Read a spin in the lidar's axes, or a radar's scan in ego at the sample's time."""
        place, _, numbers = ref.partition("|")
        feature, chunk, name, which = place.split("/")
        clip = Clip(name=name, token=chunk)
        if feature == LIDAR:
            with parsing(f"clip {name}: spin {which}"):
                return _decoded(self._spin_file(clip), int(which))
        dt_s, *matrix = map(float, numbers.split(","))
        table = self._radar_table(feature, clip)
        turned = np.array(matrix).reshape(3, 4)
        own = {
            key: column[table["timestamp"] == int(which)].astype(np.float64)
            for key, column in table.items()
        }
        flat = np.cos(own["elevation"])
        ray = np.stack(
            [
                flat * np.cos(own["azimuth"]),
                flat * np.sin(own["azimuth"]),
                np.sin(own["elevation"]),
            ],
            1,
        )
        xyz = ray * own["distance"][:, None] @ turned[:, :3].T + turned[:, 3]
        velocity = ray * own["radial_velocity"][:, None] @ turned[:, :3].T
        rest = [own[key] for key in list(RADAR)[6:-1]]
        found = np.column_stack([xyz, velocity, *rest, np.full(len(xyz), dt_s)]).astype(np.float32)
        return found[own["distance"] > 0]

    def make_images(self, refs: Sequence[str]) -> Iterator[tuple[str, bytes]]:
        """Decode frames: of each video its file is taken from the zip into a temporary one."""
        wanted: dict[tuple[str, str, str], list[int]] = {}
        for ref in refs:
            place, _, number = ref.rpartition("#frame=")
            camera, chunk, name = place.split("/")
            wanted.setdefault((camera, chunk, name), []).append(int(number))
        for (camera, chunk, clip), numbers in wanted.items():
            path, name = self._member(camera, Clip(name=clip, token=chunk), "video")
            with tempfile.NamedTemporaryFile(suffix=".mp4") as made:
                with (
                    parsing(f"file '{path.name}': {name}"),
                    zipfile.ZipFile(path) as file,
                    file.open(name) as video,
                ):
                    shutil.copyfileobj(video, made, 1 << 20)
                made.flush()
                for number, data in video_frames(
                    made.name, numbers, self.stored or JpegForm(self.settings.video_quality)
                ):
                    yield f"{camera}/{chunk}/{clip}#frame={number}", data


def radar_channel(name: str) -> Channel:
    """Return the entry of the table for a radar."""
    return Channel(
        name=name,
        kind="points",
        field=f"{name}.npy",
        law=Law(
            "ego_points", roles={"positions": (("x", "y", "z"),), "vectors": (("vx", "vy", "vz"),)}
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


def _nearest(times: np.ndarray, time: int) -> int | None:
    """Return which time is nearest, None for one of over half a period away.

    Negative times are none.
    """
    there = np.flatnonzero(times >= 0)
    if not len(there):
        return None
    at = int(there[np.abs(times[there] - time).argmin()])
    half = int(np.median(np.diff(times[there]))) // 2 + 1_000_000 if len(there) > 1 else 0
    return at if abs(int(times[at]) - time) <= half else None


def _decoded(spins: BoundedParquet, row: int) -> np.ndarray:
    """Decode the points of a spin (P, 6), :data:`LIDAR_COLUMNS`; NaN for what a spin does not
    state.
    """
    import DracoPy

    first = 0
    for group in range(spins.num_row_groups):
        if row < first + spins.metadata.row_group(group).num_rows:
            names = [
                "draco_encoded_pointcloud",
                *(one for one in SPIN[:1] if one in spins.schema_arrow.names),
            ]
            (one,) = spins.read_row_group(group, names).slice(row - first, 1).to_pylist()
            break
        first += spins.metadata.row_group(group).num_rows
    cloud = DracoPy.decode(one["draco_encoded_pointcloud"])
    found = np.full((len(cloud.points), len(LIDAR_COLUMNS)), np.nan, np.float32)
    found[:, :3] = cloud.points
    stated = {
        one["name"]: one["data"].reshape(len(found), -1) for one in cloud.attributes if one["name"]
    }
    if "intensity" in stated:
        found[:, 3] = stated["intensity"][:, 0] / 255
    if "model_element" in stated:
        found[:, 4] = stated["model_element"][:, 0]
    if "timestamp" in stated and SPIN[0] in one:
        found[:, 5] = (stated["timestamp"][:, 0].astype(np.float64) - one[SPIN[0]]) * 1e-6
    return found


def _mount(row: dict[str, float], where: str) -> np.ndarray:
    """Return sensor to rig (4, 4) of a row of ``sensor_extrinsics``."""
    return pose(
        [row[name] for name in ("qw", "qx", "qy", "qz")], [row[name] for name in "xyz"], where
    )


def _camera_calibration(
    intrinsics: dict[str, float],
    mount: dict[str, float],
    where: str,
) -> Calibration:
    """Return the calibration of a camera: the forward polynomial, in units of its slope, is the
    lens.
    """
    with parsing(where, "has no f-theta calibration"):
        forward = [float(intrinsics[f"fw_poly_{power}"]) for power in range(5)]
        focal = forward[1]
        camera = np.array([[focal, 0, intrinsics["cx"]], [0, focal, intrinsics["cy"]], [0, 0, 1]])
        return Calibration(
            intrinsics=camera,
            sensor2ego=_mount(mount, where),
            width=int(intrinsics["width"]),
            height=int(intrinsics["height"]),
            dist=tuple(coefficient / focal for coefficient in forward),
            dist_model="ftheta",
        )
