"""The adapter for T4 datasets (TIER IV, Autoware): nuScenes' tables in ``annotation/``, one scene a dataset.

What T4 has beyond nuScenes is used: lens coefficients (``camera_distortion``), data marked as not valid, visibility by
words, stored velocities, merged lidars (``LIDAR_CONCAT``), PCD files. Layout:
https://github.com/tier4/tier4_perception_dataset/blob/main/docs/t4_format_3d_detailed.md
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.rigid import invert_rigid
from fuelrail.sharding.sources.adapter.frame import Absent, BoxRows, Clip, Frame, Image, ImageBoxRows, Sensors, Sweep
from fuelrail.sharding.sources.adapter.members import POINTS
from fuelrail.sharding.sources.adapter.poses import pose
from fuelrail.sharding.sources.adapter.source import FrameSettings
from fuelrail.sharding.sources.adapter.vector_maps import MapWindows, VectorMap
from fuelrail.sharding.sources.nuscenes.boxes import VISIBILITY
from fuelrail.sharding.sources.nuscenes.extras import lanelet2, vehicle_state
from fuelrail.sharding.sources.nuscenes.extras.radar import RadarFiles, radar_channel
from fuelrail.sharding.sources.nuscenes.geometry import LENS_OF_LENGTH, NS_PER_US, coefficients, in_rig_order
from fuelrail.sharding.sources.nuscenes.scenes import NOT_VALID, POINT_COLUMNS, TableSource
from fuelrail.sharding.sources.nuscenes.tables import (
    Annotation,
    CalibratedSensor,
    EgoPose,
    Instance,
    Log,
    Named,
    Record,
    SampleData,
    SampleRecord,
    Scene,
    Sensor,
    Vector3,
    Visibility,
    check_time,
)
from fuelrail.sharding.sources.shared.foreign import read_json
from fuelrail.sharding.sources.shared.scan_table import Reference

if TYPE_CHECKING:
    from collections import Counter

    from fuelrail.sharding.sources.shared.files import SourceFiles

R = TypeVar("R", bound=Record)

_FOLDER: Final = "annotation"
_BOXES2D: Final = "annotated in the image; row counts in boxes, by the track"
_RADAR_BYTES: Final = 1 << 13
"""About that of a radar's member: 100 points."""


class _Annotation(Annotation, frozen=True, gc=False):
    """``velocity`` [m/s] in global; null: not stated."""

    velocity: Vector3 | None = None


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
            description="a sample without the image of a camera, or with one that is marked as not valid: error; mask "
            "(leave the member out, mark it invalid); drop (leave the sample out)"
        ),
    ] = "mask"
    boxes2d: Annotated[
        bool, Meta(description="true stores the boxes of table object_ann as channels boxes2d_CAMERA")
    ] = False
    vehicle_state: Annotated[
        bool, Meta(description="true stores pedals, steering, indicators and speed as the channel can_vehicle_state")
    ] = False
    map: Annotated[bool, Meta(description="true stores the Lanelet2 map about ego as the channel map")] = False
    radars: Annotated[
        bool, Meta(description="true stores radars (PCD with nuScenes' 18 fields) as channels of their names")
    ] = False


