"""The adapter for nuScenes, and the splits that its scenes belong to.

``splits.json`` beside the tables (split name to scene names, as the devkit reads it) comes first;
else the official split of v1.0-trainval, v1.0-mini and v1.0-test, where all scenes are the official
ones. The lists are those of the devkit's ``utils/splits.py``, written as runs of scene numbers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta

from fuelrail.pipeline.channels.sensors import lies_on
from fuelrail.pipeline.errors import ConfigError, SourceError
from fuelrail.sharding.sources.adapter.channels import SIGNALS_AS_SERIES
from fuelrail.sharding.sources.adapter.classes import (
    NUSCENES10,
    ClassMap,
    ClassOption,
    count_column,
)
from fuelrail.sharding.sources.adapter.frame import Absent, Clip, Frame, Sensors
from fuelrail.sharding.sources.adapter.rows import attribute_types, clip_id
from fuelrail.sharding.sources.adapter.source import (
    FrameSettings,
    FrameSource,
    S,
)
from fuelrail.sharding.sources.adapter.vector_maps import MapWindows
from fuelrail.sharding.sources.nuscenes.boxes import CATEGORIES, Annotations
from fuelrail.sharding.sources.nuscenes.extras.boxes2d import (
    TOKENS,
    image_box_channels,
    image_boxes,
)
from fuelrail.sharding.sources.nuscenes.extras.can import CanBus, CanMessages
from fuelrail.sharding.sources.nuscenes.extras.groups import (
    CHANNELS_FILE,
    DESCRIPTION,
    Group,
    GroupName,
    OwnChannels,
    Stated,
    load_channels,
)
from fuelrail.sharding.sources.nuscenes.extras.maps import (
    LAYERS,
    Maps,
    parse_map,
)
from fuelrail.sharding.sources.nuscenes.extras.radar import RadarFiles, Radars
from fuelrail.sharding.sources.nuscenes.extras.trajectories import Trajectories
from fuelrail.sharding.sources.nuscenes.geometry import NS_PER_US, Keyframes
from fuelrail.sharding.sources.nuscenes.joined import KEYFRAMES, Joined
from fuelrail.sharding.sources.nuscenes.sweeps import LidarSweeps, SweepList
from fuelrail.sharding.sources.nuscenes.tables import (
    Tables,
    check_time,
    select_sensors,
)
from fuelrail.sharding.sources.shared.joins import Cut
from fuelrail.sharding.sources.shared.points import parse_points

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.pipeline.sample.schema import F32, I64
    from fuelrail.pipeline.storage.columns import Disk
    from fuelrail.sharding.sources.adapter.frame import BoxRows
    from fuelrail.sharding.sources.shared.scan_table import ScanWriter
    from fuelrail.sharding.sources.source import Place, ScanInfo

POINT_COLUMNS: Final = ("x", "y", "z", "intensity", "ring")
SPLITS_FILE: Final = "splits.json"

_VAL_RUNS: Final = (
    (3, 3),
    (12, 18),
    (35, 36),
    (38, 39),
    (92, 110),
    (221, 221),
    (268, 278),
    (329, 332),
    (344, 346),
    (519, 524),
    (552, 565),
    (625, 627),
    (629, 630),
    (632, 638),
    (770, 771),
    (775, 775),
    (777, 778),
    (780, 784),
    (794, 800),
    (802, 802),
    (904, 917),
    (919, 931),
    (962, 963),
    (966, 969),
    (971, 972),
    (1059, 1073),
)
_VAL: Final = frozenset(number for first, last in _VAL_RUNS for number in range(first, last + 1))
_MINI_TRAIN: Final = frozenset({61, 553, 655, 757, 796, 1077, 1094, 1100})
_MINI_VAL: Final = frozenset({103, 916})
_NUM_SCENES: Final = 1110
_SCENE: Final = re.compile(r"scene-([0-9]{4})\Z")


def source_splits(tables: Tables, scenes: Sequence[str]) -> dict[str, list[str]] | None:
    """Split name to scene names of the tables, None where they say nothing and are not official."""
    stated = tables.beside(
        SPLITS_FILE,
        dict[str, list[str]],
        "does not map split names to lists of scene names",
    )
    if stated is not None:
        return stated
    numbers = [int(match.group(1)) if (match := _SCENE.match(name)) else 0 for name in scenes]
    if not all(1 <= number <= _NUM_SCENES for number in numbers):
        return None
    if tables.folder == "v1.0-test":
        return {"test": list(scenes)}
    if tables.folder == "v1.0-mini":
        if not set(numbers) <= _MINI_TRAIN | _MINI_VAL:
            return None
        val = _MINI_VAL
    elif tables.folder == "v1.0-trainval":
        val = _VAL
    else:
        return None
    splits: dict[str, list[str]] = {"train": [], "val": []}
    for name, number in zip(scenes, numbers, strict=True):
        splits["val" if number in val else "train"].append(name)
    return splits


_POINT_FILES: Final = (".bin", ".npy", ".pcd")
_NO_ROW: Final = Absent("no row")
_CUT: Final = "; the option dangling_links=cut is for sets that are cut out of larger ones"
_NOT_STATED: Final = (np.nan, np.nan, np.nan)
_COLUMNS: Final = {
    "location": str,
    "description": str,
    "night": bool,
    "rain": bool,
}
_ATTRIBUTES: Final = (
    "clip_name",
    "log_id",
    "vehicle",
    *_COLUMNS,
    "num_cameras",
    "num_boxes",
)
_CONDITIONS: Final = {
    "night": re.compile(r"\bnight(?:[ -]?time)?\b"),
    "rain": re.compile(r"(?<!\bno )(?<!\bwithout )\brain(?:s|y|ing|fall)?\b"),
}
_NUSCENES_LOCATIONS: Final = frozenset(
    (
        "boston-seaport",
        "singapore-hollandvillage",
        "singapore-onenorth",
        "singapore-queenstown",
    )
)
"""Locations of nuScenes: the devkit has maps of these only."""
_SYNTHETIC: Final = "synth-"
"""Begins the locations of `fuelrail synth`, whose descriptions are made as nuScenes' are."""


