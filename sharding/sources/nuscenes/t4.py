"""The adapter for T4 datasets (TIER IV, Autoware): nuScenes' tables in ``annotation/``, one scene a
dataset.

What T4 has beyond nuScenes is used: lens coefficients (``camera_distortion``), data marked as not
valid, visibility by words, stored velocities, merged lidars (``LIDAR_CONCAT``), PCD files. Layout:
https://github.com/tier4/tier4_perception_dataset/blob/main/docs/t4_format_3d_detailed.md
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.rigid import invert_rigid
from fuelrail.pipeline.storage.columns import Disk
from fuelrail.sharding.sources.adapter.channels import (
    SIGNALS_AS_SERIES,
    signal_series,
    signals,
)
from fuelrail.sharding.sources.adapter.frame import (
    Absent,
    Clip,
    FileMember,
    Frame,
    Image,
    ImageBoxRows,
    Sensors,
)
from fuelrail.sharding.sources.adapter.members import POINTS
from fuelrail.sharding.sources.adapter.source import FrameSettings
from fuelrail.sharding.sources.adapter.vector_maps import MapWindows, VectorMap
from fuelrail.sharding.sources.nuscenes.boxes import Annotations
from fuelrail.sharding.sources.nuscenes.extras import lanelet2, vehicle_state
from fuelrail.sharding.sources.nuscenes.extras.radar import (
    RadarFiles,
    radar_channel,
)
from fuelrail.sharding.sources.nuscenes.geometry import (
    NOT_VALID,
    NS_PER_US,
    Keyframes,
    in_rig_order,
)
from fuelrail.sharding.sources.nuscenes.joined import (
    SCENES,
    T4_KEYFRAMES,
    Joined,
)
from fuelrail.sharding.sources.nuscenes.source import POINT_COLUMNS, TableSource
from fuelrail.sharding.sources.nuscenes.tables import (
    Named,
    Record,
    Scene,
    Sensor,
    Tables,
    check_time,
)

if TYPE_CHECKING:
    import os

    from fuelrail.pipeline.sample.schema import F64, I64
    from fuelrail.sharding.sources.nuscenes.geometry import SceneRows
    from fuelrail.sharding.sources.shared.files import SourceFiles
    from fuelrail.sharding.sources.shared.scan_table import (
        Reference,
        ScanWriter,
    )
    from fuelrail.sharding.sources.source import ScanInfo

_FOLDER: Final = "annotation"
_BOXES2D: Final = "annotated in the image; row counts in boxes, by the track"
_RADAR_BYTES: Final = 1 << 13
"""About that of a radar's member: 100 points."""


class _ImageAnnotation(Record, frozen=True, gc=False):
    """Table ``object_ann``: a box in an image, left, top, right, bottom [px]."""

    sample_data_token: str
    instance_token: str
    category_token: str
    bbox: tuple[float, float, float, float]


class T4Settings(FrameSettings, frozen=True, kw_only=True):
    """Options of the adapter."""

    missing_camera: Annotated[
        Literal["error", "mask", "drop"],
        Meta(
            description="a sample without the image of a camera, or with one that is marked as not "
            "valid: error; mask (leave the member out, mark it invalid); drop (leave the "
            "sample out)"
        ),
    ] = "mask"
    boxes2d: Annotated[
        bool,
        Meta(description="true stores the boxes of table object_ann as channels boxes2d_CAMERA"),
    ] = False
    vehicle_state: Annotated[
        bool,
        Meta(
            description="true stores pedals, steering, indicators and speed as the channel "
            "can_vehicle_state"
        ),
    ] = False
    series: Annotated[bool, Meta(description=SIGNALS_AS_SERIES)] = False
    map: Annotated[
        bool,
        Meta(description="true stores the Lanelet2 map about ego as the channel map"),
    ] = False
    radars: Annotated[
        bool,
        Meta(
            description="true stores radars (PCD with nuScenes' 18 fields) as channels of their "
            "names"
        ),
    ] = False