class T4(TableSource[T4Settings]):
    """T4 datasets (TIER IV): one dataset, or a folder of many, each with the folder annotation."""

    kind = "t4"
    settings = T4Settings

    def __init__(self, location: str, options: dict[str, Any]) -> None:
        super().__init__(location, options)
        self._table = lru_cache(maxsize=16)(self._read_table)
        self._radars = lru_cache(maxsize=1)(self._radar_rows)
        read_map = partial(_read_map, self.files, self.noted)
        self.maps = MapWindows(lanelet2.MAP_LAYERS, read_map) if self.given.map else None

    def _datasets(self) -> list[str]:
        """Return folders of datasets below the root, with a slash at the end; for several versions of one the last."""
        found = []
        names = self.files.listed()
        if _FOLDER in names:
            return [""]
        for name in names:
            inside = _inside(self.files, name)
            if _FOLDER in inside:
                found.append(f"{name}/")
                continue
            versions = [one for one in inside if one.isdigit() and _FOLDER in _inside(self.files, f"{name}/{one}")]
            if versions:
                found.append(f"{name}/{max(versions, key=int)}/")
        if not found:
            raise SourceError(f"the t4 source '{self.files.shown}' has no dataset: no folder with the folder {_FOLDER}")
        return found

    def _read_table(self, dataset: str, table: str, of: type[R]) -> list[R]:
        name = f"{dataset}{_FOLDER}/{table}.json"
        where = f"table '{self.files.shown}/{name}'"
        return read_json(self.files.read(name), where, list[of])  # type: ignore[valid-type]

    def _by_token(self, dataset: str, table: str, of: type[R]) -> dict[str, R]:
        return {record.token: record for record in self._table(dataset, table, of)}

    def _found(self, dataset: str, table: str, records: dict[str, R], token: str, owner: str) -> R:
        record = records.get(token)
        if record is None:
            where = f"{self.files.shown}/{dataset}{_FOLDER}"
            raise SourceError(f"'{where}': row '{owner}' refers to '{token}', not found in table '{table}'")
        return record

    def sensors(self) -> Sensors:
        """Return the cameras and lidars of all datasets."""
        cameras: dict[str, None] = {}
        lidars: dict[str, None] = {}
        radars: dict[str, None] = {}
        attributes: dict[str, None] = {}
        for dataset in self._datasets():
            for sensor in self._table(dataset, "sensor", Sensor):
                if not re.fullmatch(r"[A-Za-z0-9_]{1,64}", sensor.channel):
                    raise SourceError(f"table 'sensor' of '{dataset}': the channel '{sensor.channel}' is no word")
                {"camera": cameras, "lidar": lidars, "radar": radars}.get(sensor.modality, {})[sensor.channel] = None
            attributes.update((record.name, None) for record in self._table(dataset, "attribute", Named))
        self.box_attributes = list(attributes)
        self.image_boxes = {name.lower(): _BOXES2D for name in cameras} if self.given.boxes2d else {}
        self.channels = tuple(map(radar_channel, sorted(radars))) if self.given.radars else ()
        self.channels += (vehicle_state.CHANNEL,) if self.given.vehicle_state else ()
        return Sensors.of(in_rig_order(cameras), dict.fromkeys(sorted(lidars), POINT_COLUMNS))

    def clips(self) -> Iterator[Clip]:
        """Yield the scene of each dataset."""
        for dataset in self._datasets():
            scenes = self._table(dataset, "scene", Scene)
            if len(scenes) != 1:
                raise SourceError(f"'{self.files.shown}/{dataset}{_FOLDER}' has {len(scenes)} scenes, expected one")
            (scene,) = scenes
            log = self._found(dataset, "log", self._by_token(dataset, "log", Log), scene.log_token, scene.token)
            maps = _map_file(self.files, dataset) if self.given.map else ()
            yield Clip(
                name=dataset.partition("/")[0] or scene.name, token=dataset or scene.token, log_id=log.logfile,
                vehicle=log.vehicle, tags={"description": scene.description, "location": log.location},
                files=(*maps, *(f"{dataset}{row.filename}" for _, row in self._radars(dataset))),
            )  # fmt: skip

    def frames(self, clip: Clip) -> Iterator[Frame]:
        """Yield the samples of a dataset by time."""
        dataset = clip.token if clip.token.endswith("/") else ""
        rows: dict[str, list[SampleData]] = {}
        for record in self._table(dataset, "sample_data", SampleData):
            if record.is_key_frame:
                rows.setdefault(record.sample_token, []).append(record)
        calibrated = self._calibrations(dataset)
        poses = self._poses(dataset)
        boxes = self._boxes(dataset)
        in_images = self._in_images(dataset) if self.given.boxes2d else None
        radars: dict[str, list[tuple[str, SampleData]]] = {}
        for name, row in self._radars(dataset):
            radars.setdefault(row.sample_token, []).append((name, row))
        samples = sorted(self._table(dataset, "sample", SampleRecord), key=lambda record: record.timestamp)
        windows = self.maps if clip.files[:1] == (f"{dataset}{lanelet2.FILE}",) else None
        if self.maps is not None and windows is None:
            self.noted["datasets without a map"] += 1
        for sample in samples:
            check_time(sample.timestamp, sample.token)
        states = self._states(dataset, [sample.timestamp * NS_PER_US for sample in samples])
        for sample, state in zip(samples, states, strict=True):
            images: dict[str, Image | Absent] = {}
            boxes2d: dict[str, ImageBoxRows] = {}
            own_boxes = boxes.get(sample.token, [])
            sweeps: dict[str, Sweep] = {}
            reference: tuple[bool, int] | None = None
            ego2global = None
            for row in rows.get(sample.token, ()):
                sensor, record, sensor2ego = _found_in(calibrated, row.calibrated_sensor_token, row.token)
                own = _found_in(poses, row.ego_pose_token, row.token)
                rank = (sensor.modality != "lidar", abs(row.timestamp - sample.timestamp))
                if reference is None or rank < reference:
                    reference, ego2global = rank, own
                channel, time_ns = sensor.channel.lower(), row.timestamp * NS_PER_US
                if channel in images or channel in sweeps:
                    raise SourceError(f"row '{row.token}' is a second keyframe of {sensor.channel} in its sample")
                if sensor.modality == "camera" and not row.is_valid:
                    images[channel] = Absent(NOT_VALID)
                elif sensor.modality == "camera":
                    images[channel] = self._image(dataset, row, record, sensor2ego, own)
                    if in_images is not None:
                        boxes2d[channel] = _image_boxes(in_images.get(row.token, []), own_boxes)
                elif sensor.modality == "lidar" and row.is_valid:
                    ref = f"{dataset}{row.filename}"
                    sweeps[channel] = Sweep(ref=ref, timestamp_ns=time_ns, lidar2ego=sensor2ego, ego2global=own)
            members = list(state)
            for name, row in radars.get(sample.token, ()):
                assert ego2global is not None, "the radar's own row has one"
                _, _, sensor2ego = _found_in(calibrated, row.calibrated_sensor_token, row.token)
                own = _found_in(poses, row.ego_pose_token, row.token)
                sensor2key = (invert_rigid(ego2global) @ own @ sensor2ego)[:3].ravel().tolist()
                age_s = (sample.timestamp - row.timestamp) * 1e-6
                made = RadarFiles(name, [f"{dataset}{row.filename}"], [age_s], [sensor2key])
                ref = POINTS + msgspec.json.encode(made).decode()
                members.append(Reference(radar_channel(name).field, ref, _RADAR_BYTES, is_estimate=True))
            if windows is not None and ego2global is not None:
                members.append(windows.made(dataset, ego2global))
            yield Frame(
                timestamp_ns=sample.timestamp * NS_PER_US, ego2global=ego2global, images=images, sweeps=sweeps,
                boxes=_box_rows(own_boxes), boxes2d=boxes2d, members=members, token=sample.token,
            )  # fmt: skip

    def _states(self, dataset: str, times_ns: list[int]) -> list[list[Reference]]:
        """Return the members of the vehicle's states at these times, with the option; note a dataset without them."""
        rows = []
        if self.given.vehicle_state and f"{vehicle_state.TABLE}.json" in self.files.listed(f"{dataset}{_FOLDER}"):
            rows = self._table(dataset, vehicle_state.TABLE, vehicle_state.VehicleState)
        if self.given.vehicle_state and not rows:
            self.noted[f"datasets without {vehicle_state.TABLE}"] += 1
        return vehicle_state.state_members(rows, times_ns)

    def _radar_rows(self, dataset: str) -> list[tuple[str, SampleData]]:
        """Return channel and row of each PCD file of a radar at a sample; note files of JSON, and leave them out."""
        if not self.given.radars:
            return []
        calibrated = self._calibrations(dataset)
        found: dict[tuple[str, str], SampleData] = {}
        for row in self._table(dataset, "sample_data", SampleData):
            sensor, _, _ = _found_in(calibrated, row.calibrated_sensor_token, row.token)
            if sensor.modality == "radar" and row.is_key_frame and row.is_valid:
                if row.filename.endswith(".json"):
                    self.noted[f"{sensor.channel}: radar files of JSON, not read"] += 1
                elif found.setdefault((row.sample_token, sensor.channel), row) is not row:
                    raise SourceError(f"row '{row.token}' is a second keyframe of {sensor.channel} in its sample")
        return [(channel, row) for (_, channel), row in found.items()]

    def _calibrations(self, dataset: str) -> dict[str, tuple[Sensor, CalibratedSensor, NDArray[np.float64]]]:
        sensors = self._by_token(dataset, "sensor", Sensor)
        return {
            one.token: (
                self._found(dataset, "sensor", sensors, one.sensor_token, one.token),
                one,
                pose(one.rotation, one.translation, f"table 'calibrated_sensor' of '{dataset}': row '{one.token}'"),
            )
            for one in self._table(dataset, "calibrated_sensor", CalibratedSensor)
        }

    def _poses(self, dataset: str) -> dict[str, NDArray[np.float64]]:
        records = self._table(dataset, "ego_pose", EgoPose)
        if not records:
            return {}
        made = pose([one.rotation for one in records], [one.translation for one in records], "table 'ego_pose'")
        return dict(zip((one.token for one in records), made, strict=True))

    def _image(
        self, dataset: str, row: SampleData, record: CalibratedSensor, cam2ego: NDArray[np.float64],
        ego2global: NDArray[np.float64],
    ) -> Image:  # fmt: skip
        dist = coefficients(record)
        if len(dist) not in LENS_OF_LENGTH:
            raise SourceError(
                f"table 'calibrated_sensor': row '{record.token}' has {len(dist)} lens coefficients, allowed are 4, 5, "
                "8, 12 and 14"
            )
        return Image(
            ref=f"{dataset}{row.filename}", timestamp_ns=row.timestamp * NS_PER_US,
            intrinsics=np.array(record.camera_intrinsic, np.float64).reshape(-1, 3), cam2ego=cam2ego,
            ego2global=ego2global, width=row.width or 0, height=row.height or 0, token=row.token,
            dist=dist, dist_model=LENS_OF_LENGTH[len(dist)],
        )  # fmt: skip

    def _boxes(self, dataset: str) -> dict[str, list[tuple[_Annotation, str, int, int]]]:
        """Return annotations with category, visibility and attribute, by sample."""
        instances = self._by_token(dataset, "instance", Instance)
        categories = self._by_token(dataset, "category", Named)
        levels = {one.token: VISIBILITY.get(one.level, -1) for one in self._table(dataset, "visibility", Visibility)}
        names = {one.token: one.name for one in self._table(dataset, "attribute", Named)}
        found: dict[str, list[tuple[_Annotation, str, int, int]]] = {}
        for one in self._table(dataset, "sample_annotation", _Annotation):
            instance = self._found(dataset, "instance", instances, one.instance_token, one.token)
            category = self._found(dataset, "category", categories, instance.category_token, instance.token)
            attribute = names.get(next(iter(one.attribute_tokens), ""))
            number = -1 if attribute is None else list(self.box_attributes).index(attribute)
            row = (one, category.name, levels.get(one.visibility_token, -1), number)
            found.setdefault(one.sample_token, []).append(row)
        return found

    def _in_images(self, dataset: str) -> dict[str, list[tuple[_ImageAnnotation, str]]]:
        """Return annotations in images with their categories, by row of ``sample_data``."""
        categories = self._by_token(dataset, "category", Named)
        found: dict[str, list[tuple[_ImageAnnotation, str]]] = {}
        for one in self._table(dataset, "object_ann", _ImageAnnotation):
            category = self._found(dataset, "category", categories, one.category_token, one.token)
            found.setdefault(one.sample_data_token, []).append((one, category.name))
        return found


