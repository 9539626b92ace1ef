"""NVIDIA's PhysicalAI-Autonomous-Vehicles: seven f-theta cameras as video in zips of about 100 clips, and egomotion.

The layout is that of https://huggingface.co/datasets/nvidia/PhysicalAI-Autonomous-Vehicles, as a download keeps it:
``clip_index.parquet`` has the chunk of each clip, ``features.csv`` says which files a chunk has. Ego is the rig frame,
global the clip's anchor frame; times count from one second before the clip's beginning, for the dataset's own may be
negative. Lidar and radar are not read.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import tempfile
import zipfile
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np
import pyarrow.parquet as pq

from fuelrail.pipeline.channels.series import series_channel
from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.adapter.frame import Absent, Clip, Frame, Image, Sensors
from fuelrail.sharding.sources.adapter.poses import Trajectory, pose
from fuelrail.sharding.sources.adapter.source import FrameSource
from fuelrail.sharding.sources.shared.foreign import parsing
from fuelrail.sharding.sources.shared.pictures import JpegForm
from fuelrail.sharding.sources.shared.video import VideoSettings, libraries, video_frames

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CAMERAS = (
    "camera_front_wide_120fov", "camera_front_tele_30fov", "camera_cross_left_120fov", "camera_cross_right_120fov",
    "camera_rear_left_70fov", "camera_rear_right_70fov", "camera_rear_tele_30fov",
)  # fmt: skip
MOTION = ("vx", "vy", "vz", "ax", "ay", "az", "curvature")
FIRST_US = 1_000_000
"""Added to times, which count from the beginning of the clip."""
MOST_BYTES = 1 << 30
"""Of a member of a zip; a clip's video has about 40 MB."""