class NuScenesOptions(FrameSettings, frozen=True, kw_only=True):
    """Options of the adapter."""

    version: (
        Annotated[
            str,
            Meta(
                description="nuScenes version folder, such as v1.0-mini",
                extra={"metavar": "FOLDER"},
            ),
        ]
        | None
    ) = None
    sweeps: Annotated[
        int,
        Meta(
            description="number of earlier nuScenes lidar sweeps to store with every keyframe (9: "
            "every sweep once; default: 0)"
        ),
    ] = 0
    dangling_links: Annotated[
        Literal["error", "cut"],
        Meta(
            description="records of a cut-out set that refer to ones that it lacks: raise an "
            "error, or cut: drop links to neighbours, and records without their sample, scene, "
            "calibration, track or category"
        ),
    ] = "error"
    classes: Annotated[
        ClassOption,
        Meta(
            description="classes of boxes: nuscenes10 (its ten detection classes), source (all "
            "categories of the tables), or a YAML file that maps category to class"
        ),
    ] = NUSCENES10
    channels: Annotated[
        tuple[GroupName, ...],
        Meta(
            description="further channels to store, as a list: radar (all radars), can (CAN bus "
            "messages between keyframes), boxes2d (2-D boxes), tokens (tokens of the tables "
            "of each box), trajectories (past and future of ego vehicle and boxes), "
            "description (text), map (vectors of the map expansion about the ego vehicle)"
        ),
    ] = ()
    series: Annotated[bool, Meta(description=SIGNALS_AS_SERIES)] = False
    radar_sweeps: Annotated[
        int,
        Meta(
            description="number of earlier nuScenes radar sweeps to store with every keyframe, "
            "ego-motion compensated (6: about every sweep once; default: 0)"
        ),
    ] = 0

    def __post_init__(self) -> None:
        """Check that the options go together."""
        has_sweeps = self.radar_sweeps > 0
        if self.radar_sweeps < 0 or (has_sweeps and "radar" not in self.channels):
            raise ConfigError(
                f"radar_sweeps={self.radar_sweeps} must be 0 or more, and 0 without "
                "channels=[radar]"
            )
        if self.series and "can" not in self.channels:
            raise ConfigError("series=true needs signals: channels=[can]")
        if self.sweeps < 0 or (self.sweeps and not self.points):
            raise ConfigError(f"sweeps={self.sweeps} must be 0 or more, and 0 without points")


class TableSource(FrameSource[S]):
    """A source of nuScenes' tables."""

    ego_origin = "rear_axle_ground"

    def points(self, ref: str) -> F32:
        """Read a sweep: rows of five float32, ``.npy``, or PCD with these columns; or a radar's."""
        if ref.startswith("{"):
            radar = msgspec.json.decode(ref, type=RadarFiles)
            return radar.points(self.files.read)
        return parse_points(
            self.files.read(ref),
            POINT_COLUMNS,
            f"lidar file '{self.files.shown}/{ref}'",
        )


class _SceneClip(Clip, frozen=True, kw_only=True):
    """A scene with the rows of its samples (S,), in time order."""

    samples: I64


