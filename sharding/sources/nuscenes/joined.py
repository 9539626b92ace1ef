"""The tables as columns on disk, joined: each is read once, and its links to others become row numbers.

Which fields are kept, and what they link to, is a plan: one entry a table, in the order in which they are read. Links
to tables of few rows become row numbers as they are read; all links to a large table are joined at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.sample.schema import NUM_DIST
from fuelrail.pipeline.storage.columns import Column
from fuelrail.sharding.sources.adapter.boxes import stable_id
from fuelrail.sharding.sources.nuscenes.tables import (
    Annotation,
    CalibratedSensor,
    EgoPose,
    Instance,
    LinkedRow,
    Log,
    Named,
    Record,
    SampleData,
    SampleRecord,
    Scene,
    Sensor,
    Visibility,
    check_finite,
    vectors,
)
from fuelrail.sharding.sources.shared.joins import Cut, Tokens, Wanted

if TYPE_CHECKING:
    from fuelrail.sharding.sources.nuscenes.tables import Tables
    from fuelrail.sharding.sources.shared.joins import Database

_LARGE: Final = ("sample", "sample_data", "ego_pose", "instance", "sample_annotation")
"""Tables whose rows are too many to look up in memory."""


class Link(NamedTuple):
    """A field with the token of a row of the table ``to``.

    ``if_cut`` says what a cut-out source does where that row is not there: raise an error, ``drop`` the record, or
    ``clear`` the link.
    """

    to: str
    may_be_empty: bool = False
    if_cut: Literal["error", "drop", "clear"] = "error"


def _field(name: str, dtype: DTypeLike) -> Callable[[list[Any]], Any]:
    get = attrgetter(name)
    return lambda records: np.fromiter(map(get, records), dtype, len(records))


def _text(name: str) -> Callable[[list[Any]], Any]:
    get = attrgetter(name)
    return lambda records: list(map(get, records))


def _vector(name: str, length: int) -> Callable[[list[Any]], Any]:
    get = attrgetter(name)
    return lambda records: vectors(list(map(get, records)), length)


def _point_counts(name: str) -> Callable[[list[Any]], Any]:
    """Return what makes numbers of points, -1 for null and for negative ones."""
    get = attrgetter(name)
    # NaN stands for null; fmax takes the other.
    return lambda records: np.fmax(np.array(list(map(get, records)), np.float64), -1).astype(np.int32)


_COLUMNS: Final[dict[str, Callable[[list[Any]], Any]]] = {
    "timestamp": _field("timestamp", np.int64),
    "filename": _text("filename"),
    "is_valid": _field("is_valid", np.bool_),
    "image_wh": lambda records: np.array([(r.width or 0, r.height or 0) for r in records], np.int32).reshape(-1, 2),
    "translation": _vector("translation", 3),
    "rotation": _vector("rotation", 4),
    "size": _vector("size", 3),
    "velocity": lambda records: vectors([r.velocity or (np.nan,) * 3 for r in records], 3),
    "num_lidar_pts": _point_counts("num_lidar_pts"),
    "num_radar_pts": _point_counts("num_radar_pts"),
    "intrinsics": lambda records: vectors([r.intrinsics for r in records], 9).reshape(-1, 3, 3),
    "num_dist": lambda records: np.array([len(r.dist) for r in records], np.int32),
    "dist": lambda records: vectors([(*r.dist, *(np.nan,) * NUM_DIST)[:NUM_DIST] for r in records], NUM_DIST),
    "id": lambda records: np.array([stable_id(r.token) for r in records], np.int64),
}
"""What makes an array (R, ...) or texts of R records, by column."""
_CHECKED: Final = ("translation", "rotation", "size")
_LINKS: Final = {
    "log_token": Link("log"),
    "scene_token": Link("scene", if_cut="drop"),
    "sensor_token": Link("sensor"),
    "calibrated_sensor_token": Link("calibrated_sensor", if_cut="drop"),
    "sample_token": Link("sample", if_cut="drop"),
    "ego_pose_token": Link("ego_pose"),
    "category_token": Link("category", if_cut="drop"),
    "instance_token": Link("instance", if_cut="drop"),
    "visibility_token": Link("visibility", may_be_empty=True),
    "attribute_token": Link("attribute", may_be_empty=True),
}


class Stored(NamedTuple):
    """How a table is stored: the type of its records, its columns, and the fields that link to other tables.

    ``may_dangle`` are links whose row is -1 where it is not there, in any source.
    """

    record: type[Record]
    columns: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    may_dangle: tuple[str, ...] = ()

    def link(self, table: str, field: str) -> Link:
        """Return a link of this table, whose name is ``table``: prev and next are to its own rows."""
        return _LINKS.get(field) or Link(table, may_be_empty=True, if_cut="clear")


_POSE: Final = ("translation", "rotation")
_FILE: Final = ("filename", "timestamp", "is_valid")
_FILE_LINKS: Final = ("calibrated_sensor_token", "sample_token", "ego_pose_token")
_BOX: Final = (*_POSE, "size", "num_lidar_pts", "num_radar_pts")
_BOX_LINKS: Final = ("sample_token", "instance_token", "visibility_token", "attribute_token")
_CALIBRATION: Final = {
    "sensor": Stored(Sensor),
    "calibrated_sensor": Stored(CalibratedSensor, (*_POSE, "intrinsics", "num_dist", "dist"), ("sensor_token",)),
}
SCENES: Final = {"log": Stored(Log), "scene": Stored(Scene, links=("log_token",))}
"""Scenes alone."""
KEYFRAMES: Final = {
    **SCENES,
    **_CALIBRATION,
    "map": Stored(Record),
    "sample": Stored(SampleRecord, ("timestamp",), ("scene_token", "prev", "next")),
    "sample_data": Stored(SampleData, (*_FILE, "image_wh"), _FILE_LINKS),
    "ego_pose": Stored(EgoPose, _POSE),
    "category": Stored(Named),
    "attribute": Stored(Named),
    "visibility": Stored(Visibility),
    "instance": Stored(Instance, ("id",), ("category_token",)),
    "sample_annotation": Stored(Annotation, _BOX, (*_BOX_LINKS, "prev", "next")),
}
"""nuScenes' keyframes."""
T4_KEYFRAMES: Final = {
    **{name: stored for name, stored in KEYFRAMES.items() if name != "map"},
    "sample": Stored(SampleRecord, ("timestamp",), ("scene_token",)),
    "sample_annotation": Stored(Annotation, (*_BOX, "velocity"), _BOX_LINKS, ("visibility_token", "attribute_token")),
}
"""T4's: its samples are ordered by time and its tracks by their instances, whatever prev and next say."""
SWEEPS: Final = {
    **_CALIBRATION,
    "sample_data": Stored(
        LinkedRow,
        _FILE,
        ("calibrated_sensor_token", "prev", "ego_pose_token"),
        ("calibrated_sensor_token", "prev"),
    ),
    "ego_pose": Stored(EgoPose, _POSE),
}
"""All files of some sensors."""