class PhysicalAi(FrameSource[VideoSettings]):
    """PhysicalAI-AV clips: frames of the front camera's times, each camera's nearest frame, poses, and egomotion."""

    kind = "physical_ai"
    settings = VideoSettings
    requires: ClassVar = {"av": "fuelrail[video]"}
    reads = "clip"
    time_base = "clip"
    ego_origin = "rig"
    license = "NVIDIA Autonomous Vehicle Dataset License Agreement"
    columns: ClassVar = {"chunk": int}
    channels = (
        series_channel(
            "egomotion", "float64", (len(MOTION),), description=f"in the anchor frame, SI units: {', '.join(MOTION)}"
        ),
    )

    def __init__(self, location: str, options: dict[str, Any]) -> None:
        super().__init__(location, options)
        self.given.check_libraries()
        self._kept: dict[str, dict[tuple[str, ...], dict[str, Any]]] = {}
        self._last: tuple[str, dict[str, np.ndarray]] = "", {}

    @property
    def options(self) -> dict[str, Any]:
        return {**super().options, "libraries": libraries()}

    def sensors(self) -> Sensors:
        return Sensors.of(CAMERAS)

    @cached_property
    def _features(self) -> dict[str, dict[str, str]]:
        """Rows of ``features.csv`` by feature."""
        text = self.files.read("features.csv").decode()
        with parsing(f"file '{self.files.shown}/features.csv'"):
            return {row["feature"]: row for row in csv.DictReader(io.StringIO(text))}

    def _chunk_file(self, feature: str, chunk: int) -> str:
        with parsing(f"file '{self.files.shown}/features.csv'"):
            return self._features[feature]["chunk_path"].replace("{chunk_id:04d}", f"{chunk:04d}")

    def clips(self) -> Iterator[Clip]:
        """Yield the clips whose egomotion and at least one camera are downloaded."""
        for (clip_id,), row in sorted(self._indexed("clip_index.parquet").items()):
            chunk = int(row["chunk"])
            names = [self._chunk_file(camera, chunk) for camera in CAMERAS if camera in self._features]
            files = [name for name in names if self.files.facts(name) is not None]
            motion = self._chunk_file("egomotion", chunk)
            if not row.get("clip_is_valid", True):
                self.noted["clips left out, not valid by clip_index.parquet"] += 1
            elif not files or self.files.facts(motion) is None:
                self.noted["clips left out, not downloaded"] += 1
            else:
                clip = Clip(name=clip_id, token=str(chunk), split=row.get("split") or "", files=(motion, *files))
                found = self._motion(clip)
                series = found["timestamp"], np.stack([found[name] for name in MOTION], 1)
                yield msgspec.structs.replace(clip, attributes={"chunk": chunk}, series={"egomotion": series})

    def _member(self, feature: str, clip: Clip, alias: str, name: str | None = None) -> tuple[Path, str]:
        """Return the zip of a clip's feature, and the name of a file in it."""
        path = self.files.path(name or self._chunk_file(feature, int(clip.token)))
        if path is None:
            raise SourceError(f"'{self.files.shown}' is a URL: copy the chunks to a folder")
        files = json.loads(self._features[feature]["clip_files_in_zip"])
        return Path(path), files[alias].replace("{clip_id}", clip.name)

    def _table(self, feature: str, clip: Clip, alias: str, columns: Sequence[str]) -> dict[str, np.ndarray]:
        """Read columns of a Parquet file in a zip; times in nanoseconds."""
        path, name = self._member(feature, clip, alias)
        with parsing(f"file '{path.name}': {name}"), zipfile.ZipFile(path) as file:
            if file.getinfo(name).file_size > MOST_BYTES:
                raise ValueError(f"it has over {MOST_BYTES} bytes")
            table = pq.read_table(io.BytesIO(file.read(name)), columns=list(columns))
            found = {column: table.column(column).to_numpy() for column in columns}
            return found | {"timestamp": (found["timestamp"].astype(np.int64) + FIRST_US) * 1000}

    def _indexed(self, name: str) -> dict[tuple[str, ...], dict[str, Any]]:
        """Read a table that pandas wrote: its rows by their index."""
        with parsing(f"file '{self.files.shown}/{name}'"):
            table = pq.read_table(io.BytesIO(self.files.read(name)))
            index = table.schema.pandas_metadata["index_columns"]
            return {tuple(str(row[key]) for key in index): row for row in table.to_pylist()}

    def _calibration(self, feature: str, clip: Clip) -> dict[str, dict[str, float]]:
        """Return a clip's rows of a chunk's table by sensor; the last tables are kept."""
        name = self._chunk_file(feature, int(clip.token))
        if name not in self._kept:
            if len(self._kept) > 1:
                self._kept.clear()
            self._kept[name] = self._indexed(name)
        return {sensor: row for (clip_id, sensor), row in self._kept[name].items() if clip_id == clip.name}

    def _motion(self, clip: Clip) -> dict[str, np.ndarray]:
        """Return the egomotion of a clip; that of the last one is kept."""
        if self._last[0] != clip.name:
            columns = ("timestamp", "qx", "qy", "qz", "qw", "x", "y", "z", *MOTION)
            self._last = clip.name, self._table("egomotion", clip, "egomotion", columns)
        return self._last[1]

    def poses(self, clip: Clip) -> Trajectory:
        motion = self._motion(clip)
        rotation, place = (np.stack([motion[name] for name in names], 1) for names in (
            ("qw", "qx", "qy", "qz"), ("x", "y", "z")
        ))  # fmt: skip
        return Trajectory(motion["timestamp"], pose(rotation, place, clip.name), clip.name)

    def frames(self, clip: Clip) -> Iterator[Frame]:
        """Yield a frame for each time of the first camera that is there and lies within the egomotion."""
        intrinsics, mounts = (self._calibration(name, clip) for name in ("camera_intrinsics", "sensor_extrinsics"))
        times = {
            camera: self._table(camera, clip, "frame_timestamps", ["timestamp"])["timestamp"]
            for camera in CAMERAS
            if camera in self._features and self._chunk_file(camera, int(clip.token)) in clip.files
        }
        known = self._motion(clip)["timestamp"][[0, -1]]
        reference = next(iter(times.values()))
        half = int(np.median(np.diff(reference))) // 2 if len(reference) > 1 else 0
        models = {camera: _model(intrinsics[camera], mounts[camera], f"clip {clip.name}") for camera in times}
        for time in reference[(reference >= known[0]) & (reference <= known[1])].tolist():
            images: dict[str, Image | Absent] = {}
            for camera, stamps in times.items():
                at = int(np.abs(stamps - time).argmin())
                if abs(int(stamps[at]) - time) > half or not known[0] <= stamps[at] <= known[1]:
                    images[camera] = Absent("no frame within half a period")
                    continue
                ref = f"{camera}/{clip.token}/{clip.name}#frame={at}"
                images[camera] = Image(ref=ref, timestamp_ns=int(stamps[at]), **models[camera])
            yield Frame(timestamp_ns=time, images=images, attributes={"chunk": int(clip.token)})

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
                with parsing(f"file '{path.name}': {name}"), zipfile.ZipFile(path) as file, file.open(name) as video:
                    shutil.copyfileobj(video, made, 1 << 20)
                made.flush()
                for number, data in video_frames(made.name, numbers, self.stored or JpegForm(self.given.video_quality)):
                    yield f"{camera}/{chunk}/{clip}#frame={number}", data


def _model(intrinsics: dict[str, float], mount: dict[str, float], where: str) -> dict[str, Any]:
    """Return what an image has of its camera: the forward polynomial, in units of its slope, is the lens."""
    with parsing(where, "has no f-theta calibration"):
        forward = [float(intrinsics[f"fw_poly_{power}"]) for power in range(5)]
        focal, width, height = forward[1], int(intrinsics["width"]), int(intrinsics["height"])
        camera = np.array([[focal, 0, intrinsics["cx"]], [0, focal, intrinsics["cy"]], [0, 0, 1]])
        rotation, place = ([mount[name] for name in names] for names in (("qw", "qx", "qy", "qz"), "xyz"))
        return {
            "intrinsics": camera, "cam2ego": pose(rotation, place, where), "dist_model": "ftheta",
            "dist": tuple(one / focal for one in forward), "width": width, "height": height, "made": True,
            "extension": "jpg", "num_bytes": width * height // 5,
        }  # fmt: skip