def _inside(files: SourceFiles, folder: str) -> list[str]:
    try:
        return files.listed(folder)
    except SourceError:
        return []  # a file


def _found_in(records: dict[str, Any], token: str, owner: str) -> Any:  # noqa: ANN401 - of any table
    if token not in records:
        raise SourceError(f"table 'sample_data': row '{owner}' refers to '{token}', which is not there")
    return records[token]


def _map_file(files: SourceFiles, dataset: str) -> list[str]:
    """Return the map of a dataset, if it exists."""
    folder, _, name = lanelet2.FILE.partition("/")
    return [f"{dataset}{lanelet2.FILE}"] if name in _inside(files, f"{dataset}{folder}") else []


def _read_map(files: SourceFiles, noted: Counter[str], dataset: str) -> VectorMap:
    name = f"{dataset}{lanelet2.FILE}"
    found, num_others = lanelet2.parse_map(files.read(name), f"map '{files.shown}/{name}'")
    if num_others:
        noted["lines of maps whose type is not stored"] += num_others
    return found


def _box_rows(rows: list[tuple[_Annotation, str, int, int]]) -> BoxRows:
    records = [row[0] for row in rows]
    nothing = (np.nan,) * 3
    velocity = None
    if any(one.velocity is not None for one in records):
        velocity = [one.velocity or nothing for one in records]
    size_wlh = np.array([one.size for one in records], np.float64).reshape(-1, 3)
    return BoxRows(
        centre=[one.translation for one in records], size_lwh=size_wlh[:, [1, 0, 2]],
        rotation_wxyz=[one.rotation for one in records], category=[row[1] for row in rows],
        track=[one.instance_token for one in records], velocity=velocity,
        num_lidar_pts=[_number(one.num_lidar_pts) for one in records],
        num_radar_pts=[_number(one.num_radar_pts) for one in records],
        visibility=[row[2] for row in rows], attribute=[row[3] for row in rows], in_global=True,
    )  # fmt: skip


def _image_boxes(
    rows: list[tuple[_ImageAnnotation, str]], in_space: list[tuple[_Annotation, str, int, int]]
) -> ImageBoxRows:
    row_of = {one[0].instance_token: at for at, one in enumerate(in_space)}
    return ImageBoxRows(
        box=[one.bbox for one, _ in rows], category=[name for _, name in rows],
        track=[one.instance_token for one, _ in rows], row=[row_of.get(one.instance_token, -1) for one, _ in rows],
    )  # fmt: skip


def _number(stated: int | None) -> int:
    """Return a number of points, -1 unknown."""
    return -1 if stated is None or stated < 0 else stated