class JoinedTable:
    """A table's rows: their tokens, their columns, and for each link the rows of the other table.

    ``columns`` are arrays (R, ...) or :class:`Texts`; ``links`` are row numbers (R,), -1 for none, and
    ``link_texts`` the tokens of those to large tables. ``records`` are those of a table of few rows.
    """

    def __init__(self, name: str, stored: Stored, database: Database) -> None:
        self.name, self.stored, self.tokens, self.records = name, stored, Tokens(name, database), list[Any]()
        self.to = {field: stored.link(name, field) for field in stored.links}
        self.link_texts = {field: database.texts() for field, link in self.to.items() if link.to in _LARGE}
        self.columns: dict[str, Any] = {}
        for field in stored.columns:
            made = _COLUMNS[field]([])
            of_numbers = isinstance(made, np.ndarray)
            self.columns[field] = database.column(made.dtype, made.shape[1:]) if of_numbers else database.texts()
        self.links: dict[str, Any] = {field: database.column(np.int64) for field in self.to.keys() - self.link_texts}

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, records: list[Any], rows: Mapping[str, NDArray[np.int64]]) -> None:
        """Add records and the rows of tables of few rows that they link to; raises SourceError for bad numbers."""
        own = list(map(_TOKEN, records))
        self.tokens.append(own)
        if self.name not in _LARGE:
            self.records += records
        for field, column in self.columns.items():
            made = _COLUMNS[field](records)
            if field in _CHECKED and self.name != "ego_pose":
                check_finite(made, own, table=self.name, column=field)
            column.append(made)
        for field, tokens in self.link_texts.items():
            tokens.append(list(map(attrgetter(field), records)))
        for field, found in rows.items():
            self.links[field].append(found)

    def close(self) -> None:
        """Make arrays of the numbers: all records are there."""
        for of in (self.columns, self.links):
            of.update({field: column.values for field, column in of.items() if isinstance(column, Column)})


