"""The adapter for nuScenes, and the splits that its scenes belong to.

``splits.json`` beside the tables (split name to scene names, as the devkit reads it) comes first; else the official
split of v1.0-trainval, v1.0-mini and v1.0-test, where all scenes are the official ones. The lists are those of the
devkit's ``utils/splits.py``, written as runs of scene numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

import msgspec
import numpy as np
import xxhash
from msgspec import Meta
from numpy.typing import NDArray

from fuelrail.pipeline.channels.sensors import LidarEntry
from fuelrail.pipeline.errors import ConfigError, SourceError
from fuelrail.pipeline.sample.schema import encode_arrays, encode_points, encode_stacked
from fuelrail.pipeline.settings import Settings, convert
from fuelrail.sharding.sources.adapter.classes import NUSCENES10, ClassMap, ClassOption, loaded
from fuelrail.sharding.sources.nuscenes.channels import (
    CHANNELS_FILE,
    CHANNELS_FOLDER,
    channel_file,
    channel_members,
    load_channels,
)
from fuelrail.sharding.sources.nuscenes.extras.batch import Batch
from fuelrail.sharding.sources.nuscenes.extras.groups import MADE, Extras, Group, check_apart, made
from fuelrail.sharding.sources.nuscenes.geometry import NS_PER_US, Keyframes
from fuelrail.sharding.sources.nuscenes.members import KeyframeFiles
from fuelrail.sharding.sources.nuscenes.samples import SceneFacts, attribute_types, clip_ids
from fuelrail.sharding.sources.nuscenes.sweeps import LidarSweeps, SweepList
from fuelrail.sharding.sources.nuscenes.tables import TABLES, check_tables, check_time
from fuelrail.sharding.sources.shared.files import check_no_pointer, source_files
from fuelrail.sharding.sources.shared.foreign import read_json
from fuelrail.sharding.sources.shared.joins import Cut
from fuelrail.sharding.sources.shared.pictures import (
    CHECK_IMAGES,
    MAX_DAMAGED,
    Depth,
    ImagePolicy,
    MaxDamaged,
    recorded,
)
from fuelrail.sharding.sources.shared.scan_report import ScanReport
from fuelrail.sharding.sources.source import Camera, Place, ScanInfo

if TYPE_CHECKING:
    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.pipeline.sample.schema import Geometry
    from fuelrail.sharding.sources.nuscenes.geometry import Frame
    from fuelrail.sharding.sources.shared.scan_table import ScanWriter
    from fuelrail.sharding.sources.source import Reads

SPLITS_FILE: Final = "splits.json"

_VAL_RUNS: Final = (
    (3, 3), (12, 18), (35, 36), (38, 39), (92, 110), (221, 221), (268, 278), (329, 332), (344, 346), (519, 524),
    (552, 565), (625, 627), (629, 630), (632, 638), (770, 771), (775, 775), (777, 778), (780, 784), (794, 800),
    (802, 802), (904, 917), (919, 931), (962, 963), (966, 969), (971, 972), (1059, 1073),
)  # fmt: skip


_VAL: Final = frozenset(number for first, last in _VAL_RUNS for number in range(first, last + 1))


_MINI_TRAIN: Final = frozenset({61, 553, 655, 757, 796, 1077, 1094, 1100})


_MINI_VAL: Final = frozenset({103, 916})


_NUM_SCENES: Final = 1110


_SCENE: Final = re.compile(r"scene-([0-9]{4})\Z")


def source_splits(folder: Path, scenes: Sequence[str]) -> dict[str, list[str]] | None:
    """Split name to scene names for the tables in ``folder``, None where they say nothing and are not official."""
    files, name = source_files(str(folder.parent)), f"{folder.name}/{SPLITS_FILE}"
    if (folder / SPLITS_FILE).exists():
        what = "does not map split names to lists of scene names"
        return read_json(files.read(name), f"'{folder / SPLITS_FILE}'", dict[str, list[str]], what)
    numbers = [int(match.group(1)) if (match := _SCENE.match(name)) else 0 for name in scenes]
    if not all(1 <= number <= _NUM_SCENES for number in numbers):
        return None
    if folder.name == "v1.0-test":
        return {"test": list(scenes)}
    if folder.name == "v1.0-mini":
        if not set(numbers) <= _MINI_TRAIN | _MINI_VAL:
            return None
        val = _MINI_VAL
    elif folder.name == "v1.0-trainval":
        val = _VAL
    else:
        return None
    both: dict[str, list[str]] = {"train": [], "val": []}
    for name, number in zip(scenes, numbers, strict=True):
        both["val" if number in val else "train"].append(name)
    return both


_TABLE_FILES: Final = (*(f"{table}.json" for table in TABLES), SPLITS_FILE, CHANNELS_FILE)


POINT_COLUMNS: Final = ("x", "y", "z", "intensity", "ring")


_FRAMES_AT_ONCE: Final = 256


_NO_IMAGE: Final = "no camera image"


class NuScenesOptions(Settings, frozen=True):
    """Options of the adapter.

    ``version``: name of the tables' folder; optional where there is just one. ``missing_camera``: what to do about a
    camera file that does not exist: ``error``, or ``mask`` (absent member, ``cam_valid`` 0). Files that the tables mark
    as not valid are always masked, and a sample without any image is dropped. ``points``: store lidar sweeps; without,
    their geometry stays. ``sweeps``: number of earlier sweeps of each lidar to store with every keyframe (9 are all
    between two keyframes, each once). ``channels``: groups of further channels to store, each from what nuScenes has
    beyond cameras, lidars and boxes. ``radar_sweeps``: as ``sweeps``, of each radar (6 are all between two keyframes).
    """

    version: (
        Annotated[str, Meta(description="nuScenes version folder, such as v1.0-mini", extra={"metavar": "FOLDER"})]
        | None
    ) = None
    missing_camera: Annotated[
        Literal["error", "mask"],
        Meta(
            description="nuScenes camera file that does not exist: raise an error, or leave the member out and mark it "
            "invalid; samples without any image are dropped (default: error)"
        ),
    ] = "error"
    damaged_image: Annotated[
        Literal["error", "mask"],
        Meta(
            description="an image that check_images finds damaged: error; mask (leave the member out, mark it invalid)"
        ),
    ] = "error"
    max_damaged: Annotated[MaxDamaged, Meta(description=MAX_DAMAGED)] = 0.01
    check_images: Annotated[Depth, Meta(description=CHECK_IMAGES)] = "head"
    points: Annotated[bool, Meta(description="false leaves lidar sweeps out")] = True
    sweeps: Annotated[
        int,
        Meta(
            description="number of earlier nuScenes lidar sweeps to store with every keyframe (9: every sweep once; "
            "default: 0)"
        ),
    ] = 0
    dangling_links: Annotated[
        Literal["error", "cut"],
        Meta(
            description="records of a cut-out set that refer to ones that it lacks: raise an error, or cut: drop links "
            "to neighbours, and records without their sample, scene, calibration, track or category"
        ),
    ] = "error"
    classes: Annotated[
        ClassOption,
        Meta(
            description="classes of boxes: nuscenes10 (its ten detection classes), source (all categories of the "
            "tables), or a YAML file that maps category to class"
        ),
    ] = NUSCENES10

    channels: Annotated[
        tuple[Group, ...],
        Meta(
            description="further channels to store, as a list: radar (all radars), can (CAN bus messages between "
            "keyframes), boxes2d (2-D boxes), tokens (tokens of the tables of each box), trajectories (past and future "
            "of ego vehicle and boxes), description (text), map (vectors of the map expansion about the ego vehicle)"
        ),
    ] = ()
    radar_sweeps: Annotated[
        int,
        Meta(
            description="number of earlier nuScenes radar sweeps to store with every keyframe, ego-motion compensated "
            "(6: about every sweep once; default: 0)"
        ),
    ] = 0

    def __post_init__(self) -> None:
        """Check that the options go together."""
        if self.radar_sweeps < 0 or (self.radar_sweeps and "radar" not in self.channels):
            raise ConfigError(f"radar_sweeps={self.radar_sweeps} must be 0 or more, and 0 without channels=[radar]")
        if self.sweeps < 0 or (self.sweeps and not self.points):
            raise ConfigError(f"sweeps={self.sweeps} must be 0 or more, and 0 without points")


class NuScenesSource:
    """A nuScenes dataroot: a folder, or a URL that fsspec knows."""

    kind = "nuscenes"
    settings = NuScenesOptions
    requires: ClassVar[Mapping[str, str]] = {}
    reads: Reads = "random"

    def __init__(self, location: str, options: dict[str, Any]) -> None:
        self._files = source_files(location)
        given = convert(options, NuScenesOptions, "options of source nuscenes")
        self._options = msgspec.structs.replace(given, classes=loaded(given.classes))

    @property
    def attribute_types(self) -> dict[str, type]:
        """Columns of attributes; classes of the source's own are not known before the tables are read: no counts."""
        return attribute_types(ClassMap(self._options.classes, ()).names)

    @property
    def options(self) -> dict[str, Any]:
        """All options; the version is that of the one folder of tables where none was given."""
        given = msgspec.structs.asdict(self._options)
        return recorded({**given, "version": self._version(), "channels": list(self._options.channels)})

    def place(self, ref: str) -> Place | None:
        """The file of an image on this machine; None for lidar, which :meth:`open` makes arrays of, and at a URL."""
        if _is_sweep(ref) or ref.startswith(("[", MADE)):
            return None
        path = self._files.path(ref)
        return None if path is None else Place(path)

    def open(self, ref: str) -> bytes:
        """Bytes of a sensor file; a lidar sweep as ``.npy``, float32 (P, 5) in the lidar frame."""
        if ref.startswith(MADE):
            return made(ref, self._files.read)
        if ref.startswith("["):
            return SweepList.decode(ref).member(self._points)
        return encode_points(self._points(ref)) if _is_sweep(ref) else self._files.read(ref)

    def _points(self, ref: str) -> NDArray[np.float32]:
        path, data = f"{self._files.shown}/{ref}", self._files.read(ref)
        row_bytes = 4 * len(POINT_COLUMNS)
        check_no_pointer(data, f"lidar file '{path}'")
        if len(data) % row_bytes:
            raise SourceError(f"lidar file '{path}' of {len(data)} bytes does not hold points of {row_bytes} bytes")
        return np.frombuffer(data, "<f4").reshape(-1, len(POINT_COLUMNS))

    def scan(self, out: ScanWriter) -> ScanInfo:
        """Read the tables, look at every file's size, write one row for each sample."""
        with self._files.fetched(self._version(), _TABLE_FILES) as folder:
            check_tables(folder)
            return self._scan(folder, out)

    def _scan(self, folder: Path, out: ScanWriter) -> ScanInfo:
        cut = Cut(is_on=self._options.dangling_links == "cut")
        keyframes = Keyframes(folder, out.database, self._options.classes, cut)
        report = ScanReport(cut_links=cut.counts)
        channels = load_channels(folder)
        chosen = self._options.channels
        extras = None
        if chosen:
            extras = Extras(chosen, folder, out.database, keyframes, radar_sweeps=self._options.radar_sweeps)
        num_masked = self._append_samples(folder, keyframes, out, report, channels, extras)
        if extras is not None:
            check_apart(channels, extras.channels, f"'{folder / CHANNELS_FILE}'")
            channels += extras.channels
            for name in extras.empty:
                report.note(f"samples without files of channels=[{name}]", report.samples)
        keyframes.annotations.report(report)
        return ScanInfo(
            name=f"nuscenes-{folder.name}",
            clips=out.clips,
            cameras=[Camera(channel=name.lower(), source_name=name) for name in keyframes.cameras],
            lidars=[
                LidarEntry(channel=name.lower(), source_name=name, columns=POINT_COLUMNS) for name in keyframes.lidars
            ],
            channels=channels,
            classes=keyframes.annotations.classes,
            attributes=keyframes.annotations.attribute_names,
            names=out.member_names(
                [*(name.lower() for name in (*keyframes.cameras, *keyframes.lidars)), *(one.name for one in channels)]
            ),
            time_base="unix",
            ego_origin="rear_axle_ground",
            splits=source_splits(folder, [clip.clip_name for clip in out.clips]),
            facts={"num_masked_cameras": num_masked},
            report=report,
        )

    def _with_pictures(
        self, keyframes: Keyframes, files: KeyframeFiles, report: ScanReport
    ) -> list[tuple[int, NDArray[np.int64], NDArray[np.bool_]]]:
        """Scene row, its samples in time order, and which of them have an image; scenes without any left out."""

        def are_files(filenames: list[str]) -> list[bool]:
            files.look_at(filenames)
            files.examine(filenames)
            return list(map(files.has_picture, filenames))

        scenes = []
        all_count = self._options.missing_camera == self._options.damaged_image == "error"
        for row, samples in keyframes.scenes():
            for own in samples[[0, -1]].tolist():
                check_time(int(keyframes.timestamp_us[own]), keyframes.sample_tokens[own])
            kept = keyframes.have_pictures(samples, None if all_count else are_files)
            num_kept = int(np.count_nonzero(kept))
            report.samples += num_kept
            if num_kept < len(kept):
                found = report.dropped_samples
                found[_NO_IMAGE] = found.get(_NO_IMAGE, 0) + len(kept) - num_kept
            if num_kept:
                scenes.append((row, samples, kept))
        if not scenes:
            dropped = sum(report.dropped_samples.values())
            raise SourceError(
                f"no camera of the {dropped} samples in '{self._files.shown}' has an image: each file is absent, or "
                "marked as not valid in table 'sample_data'; bring the camera files to where the table names them"
            )
        return scenes

    def _append_samples(
        self,
        folder: Path,
        keyframes: Keyframes,
        out: ScanWriter,
        report: ScanReport,
        channels: tuple[Channel, ...],
        extras: Extras | None,
    ) -> int:
        """Write a row for each sample, scene by scene; returns the number of cameras that are masked."""
        sweeps = None
        if self._options.sweeps:
            sweeps = LidarSweeps(folder, out.database, keyframes.data_tokens)
        ids = clip_ids(keyframes.scene)
        counted = ClassMap(self._options.classes, ()).names
        num_masked = 0
        options = self._options
        depth = out.depth(options.check_images, options.damaged_image)
        files = KeyframeFiles(
            self._files, ImagePolicy(options.missing_camera, options.damaged_image, depth), options.max_damaged,
            points=options.points, num_sweeps=options.sweeps,
        )  # fmt: skip
        scenes = self._with_pictures(keyframes, files, report)
        places = ((row, kept, int(number)) for row, _, kept in scenes for number in np.flatnonzero(kept))
        order = np.concatenate([samples[kept] for _, samples, kept in scenes])
        current = -1
        for first in range(0, len(order), _FRAMES_AT_ONCE):
            geometry, frames = keyframes.frames(order[first : first + _FRAMES_AT_ONCE])
            files.look_at([row.filename for frame in frames for row in frame.sensors if row is not None])
            cameras = range(len(keyframes.cameras))
            rows = [
                row for frame in frames for at in cameras if (row := frame.sensors[at]) is not None and row.is_valid
            ]
            files.examine(row.filename for row in rows)
            stamps: list[list[str]] = [[] for _ in frames]
            found = [files.of(keyframes, *of, report) for of in zip(frames, stamps, strict=True)]
            if files.findings.num_found:
                for _ in frames:
                    next(places)
                continue  # no rows any more, but the other faults
            for at, members in enumerate(found):
                present = {member.name.partition(".")[0] for member in members}
                geometry.cam_valid[at] = [name.lower() in present for name in keyframes.cameras]
            self._note_offsets(keyframes, geometry, frames, report)
            sizes = np.where(geometry.cam_valid[..., None] > 0, geometry.img_wh, -1)
            report.note_principal_points([name.lower() for name in keyframes.cameras], geometry.intrinsics, sizes)
            num_cameras = geometry.cam_valid.sum(axis=1).tolist()
            num_masked += geometry.cam_valid.size - sum(num_cameras)
            for name, count in zip(keyframes.cameras, keyframes.num_distorted(geometry), strict=True):
                if count:
                    report.distorted[name.lower()] = report.distorted.get(name.lower(), 0) + count
            batch = Batch(keyframes, order[first : first + _FRAMES_AT_ONCE], geometry, frames, files, stamps)
            earlier = [{} if sweeps is None else files.sweeps_before(keyframes, sweeps, frame) for frame in frames]
            _look_at_more(batch, earlier, channels)
            if extras is not None:
                with files.findings.of("channels"):
                    extras.look_at(batch)
            for at, (frame, members, encoded) in enumerate(zip(frames, found, encode_stacked(geometry), strict=True)):
                scene_row, kept, number = next(places)
                if scene_row != current:
                    current = scene_row
                    scene, log = keyframes.scene[scene_row], keyframes.log[keyframes.scene_log[scene_row]]
                    out.begin_clip(ids[scene_row], scene.name, scene.token)
                    facts = SceneFacts(scene, log, ids[scene_row], kept, keyframes.cameras, counted)
                members += files.earlier(earlier[at], stamps[at])
                if channels:
                    found_bytes = partial(files.file_bytes, stamps=stamps[at])
                    members += channel_members(channels, frame.token, found_bytes)
                if extras is not None:
                    with files.findings.of("channels"):
                        members += extras.members(batch, at)
                boxes = None if frame.boxes is None else encode_arrays(frame.boxes)
                meta = facts.meta(number, frame, members)
                attributes = facts.attributes(num_cameras[at], frame.boxes)
                stamp = xxhash.xxh3_64_intdigest(" ".join(stamps[at]).encode())
                out.append(meta, encoded, boxes, members, attributes, stamp)
        files.findings.check()
        return num_masked

    def _note_offsets(self, keyframes: Keyframes, geometry: Geometry, frames: list[Frame], report: ScanReport) -> None:
        """Largest time between a sample and each of its images."""
        times = np.array([frame.timestamp_us for frame in frames])[:, None] * NS_PER_US
        offsets = np.where(geometry.cam_valid > 0, np.abs(geometry.cam_timestamp_ns - times), 0).max(axis=0)
        for name, offset_ns in zip(keyframes.cameras, offsets.tolist(), strict=True):
            report.offset(name.lower(), offset_ns)

    def _version(self) -> str:
        """Name of the tables' folder."""
        version, shown = self._options.version, self._files.shown
        if version is None:
            found = self._files.folders_with("sample.json")
            if len(found) != 1:
                raise ConfigError(
                    f"'{shown}' needs the option version to choose the tables, such as -o version={found[0]}; there "
                    f"are: {', '.join(found)}"
                    if found
                    else f"'{shown}' has no nuScenes tables: no folder such as v1.0-mini with a sample.json; give the "
                    "folder that holds it, with samples/ beside it"
                )
            version = found[0]
        elif version not in (found := self._files.folders_with("sample.json")):
            if version in ("", "..") or Path(version).name != version:
                raise ConfigError(f"version {version!r} is not the name of a folder in '{shown}'")
            if found:
                raise SourceError(
                    f"nuScenes version '{version}': '{shown}/{version}' is not a folder with tables; there are: "
                    f"{', '.join(found)}"
                )
        return version


def _look_at_more(batch: Batch, earlier: list[dict[str, SweepList]], channels: tuple[Channel, ...]) -> None:
    """Look at the earlier sweeps and the channels' own files of a batch together."""
    names = [name for own in earlier for found in own.values() for name in found.files]
    names += [channel_file(channel, frame.token) for frame in batch.frames for channel in channels]
    batch.files.look_at(names, more=True)


def _is_sweep(ref: str) -> bool:
    return ref.endswith(".bin") and not ref.startswith(f"{CHANNELS_FOLDER}/")