class T4(TableSource[T4Settings]):
    """T4 datasets (TIER IV): one dataset, or a folder of many, each with the folder annotation.

    Of each dataset the last version is read. Images marked as not valid are absent. Radars are read
    from PCD, as in nuScenes, not from JSON. The map is Lanelet2 (`map/lanelet2_map.osm`, nodes with
    `local_x` and `local_y`): `lane_border` is `virtual`, `road_border` includes curbstones, guard
    rails, walls and fences, `lane` all lanelets but crosswalks and walkways; other lines, such as
    traffic lights, are left out. `can_vehicle_state` has pedals [%], steering [rad], indicators (1
    is on) and speed [km/h].
    """

    kind = "t4"
    settings_type = T4Settings
    _folder: str | os.PathLike[str]

    def __init__(self, location: str, options: dict[str, Any]) -> None:
        super().__init__(location, options)

        def read_map(dataset: str) -> VectorMap:
            name = f"{dataset}{lanelet2.FILE}"
            where = f"map '{self.files.shown}/{name}'"
            vector_map, num_others = lanelet2.parse_map(self.files.read(name), where)
            if num_others:
                self.noted["lines of maps whose type is not stored"] += num_others
            return vector_map

        self.maps = None
        if self.settings.map:
            self.maps = MapWindows(lanelet2.MAP_LAYERS, read_map)
        self._state_channel = vehicle_state.state_channel(series=self.settings.series)

    def scan(self, out: ScanWriter) -> ScanInfo:
        """Write a row for each frame that is kept; columns of the tables are on the disk of the
        scan table.
        """
        self._folder = out.disk.folder
        return super().scan(out)

    def _datasets(self) -> list[str]:
        """Return folders of datasets below the root, with a slash at the end; for several
        versions of one the last.
        """
        folders = []
        names = self.files.listed()
        if _FOLDER in names:
            return [""]
        for name in names:
            inside = _list_inside(self.files, name)
            if _FOLDER in inside:
                folders.append(f"{name}/")
                continue
            versions = [
                version
                for version in inside
                if version.isdigit() and _FOLDER in _list_inside(self.files, f"{name}/{version}")
            ]
            if versions:
                folders.append(f"{name}/{max(versions, key=int)}/")
        if not folders:
            raise SourceError(
                f"the t4 source '{self.files.shown}' has no dataset: no folder with the "
                f"folder {_FOLDER}"
            )
        return folders

    def _tables(self, dataset: str) -> Tables:
        return Tables(self.files, f"{dataset}{_FOLDER}")

    @contextlib.contextmanager
    def _naming(self, dataset: str) -> Iterator[None]:
        """Name the dataset in errors."""
        try:
            yield
        except SourceError as error:
            raise SourceError(f"in '{self.files.shown}/{dataset}{_FOLDER}': {error}") from error

    def sensors(self) -> Sensors:
        """Return the cameras and lidars of all datasets."""
        cameras: dict[str, None] = {}
        lidars: dict[str, None] = {}
        radars: dict[str, None] = {}
        attributes: dict[str, None] = {}
        for dataset in self._datasets():
            for sensor in self._tables(dataset).all("sensor", Sensor):
                if not re.fullmatch(r"[A-Za-z0-9_]{1,64}", sensor.channel):
                    raise SourceError(
                        f"table 'sensor' of '{dataset}': the channel '{sensor.channel}' is "
                        "not a word"
                    )
                {"camera": cameras, "lidar": lidars, "radar": radars}.get(sensor.modality, {})[
                    sensor.channel
                ] = None
            attributes.update(
                (record.name, None) for record in self._tables(dataset).all("attribute", Named)
            )
        self.box_attributes = list(attributes)
        self.image_boxes = (
            {name.lower(): _BOXES2D for name in cameras} if self.settings.boxes2d else {}
        )
        self.channels = tuple(map(radar_channel, sorted(radars))) if self.settings.radars else ()
        self.channels += (self._state_channel,) if self.settings.vehicle_state else ()
        return Sensors.from_names(
            in_rig_order(cameras), dict.fromkeys(sorted(lidars), POINT_COLUMNS)
        )

    def clips(self) -> Iterator[Clip]:
        """Yield the scene of each dataset."""
        for dataset in self._datasets():
            with self._naming(dataset):
                disk = Disk(self._folder)
                joined = Joined(self._tables(dataset), disk, SCENES)
            scenes: list[Scene] = joined["scene"].records
            if len(scenes) != 1:
                raise SourceError(
                    f"'{self.files.shown}/{dataset}{_FOLDER}' has {len(scenes)} scenes, "
                    "expected one"
                )
            log_row = int(joined["scene"].links["log_token"][0])
            log = joined["log"].records[log_row]
            (scene,) = scenes
            maps: list[str] = []
            if self.settings.map:
                map_folder, _, map_name = lanelet2.FILE.partition("/")
                if map_name in _list_inside(self.files, f"{dataset}{map_folder}"):
                    maps = [f"{dataset}{lanelet2.FILE}"]
            series = {}
            if self.settings.vehicle_state and self.settings.series:
                series[self._state_channel.name] = signal_series(*self._read_states(dataset))
            yield Clip(
                name=dataset.partition("/")[0] or scene.name,
                token=dataset or scene.token,
                log_id=log.logfile,
                vehicle=log.vehicle,
                tags={
                    "description": scene.description,
                    "location": log.location,
                },
                files=tuple(maps),
                series=series,
            )

    def frames(self, clip: Clip) -> Iterator[Frame]:
        """Yield the samples of a dataset by time."""
        dataset = clip.token if clip.token.endswith("/") else ""
        with self._naming(dataset):
            disk = Disk(self._folder)
            joined = Joined(self._tables(dataset), disk, T4_KEYFRAMES)
            keyframes = Keyframes(
                joined=joined,
                disk=disk,
                leading=None,
                folder=dataset,
                stay=False,
            )
            # Annotations in images with their categories, by row of `sample_data`.
            in_images: dict[str, list[tuple[_ImageAnnotation, str]]] = {}
            if self.settings.boxes2d:
                category = joined["category"]
                records = self._tables(dataset).all("object_ann", _ImageAnnotation)
                links = [record.category_token for record in records]
                categories = category.tokens.find(links)
                category.tokens.check(
                    categories,
                    links,
                    table="object_ann",
                    column="category_token",
                    owners=[record.token for record in records],
                    may_be_empty=False,
                )
                for record, category_row in zip(records, categories.tolist(), strict=True):
                    name = category.records[category_row].name
                    annotations = in_images.setdefault(record.sample_data_token, [])
                    annotations.append((record, name))
        ((_, samples),) = keyframes.scenes()
        rows = keyframes.scene_rows(samples)
        boxes = Annotations(joined, disk).scene_boxes(rows, self.box_attributes)
        has_map = clip.files[:1] == (f"{dataset}{lanelet2.FILE}",)
        windows = self.maps if has_map else None
        if self.maps is not None and windows is None:
            self.noted["datasets without a map"] += 1
        for token, timestamp_us in zip(rows.tokens, rows.timestamp_us, strict=True):
            check_time(timestamp_us, token)
        states: list[list[Reference]] = [[] for _ in rows.timestamp_us]
        if self.settings.vehicle_state and not self.settings.series:
            times_ns = [timestamp_us * NS_PER_US for timestamp_us in rows.timestamp_us]
            states = signals(self._state_channel, *self._read_states(dataset), times_ns)
        for number, own_boxes in enumerate(boxes):
            ego2global = (
                None if np.isnan(rows.ego2global[number, 0, 0]) else rows.ego2global[number]
            )
            images: dict[str, Image | Absent] = {}
            boxes2d: dict[str, ImageBoxRows] = {}
            for channel, image in rows.images[number].items():
                images[channel] = Absent(NOT_VALID) if image.absent else image
                if self.settings.boxes2d and not image.absent:
                    stated = in_images.get(image.token, [])
                    row_of = {track: row for row, track in enumerate(own_boxes.track or ())}
                    boxes2d[channel] = ImageBoxRows(
                        box=[annotation.bbox for annotation, _ in stated],
                        category=[name for _, name in stated],
                        track=[annotation.instance_token for annotation, _ in stated],
                        row=[row_of.get(annotation.instance_token, -1) for annotation, _ in stated],
                    )
            sweeps = {
                name.lower(): sweep
                for name, sweep in rows.lidars[number].items()
                if not sweep.absent
            }
            members: list[Reference | FileMember] = [*states[number]]
            if self.settings.radars:
                members += self._iter_radars(rows, number)
            if windows is not None and ego2global is not None:
                members.append(windows.make_window(dataset, ego2global))
            yield Frame(
                timestamp_ns=rows.timestamp_us[number] * NS_PER_US,
                ego2global=ego2global,
                images=images,
                sweeps=sweeps,
                boxes=own_boxes,
                boxes2d=boxes2d,
                members=members,
                token=rows.tokens[number],
            )

    def _read_states(self, dataset: str) -> tuple[I64, F64]:
        """Return times [ns] and numbers of the vehicle's states; note a dataset without them."""
        rows = []
        if f"{vehicle_state.TABLE}.json" in self.files.listed(f"{dataset}{_FOLDER}"):
            rows = self._tables(dataset).all(vehicle_state.TABLE, vehicle_state.VehicleState)
        if not rows:
            self.noted[f"datasets without {vehicle_state.TABLE}"] += 1
        return vehicle_state.state_signals(rows)

    def _iter_radars(self, rows: SceneRows, number: int) -> Iterator[FileMember]:
        """Yield the radars of a sample, in ego at its time; note files of JSON, and leave them
        out.
        """
        for channel, sweep in rows.radars[number].items():
            if not sweep.absent and sweep.ref.endswith(".json"):
                self.noted[f"{channel}: radar files of JSON, not read"] += 1
            elif not sweep.absent:
                assert sweep.ego2global is not None, "every row has a pose"
                sensor2key = (
                    invert_rigid(rows.ego2global[number]) @ sweep.ego2global @ sweep.lidar2ego
                )
                age_s = (rows.timestamp_us[number] - sweep.timestamp_ns // NS_PER_US) * 1e-6
                radar_files = RadarFiles(
                    channel,
                    [sweep.ref],
                    [age_s],
                    [sensor2key[:3].ravel().tolist()],
                )
                ref = POINTS + msgspec.json.encode(radar_files).decode()
                hint = "the option radars=false leaves radars out"
                yield FileMember(
                    name=radar_channel(channel).field,
                    ref=ref,
                    files=radar_files.files,
                    hint=hint,
                    num_bytes=_RADAR_BYTES,
                )


def _list_inside(files: SourceFiles, folder: str) -> list[str]:
    try:
        return files.listed(folder)
    except SourceError:
        return []  # a file