def all_sensors(sensors: Sequence[Sensor]) -> NDArray[np.bool_]:
    """Return which sensors are cameras, lidars or radars."""
    return np.array([sensor.modality in ("camera", "lidar", "radar") for sensor in sensors], np.bool_)


class Joined:
    """The tables of a plan, joined.

    ``wanted`` says of all sensors (S,) whose rows of ``sample_data`` are kept; all plans but `SWEEPS` keep keyframes.
    """

    def __init__(
        self,
        tables: Tables,
        database: Database,
        plan: Mapping[str, Stored],
        wanted: Callable[[Sequence[Sensor]], NDArray[np.bool_]] = all_sensors,
        cut: Cut | None = None,
    ) -> None:
        """Read all tables of the plan; raise SourceError for what is wrong in them, and for links that dangle."""
        self._cut, self._wanted = cut or Cut(is_on=False), wanted
        self._tables: dict[str, JoinedTable] = {}
        poses = Wanted()
        for name, stored in plan.items():
            table = self._tables[name] = JoinedTable(name, stored, database)
            for piece in tables.read(name, stored.record):
                records: list[Any] = piece
                if name == "ego_pose":  # of one for each of nuScenes' 2.6 million rows, few are of keyframes
                    records = poses.kept(records, list(map(_TOKEN, records)))
                elif stored.record is SampleData:
                    records = [record for record in records if record.is_key_frame]
                added = self._add(table, records)
                if name == "sample_data":
                    poses.add([record.ego_pose_token for record in added])
            table.close()
            if name not in _LARGE:
                table.tokens.check_unique()
            elif name == "sample" and not len(table):
                raise SourceError(f"table '{tables.path(name)}' has no rows: nothing to shard")
        for name in _LARGE:
            self._join(name)

    def __getitem__(self, name: str) -> JoinedTable:
        return self._tables[name]

    def _add(self, table: JoinedTable, records: list[Any]) -> list[Any]:
        """Add what is wanted of some records, and return it."""
        needed = {field: self[link.to].tokens for field, link in table.to.items() if link.if_cut == "drop"}
        records = self._cut.kept(records, table.name, **needed)
        own, rows = list(map(_TOKEN, records)), dict[str, NDArray[np.int64]]()
        for field in table.links:
            link, tokens = table.to[field], list(map(attrgetter(field), records))
            rows[field] = self[link.to].tokens.find(tokens)
            if field not in table.stored.may_dangle:
                self[link.to].tokens.check(
                    rows[field], tokens, table=table.name, column=field, owners=own, may_be_empty=link.may_be_empty
                )
        if table.name == "sample_data":
            calibrated = rows["calibrated_sensor_token"]
            is_wanted = (calibrated >= 0) & self._is_wanted[calibrated]
            records = list(itertools.compress(records, is_wanted.tolist()))
            rows = {field: found[is_wanted] for field, found in rows.items()}
        table.append(records, rows)
        return records

    @cached_property
    def _is_wanted(self) -> NDArray[np.bool_]:
        """Which rows of ``calibrated_sensor`` are of a wanted sensor."""
        return np.asarray(self._wanted(self["sensor"].records)[self["calibrated_sensor"].links["sensor_token"]])

    def _join(self, name: str) -> None:
        """Make row numbers of all links to a large table."""
        into = [(table, field) for table in self._tables.values() for field in table.to if table.to[field].to == name]
        if not into:
            return
        target = self[name].tokens
        # Tokens are compared with themselves too, to find one that is there twice; of poses not all are there.
        own = [] if name == "ego_pose" else [target]
        found = target.rows_of(*own, *(table.link_texts[field] for table, field in into))
        for (table, field), rows in zip(into, found[len(own) :], strict=True):
            link, table.links[field] = table.to[field], rows
            if field not in table.stored.may_dangle:
                target.check(
                    rows, table.link_texts[field], table=table.name, column=field, owners=table.tokens,
                    may_be_empty=link.may_be_empty, cut=self._cut if link.if_cut == "clear" else None,
                )  # fmt: skip


_TOKEN: Final = attrgetter("token")