class NuScenesSource(TableSource[NuScenesOptions]):
    """A nuScenes dataroot: a folder, or a URL that fsspec knows.

    - Cut-out sets, whose records name missing ones, need `-o dangling_links=cut`.
    - Lyft Level 5: `-o version=v1.02-train -o classes=source`. Fractions of microseconds are
      rounded.
    - `radar` gives a channel for each radar, such as `radar_front`: points, 18 fields and `dt_s`,
      unfiltered; position and velocity in ego at the sample's time. Earlier sweeps (`radar_sweeps`)
      are compensated for ego's motion as in nuscenes-devkit.
    - `can` gives a channel for each kind of message, such as `can_pose`, `can_ms_imu`, not
      augmented.
    - `boxes2d` gives a channel for each camera: bounds [px] of the part of each 3-D box inside the
      image and at least 0.1 m in front of the camera, with the box's row, label and instance.
    - `tokens` gives `box_tokens`, JSON: tokens of annotation, instance and visibility of each box.
    - `trajectories` gives `ego_trajectory` [17, 6] and `agent_trajectories` [M, 17, ...]: poses in
      ego at the sample's time, 4 keyframes back (2 s) and 12 ahead (6 s), with `valid`.
    - `map` reads `maps/expansion`.
    - Attributes `night` and `rain` are true if the scene's description states them; false if there
      is a description and the log's location is one of nuScenes' four or begins with `synth-`
      (`fuelrail synth`); else null.

    To store channels of your own, write `channels.json` beside the tables, and a file for each
    sample, such as `channels/depth_cam_front/{sample token}.png`:

        [{"name": "depth_cam_front", "kind": "image", "field": "depth_cam_front.png",
          "dtype": "uint16", "axes": ["height", "width"], "shape": [null, null], "units": ["mm"],
          "frame": "image:cam_front", "law": {"name": "image", "camera": "cam_front"}}]

    Dtype, shape, NaN, infinities and the size of masks are checked.
    """

    kind = "nuscenes"
    settings_type = NuScenesOptions
    sync = "keyframe"
    columns = _COLUMNS
    _keyframes: Keyframes
    _annotations: Annotations
    _groups: list[Group]

    def __init__(self, location: str, options: dict[str, Any]) -> None:
        super().__init__(location, options)
        self._can = CanBus(has_series=self.settings.series)
        if "map" in self.settings.channels:
            self.maps = MapWindows(LAYERS, lambda file: parse_map(self.files.read(file), file))

    @property
    def attribute_types(self) -> dict[str, type]:
        """Columns of attributes; classes of the source's own are not known before the tables are
        read: no counts.
        """
        names = ClassMap(self.settings.classes, ()).names
        types = attribute_types(names, self.columns)
        return {name: types[name] for name in (*_ATTRIBUTES, *map(count_column, names))}

    @property
    def options(self) -> dict[str, Any]:
        """All options; the version is that of the one folder of tables where none was given."""
        return {**super().options, "version": self._version()}

    def scan(self, out: ScanWriter) -> ScanInfo:
        """Read the tables, look at every file's size, write one row for each sample."""
        settings = self.settings
        cut = Cut(is_on=self.settings.dangling_links == "cut", remedy=_CUT)
        with self.files.scanning():
            tables = Tables(self.files, self._version())
            tables.check()
            sensor_filter = partial(
                select_sensors,
                cameras=settings.cameras,
                where=self.files.shown,
                radars="radar" in settings.channels,
            )
            joined = Joined(
                tables=tables,
                disk=out.disk,
                plan=KEYFRAMES,
                select_sensors=sensor_filter,
                cut=cut,
            )
            self._keyframes = keyframes = Keyframes(
                joined=joined,
                disk=out.disk,
                leading=("LIDAR_TOP",),
                stay=True,
            )
            if not keyframes.cameras:
                raise SourceError(
                    f"table '{tables.path('sample_data')}' has no keyframes of cameras"
                )
            self._annotations = annotations = Annotations(joined, out.disk)
            self.box_attributes = annotations.attribute_names
            rig = [name.lower() for name in keyframes.cameras]
            own_channels = OwnChannels(
                tuple(channel for channel in load_channels(tables) if lies_on(channel, rig))
            )
            groups = self._make_groups(tables, out.disk)
            self._groups = [own_channels, *groups.values()]
            if settings.sweeps:
                self._groups.append(
                    LidarSweeps(
                        tables,
                        disk=out.disk,
                        modality="lidar",
                        keyframes=keyframes,
                        num_sweeps=settings.sweeps,
                    )
                )
            names_made = {channel.name for group in groups.values() for channel in group.channels}
            for channel in own_channels.channels:
                if channel.name in names_made:
                    raise SourceError(
                        f"'{self.files.shown}/{tables.folder}/{CHANNELS_FILE}' has the "
                        f"channel '{channel.name}', which the option channels makes too: "
                        "rename or leave out one"
                    )
            self.channels = []
            for group in self._groups:
                if not isinstance(group, Maps):
                    self.channels += group.channels
            info = self._scan(out)
            report = info.report
            splits = source_splits(tables, [clip.clip_name for clip in info.clips])
        assert report is not None, "the adapter counts"
        report.cut_links = cut.counts
        if_found = set()
        for name in ("can", "map"):
            if name in groups:
                if_found |= {channel.name for channel in groups[name].channels}
        channels = tuple(
            entry
            for entry in info.channels
            if entry.name not in if_found or entry.field in info.names
        )
        for name, group in groups.items():
            if not any(channel in channels for channel in group.channels):
                report.note(
                    f"samples without files of channels=[{name}]",
                    report.samples,
                )
        return replace(
            info,
            name=f"nuscenes-{tables.folder}",
            channels=channels,
            splits=splits,
        )

    def _make_groups(self, tables: Tables, disk: Disk) -> dict[GroupName, Group]:
        """Return the groups that the option ``channels`` names, in the order of the table of
        channels.
        """
        keyframes = self._keyframes
        annotations = self._annotations
        is_labelled = len(annotations) > 0
        make: dict[GroupName, Callable[[], Group]] = {
            "radar": lambda: Radars(tables, disk, keyframes, self.settings.radar_sweeps),
            "can": lambda: self._can,
            "boxes2d": lambda: Stated(image_box_channels(keyframes.cameras if is_labelled else ())),
            "tokens": lambda: Stated((TOKENS,) if is_labelled else ()),
            "trajectories": lambda: Trajectories(disk, keyframes, annotations),
            "description": lambda: Stated((DESCRIPTION,)),
        }
        if self.maps is not None:
            make["map"] = partial(Maps, self.maps)
        return {name: make[name]() for name in make if name in self.settings.channels}

    def _classes(self) -> ClassMap:
        option = CATEGORIES if self.settings.classes == NUSCENES10 else self.settings.classes
        return ClassMap(option, self._annotations.categories)

    def sensors(self) -> Sensors:
        """Return the cameras and lidars that have keyframes."""
        return Sensors.from_names(
            self._keyframes.cameras,
            dict.fromkeys(self._keyframes.lidars, POINT_COLUMNS),
        )

    def clips(self) -> Iterator[Clip]:
        """Yield the scenes that have samples, in the order of the table."""
        keyframes = self._keyframes
        joined = self._keyframes.joined
        scenes = joined["scene"].records
        logs = joined["log"].records
        count = Counter(scene.name for scene in scenes)
        for row, samples in keyframes.scenes():
            scene = scenes[row]
            log = logs[joined["scene"].links["log_token"][row]]
            # Samples in the order of time are the scene's next links, and nbr_samples of them.
            is_cut = self.settings.dangling_links == "cut"
            table = self._keyframes.joined["sample"]
            if len(samples) != scene.nbr_samples and not is_cut:
                raise SourceError(
                    f"table 'scene': '{scene.name}' has nbr_samples {scene.nbr_samples}, "
                    f"table 'sample' has {len(samples)} of it"
                )
            following = table.links["next"][samples]
            expected = np.append(samples[1:], -1)[: len(samples)]
            is_link_cut = is_cut & (following < 0)
            wrong = (following != expected) & ~is_link_cut
            if wrong.any():
                raise SourceError(
                    f"table 'sample': row '{table.tokens[int(samples[wrong.argmax()])]}' of "
                    f"scene '{scene.name}': its next is not the scene's following sample in time"
                )
            if not len(samples):
                continue
            for sample in samples[[0, -1]].tolist():
                check_time(
                    int(keyframes.timestamp_us[sample]),
                    joined["sample"].tokens[sample],
                )
            # nuScenes' own descriptions name night and rain wherever they occur, so there a
            # description without the word is a denial. Those of others deny nothing by silence,
            # and an empty one (nuScenes' test split) says nothing at all.
            text = scene.description.lower()
            names_all = text and (
                log.location in _NUSCENES_LOCATIONS or log.location.startswith(_SYNTHETIC)
            )
            tags: dict[str, Any] = {"location": log.location, "description": scene.description}
            for word, pattern in _CONDITIONS.items():
                is_stated = bool(pattern.search(text))
                if is_stated or names_all:
                    tags[word] = is_stated
            times_ns = (keyframes.timestamp_us[samples] * NS_PER_US).tolist()
            files, series = self._can.series(self.files, scene.name, times_ns)
            yield _SceneClip(
                name=scene.name,
                token=scene.token,
                log_id=log.logfile or log.token,
                vehicle=log.vehicle,
                tags=tags,
                attributes=tags,
                id=clip_id(scene.name, scene.token, is_taken=count[scene.name] > 1),
                samples=samples,
                files=files,
                series=series,
            )

    def frames(self, clip: Clip) -> Iterator[Frame]:
        """Yield the samples of a scene; raises SourceError for one that has no pose, and for
        files of unknown kinds.
        """
        assert isinstance(clip, _SceneClip), "it is of this source"
        keyframes = self._keyframes
        channel_groups = self.settings.channels
        rows = keyframes.scene_rows(clip.samples)
        cameras = [name.lower() for name in keyframes.cameras]
        # A test split has no annotations.
        boxes: Sequence[BoxRows | None] = [None] * len(rows.tokens)
        if len(self._annotations):
            boxes = self._annotations.scene_boxes(rows, self.box_attributes)
        for number, token in enumerate(rows.tokens):
            if np.isnan(rows.ego2global[number, 0, 0]):
                raise SourceError(f"table 'sample': row '{token}' has no sensor data at all")
            for lidar, sweep in rows.lidars[number].items():
                if not sweep.absent and not sweep.ref.endswith(_POINT_FILES):
                    data_row = rows.row_of(number, lidar)
                    row = keyframes.joined["sample_data"].tokens[data_row]
                    raise SourceError(
                        f"table 'sample_data': row '{row}' of a lidar has the file "
                        f"'{sweep.ref}', of a kind that is not read; read are "
                        f"{', '.join(_POINT_FILES)}"
                    )
            sample_boxes = boxes[number]
            values = dict[str, str]()
            if "tokens" in channel_groups and sample_boxes is not None:
                tokens = self._annotations.tokens_of(int(rows.samples[number]))
                values[TOKENS.name] = msgspec.json.encode(tokens).decode()
            if "description" in channel_groups and rows.scene.description:
                values[DESCRIPTION.name] = rows.scene.description
            yield Frame(
                timestamp_ns=rows.timestamp_us[number] * NS_PER_US,
                images={name: rows.images[number].get(name, _NO_ROW) for name in cameras},
                ego2global=rows.ego2global[number],
                sweeps={lidar.lower(): sweep for lidar, sweep in rows.lidars[number].items()},
                boxes=sample_boxes,
                boxes2d=image_boxes(rows, number, sample_boxes)
                if "boxes2d" in channel_groups and sample_boxes is not None
                else {},
                values=values,
                members=[
                    member for group in self._groups for member in group.members(rows, number)
                ],
                token=token,
                ego_velocity=_NOT_STATED,
            )

    def place(self, ref: str) -> Place | None:
        """Return file of an image on this machine; None for lidar, which :meth:`open` makes
        arrays of, and at a URL.
        """
        if ref.startswith(("[", "{")):
            return None
        return super().place(ref)

    def open(self, ref: str) -> Buffer:
        """Return bytes of a member; a lidar sweep as ``.npy``, float32 (P, 5) in the lidar
        frame.
        """
        if ref.startswith("{"):
            messages = msgspec.json.decode(ref, type=CanMessages)
            return messages.member(self.files.read)
        if ref.startswith("["):
            sweeps = msgspec.json.decode(ref, type=SweepList)
            return sweeps.member(self.points)
        return super().open(ref)

    def _version(self) -> str:
        """Name of the tables' folder."""
        version = self.settings.version
        root = self.files.shown
        if version is None:
            folders = self.files.folders_with("sample.json")
            if len(folders) != 1:
                raise ConfigError(
                    f"'{root}' needs the option version to choose the tables, such as -o "
                    f"version={folders[0]}; there are: {', '.join(folders)}"
                    if folders
                    else f"'{root}' has no nuScenes tables: no folder such as v1.0-mini with a "
                    "sample.json; give the folder that holds it, with samples/ beside it"
                )
            version = folders[0]
        elif version not in (folders := self.files.folders_with("sample.json")):
            if version in ("", "..") or Path(version).name != version:
                raise ConfigError(f"version {version!r} is not the name of a folder in '{root}'")
            if folders:
                raise SourceError(
                    f"nuScenes version '{version}': '{root}/{version}' is not a folder with "
                    f"tables; there are: {', '.join(folders)}"
                )
        return version
